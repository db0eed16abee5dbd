# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized products of `dot_general`: one forward, two backward.

Each contracts other dimensions, so each quantizes its operands along others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint
from jax import lax

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import hadamard
from jaxplugin.quantization import operands
from jaxplugin.quantization import problems
from jaxplugin.training import recipes

Side = Literal["lhs", "rhs"]


def other_side(side: Side) -> Side:
  return "rhs" if side == "lhs" else "lhs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """A recipe, and which operand is what in it.

  Attributes:
    recipe: what is quantized to what.
    weight: the operand that is weights; the other is activations. None: both
      are activations, and the gradients of both are as dgrad.
    implementation: as in `block_scaled_dot`.
  """

  recipe: recipes.Recipe
  weight: Side | None
  implementation: str | None = None

  def format(self, side: Side) -> formats.BlockFormat | None:
    if side == self.weight:
      return self.recipe.weight_format
    return self.recipe.activation_format

  def gradient(self, side: Side) -> str:
    """The product that makes an operand's gradient: "dgrad" or "wgrad"."""
    return "wgrad" if side == self.weight else "dgrad"

  def is_square(self, side: Side) -> bool:
    """Whether an operand is quantized in square blocks."""
    return side == self.weight and self.recipe.weight_2d

  def manner(
    self,
    format: formats.BlockFormat,
    along: blocking.Blocking,
    *,
    transform: int | None = None,
    square: tuple[int, ...] | None = None,
    is_gradient: bool = False,
  ) -> operands.Manner:
    """How an array is quantized for a product."""
    recipe = self.recipe
    has_choice = quantization.has_four_over_six(format)
    return operands.Manner(
      format=format,
      along=along,
      scale_rounding=recipe.scale_rounding,
      hadamard=transform,
      square=square,
      four_over_six=recipe.four_over_six and has_choice,
      scale_up=recipe.grad_scale_up and is_gradient,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A quantized product: how its operands are blocked, and multiplied.

  Attributes:
    lhs, rhs: blockings, along what is contracted. Sizes are padded to whole
      blocks of both formats, and to whole groups of the transform.
    numbers: `block_scaled_dot`'s, of the blocked operands.
    hadamard: the size of the transform of both operands, or None.
  """

  lhs: blocking.Blocking
  rhs: blocking.Blocking
  numbers: sides.DimensionNumbers
  hadamard: int | None = None

  @classmethod
  def of(
    cls,
    numbers: sides.DimensionNumbers,
    ndims: tuple[int, int],
    operand_formats: tuple[
      formats.BlockFormat | None, formats.BlockFormat | None
    ],
    hadamard: int | None = None,
  ) -> Product:
    multiple = math.lcm(*(f.block_size for f in operand_formats if f))
    multiple = math.lcm(multiple, hadamard or 1)
    contracting, batch = numbers
    lhs, rhs = (
      blocking.Blocking(
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
      hadamard=hadamard,
    )

  @classmethod
  def forward(
    cls,
    scheme: Scheme,
    numbers: sides.DimensionNumbers,
    lhs_ndim: int,
    rhs_ndim: int,
  ) -> Product:
    return cls.of(
      numbers,
      (lhs_ndim, rhs_ndim),
      (scheme.format("lhs"), scheme.format("rhs")),
    )

  def multiply(
    self, lhs: Any, rhs: Any, dtype: Any, scheme: Scheme
  ) -> jax.Array:
    """The product of blocked operands, quantized or not."""
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=self.numbers,
      preferred_element_type=dtype,
      implementation=scheme.implementation,
    )

  def blocked(self, x: jax.Array, along: blocking.Blocking) -> jax.Array:
    """An operand that is not quantized, as `multiply` takes it."""
    x = along.apply(x)
    if self.hadamard is None:
      return x
    return hadamard.transform(x, along.axis(), self.hadamard)


def quantized(
  x: jax.Array,
  manners: Sequence[operands.Manner],
  keys: Sequence[jax.Array | None] | None = None,
) -> list[Any]:
  """`x` quantized in each manner, all of one format; from one read if can be.

  Args:
    keys: of each, for stochastic rounding.
  """
  keys = keys or [None] * len(manners)
  if not manners:
    return []
  x = tangents.without_derivative(
    x,
    "dot_general: a gradient that is a product of quantized arrays has no"
    " derivative; for a second one pass quantize_dgrad=False and"
    " quantize_wgrad=False",
  )
  first = manners[0]
  is_plain = [
    manner.extras == problems.NO_EXTRAS and key is None
    for manner, key in zip(manners, keys, strict=True)
  ]
  if len(manners) > 1 and all(is_plain):
    return quantization.quantize_blocked(
      x,
      first.format,
      [manner.along for manner in manners],
      scale_rounding=first.scale_rounding,
    )
  if len(manners) > 1 and not any(manner.square for manner in manners):
    return list(operands.quantize_all(x, tuple(manners), tuple(keys)))
  return [
    quantization.quantize(
      manner.along.apply(x),
      manner.format,
      axis=manner.along.axis(),
      scale_rounding=manner.scale_rounding,
      packed=False,
    )
    if plain
    else operands.quantize(x, manner, key)
    for manner, key, plain in zip(manners, keys, is_plain, strict=True)
  ]


def _bits_of(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  """`x` as integers, FP4 two a byte where its blocks are even.

  What a policy of `jax.checkpoint` saves goes through `lax.reduce_precision`
  where it is a float. That knows no type without Inf, and makes NaN of E4M3's
  scales above 240. And XLA:CPU slices bytes as they are, but FP4, in a scan
  over layers, value by value.
  """
  if x.format.is_fp4 and x.format.block_size % 2 == 0:
    x = x.pack()
  (values, scale, *rest), aux = x.tree_flatten()
  if not x.is_packed:
    bits = jnp.uint4 if x.format.is_fp4 else jnp.uint8
    values = lax.bitcast_convert_type(values, bits)
  scale = lax.bitcast_convert_type(scale, jnp.uint8)
  return x.tree_unflatten(aux, (values, scale, *rest))


def _of_bits(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  """Undoes `_bits_of`; FP4 values stay packed."""
  (values, scale, *rest), aux = x.tree_flatten()
  if not x.is_packed:
    values = lax.bitcast_convert_type(values, x.format.array_dtype)
  scale = lax.bitcast_convert_type(scale, x.format.scale_dtype)
  return x.tree_unflatten(aux, (values, scale, *rest))


def backward_product(
  scheme: Scheme, side: Side, dims: derivatives.GradientDims, other_ndim: int
) -> Product | None:
  """g x the other operand, the gradient of `side`; None if not quantized."""
  name = scheme.gradient(side)
  recipe = scheme.recipe
  operand_formats = (recipe.grad_format, scheme.format(other_side(side)))
  if not recipe.is_quantized(name) or operand_formats == (None, None):
    return None
  return Product.of(
    dims.dgrad if side == "lhs" else dims.wgrad,
    (dims.g_ndim, other_ndim),
    operand_formats,
    recipe.hadamard(name),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """An operand in the forward product, and in one backward product.

  Attributes:
    side: "lhs" or "rhs".
    shape: of the array.
    dtype: of the array.
    forward: how the forward product has it; None as it is, where its format is
      None.
    backward: how the backward product has it; None as it is.
    product: the backward product; None where that is in high precision.
    keeps_forward: whether the forward pass leaves to the backward pass what the
      forward product had, and not another copy.
  """

  side: Side
  shape: tuple[Any, ...]
  dtype: np.dtype
  forward: operands.Manner | None
  backward: operands.Manner | None
  product: Product | None
  keeps_forward: bool

  @classmethod
  def of(
    cls,
    scheme: Scheme,
    side: Side,
    x: jax.Array,
    free: tuple[int, ...],
    forward: blocking.Blocking,
    product: Product | None,
  ) -> Operand:
    """That of an array with dimensions `free` beside contracted and batch."""
    format = scheme.format(side)
    now = later = None
    if format is not None:
      square = free if scheme.is_square(side) else None
      now = scheme.manner(format, forward, square=square)
      if product is not None:
        later = scheme.manner(format, product.rhs, transform=product.hadamard)
    keeps_forward = now is not None and (
      scheme.recipe.backward_from_quantized
      or (later is not None and now.square is not None)
    )
    return cls(
      side=side,
      shape=tuple(x.shape),
      dtype=x.dtype,
      forward=now,
      backward=later,
      product=product,
      keeps_forward=keeps_forward,
    )

  def quantize(
    self, x: jax.Array, is_needed: bool, name: str | None = None
  ) -> tuple[Any, Any]:
    """What the forward product takes, and what is kept.

    Args:
      is_needed: whether anything is kept.
      name: what policies of `jax.checkpoint` know it by, where it is quantized.

    Returns:
      None for an operand that the forward product takes as it is.
    """
    if self.forward is None:
      return None, x
    if not is_needed or (self.backward is None and not self.keeps_forward):
      (now,) = quantized(x, [self.forward])
      return now, x
    if self.keeps_forward:
      (now,) = quantized(x, [self.forward])
      later = now
    else:
      assert self.backward is not None
      now, later = quantized(x, [self.forward, self.backward])
    return now, ad_checkpoint.checkpoint_name(_bits_of(later), name)

  def as_kept(self, kept: Any) -> jax.Array:
    """The array, of which `kept` is the forward copy, dequantized: f32."""
    assert self.forward is not None
    x = quantization.dequantize(kept, np.float32)
    return self.forward.along.undo(x, self.shape)

  def taken(self, kept: Any) -> Any:
    """What the backward product takes."""
    if isinstance(kept, scaled_array.ScaledArray):
      kept = _of_bits(kept)
    if self.keeps_forward and self.backward is not None:
      assert self.forward is not None
      if self.forward.square is not None:
        return operands.turned(
          kept, self.forward, self.backward.along, self.shape
        )
      (later,) = quantized(self.as_kept(kept), [self.backward])
      return later
    if self.keeps_forward:
      return self.as_kept(kept)
    if self.product is not None and self.backward is None:
      return self.product.blocked(kept, self.product.rhs)
    return kept
