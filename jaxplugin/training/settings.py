# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A call of `dot_general` without its arrays, and its matmuls."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxplugin.dot import derivatives, reference, sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import arguments
from jaxplugin.training import products

SIDES: Final[tuple[products.Side, products.Side]] = ("lhs", "rhs")
# `fold_in` of these implementations mixes the key and the number, so the order
# of folds changes the result. `fold_in` of "unsafe_rbg" is the exclusive or of
# the key and bits made from the number. Folding 0 and then 1 therefore equals
# folding 1 and then 0, and folding a number twice restores the first key.
_SENSITIVE_TO_ORDER: Final = frozenset({"threefry2x32", "rbg"})


def data_of_key(scheme: products.Scheme, key: Any) -> tuple[Any, Any]:
  """Returns the numbers of a key and its implementation, None for a raw key.

  Both are None if the recipe needs no key. `Setting.key` is the inverse.

  Raises:
    TypeError: If `key` is not a key.
  """
  arguments.validate_key(scheme.who, key)
  if key is None or not scheme.recipe.stochastic_rounding:
    return None, None
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    return key, None
  return jax.random.key_data(key), jax.random.key_impl(key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """A call of `dot_general` without its arrays.

  Attributes:
    scheme: the recipe, and which operand is the weight.
    numbers: dimension numbers.
    precision: of matmuls in high precision.
    dtype: of the result.
    key_impl: implementation of the key; None for a raw key.
    out_sharding: of the result on a mesh with explicit axes, or None.
  """

  scheme: products.Scheme
  numbers: sides.DimensionNumbers
  precision: Any
  dtype: Any
  key_impl: Any = None
  out_sharding: NamedSharding | None = None

  # The class of the call's matmuls.
  kind: ClassVar[type[products.Product]] = products.Product

  def gradient_dims(self, lhs: Any, rhs: Any) -> derivatives.GradientDims:
    """Returns the dimension numbers of the matmuls for the gradients."""
    return derivatives.GradientDims.of(self.numbers, lhs.ndim, rhs.ndim)

  def shape(self, lhs: Any, rhs: Any) -> tuple[Any, ...]:
    """Returns the shape of the result."""
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = self.numbers
    m = sides.free_dims(lhs.ndim, lhs_k, lhs_batch)
    n = sides.free_dims(rhs.ndim, rhs_k, rhs_batch)
    rows = [lhs.shape[d] for d in (*lhs_batch, *m)]
    return (*rows, *(rhs.shape[d] for d in n))

  def plain_dot(
    self,
    lhs: jax.Array,
    rhs: jax.Array,
    dtype: Any,
    sizes: Any,
    *,
    numbers: sides.DimensionNumbers,
    product: products.Product | None = None,
    out_sharding: NamedSharding | None = None,
  ) -> jax.Array:
    """Multiplies in high precision.

    Args:
      lhs, rhs: the operands.
      dtype: of the result.
      sizes: see `Product.multiply`.
      numbers: dimension numbers.
      product: the matmul that both were prepared and blocked for, or None.
      out_sharding: of the result.
    """
    del sizes, product
    return reference.plain_dot(
      lhs, rhs, numbers, dtype, self.precision, out_sharding
    )

  def forward(self, lhs: Any, rhs: Any) -> products.Product:
    return self.kind.of(
      self.numbers,
      (lhs.shape, rhs.shape),
      (self.scheme.format("lhs"), self.scheme.format("rhs")),
      out_sharding=self.out_sharding,
    )

  def gradient_shardings(
    self, lhs: Any, rhs: Any
  ) -> dict[products.Side, NamedSharding | None]:
    """Returns the shardings of the backward matmuls' results.

    Their dimensions are not yet in the order of the operand.
    """
    if self.out_sharding is None:
      return dict.fromkeys(SIDES)
    dims = self.gradient_dims(lhs, rhs)
    result: dict[products.Side, NamedSharding | None] = {}
    for side, x, order in zip(
      SIDES, (lhs, rhs), (dims.lhs_order, dims.rhs_order), strict=True
    ):
      # Dimension i of the operand is `order[i]` of the product.
      axes = dict(zip(order, mesh_axes.spec_of(x), strict=True))
      spec = mesh_axes.partition_spec(tuple(axes[d] for d in range(x.ndim)))
      result[side] = self.out_sharding.update(spec=spec)
    return result

  def multiply(
    self,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_q: Any,
    rhs_q: Any,
    sizes: Any,
  ) -> jax.Array:
    """Multiplies forward, by the array if an operand is not quantized."""
    if not self.scheme.recipe.quantize_forward:
      return self.plain_dot(
        lhs,
        rhs,
        self.dtype,
        sizes,
        numbers=self.numbers,
        out_sharding=self.out_sharding,
      )
    product = self.forward(lhs, rhs)
    if lhs_q is None:
      lhs_q = product.lhs.apply(lhs)
    if rhs_q is None:
      rhs_q = product.rhs.apply(rhs)
    return product.multiply(lhs_q, rhs_q, self.dtype, self.scheme, sizes)

  def backward(
    self,
    lhs: Any,
    rhs: Any,
    wanted: dict[products.Side, bool],
  ) -> dict[products.Side, products.Product | None]:
    """Returns the matmuls for the wanted gradients; None in high precision."""
    dims, scheme = self.gradient_dims(lhs, rhs), self.scheme
    shardings = self.gradient_shardings(lhs, rhs)
    found: dict[products.Side, products.Product | None] = dict.fromkeys(SIDES)
    for side, other, numbers in zip(
      SIDES, (rhs, lhs), (dims.dgrad, dims.wgrad), strict=True
    ):
      name = scheme.gradient(side)
      formats = (
        scheme.recipe.grad_format,
        scheme.format(products.other_side(side)),
      )
      is_quantized = scheme.recipe.is_quantized(name)
      if wanted[side] and is_quantized and formats != (None, None):
        found[side] = self.kind.of(
          numbers,
          (self.shape(lhs, rhs), other.shape),
          formats,
          scheme.recipe.hadamard(name),
          shardings[side],
        )
    return found

  def operands(
    self,
    lhs: Any,
    rhs: Any,
    backward: dict[products.Side, products.Product | None],
  ) -> dict[products.Side, products.TrainingOperand]:
    """Returns both operands.

    Args:
      lhs, rhs: arrays, or their shapes and dtypes.
      backward: the matmul for the gradient of each operand.
    """
    product = self.forward(lhs, rhs)
    contracting, batch = self.numbers
    return {
      side: products.TrainingOperand.of(
        self.scheme,
        side,
        x,
        sides.free_dims(x.ndim, k, b),
        product,
        backward[products.other_side(side)],
      )
      for side, x, k, b in zip(
        SIDES, (lhs, rhs), contracting, batch, strict=True
      )
    }

  def differentiated(
    self, lhs: Any, rhs: Any
  ) -> dict[products.Side, products.TrainingOperand]:
    """Returns both operands for a call whose two gradients are needed."""
    backward = self.backward(lhs, rhs, {"lhs": True, "rhs": True})
    return self.operands(lhs, rhs, backward)

  def key(self, data: Any, side: products.Side) -> Any:
    """Returns the key of an operand's gradient: 0 or 1 folded into `data`."""
    if self.key_impl is not None:
      data = jax.random.wrap_key_data(data, impl=self.key_impl)
    return fold_in(data, SIDES.index(side))


def fold_in(key: Any, number: Any) -> jax.Array:
  """Returns a key that depends on `key`, on `number` and on their order.

  It is `jax.random.fold_in(key, number)` for JAX's "threefry2x32" and "rbg".
  For other implementations the key is split first, which mixes its bits.
  """
  if jax.random.key_impl(key) not in _SENSITIVE_TO_ORDER:
    (key,) = jax.random.split(key, 1)
  return jax.random.fold_in(key, number)
