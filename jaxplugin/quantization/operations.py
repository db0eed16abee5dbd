# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize` in JAX operations, for every platform.

`api` checks the arguments and describes the results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.quantization import codes
from jaxplugin.quantization.sharding import offsets

ScaleRounding = Literal["up", "floor"]

# Tensors with a global scale below 2^-64 are quantized as if multiplied by
# 2^64: quotients keep their bits, and no intermediate is an f32 subnormal.
_TINY_GLOBAL_EXPONENT: Final = -64
_MIN_GLOBAL_SCALE: Final = 2.0**-126
_MIN_NORMAL: Final = 2.0**-126

# The value that `four_over_six` scales a block to instead of 6, E2M1's largest
# value, and the largest scale for which 1.5 times the scale exists.
_FOUR: Final = 4.0
_FOUR_OVER_SIX_MAX: Final = 256.0


def has_four_over_six(format: formats.BlockFormat) -> bool:
  """Returns whether blocks can be scaled to 4 instead of 6."""
  return format.is_fp4 and not format.scale_is_power_of_two


# Traced once for each signature, and inlined into the module.
@functools.partial(
  jax.jit,
  static_argnames=(
    "format",
    "axis",
    "scale_rounding",
    "packed",
    "scale_layout",
    "square",
    "four_over_six",
    "scale_up",
    "strides",
  ),
  inline=True,
)
def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: ScaleRounding,
  packed: bool = False,
  scale_layout: layouts.ScaleLayout = layouts.LINEAR,
  square: tuple[int, ...] | None = None,
  four_over_six: bool = False,
  scale_up: bool = False,
  strides: tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns values, scale and global scale of `quantize`.

  Args:
    key: for stochastic rounding. `jax.random.bits(key, x.shape, uint32)` has
      the bits of each value of the blocked and padded array, in row-major
      order. `codes.encode` uses the lowest bits.
    packed: whether values, of an FP4 format with an even block size, are uint8
      with two of them a byte along `axis`.
    scale_layout: of the scale; for one that is swizzled axis is the last.
    square: dimensions of x, without `axis`, that are merged in this order and
      cut into groups of block_size, the last of which may be smaller. The
      blocks of a group have one scale, repeated, as if they were one block. Of
      none, each block is a group. None: there are no groups.
    four_over_six: whether each block, or group, is scaled to 6 or to 4. Global
      scales are computed for scales up to 256, so that 1.5 times as much is a
      scale too (arXiv 2512.02010).
    scale_up: whether a floating-point scale is the least one that is not less
      than what is rounded to it, instead of the nearest.
    strides: of the array that this is a part of; then key is `offsets.words` of
      the part, which has the random bits that the array has there. None: it is
      a whole one.
  """
  blocks = _split(x.astype(jnp.float32), axis, format.block_size)
  random_bits = None
  if key is not None:
    if strides is None:
      random_bits = jax.random.bits(key, x.shape, jnp.uint32)
    else:
      random_bits = offsets.bits(key, x.shape, strides)
    random_bits = random_bits.reshape(blocks.shape)
  groups = _Groups.of(x.ndim, axis, format.block_size, square)
  if format.scale_is_power_of_two:
    values, scale = _quantize_mx(
      blocks, groups, format, scale_rounding, random_bits
    )
  else:
    if not format.has_global_scale:
      global_scale = None
    elif global_scale is None:
      global_scale = _computed_global_scale(
        blocks, groups, format, four_over_six
      )
    one = jnp.float32(1)
    values, scale = _quantize_two_level(
      blocks,
      groups,
      format,
      one if global_scale is None else global_scale,
      random_bits,
      four_over_six=four_over_six,
      scale_up=scale_up,
    )
  if packed:
    values = _two_a_byte(values, axis + 1)
    shape = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    values = values.reshape(shape)
  else:
    values = codes.from_codes(values.reshape(x.shape), format.array_dtype)
  scale = jnp.squeeze(scale, axis + 1)
  if scale_layout == layouts.SWIZZLED:
    scale = layouts.swizzle_scale(scale)
  return values, codes.from_codes(scale, format.scale_dtype), global_scale


@functools.partial(
  jax.jit, static_argnames=("format", "axis", "dtype"), inline=True
)
def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  dtype: np.dtype,
) -> jax.Array:
  """Returns `values * scale * global_scale`, of linear scales.

  Args:
    global_scale: None, or as for `ScaledArray`.
  """
  result = dequantize_raw(values, scale, format, axis=axis)
  if global_scale is not None:
    result = result * expand_global_scale(global_scale, result.ndim)
  return result.astype(dtype)


def expand_global_scale(global_scale: jax.Array, ndim: int) -> jax.Array:
  """Returns a global scale as f32[] or with rank `ndim`."""
  if all(size == 1 for size in global_scale.shape):
    return global_scale.reshape(())
  trailing = (1,) * (ndim - global_scale.ndim)
  return global_scale.reshape(*global_scale.shape, *trailing)


def dequantize_raw(
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  *,
  axis: int,
) -> jax.Array:
  """f32 `values * repeat(scale, block_size, axis)`; see
  `quantization.dequantize`.

  The size of `axis` need not be a multiple of the block size: the last scale
  then covers the remainder.
  """
  if format.is_fp4 and values.dtype == formats.PACKED:
    values = layouts.unpack_fp4(values, axis=axis)
  size = values.shape[axis]
  whole = scale.shape[axis] * format.block_size
  result = extents.pad_axis(_as_f32(values, format), axis, whole)
  blocks = _split(result, axis, format.block_size)
  factors: tuple[jax.Array, ...] = (scale.astype(jnp.float32),)
  if format.scale_is_power_of_two:
    factors = codes.decode_e8m0(scale)
  for factor in reversed(factors):
    blocks = blocks * jnp.expand_dims(factor, axis + 1)
  result = blocks.reshape(result.shape)
  return lax.slice_in_dim(result, 0, size, axis=axis)


def _as_f32(values: jax.Array, format: formats.BlockFormat) -> jax.Array:
  if format.array_dtype == format.values_dtype:
    return values.astype(jnp.float32)
  return codes.decode(values, format.values_encoding)


def _split(x: jax.Array, axis: int, block_size: int) -> jax.Array:
  """Splits `axis` in two: blocks, and the values in a block."""
  blocks = x.shape[axis] // block_size
  return x.reshape(*x.shape[:axis], blocks, block_size, *x.shape[axis + 1 :])


def _two_a_byte(fp4_codes: jax.Array, axis: int) -> jax.Array:
  """Packs codes uint8[...] of FP4 along `axis`, the first in the low nibble."""
  size = fp4_codes.shape[axis]
  low, high = (
    lax.slice_in_dim(fp4_codes, first, size, 2, axis) for first in (0, 1)
  )
  return low | (high << 4)


def _block_amax(blocks: jax.Array, axis: int) -> jax.Array:
  """Bits of the largest magnitude of each block, NaN above Inf; keeps dims."""
  bits = codes.magnitude_bits(blocks)
  return jnp.max(bits, axis=axis, keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Groups:
  """Which blocks have one scale together.

  Attributes:
    axis: the dimension of `_split`'s result that counts the values of a block.
    merged: cuts an array with one number for each block into groups that share
      a scale, along one dimension; None if each block has a separate scale.
  """

  axis: int
  merged: blocking.Blocking | None

  @classmethod
  def of(
    cls, ndim: int, axis: int, block_size: int, square: tuple[int, ...] | None
  ) -> _Groups:
    merged = None
    if square is not None:
      lead = tuple(d for d in range(ndim) if d not in square)
      merged = blocking.Blocking(dims=square, lead=lead, multiple=block_size)
    return cls(axis=axis + 1, merged=merged)

  def max(self, per_block: jax.Array) -> jax.Array:
    """Returns int32: the largest of each group, in all of its blocks."""
    return self._reduce(per_block, lambda x, axis: jnp.max(x, axis=axis))

  def sum(self, per_value: jax.Array) -> jax.Array:
    """Returns f32: the sum of each group, in all of its blocks.

    It is a tree of halves, first over a block, so its rounding is the same on
    every platform. A smaller group ends in zeros.
    """
    per_block = jnp.expand_dims(_tree_sum(per_value, self.axis), self.axis)
    return self._reduce(per_block, _tree_sum)

  def _reduce(
    self,
    per_block: jax.Array,
    reduce: Callable[[jax.Array, int], jax.Array],
  ) -> jax.Array:
    if self.merged is None:
      return per_block
    x = jnp.squeeze(per_block, self.axis)
    merged = self.merged.apply(x)
    axis, size = self.merged.axis(), self.merged.multiple
    groups = _split(merged, axis, size)
    each = jnp.expand_dims(reduce(groups, axis + 1), axis + 1)
    each = jnp.broadcast_to(each, groups.shape).reshape(merged.shape)
    return jnp.expand_dims(self.merged.undo(each, x.shape), self.axis)


def _tree_sum(x: jax.Array, axis: int) -> jax.Array:
  """x[0] + x[half], x[1] + x[half + 1], ... and so on, along a dimension."""
  size = x.shape[axis]
  whole = 1 << (size - 1).bit_length()
  x = extents.pad_axis(x, axis, whole)
  while whole > 1:
    whole //= 2
    first, second = (
      lax.slice_in_dim(x, start, start + whole, axis=axis)
      for start in (0, whole)
    )
    x = first + second
  return jnp.squeeze(x, axis)


def _quantize_mx(
  blocks: jax.Array,
  groups: _Groups,
  format: formats.BlockFormat,
  scale_rounding: ScaleRounding,
  random_bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Codes of the values and of the scale, for E8M0 scales."""
  encoding = format.values_encoding
  amax = groups.max(_block_amax(blocks, groups.axis))
  exponent_field = amax >> codes.F32_MANTISSA_BITS
  if scale_rounding == "up":
    max_bits = codes.static_bits(encoding.max)
    mask = codes.MIN_NORMAL_BITS - 1
    exceeds = (amax & mask) > (max_bits & mask)
    max_exponent = (max_bits >> codes.F32_MANTISSA_BITS) - codes.F32_BIAS
    scale = exponent_field - max_exponent + exceeds.astype(jnp.int32)
  else:
    scale = exponent_field - encoding.max_exponent
  scale = jnp.clip(scale, 0, formats.E8M0_NAN - 1)
  is_nan = amax >= codes.INFINITY_BITS

  bits = codes.magnitude_bits(blocks)
  quotient = codes.times_power_of_two(
    codes.extend(bits), formats.E8M0_BIAS - scale
  )
  quotient = jnp.where(bits == 0, 0, codes.flush(quotient))
  values = codes.encode(quotient, encoding, random_bits)
  values = codes.with_sign(values, blocks, encoding.sign_shift)
  values = jnp.where(is_nan, jnp.uint8(0), values)
  scale = jnp.where(is_nan, formats.E8M0_NAN, scale)
  return values, scale.astype(jnp.uint8)


@functools.partial(
  jax.jit,
  static_argnames=("format", "axis", "square", "four_over_six"),
  inline=True,
)
def partial_global_scale(
  x: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  square: tuple[int, ...] | None = None,
  four_over_six: bool = False,
) -> jax.Array:
  """Returns f32[]: the global scale that a part needs, or 0.

  The largest value of all parts gives the global scale of the array
  (`global_scale_of_partial`).
  """
  blocks = _split(x.astype(jnp.float32), axis, format.block_size)
  groups = _Groups.of(x.ndim, axis, format.block_size, square)
  return _partial_global_scale(blocks, groups, format, four_over_six)


def global_scale_of_partial(partial: jax.Array) -> jax.Array:
  return jnp.where(partial == 0, jnp.float32(1), partial)


def partial_scale_of_maxima(
  maxima: jax.Array, format: formats.BlockFormat, four_over_six: bool
) -> jax.Array:
  """Returns f32[...]: the global scales that a part needs, or 0.

  Args:
    maxima: uint32[..., n], largest magnitudes of n pieces of the part, over the
      blocks without NaN or Inf, as f32 bits.
  """
  amax = jnp.max(maxima, axis=-1).astype(jnp.int32)
  return _partial_scale_of_amax(amax, format, four_over_six)


def _partial_scale_of_amax(
  amax: jax.Array, format: formats.BlockFormat, four_over_six: bool
) -> jax.Array:
  scale_max = format.scale_encoding.max
  if four_over_six:
    scale_max = _FOUR_OVER_SIX_MAX
  range_max = scale_max * format.values_encoding.max
  quotient = codes.divide(codes.from_bits(amax), range_max)
  # Never subnormal, so that a maximum over devices flushes nothing to zero.
  quotient = jnp.maximum(quotient, _MIN_GLOBAL_SCALE)
  return jnp.where(amax == 0, jnp.float32(0), quotient)


@functools.partial(
  jax.jit, static_argnames=("format", "axis", "square"), inline=True
)
def finite_amax(
  x: jax.Array,
  format: formats.BlockFormat,
  axis: int,
  square: tuple[int, ...] | None = None,
) -> jax.Array:
  """Returns int32[]: amax of blocks without NaN or Inf, as f32 bits."""
  blocks = _split(x.astype(jnp.float32), axis, format.block_size)
  groups = _Groups.of(x.ndim, axis, format.block_size, square)
  return _finite_amax(blocks, groups)


def _computed_global_scale(
  blocks: jax.Array,
  groups: _Groups,
  format: formats.BlockFormat,
  four_over_six: bool,
) -> jax.Array:
  """Returns f32[]: amax of the finite blocks / (scale max * values max)."""
  return global_scale_of_partial(
    _partial_global_scale(blocks, groups, format, four_over_six)
  )


def _partial_global_scale(
  blocks: jax.Array,
  groups: _Groups,
  format: formats.BlockFormat,
  four_over_six: bool,
) -> jax.Array:
  amax = _finite_amax(blocks, groups)
  return _partial_scale_of_amax(amax, format, four_over_six)


def _finite_amax(blocks: jax.Array, groups: _Groups) -> jax.Array:
  amax = groups.max(_block_amax(blocks, groups.axis))
  return jnp.max(jnp.where(amax < codes.INFINITY_BITS, amax, 0), initial=0)


def _quantize_two_level(
  blocks: jax.Array,
  groups: _Groups,
  format: formats.BlockFormat,
  global_scale: jax.Array,
  random_bits: jax.Array | None,
  *,
  four_over_six: bool,
  scale_up: bool,
) -> tuple[jax.Array, jax.Array]:
  """Codes of the values and of the scale, for floating-point scales."""
  encoding = format.values_encoding
  scale_encoding = format.scale_encoding
  bits = codes.magnitude_bits(blocks)
  amax = groups.max(_block_amax(blocks, groups.axis))
  is_zero = amax == 0
  global_bits = codes.magnitude_bits(global_scale)
  is_nan = (amax >= codes.INFINITY_BITS) | ~(
    (codes.f32_bits(global_scale) > 0) & (global_bits < codes.INFINITY_BITS)
  )

  tiny = global_bits < codes.static_bits(2.0**_TINY_GLOBAL_EXPONENT)
  numerators = _normal_range(bits, tiny)
  divisor = _normal_range(global_bits, tiny)
  amax = _normal_range(amax, tiny)

  def scaled_to(largest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes of scales, their numbers, and bits of what values are rounded."""
    ideal = codes.divide(codes.divide(amax, largest), divisor)
    # A scale that rounds to 0 would lose all values of its block.
    ideal = jnp.maximum(ideal, scale_encoding.min_positive)
    scale = codes.encode(codes.magnitude_bits(ideal), scale_encoding)
    number = codes.from_codes(scale, format.scale_dtype).astype(jnp.float32)
    if scale_up:
      is_less = (number < ideal) & (number < scale_encoding.max)
      scale = jnp.where(is_less, scale + 1, scale)
      number = codes.from_codes(scale, format.scale_dtype).astype(jnp.float32)
    step = jnp.broadcast_to(number * divisor, blocks.shape)
    quotient = codes.divide(numerators, step)
    return scale, number, codes.flush(codes.magnitude_bits(quotient))

  scale, number, quotient = scaled_to(encoding.max)
  if four_over_six:
    other, other_number, other_quotient = scaled_to(_FOUR)
    error, other_error = (
      groups.sum(_squared_errors(q, n, encoding))
      for q, n in ((quotient, number), (other_quotient, other_number))
    )
    is_other = other_error < error
    scale = jnp.where(is_other, other, scale)
    quotient = jnp.where(is_other, other_quotient, quotient)
  values = codes.encode(quotient, encoding, random_bits)
  values = codes.with_sign(values, blocks, encoding.sign_shift)
  values = jnp.where(is_nan, jnp.uint8(0), values)
  nan_code = scale_encoding.nan_code
  scale = jnp.where(is_zero, jnp.uint8(0), scale)
  scale = jnp.where(is_nan, jnp.uint8(nan_code), scale)
  return values, scale


def _squared_errors(
  bits: jax.Array, scale: jax.Array, encoding: formats.Element
) -> jax.Array:
  """Returns f32 squared errors, in units of the global scale.

  Each is ((x - rounded) * scale)^2, with three roundings.
  """
  rounded = codes.decode(codes.encode(bits, encoding), encoding)
  error = (codes.from_bits(bits) - rounded) * scale
  square = error * error
  # Subnormals are zeros to some platforms. And the select keeps a compiler from
  # fusing the square into a later sum, which would not be rounded alike
  # everywhere.
  return jnp.where(square < _MIN_NORMAL, jnp.float32(0), square)


def _normal_range(bits: jax.Array, tiny: jax.Array) -> jax.Array:
  """The magnitudes `bits` as f32, times 2^64 where `tiny`, subnormals too."""
  exponent = -_TINY_GLOBAL_EXPONENT
  ceiling = codes.MAX_FINITE_BITS - (exponent << codes.F32_MANTISSA_BITS)
  scaled = codes.times_power_of_two(
    jnp.minimum(codes.extend(bits), ceiling), exponent
  )
  scaled = jnp.where(bits == 0, 0, scaled)
  return codes.from_bits(jnp.where(tiny, scaled, bits))
