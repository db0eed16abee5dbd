# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized matmuls of `dot_general`: one forward, two backward.

The three matmuls contract different dimensions. Each matmul quantizes its
operands along its contracting dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint, lax
from jax.sharding import NamedSharding

from jaxplugin import dot, quantization
from jaxplugin.arrays import scaled_array, validation
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import derivatives, sides
from jaxplugin.dot.backends import xla
from jaxplugin.jaxext import mesh_axes, tangents
from jaxplugin.quantization import (
  arguments,
  hadamard,
  operands,
  problems,
  prologues,
)
from jaxplugin.quantization.sharding import global_scales
from jaxplugin.training import recipes

Side = Literal["lhs", "rhs"]
_Formats = tuple[formats.BlockFormat | None, formats.BlockFormat | None]

NO_SECOND: Final = (
  ": a gradient computed from quantized arrays has no derivative; for a"
  " second derivative pass a recipe with unquantized gradients,"
  " dataclasses.replace(recipe, quantize_dgrad=False, quantize_wgrad=False)"
)


def other_side(side: Side) -> Side:
  return "rhs" if side == "lhs" else "lhs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """A recipe, and which operand is the weight.

  Attributes:
    recipe: the recipe.
    weight: the operand that is the weight; the other is the activations. If
      None, both are activations and both gradients are dgrad.
    is_weight_given: whether the caller passed `weight`. If only formats were
      passed, rhs with batch dimensions may be activations, as in attention.
    implementation: see `block_scaled_dot`.
    who: the function that errors name.
    reduce_dtype: dtype of sums over devices; None is that of each matmul.
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
    """Returns the matmul for an operand's gradient: "dgrad" or "wgrad"."""
    return "wgrad" if side == self.weight else "dgrad"

  def keeps_array(self, side: Side, has_batch: bool) -> bool:
    """Whether the residual of an operand is the unquantized array.

    A weight is a parameter, which stays in memory. Copies would add the weights
    of all layers.
    """
    return side == self.weight and (self.is_weight_given or not has_batch)

  def is_square(self, side: Side) -> bool:
    """Whether an operand is quantized in square blocks."""
    return side == self.weight and self.recipe.weight_2d

  def spec(
    self,
    format: formats.BlockFormat,
    along: blocking.Blocking,
    shape: Sequence[Any],
    *,
    transform: int | None = None,
    square: tuple[int, ...] | None = None,
    is_gradient: bool = False,
  ) -> operands.QuantizeSpec:
    """Returns how an array of a shape is quantized for a matmul."""
    recipe = self.recipe
    format = format.along(along.shape(shape)[along.axis()])
    axis_name: tuple[str, ...] = ()
    if format.has_global_scale and recipe.axis_name is not None:
      axis_name = global_scales.bound_names(self.who, recipe.axis_name)
    return operands.QuantizeSpec(
      format=format,
      along=along,
      scale_rounding=(
        recipe.scale_rounding if format.scale_is_power_of_two else "up"
      ),
      options=problems.RecipeOptions(
        hadamard=transform,
        square=square,
        four_over_six=recipe.four_over_six
        and quantization.has_four_over_six(format),
        scale_up=recipe.grad_scale_up and is_gradient,
      ),
      axis_name=axis_name,
    )

  def spec_of_gradient(
    self, product: Product, shape: Sequence[Any]
  ) -> operands.QuantizeSpec:
    """Returns how the result's gradient is quantized for a backward matmul."""
    format = self.recipe.grad_format
    assert format is not None
    return self.spec(
      format, product.lhs, shape, transform=product.hadamard, is_gradient=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A quantized matmul: how its operands are blocked and multiplied.

  If several dimensions are contracted and the last one has whole blocks, that
  one is blocked. The codes are those of the merged dimensions, and the sharding
  of each dimension stays. Otherwise the dimensions are merged.

  Attributes:
    lhs, rhs: blockings along the contracting dimensions. Sizes are padded to
      whole blocks of both formats, and to whole groups of the transform.
    numbers: dimension numbers of the blocked operands.
    operand_formats: formats of the operands; None for an unquantized one.
    hadamard: size of the transform of both operands, or None.
    out_sharding: of the result on a mesh with explicit axes, or None.
  """

  lhs: blocking.Blocking
  rhs: blocking.Blocking
  numbers: sides.DimensionNumbers
  operand_formats: _Formats
  hadamard: int | None = None
  out_sharding: NamedSharding | None = None

  @classmethod
  def of(
    cls,
    numbers: sides.DimensionNumbers,
    shapes: tuple[Sequence[Any], Sequence[Any]],
    operand_formats: _Formats,
    hadamard: int | None = None,
    out_sharding: NamedSharding | None = None,
  ) -> Self:
    """Returns the matmul of arrays of two shapes."""
    multiple = math.lcm(*(f.block_size or 1 for f in operand_formats if f))
    multiple = math.lcm(multiple, hadamard or 1)
    contracting, batch = numbers
    ndims = tuple(map(len, shapes))
    frees = map(sides.free_dims, ndims, contracting, batch)
    (_, last), (_, shape) = contracting, shapes
    is_merged = len(last) <= 1 or not _has_whole(shape[last[-1]], multiple)
    lhs, rhs = (
      blocking.Blocking(
        dims=k if is_merged else k[-1:],
        lead=(*b, *free) if is_merged else (*b, *free, *k[:-1]),
        multiple=multiple,
      )
      for k, b, free in zip(contracting, batch, frees, strict=True)
    )
    if is_merged:
      # Merging brings the batch dimensions to the front.
      lhs_batch, rhs_batch = (
        tuple(range(len(b))) if len(k) > 1 else b
        for k, b in zip(contracting, batch, strict=True)
      )
      numbers = ((lhs.axis(),), (rhs.axis(),)), (lhs_batch, rhs_batch)
    return cls(
      lhs=lhs,
      rhs=rhs,
      numbers=numbers,
      operand_formats=operand_formats,
      hadamard=hadamard,
      out_sharding=out_sharding,
    )

  def prepared(self, side: Side, x: jax.Array, sizes: Any) -> jax.Array:
    """Prepares an operand before it is blocked. By default returns `x`."""
    del side, sizes
    return x

  def prologue_refusal(self, side: Side) -> str:
    """Returns why `prepared` needs the array of a prologue, or ""."""
    del side
    return ""

  def multiply(
    self, lhs: Any, rhs: Any, dtype: Any, scheme: Scheme, sizes: Any
  ) -> jax.Array:
    """Multiplies blocked operands, quantized or not.

    Args:
      sizes: sizes of the groups of rows; None if there are no groups.
    """
    del sizes
    with error_context.in_function(scheme.who):
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
    """Returns `multiply(g, other)` with its dimensions in an order.

    A weight's gradient often needs the order of `multiply(other, g)`, which is
    then computed instead, because XLA would copy a kernel's result to transpose
    it.

    Args:
      order: a permutation of the dimensions of `multiply(g, other)`.
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
    """Returns the matmul with swapped operands, with dimensions in `order`."""
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
      operand_formats=self.operand_formats[::-1],
      out_sharding=sharding,
    )

  def blocked(self, x: jax.Array, along: blocking.Blocking) -> jax.Array:
    """Returns an unquantized operand for `multiply`."""
    x = along.apply(x)
    if self.hadamard is None:
      return x
    return hadamard.transform(x, along.axis(), self.hadamard)


def _has_whole(size: Any, multiple: int) -> bool:
  """Whether a size is not symbolic and is a multiple."""
  return isinstance(size, int) and size % multiple == 0


def quantized(
  x: jax.Array,
  specs: Sequence[operands.QuantizeSpec],
  keys: Sequence[jax.Array | None] | None = None,
  *,
  who: str,
  call: prologues.PrologueCall | None = None,
) -> list[Any]:
  """Quantizes `x` for each spec, from one read if possible.

  Args:
    keys: for each spec the key of stochastic rounding, or None.
    call: the prologue that computes x, whose f32 result is quantized instead
      if kernels may compute it; or None.
  """
  keys = keys or [None] * len(specs)
  if not specs:
    return []
  if call and not operands.prologue_refusal(specs, x.shape):
    guard = tangents.derivative_guard(x, f"{who}{NO_SECOND}")
    call = tangents.attach_guard(call, guard)
    return list(operands.quantize_all(call, tuple(specs), tuple(keys)))
  x = tangents.without_derivative(x, f"{who}{NO_SECOND}")
  groups = [list(zip(specs, keys, strict=True))]
  if any(s.format != specs[0].format or s.options.square for s in specs):
    # No kernel quantizes these from one read.
    groups = [[pair] for pair in groups[0]]
  results: list[Any] = []
  for group in groups:
    results += operands.quantize_all(x, *zip(*group, strict=True))
  for result in results:
    validation.remember_positive(result.scale)
  return results


def bits_of(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  """Returns `x` as integers, with 4-bit values packed if blocks are even.

  A policy of `jax.checkpoint` passes floats through `lax.reduce_precision`,
  which does not support dtypes without Inf: it turns E4M3 scales above 240 into
  NaN. In a scan over layers, XLA:CPU slices FP4 value by value, but not bytes.
  Optimizers do not update integers.
  """
  if x.format.has_pairs and x.format.block_size % 2 == 0:
    x = x.pack()
  (values, scale, global_scale), aux = x.tree_flatten()
  if not x.is_packed:
    bits = jnp.uint4 if x.format.has_pairs else jnp.uint8
    values = lax.bitcast_convert_type(values, bits)
  scale = lax.bitcast_convert_type(scale, jnp.uint8)
  if global_scale is not None:
    global_scale = lax.bitcast_convert_type(global_scale, jnp.uint32)
  return x.tree_unflatten(aux, (values, scale, global_scale))


def of_bits(x: scaled_array.ScaledArray) -> scaled_array.ScaledArray:
  """Undoes `bits_of`; FP4 values stay packed."""
  (values, scale, global_scale), aux = x.tree_flatten()
  if not x.is_packed:
    values = lax.bitcast_convert_type(values, x.format.array_dtype)
  scale = lax.bitcast_convert_type(scale, x.format.scale_dtype)
  if global_scale is not None:
    global_scale = lax.bitcast_convert_type(global_scale, jnp.float32)
  return x.tree_unflatten(aux, (values, scale, global_scale))


class Held(NamedTuple):
  """Copies from `bits_of` of an operand that was quantized before.

  A copy is None if the matmul uses the array, or the other copy.
  """

  forward: scaled_array.ScaledArray | None
  backward: scaled_array.ScaledArray | None


class _KeptCopy(NamedTuple):
  """A copy of a `Held`, and `tangents.derivative_guard` of the operand."""

  copy: scaled_array.ScaledArray
  guard: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOperand:
  """An operand in the forward matmul, and in one backward matmul.

  Attributes:
    scheme: the recipe, and which operand is the weight.
    side: "lhs" or "rhs".
    shape: of the array.
    dtype: of the array.
    free: its noncontracting dimensions.
    first: the forward matmul.
    product: the backward matmul; None if that is in high precision.
  """

  scheme: Scheme
  side: Side
  shape: tuple[Any, ...]
  dtype: np.dtype
  free: tuple[int, ...]
  first: Product
  product: Product | None

  @functools.cached_property
  def forward(self) -> operands.QuantizeSpec | None:
    """How the forward matmul quantizes it; None if it does not."""
    format = self.scheme.format(self.side)
    if format is None:
      return None
    along = self.first.lhs if self.side == "lhs" else self.first.rhs
    square = self.free if self.scheme.is_square(self.side) else None
    return self.scheme.spec(format, along, self.shape, square=square)

  @functools.cached_property
  def backward(self) -> operands.QuantizeSpec | None:
    """How the backward matmul quantizes it; None if it does not."""
    format, product = self.scheme.format(self.side), self.product
    if format is None or product is None:
      return None
    return self.scheme.spec(
      format, product.rhs, self.shape, transform=product.hadamard
    )

  @property
  def keeps_forward(self) -> bool:
    """Whether the backward matmul uses the forward copy."""
    forward = self.forward
    return forward is not None and (
      self.scheme.recipe.backward_from_quantized
      or (self.backward is not None and forward.options.square is not None)
    )

  @property
  def keeps_array(self) -> bool:
    """Whether the residual is the array, which the backward pass quantizes.

    Otherwise the residual is a quantized copy.
    """
    (_, (batch, _)) = self.first.numbers
    return self.scheme.keeps_array(self.side, bool(batch))

  @property
  def who(self) -> str:
    """The function that errors name."""
    return self.scheme.who

  def quantize(
    self,
    x: jax.Array,
    sizes: Any,
    is_needed: bool,
    name: str | None = None,
    held: Held | prologues.PrologueCall | None = None,
  ) -> tuple[Any, Any]:
    """Returns the operand of the forward matmul, and the residual.

    Args:
      sizes: see `Product.multiply`.
      is_needed: whether the backward pass needs a residual.
      name: name of a quantized residual for policies of `jax.checkpoint`.
      held: copies that exist already; or the prologue that computes the array;
        None to quantize the array.

    Returns:
      The first is None if the forward matmul does not quantize the operand.
    """
    if self.forward is None:
      return None, x
    if isinstance(held, Held):
      return self._held(x, held, is_needed)
    quantize = functools.partial(quantized, who=self.who, call=held)
    given = self.first.prepared(self.side, x, sizes)
    keeps_array = self.backward is None and not self.keeps_forward
    if not is_needed or keeps_array or self.keeps_array:
      (now,) = quantize(given, [self.forward])
      return now, x
    if self.keeps_forward:
      (now,) = quantize(given, [self.forward])
      return now, ad_checkpoint.checkpoint_name(bits_of(now), name)
    assert self.backward is not None and self.product is not None
    other = self.product.prepared("rhs", x, sizes)
    specs = [self.forward, self.backward]
    if other is given:
      now, later = quantize(x, specs)
    else:
      (now,), (later,) = (
        quantized(each, [spec], who=self.who)
        for each, spec in zip((given, other), specs, strict=True)
      )
    return now, ad_checkpoint.checkpoint_name(bits_of(later), name)

  def _held(self, x: jax.Array, held: Held, is_needed: bool) -> tuple[Any, Any]:
    """Returns the results of `quantize` from copies that exist already."""
    guard = tangents.derivative_guard(x, f"{self.who}{NO_SECOND}")
    now = None
    if held.forward is not None:
      now = of_bits(tangents.attach_guard(held.forward, guard))
    if not is_needed or (self.backward is None and not self.keeps_forward):
      return now, x
    copy = held.forward if self.keeps_forward else held.backward
    assert copy is not None
    return now, _KeptCopy(copy, guard)

  def taken(self, kept: Any, sizes: Any) -> Any:
    """Returns the operand of the backward matmul from the residual."""
    if self.forward is None or not (self.keeps_forward or self.backward):
      if self.product is None:
        return kept
      kept = self.product.prepared("rhs", kept, sizes)
      return self.product.blocked(kept, self.product.rhs)
    if isinstance(kept, _KeptCopy):
      kept = tangents.attach_guard(*kept)
    if isinstance(kept, scaled_array.ScaledArray):
      kept = of_bits(kept)
    else:
      kept = self._quantized_again(kept, sizes)
    return self._to_backward(kept, sizes) if self.keeps_forward else kept

  def _quantized_again(self, x: jax.Array, sizes: Any) -> Any:
    """Quantizes a residual that is the array."""
    spec = self.forward if self.keeps_forward else self.backward
    assert spec is not None
    if self.keeps_forward:
      given = self.first.prepared(self.side, x, sizes)
    else:
      assert self.product is not None
      given = self.product.prepared("rhs", x, sizes)
    (result,) = quantized(given, [spec], who=self.who)
    return result

  def _to_backward(self, kept: scaled_array.ScaledArray, sizes: Any) -> Any:
    """Converts a forward copy to the operand of the backward matmul."""
    assert self.forward is not None
    if self.backward is not None and self.forward.options.square is not None:
      return operands.transposed(
        kept, self.forward, self.backward.along, self.shape
      )
    x = quantization.dequantize(kept, np.float32)
    x = self.forward.along.undo(x, self.shape)
    if self.backward is None:
      return x
    assert self.product is not None
    x = self.product.prepared("rhs", x, sizes)
    (later,) = quantized(x, [self.backward], who=self.who)
    return later


SIDES: Final[tuple[Side, Side]] = ("lhs", "rhs")
# `fold_in` of these implementations mixes the key and the number, so the order
# of folds changes the result. `fold_in` of "unsafe_rbg" is the exclusive or of
# the key and bits made from the number. Folding 0 and then 1 therefore equals
# folding 1 and then 0, and folding a number twice restores the first key.
_SENSITIVE_TO_ORDER: Final = frozenset({"threefry2x32", "rbg"})


def data_of_key(scheme: Scheme, key: Any) -> tuple[Any, Any]:
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

  scheme: Scheme
  numbers: sides.DimensionNumbers
  precision: Any
  dtype: Any
  key_impl: Any = None
  out_sharding: NamedSharding | None = None

  # The class of the call's matmuls.
  kind: ClassVar[type[Product]] = Product

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
    product: Product | None = None,
    out_sharding: NamedSharding | None = None,
  ) -> jax.Array:
    """Multiplies in high precision.

    Args:
      sizes: see `Product.multiply`.
      product: the matmul that both were prepared and blocked for, or None.
    """
    del sizes, product
    return xla.plain_dot(
      lhs,
      rhs,
      numbers,
      dtype,
      precision=self.precision,
      out_sharding=out_sharding,
    )

  def forward(self, lhs: Any, rhs: Any) -> Product:
    return self.kind.of(
      self.numbers,
      (lhs.shape, rhs.shape),
      (self.scheme.format("lhs"), self.scheme.format("rhs")),
      out_sharding=self.out_sharding,
    )

  def gradient_shardings(
    self, lhs: Any, rhs: Any
  ) -> dict[Side, NamedSharding | None]:
    """Returns the shardings of the backward matmuls' results.

    Their dimensions are not yet in the order of the operand.
    """
    if self.out_sharding is None:
      return dict.fromkeys(SIDES)
    dims = self.gradient_dims(lhs, rhs)
    result: dict[Side, NamedSharding | None] = {}
    for side, x in zip(SIDES, (lhs, rhs), strict=True):
      _, order = dims.of_side(side)
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
    wanted: dict[Side, bool],
  ) -> dict[Side, Product | None]:
    """Returns the matmuls for the wanted gradients; None in high precision."""
    dims, scheme = self.gradient_dims(lhs, rhs), self.scheme
    shardings = self.gradient_shardings(lhs, rhs)
    found: dict[Side, Product | None] = dict.fromkeys(SIDES)
    for side, other in zip(SIDES, (rhs, lhs), strict=True):
      numbers, _ = dims.of_side(side)
      name = scheme.gradient(side)
      formats = (
        scheme.recipe.grad_format,
        scheme.format(other_side(side)),
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
    backward: dict[Side, Product | None],
  ) -> dict[Side, TrainingOperand]:
    """Returns both operands.

    Args:
      lhs, rhs: arrays, or their shapes and dtypes.
      backward: the matmul for the gradient of each operand.
    """
    product = self.forward(lhs, rhs)
    contracting, batch = self.numbers
    return {
      side: TrainingOperand(
        scheme=self.scheme,
        side=side,
        shape=tuple(x.shape),
        dtype=x.dtype,
        free=sides.free_dims(x.ndim, k, b),
        first=product,
        product=backward[other_side(side)],
      )
      for side, x, k, b in zip(
        SIDES, (lhs, rhs), contracting, batch, strict=True
      )
    }

  def differentiated(self, lhs: Any, rhs: Any) -> dict[Side, TrainingOperand]:
    """Returns both operands for a call whose two gradients are needed."""
    backward = self.backward(lhs, rhs, {"lhs": True, "rhs": True})
    return self.operands(lhs, rhs, backward)

  def key(self, data: Any, side: Side) -> Any:
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
