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
from typing import Final
from typing import Literal
from typing import NamedTuple
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint
from jax import lax
from jax.sharding import NamedSharding

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext import tangents
from jaxplugin.quantization import arguments
from jaxplugin.quantization import hadamard
from jaxplugin.quantization import operands
from jaxplugin.quantization import problems
from jaxplugin.training import recipes

Side = Literal["lhs", "rhs"]

_NO_SECOND: Final = (
  ": a gradient computed from quantized arrays has no derivative; for a"
  " second derivative pass quantize_dgrad=False and quantize_wgrad=False"
)


def other_side(side: Side) -> Side:
  return "rhs" if side == "lhs" else "lhs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """A recipe, and which operand is what in it.

  Attributes:
    recipe: what is quantized to what.
    weight: the operand that is weights; the other is activations. None: both
      are activations, and the gradients of both are as dgrad.
    is_weight_given: whether `weight` was said. Of formats alone it is not, and
      rhs with batch dimensions may be activations, as in attention.
    implementation: as in `block_scaled_dot`.
    who: the function that errors name.
    reduce_dtype: of sums over devices; None is each product's own dtype.
  """

  recipe: recipes.Recipe
  weight: Side | None
  is_weight_given: bool = True
  implementation: str | None = None
  who: str = "dot_general"
  reduce_dtype: np.dtype | None = None

  def format(self, side: Side) -> formats.BlockFormat | None:
    if side == self.weight:
      return self.recipe.weight_format
    return self.recipe.activation_format

  def gradient(self, side: Side) -> str:
    """The product that makes an operand's gradient: "dgrad" or "wgrad"."""
    return "wgrad" if side == self.weight else "dgrad"

  def keeps_array(self, side: Side, has_batch: bool) -> bool:
    """Whether the backward pass gets an operand itself, and no copy of it.

    A weight is alive anyway: it is a parameter, and a copy would be a second
    one beside it, of every layer at once.
    """
    return side == self.weight and (self.is_weight_given or not has_batch)

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
  ) -> operands.QuantizeSpec:
    """How an array is quantized for a product."""
    recipe = self.recipe
    has_choice = quantization.has_four_over_six(format)
    return operands.QuantizeSpec(
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

  Of several dimensions that are contracted together the last one is blocked,
  where it has whole blocks: the codes are those of all merged into one, and no
  dimension changes, so that a sharding of each stays what it is. Else they are
  merged.

  Attributes:
    lhs, rhs: blockings, along what is contracted. Sizes are padded to whole
      blocks of both formats, and to whole groups of the transform.
    numbers: `block_scaled_dot`'s, of the blocked operands.
    hadamard: the size of the transform of both operands, or None.
    out_sharding: of the result, on a mesh with explicit axes, or None.
  """

  lhs: blocking.Blocking
  rhs: blocking.Blocking
  numbers: sides.DimensionNumbers
  hadamard: int | None = None
  out_sharding: NamedSharding | None = None

  @classmethod
  def of(
    cls,
    numbers: sides.DimensionNumbers,
    shapes: tuple[Sequence[Any], Sequence[Any]],
    operand_formats: tuple[
      formats.BlockFormat | None, formats.BlockFormat | None
    ],
    hadamard: int | None = None,
  ) -> Self:
    """The product of arrays of two shapes."""
    multiple = math.lcm(*(f.block_size for f in operand_formats if f))
    multiple = math.lcm(multiple, hadamard or 1)
    contracting, batch = numbers
    ndims = tuple(map(len, shapes))
    frees = map(sides.free_dims, ndims, contracting, batch)
    (_, last), (_, shape) = contracting, shapes
    if len(last) > 1 and _has_whole(shape[last[-1]], multiple):
      lhs, rhs = (
        blocking.Blocking(
          dims=k[-1:], lead=(*b, *free, *k[:-1]), multiple=multiple
        )
        for k, b, free in zip(contracting, batch, frees, strict=True)
      )
      return cls(lhs=lhs, rhs=rhs, numbers=numbers, hadamard=hadamard)
    lhs, rhs = (
      blocking.Blocking(dims=k, lead=(*b, *free), multiple=multiple)
      for k, b, free in zip(contracting, batch, frees, strict=True)
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
    lhs: Any,
    rhs: Any,
  ) -> Self:
    return cls.of(
      numbers,
      (lhs.shape, rhs.shape),
      (scheme.format("lhs"), scheme.format("rhs")),
    )

  def prepared(self, side: Side, x: jax.Array, sizes: Any) -> jax.Array:
    """An operand before it is blocked; `x` itself where nothing is done."""
    del side, sizes
    return x

  def multiply(
    self, lhs: Any, rhs: Any, dtype: Any, scheme: Scheme, sizes: Any
  ) -> jax.Array:
    """The product of blocked operands, quantized or not.

    Args:
      sizes: of groups of rows, for a product that has some; else None.
    """
    del sizes
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=self.numbers,
      preferred_element_type=dtype,
      reduce_dtype=scheme.reduce_dtype or dtype,
      out_sharding=self.out_sharding,
      implementation=scheme.implementation,
    )

  def gradient(
    self,
    g: Any,
    other: Any,
    dtype: Any,
    scheme: Scheme,
    sizes: Any,
    order: tuple[int, ...],
  ) -> jax.Array:
    """`multiply(g, other)`, with its dimensions in an order.

    Where that is the order of the product the other way round, as a weight's
    is, it is made so: XLA cannot have a kernel's result transposed for nothing.

    Args:
      order: a permutation of the product's dimensions.
    """
    dims = tuple(range(len(order)))
    (g_k, _), (g_batch, _) = self.numbers
    batch, middle = len(g_batch), len(self.lhs.lead) + 1 - len(g_k)
    if order == dims or order != (
      *dims[:batch],
      *dims[middle:],
      *dims[batch:middle],
    ):
      return self.multiply(g, other, dtype, scheme, sizes).transpose(order)
    return self._from_the_right(order).multiply(other, g, dtype, scheme, sizes)

  def _from_the_right(self, order: tuple[int, ...]) -> Self:
    """The product the other way round, whose dimensions come in `order`."""
    sharding = self.out_sharding
    if sharding is not None:
      spec = mesh_axes.normalize_spec(sharding.spec, len(order))
      spec = tuple(spec[d] for d in order)
      sharding = sharding.update(spec=mesh_axes.partition_spec(spec))
    contracting, batch = self.numbers
    return dataclasses.replace(
      self,
      lhs=self.rhs,
      rhs=self.lhs,
      numbers=(contracting[::-1], batch[::-1]),
      out_sharding=sharding,
    )

  def blocked(self, x: jax.Array, along: blocking.Blocking) -> jax.Array:
    """An operand that is not quantized, as `multiply` takes it."""
    x = along.apply(x)
    if self.hadamard is None:
      return x
    return hadamard.transform(x, along.axis(), self.hadamard)


def _has_whole(size: Any, multiple: int) -> bool:
  """Whether a size, not symbolic, is a multiple."""
  return isinstance(size, int) and size % multiple == 0


def quantized(
  x: jax.Array,
  manners: Sequence[operands.QuantizeSpec],
  keys: Sequence[jax.Array | None] | None = None,
  *,
  who: str,
) -> list[Any]:
  """`x` quantized in each manner, all of one format; from one read if can be.

  Args:
    keys: of each, for stochastic rounding.
    who: the function that errors name.
  """
  keys = keys or [None] * len(manners)
  if not manners:
    return []
  x = tangents.without_derivative(x, f"{who}{_NO_SECOND}")
  first = manners[0]
  is_plain = [
    manner.extras == problems.NO_EXTRAS and key is None
    for manner, key in zip(manners, keys, strict=True)
  ]
  is_explicit = explicit_axes.mesh_of([x]) is not None
  if all(is_plain) and (len(manners) > 1 or is_explicit):
    return quantization.quantize_blocked(
      x,
      first.format,
      [manner.along for manner in manners],
      scale_rounding=first.scale_rounding,
      packed=arguments.can_be_packed(first.format),
      for_products=True,
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


def bits_of(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
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


def of_bits(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  """Undoes `bits_of`; FP4 values stay packed."""
  (values, scale, *rest), aux = x.tree_flatten()
  if not x.is_packed:
    values = lax.bitcast_convert_type(values, x.format.array_dtype)
  scale = lax.bitcast_convert_type(scale, x.format.scale_dtype)
  return x.tree_unflatten(aux, (values, scale, *rest))


def backward_product(
  kind: type[Product],
  scheme: Scheme,
  side: Side,
  dims: derivatives.GradientDims,
  g_shape: Sequence[Any],
  other_shape: Sequence[Any],
  out_sharding: NamedSharding | None = None,
) -> Product | None:
  """g x the other operand, the gradient of `side`; None if not quantized."""
  name = scheme.gradient(side)
  recipe = scheme.recipe
  operand_formats = (recipe.grad_format, scheme.format(other_side(side)))
  if not recipe.is_quantized(name) or operand_formats == (None, None):
    return None
  product = kind.of(
    dims.dgrad if side == "lhs" else dims.wgrad,
    (g_shape, other_shape),
    operand_formats,
    recipe.hadamard(name),
  )
  return dataclasses.replace(product, out_sharding=out_sharding)


class Held(NamedTuple):
  """Copies of an operand that were made before, as `bits_of` has them.

  None where a product takes the operand as it is, or another copy.
  """

  forward: scaled_array.ScaledArray | None
  backward: scaled_array.ScaledArray | None


class _KeptCopy(NamedTuple):
  """A copy that was made before, and `tangents.witness` of the operand."""

  copy: scaled_array.ScaledArray
  witness: jax.Array


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
    first: the forward product.
    product: the backward product; None where that is in high precision.
    keeps_forward: whether the backward product is made of what the forward
      product had, and not of another copy.
    keeps_array: whether the forward pass leaves the array to the backward pass,
      which quantizes it; else its quantized copy.
    who: the function that errors name.
  """

  side: Side
  shape: tuple[Any, ...]
  dtype: np.dtype
  forward: operands.QuantizeSpec | None
  backward: operands.QuantizeSpec | None
  first: Product
  product: Product | None
  keeps_forward: bool
  keeps_array: bool
  who: str

  @classmethod
  def of(
    cls,
    scheme: Scheme,
    side: Side,
    x: Any,
    free: tuple[int, ...],
    first: Product,
    product: Product | None,
  ) -> Operand:
    """That of an array with dimensions `free` beside contracted and batch."""
    format = scheme.format(side)
    now = later = None
    if format is not None:
      square = free if scheme.is_square(side) else None
      forward = first.lhs if side == "lhs" else first.rhs
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
      first=first,
      product=product,
      keeps_forward=keeps_forward,
      keeps_array=scheme.keeps_array(side, bool(first.numbers[1][0])),
      who=scheme.who,
    )

  def quantize(
    self,
    x: jax.Array,
    sizes: Any,
    is_needed: bool,
    name: str | None = None,
    held: Held | None = None,
  ) -> tuple[Any, Any]:
    """What the forward product takes, and what is kept.

    Args:
      sizes: as of `Product.multiply`.
      is_needed: whether anything is kept.
      name: what policies of `jax.checkpoint` know it by, where it is quantized.
      held: copies that are there; None where it is quantized here.

    Returns:
      None for an operand that the forward product takes as it is.
    """
    if self.forward is None:
      return None, x
    if held is not None:
      return self._held(x, held, is_needed)
    given = self.first.prepared(self.side, x, sizes)
    keeps_array = self.backward is None and not self.keeps_forward
    if not is_needed or keeps_array or self.keeps_array:
      (now,) = quantized(given, [self.forward], who=self.who)
      return now, x
    if self.keeps_forward:
      (now,) = quantized(given, [self.forward], who=self.who)
      return now, ad_checkpoint.checkpoint_name(bits_of(now), name)
    assert self.backward is not None and self.product is not None
    other = self.product.prepared("rhs", x, sizes)
    manners = [self.forward, self.backward]
    if other is given:
      now, later = quantized(x, manners, who=self.who)
    else:
      (now,), (later,) = (
        quantized(each, [manner], who=self.who)
        for each, manner in zip((given, other), manners, strict=True)
      )
    return now, ad_checkpoint.checkpoint_name(bits_of(later), name)

  def _held(self, x: jax.Array, held: Held, is_needed: bool) -> tuple[Any, Any]:
    """As `quantize`, of copies that are there."""
    witness = tangents.witness(x, f"{self.who}{_NO_SECOND}")
    now = None
    if held.forward is not None:
      now = of_bits(tangents.beside(held.forward, witness))
    if not is_needed or (self.backward is None and not self.keeps_forward):
      return now, x
    copy = held.forward if self.keeps_forward else held.backward
    assert copy is not None
    return now, _KeptCopy(copy, witness)

  def as_kept(self, kept: Any) -> jax.Array:
    """The array, of which `kept` is the forward copy, dequantized: f32."""
    assert self.forward is not None
    x = quantization.dequantize(kept, np.float32)
    return self.forward.along.undo(x, self.shape)

  def taken(self, kept: Any, sizes: Any) -> Any:
    """What the backward product takes."""
    if self.forward is None or not (self.keeps_forward or self.backward):
      if self.product is None:
        return kept
      kept = self.product.prepared("rhs", kept, sizes)
      return self.product.blocked(kept, self.product.rhs)
    if isinstance(kept, _KeptCopy):
      kept = tangents.beside(*kept)
    if isinstance(kept, scaled_array.ScaledArray):
      kept = of_bits(kept)
    else:
      kept = self._quantized_again(kept, sizes)
    return self._turned(kept, sizes) if self.keeps_forward else kept

  def _quantized_again(self, x: jax.Array, sizes: Any) -> Any:
    """The array as it would have been kept quantized."""
    manner = self.forward if self.keeps_forward else self.backward
    assert manner is not None
    if self.keeps_forward:
      given = self.first.prepared(self.side, x, sizes)
    else:
      assert self.product is not None
      given = self.product.prepared("rhs", x, sizes)
    (result,) = quantized(given, [manner], who=self.who)
    return result

  def _turned(self, kept: scaled_array.ScaledArray, sizes: Any) -> Any:
    """What the forward product had, as the backward product takes it."""
    assert self.forward is not None
    if self.backward is None:
      return self.as_kept(kept)
    if self.forward.square is not None:
      return operands.transposed(
        kept, self.forward, self.backward.along, self.shape
      )
    assert self.product is not None
    x = self.product.prepared("rhs", self.as_kept(kept), sizes)
    (later,) = quantized(x, [self.backward], who=self.who)
    return later
