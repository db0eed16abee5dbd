# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A differentiable `dot_general` that quantizes both operands on the fly.

Forward it contracts an operand along one dimension, backward along another, and
is quantized along that which is contracted. Where a gradient will be taken, the
forward pass quantizes an operand along both at once and keeps the second for
the backward pass; that quantizes the incoming gradient along both at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.sharding import NamedSharding

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking as blocking_lib
from jaxplugin.core import formats
from jaxplugin.dot import backends
from jaxplugin.dot import reference
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import linear_calls
from jaxplugin.jaxext import tangents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What is quantized to what, forward and backward.

  Attributes:
    lhs_format, rhs_format: formats of the operands; None leaves one as it is.
    grad_format: format of the incoming gradient in the backward products.
    quantize_dgrad: whether the product that makes lhs's gradient is quantized.
    quantize_wgrad: whether the product that makes rhs's gradient is quantized.
    scale_rounding: as in `quantize`.
    implementation: as in `block_scaled_dot`.
  """

  lhs_format: formats.BlockFormat | None
  rhs_format: formats.BlockFormat | None
  grad_format: formats.BlockFormat | None
  quantize_dgrad: bool = True
  quantize_wgrad: bool = True
  scale_rounding: quantization.ScaleRounding = "up"
  implementation: str | None = None


def dot_general(
  lhs_format: formats.BlockFormat | str | None,
  rhs_format: formats.BlockFormat | str | None,
  *,
  grad_format: formats.BlockFormat | str | None = None,
  quantize_dgrad: bool = True,
  quantize_wgrad: bool = True,
  scale_rounding: quantization.ScaleRounding = "up",
  implementation: str | None = None,
) -> Callable[..., jax.Array]:
  """Makes a drop-in for `lax.dot_general` that multiplies in block formats.

  The function returned quantizes both operands along the contracting dimension
  and multiplies them with `block_scaled_dot`. Backward, with g the gradient of
  the result, lhs's gradient is g x rhs and rhs's is g x lhs: each quantizes g
  and the operand along the dimension which that product contracts, from the
  high-precision values that the forward pass was given (quantizing twice would
  add up errors). Quantization itself counts as the identity (straight-through).

  Under differentiation the forward pass quantizes each operand along both
  dimensions, and what is kept for the backward pass is the second quantization
  and not the operand: 1 byte a value for FP8, half a byte for FP4, and scales.
  An operand is kept as it is, and quantized forward only, where its format is
  None or its product backward is not quantized. g is quantized along both
  dimensions where both products are. On GPUs both take one read where
  `quantize_both` does: dimensions that are contracted together lie side by
  side in order, those of the other product beside them, batch dimensions first.
  Without differentiation, and under `jit` for a gradient that is not used,
  nothing is quantized twice.

  Forward mode (`jax.jvp`, `jax.jacfwd`) multiplies tangents, in high precision
  and as they are, with what the backward pass multiplies g with: both modes are
  the same matrix, but for the quantization of g. Second derivatives, in any
  order of modes, are there where neither product is quantized backward; else
  they are an error.

  Use it as `flax.linen.Dense(dot_general=...)`, in
  `jnp.einsum(..., _dot_general=...)` (which may swap its operands, so give both
  the same format there), or directly.

  Args:
    lhs_format: e.g. `jp.MXFP8`, or its name, "mxfp8"; None leaves lhs in its
      own dtype (a plain f32, bf16 or f16 operand of a one-sided product).
    rhs_format: likewise for rhs. One of the two must be given.
    grad_format: format of the gradient in the backward products; lhs_format by
      default (rhs_format where that is None).
    quantize_dgrad: False computes lhs's gradient in high precision.
    quantize_wgrad: False computes rhs's gradient in high precision.
    scale_rounding: "up" or "floor", see `quantize`.
    implementation: None chooses; a name forces one, see `block_scaled_dot`.

  Returns:
    f(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, out_sharding=None) with the meaning of `lax.dot_general`: lhs and rhs are
    f32, bf16 or f16 of any rank; the result has preferred_element_type, by
    default the operands' common dtype. Contracting sizes need not be multiples
    of the block: they are padded with zeros inside. `precision` is that of
    products in high precision, by default the highest. Under explicit mesh axes
    the result has the sharding that `lax.dot_general` gives it: `out_sharding`,
    or else that of the operands' remaining dimensions; between, the compiler
    decides, and what has to be gathered travels quantized. Gradients have the
    operands' dtypes and shardings.

  Raises:
    TypeError: a format is no BlockFormat, or both are None; and from the
      function returned: operands are no floats or their shapes do not fit.
    ValueError: scale_rounding, implementation or a format's name is unknown.
    NotImplementedError: out_sharding has unreduced axes, or from the function
      returned, a second derivative where products backward are quantized.
    JAX's own errors of shardings, those of `lax.dot_general`: out_sharding
      names an axis that is not explicit, or is needed, as a contracting
      dimension is sharded, and is not given.

  Source: NVIDIA, "Recipes for Pre-training LLMs with MXFP8" (2025), section 3.
  """
  lhs_format, rhs_format, grad_format = (
    None if format is None else formats.resolve("dot_general", format, name)
    for name, format in (
      ("lhs_format", lhs_format),
      ("rhs_format", rhs_format),
      ("grad_format", grad_format),
    )
  )
  if lhs_format is None and rhs_format is None:
    raise TypeError(
      "dot_general: lhs_format or rhs_format must be given, got None for both;"
      " without quantization use jax.lax.dot_general"
    )
  if scale_rounding not in quantization.SCALE_ROUNDINGS:
    raise ValueError(
      "dot_general: scale_rounding must be one of"
      f" {quantization.SCALE_ROUNDINGS}, got {scale_rounding!r}"
    )
  backends.validate_name(implementation)
  recipe = Recipe(
    lhs_format=lhs_format,
    rhs_format=rhs_format,
    grad_format=grad_format or lhs_format or rhs_format,
    quantize_dgrad=quantize_dgrad,
    quantize_wgrad=quantize_wgrad,
    scale_rounding=scale_rounding,
    implementation=implementation,
  )

  def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
  ) -> jax.Array:
    lhs, rhs = _operand("lhs", lhs), _operand("rhs", rhs)
    numbers = rules.canonical_dimension_numbers(
      dimension_numbers, lhs.ndim, rhs.ndim
    )
    rules.validate_dimension_numbers(
      "dot_general", numbers, lhs.shape, rhs.shape
    )
    if preferred_element_type is None:
      preferred_element_type = jnp.result_type(lhs, rhs)
    try:
      result_dtype = np.dtype(preferred_element_type)
    except TypeError as error:
      raise TypeError(
        "dot_general: preferred_element_type must be a dtype, got"
        f" {preferred_element_type!r}"
      ) from error
    # Here and not inside, so that an operand that is the same on all devices of
    # a `shard_map` gets the sum of their gradients.
    lhs, rhs = dot.vary_alike([lhs, rhs])
    product = functools.partial(
      _dot,
      recipe,
      numbers,
      lax.Precision(precision) if isinstance(precision, str) else precision,
      result_dtype,
    )
    sharding = _explicit_sharding(lhs, rhs, numbers, out_sharding)
    if sharding is not None:
      axes = _explicit_axes(sharding.mesh)
      product = jax.sharding.auto_axes(
        product, axes=axes, out_sharding=sharding
      )
    return product(lhs, rhs)

  return quantized_dot_general


def _explicit_axes(mesh: Any) -> tuple[str, ...]:
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in types if kind == AxisType.Explicit)


def _explicit_sharding(
  lhs: jax.Array,
  rhs: jax.Array,
  numbers: sides.DimensionNumbers,
  out_sharding: Any,
) -> NamedSharding | None:
  """The sharding in the type of the result; None without explicit mesh axes.

  JAX is asked what `lax.dot_general` would give, or raise.
  """
  meshes = [jax.typeof(x).sharding.mesh for x in (lhs, rhs)]
  if out_sharding is None and not any(map(_explicit_axes, meshes)):
    return None
  spec = getattr(out_sharding, "spec", out_sharding)
  if getattr(spec, "unreduced", None):
    raise NotImplementedError(
      "dot_general: out_sharding must have no unreduced axes, got"
      f" {out_sharding}; leave them out, and the sum is made here"
    )

  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(
      # Of one dtype: which pairs of them go together is our own rule.
      lhs.astype(np.float32),
      rhs.astype(np.float32),
      numbers,
      out_sharding=out_sharding,
    )

  sharding = jax.eval_shape(product, lhs, rhs).sharding
  assert sharding is None or isinstance(sharding, NamedSharding)
  return sharding


def _operand(name: str, x: Any) -> jax.Array:
  x = scaled_array.as_array("dot_general", name, x)
  if x.dtype not in sides.PLAIN_DTYPES:
    raise TypeError(
      f"dot_general: {name} must be float32, bfloat16 or float16, got"
      f" {x.dtype}{list(x.shape)}"
    )
  return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _dot(
  recipe: Recipe,
  numbers: sides.DimensionNumbers,
  precision: Any,
  dtype: Any,
  lhs: jax.Array,
  rhs: jax.Array,
) -> jax.Array:
  del precision  # of products in high precision; this one is quantized
  product = _Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)
  (lhs_q,) = _quantized(lhs, recipe.lhs_format, [product.lhs], recipe)
  (rhs_q,) = _quantized(rhs, recipe.rhs_format, [product.rhs], recipe)
  return product.multiply(lhs_q, rhs_q, dtype, recipe)


def _dot_jvp(
  recipe: Recipe,
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
      _backward_products(recipe, dims, lhs.ndim, rhs.ndim), active, strict=True
    )
  )
  lhs_kept, rhs_kept = lhs, rhs
  if dgrad is None and wgrad is None:
    # A custom derivative again, so that there is a second one.
    result = _dot(recipe, numbers, precision, dtype, lhs, rhs)
  else:
    forward = _Product.forward(recipe, numbers, lhs.ndim, rhs.ndim)

    def quantize(
      x: jax.Array,
      format: formats.BlockFormat | None,
      blocking: blocking_lib.Blocking,
      backward: _Product | None,
    ) -> tuple[Any, Any]:
      if format is None or backward is None:
        (now,) = _quantized(x, format, [blocking], recipe)
        return now, x
      now, later = _quantized(x, format, [blocking, backward.rhs], recipe)
      return now, later

    lhs_q, lhs_kept = quantize(lhs, recipe.lhs_format, forward.lhs, wgrad)
    rhs_q, rhs_kept = quantize(rhs, recipe.rhs_format, forward.rhs, dgrad)
    result = forward.multiply(lhs_q, rhs_q, dtype, recipe)

  sides = []
  linear, constants = [], []
  for name, x, tangent, other, side_numbers, order, product in (
    ("dgrad", lhs, tangents[0], rhs_kept, dims.dgrad, dims.lhs_order, dgrad),
    ("wgrad", rhs, tangents[1], lhs_kept, dims.wgrad, dims.rhs_order, wgrad),
  ):
    if isinstance(tangent, SymbolicZero):
      continue
    leaves, tree = jax.tree.flatten(other)
    sides.append(
      _Side(
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
    sides=tuple(sides),
    shape=tuple(result.shape),
    dtype=result.dtype,
  )
  return result, linear_calls.linear_call(function, linear, constants)


_dot.defjvp(_dot_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
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
  product: _Product | None
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
    sides: the operands that have a tangent.
    shape, dtype: of the result.
  """

  recipe: Recipe
  precision: Any
  sides: tuple[_Side, ...]
  shape: tuple[Any, ...]
  dtype: np.dtype

  def _others(self, constants: Sequence[jax.Array]) -> list[Any]:
    rest = list(constants)
    others = []
    for side in self.sides:
      count = side.other.num_leaves
      others.append(side.other.unflatten(rest[:count]))
      rest = rest[count:]
    return others

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    g = jax.ShapeDtypeStruct(self.shape, np.float32)
    terms = []
    for side, tangent, other in zip(
      self.sides, linear, self._others(constants), strict=True
    ):
      gradient = functools.partial(self._plain_gradient, side, other)
      (term,) = jax.linear_transpose(gradient, g)(tangent.astype(np.float32))
      terms.append(term)
    return sum(terms[1:], start=terms[0]).astype(self.dtype)

  def _plain_gradient(self, side: _Side, other: Any, g: jax.Array) -> jax.Array:
    """The operand's gradient of a g that is not quantized, in f32."""
    other, numbers = side.blocked(other), side.numbers
    if isinstance(other, scaled_array.ScaledArray):
      other = quantization.dequantize(other, np.float32)
    if side.product is not None:
      g, numbers = side.product.lhs.apply(g), side.product.numbers
    product = reference.plain_dot(g, other, numbers, np.float32, self.precision)
    return product.transpose(side.order)

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
  ) -> list[jax.Array | None]:
    sides = [s for s, used in zip(self.sides, wanted, strict=True) if used]
    products = [s.product for s in sides if s.product is not None]
    g_blocked = dict(
      zip(
        products,
        _quantized(
          g, self.recipe.grad_format, [p.lhs for p in products], self.recipe
        ),
        strict=True,
      )
    )
    result: list[jax.Array | None] = []
    for side, other, is_wanted in zip(
      self.sides, self._others(constants), wanted, strict=True
    ):
      if not is_wanted:
        result.append(None)
        continue
      with jax.named_scope(side.name):
        gradient = self._gradient(side, other, g, g_blocked)
      result.append(gradient.transpose(side.order))
    return result

  def _gradient(
    self, side: _Side, other: Any, g: jax.Array, g_blocked: dict[_Product, Any]
  ) -> jax.Array:
    if side.product is None:
      return reference.plain_dot(
        g, other, side.numbers, side.dtype, self.precision
      )
    return side.product.multiply(
      g_blocked[side.product], side.blocked(other), side.dtype, self.recipe
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
  """A quantized product: how its operands are blocked, and multiplied.

  Attributes:
    lhs, rhs: blockings, along what is contracted. Sizes are padded to whole
      blocks of both formats.
    numbers: `block_scaled_dot`'s, of the blocked operands.
  """

  lhs: blocking_lib.Blocking
  rhs: blocking_lib.Blocking
  numbers: sides.DimensionNumbers

  @classmethod
  def of(
    cls,
    numbers: sides.DimensionNumbers,
    ndims: tuple[int, int],
    operand_formats: tuple[
      formats.BlockFormat | None, formats.BlockFormat | None
    ],
  ) -> _Product:
    multiple = math.lcm(*(f.block_size for f in operand_formats if f))
    contracting, batch = numbers
    lhs, rhs = (
      blocking_lib.Blocking(
        dims=k, lead=(*b, *sides.free_dims(ndim, k, b)), multiple=multiple
      )
      for k, b, ndim in zip(contracting, batch, ndims, strict=True)
    )
    # Merging brings the batch dimensions to the front.
    lhs_batch, rhs_batch = (
      tuple(range(len(b))) if len(k) > 1 else b
      for k, b in zip(contracting, batch, strict=True)
    )
    return cls(
      lhs=lhs,
      rhs=rhs,
      numbers=(((lhs.axis(),), (rhs.axis(),)), (lhs_batch, rhs_batch)),
    )

  @classmethod
  def forward(
    cls,
    recipe: Recipe,
    numbers: sides.DimensionNumbers,
    lhs_ndim: int,
    rhs_ndim: int,
  ) -> _Product:
    return cls.of(
      numbers, (lhs_ndim, rhs_ndim), (recipe.lhs_format, recipe.rhs_format)
    )

  def multiply(
    self, lhs: Any, rhs: Any, dtype: Any, recipe: Recipe
  ) -> jax.Array:
    """The product of blocked operands, quantized or not."""
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=self.numbers,
      preferred_element_type=dtype,
      implementation=recipe.implementation,
    )


def _quantized(
  x: jax.Array,
  format: formats.BlockFormat | None,
  blockings: list[blocking_lib.Blocking],
  recipe: Recipe,
) -> list[Any]:
  """`x`, blocked each way and quantized; only blocked where format is None."""
  if format is None or not blockings:
    return [b.apply(x) for b in blockings]
  x = tangents.without_derivative(
    x,
    "dot_general: a gradient that is a product of quantized arrays has no"
    " derivative; for a second one pass quantize_dgrad=False and"
    " quantize_wgrad=False",
  )
  if len(blockings) > 1:
    return quantization.quantize_blocked(
      x, format, blockings, scale_rounding=recipe.scale_rounding
    )
  return [
    quantization.quantize(
      b.apply(x),
      format,
      axis=b.axis(),
      scale_rounding=recipe.scale_rounding,
      packed=False,
    )
    for b in blockings
  ]


def _backward_products(
  recipe: Recipe,
  dims: derivatives.GradientDims,
  lhs_ndim: int,
  rhs_ndim: int,
) -> tuple[_Product | None, _Product | None]:
  """g x rhs, for lhs's gradient, and g x lhs; None where not quantized."""
  dgrad = wgrad = None
  if recipe.quantize_dgrad:
    dgrad = _Product.of(
      dims.dgrad,
      (dims.g_ndim, rhs_ndim),
      (recipe.grad_format, recipe.rhs_format),
    )
  if recipe.quantize_wgrad:
    wgrad = _Product.of(
      dims.wgrad,
      (dims.g_ndim, lhs_ndim),
      (recipe.grad_format, recipe.lhs_format),
    )
  return dgrad, wgrad


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
