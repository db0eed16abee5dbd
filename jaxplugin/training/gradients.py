# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The derivative of `dot_general`, and the gradients of such products.

Forward an operand is contracted along one dimension, backward along another,
and is quantized along that which is contracted. Where a gradient will be taken,
the forward pass quantizes an operand along both at once and keeps the second
for the backward pass; that quantizes the incoming gradient along both at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import linear_calls
from jaxplugin.training import products


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def quantized_dot(
  recipe: products.Recipe,
  numbers: sides.DimensionNumbers,
  precision: Any,
  dtype: Any,
  lhs: jax.Array,
  rhs: jax.Array,
) -> jax.Array:
  del precision  # of products in high precision; this one is quantized
  product = products.Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)
  (lhs_q,) = products.quantized(lhs, recipe.lhs_format, [product.lhs], recipe)
  (rhs_q,) = products.quantized(rhs, recipe.rhs_format, [product.rhs], recipe)
  return product.multiply(lhs_q, rhs_q, dtype, recipe)


def _dot_jvp(
  recipe: products.Recipe,
  numbers: sides.DimensionNumbers,
  precision: Any,
  dtype: Any,
  primals: tuple[jax.Array, jax.Array],
  tangents: tuple[Any, Any],
) -> tuple[jax.Array, Any]:
  lhs, rhs = primals
  active = [not isinstance(t, SymbolicZero) for t in tangents]
  dims = derivatives.GradientDims.of(numbers, lhs.ndim, rhs.ndim)
  dgrad, wgrad = (
    product if is_active else None
    for product, is_active in zip(
      products.backward_products(recipe, dims, lhs.ndim, rhs.ndim),
      active,
      strict=True,
    )
  )
  lhs_kept, rhs_kept = lhs, rhs
  if dgrad is None and wgrad is None:
    # A custom derivative again, so that there is a second one.
    result = quantized_dot(recipe, numbers, precision, dtype, lhs, rhs)
  else:
    forward = products.Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)

    def quantize(
      x: jax.Array,
      format: formats.BlockFormat | None,
      along: blocking.Blocking,
      backward: products.Product | None,
    ) -> tuple[Any, Any]:
      if format is None or backward is None:
        (now,) = products.quantized(x, format, [along], recipe)
        return now, x
      now, later = products.quantized(x, format, [along, backward.rhs], recipe)
      return now, later

    lhs_q, lhs_kept = quantize(lhs, recipe.lhs_format, forward.lhs, wgrad)
    rhs_q, rhs_kept = quantize(rhs, recipe.rhs_format, forward.rhs, dgrad)
    result = forward.multiply(lhs_q, rhs_q, dtype, recipe)

  terms = []
  linear, constants = [], []
  for name, x, tangent, other, side_numbers, order, product in (
    ("dgrad", lhs, tangents[0], rhs_kept, dims.dgrad, dims.lhs_order, dgrad),
    ("wgrad", rhs, tangents[1], lhs_kept, dims.wgrad, dims.rhs_order, wgrad),
  ):
    if isinstance(tangent, SymbolicZero):
      continue
    leaves, tree = jax.tree.flatten(other)
    terms.append(
      _Term(
        name=name,
        shape=tuple(x.shape),
        dtype=x.dtype,
        numbers=side_numbers,
        order=order,
        product=product,
        other=tree,
      )
    )
    linear.append(tangent)
    constants += leaves
  function = _Tangent(
    recipe=recipe,
    precision=precision,
    terms=tuple(terms),
    shape=tuple(result.shape),
    dtype=result.dtype,
  )
  return result, linear_calls.linear_call(function, linear, constants)


quantized_dot.defjvp(_dot_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Term:
  """What the tangent of an operand is multiplied with, and its gradient of.

  Attributes:
    name: "dgrad" or "wgrad": what profiles and `explain` call the product.
    shape, dtype: of the operand.
    numbers: dimension numbers of g and the other operand.
    order: brings the dimensions of their product into the operand's order.
    product: that product, quantized; None in high precision.
    other: structure of what is kept of the other operand: an array, or a
      `ScaledArray` of it, quantized along what `product` contracts.
  """

  name: str
  shape: tuple[Any, ...]
  dtype: np.dtype
  numbers: sides.DimensionNumbers
  order: tuple[int, ...]
  product: products.Product | None
  other: Any

  def blocked(self, other: Any) -> Any:
    """The other operand as `product` takes it."""
    if isinstance(other, scaled_array.ScaledArray):
      return other
    return other if self.product is None else self.product.rhs.apply(other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tangent(linear_calls.Linear):
  """The result's tangent, of one operand's or of the sum of both.

  Forward it multiplies in high precision with what the backward pass multiplies
  with, so that both are one matrix, but for how the backward pass rounds g.

  Attributes:
    recipe, precision: the call's.
    terms: of the operands that have a tangent.
    shape, dtype: of the result.
  """

  recipe: products.Recipe
  precision: Any
  terms: tuple[_Term, ...]
  shape: tuple[Any, ...]
  dtype: np.dtype

  def _others(self, constants: Sequence[jax.Array]) -> list[Any]:
    rest = list(constants)
    others = []
    for term in self.terms:
      count = term.other.num_leaves
      others.append(term.other.unflatten(rest[:count]))
      rest = rest[count:]
    return others

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    g: Any = jax.ShapeDtypeStruct(self.shape, np.float32)
    if jax_private.varying_axes(linear[0]):
      # Inside `shard_map`: of a g that is the same on all devices the transpose
      # would be the sum over them.
      g = dot.vary_alike([jnp.zeros(self.shape, np.float32), *linear])[0]
    summands = []
    for term, tangent, other in zip(
      self.terms, linear, self._others(constants), strict=True
    ):
      gradient = functools.partial(self._plain_gradient, term, other)
      (summand,) = jax.linear_transpose(gradient, g)(tangent.astype(np.float32))
      summands.append(summand)
    return sum(summands[1:], start=summands[0]).astype(self.dtype)

  def _plain_gradient(self, term: _Term, other: Any, g: jax.Array) -> jax.Array:
    """The operand's gradient of a g that is not quantized, in f32."""
    other, numbers = term.blocked(other), term.numbers
    if isinstance(other, scaled_array.ScaledArray):
      other = quantization.dequantize(other, np.float32)
    if term.product is not None:
      g, numbers = term.product.lhs.apply(g), term.product.numbers
    product = reference.plain_dot(g, other, numbers, np.float32, self.precision)
    return product.transpose(term.order)

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
  ) -> list[jax.Array | None]:
    pairs = zip(self.terms, wanted, strict=True)
    used = [
      term.product
      for term, is_wanted in pairs
      if is_wanted and term.product is not None
    ]
    g_blocked = dict(
      zip(
        used,
        products.quantized(
          g, self.recipe.grad_format, [p.lhs for p in used], self.recipe
        ),
        strict=True,
      )
    )
    result: list[jax.Array | None] = []
    for term, other, is_wanted in zip(
      self.terms, self._others(constants), wanted, strict=True
    ):
      if not is_wanted:
        result.append(None)
        continue
      with jax.named_scope(term.name):
        gradient = self._gradient(term, other, g, g_blocked)
      result.append(gradient.transpose(term.order))
    return result

  def _gradient(
    self,
    term: _Term,
    other: Any,
    g: jax.Array,
    g_blocked: dict[products.Product, Any],
  ) -> jax.Array:
    if term.product is None:
      return reference.plain_dot(
        g, other, term.numbers, term.dtype, self.precision
      )
    return term.product.multiply(
      g_blocked[term.product], term.blocked(other), term.dtype, self.recipe
    )


Product = Callable[[jax.Array, Any, sides.DimensionNumbers, Any], jax.Array]


def gradients(
  g: jax.Array,
  lhs: Any,
  rhs: Any,
  numbers: sides.DimensionNumbers,
  *,
  dgrad: Product,
  wgrad: Product,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of `dot_general(lhs, rhs, numbers)`, given that of its result.

  Args:
    g: [batch..., m..., n...].
    lhs, rhs: the operands, or what the products take for them that has their
      ndim and dtype.
    numbers: their dimension numbers.
    dgrad: (g, rhs, dimension_numbers, dtype) -> product, used for lhs.
    wgrad: (g, lhs, dimension_numbers, dtype) -> product, used for rhs.

  Returns:
    Gradients with the shapes and dtypes of lhs and rhs.
  """
  dims = derivatives.GradientDims.of(numbers, lhs.ndim, rhs.ndim)
  # Profiles and `explain` tell them apart by these names.
  with jax.named_scope("dgrad"):
    lhs_gradient = dgrad(g, rhs, dims.dgrad, lhs.dtype)
  with jax.named_scope("wgrad"):
    rhs_gradient = wgrad(g, lhs, dims.wgrad, rhs.dtype)
  return (
    lhs_gradient.transpose(dims.lhs_order).astype(lhs.dtype),
    rhs_gradient.transpose(dims.rhs_order).astype(rhs.dtype),
  )
