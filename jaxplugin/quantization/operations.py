# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize` in XLA ops, for every platform.

`api` checks the arguments and documents the results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, formats
from jaxplugin.quantization import codes, hadamard, problems
from jaxplugin.quantization.sharding import offsets

# If the global scale is below 2^-64, the array and the global scale are first
# multiplied by 2^64. Quotients keep their bits, and no intermediate is an f32
# subnormal. The same is done for each block whose amax is below 2^-64, if the
# format has no global scale.
_TINY_EXPONENT: Final = -64
_MIN_NORMAL: Final = 2.0**-126

# `four_over_six` may scale a block's amax to 4 instead of 6, the largest E2M1
# value. This needs 1.5 times the scale. 256 is the largest E4M3 scale for which
# that is an E4M3 number.
_FOUR: Final = 4.0
_FOUR_OVER_SIX_MAX: Final = 256.0


def has_four_over_six(format: formats.BlockFormat) -> bool:
  """Returns whether blocks can be scaled to 4 instead of 6."""
  return format.is_fp4 and not format.scale_is_power_of_two


# `jit` traces the function once for each problem; `inline` removes the call.
@functools.partial(jax.jit, static_argnames="problem", inline=True)
def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  problem: problems.QuantizationProblem,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns values, scale and global scale of x along one blocking.

  Args:
    x: floats: the array, or the result of the prologue.
    global_scale: f32[], or None to compute it if the format has one.
    key: key for stochastic rounding, or None. The bits of each value are those
      of `jax.random.bits(key, shape, uint32)`, with the shape of the blocked
      array. `codes.encode` uses the lowest ones. If the options have strides,
      it is the `offsets.words` of a shard.
  """
  (b,), (options,), format = problem.blockings, problem.options, problem.format
  axis, shape = b.axis(), b.shape(problem.shape)
  blocks, groups = _blocks(x, problem)
  random_bits = None
  if key is not None:
    if options.strides is None:
      random_bits = jax.random.bits(key, shape, jnp.uint32)
    else:
      random_bits = offsets.bits(key, shape, options.strides)
    random_bits = random_bits.reshape(blocks.shape)
  if format.scale_is_power_of_two:
    values, scale = _quantize_mx(
      blocks, groups, format, problem.scale_rounding, random_bits
    )
  else:
    if not format.has_global_scale:
      global_scale = None
    elif global_scale is None:
      global_scale = _global_scale_of_amax(
        _finite_amax(blocks, groups), format, options.four_over_six
      )
    values, scale = _quantize_two_level(
      blocks,
      groups,
      format,
      global_scale,
      random_bits,
      four_over_six=options.four_over_six,
      scale_up=options.scale_up,
    )
  if problem.packed:
    values = two_a_byte(values, axis + 1)
    values = values.reshape(*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
  else:
    values = codes.from_codes(values.reshape(shape), format.array_dtype)
  scale = jnp.squeeze(scale, axis + 1)
  if problem.scale_layout == layouts.SWIZZLED:
    scale = layouts.swizzle_scale(scale)
  return values, codes.from_codes(scale, format.scale_dtype), global_scale


def _blocks(
  x: jax.Array, problem: problems.QuantizationProblem
) -> tuple[jax.Array, _Groups]:
  """Returns f32 blocks of x, and the groups of blocks that share a scale."""
  (b,), (options,), format = problem.blockings, problem.options, problem.format
  x, axis, merged = b.apply(x), b.axis(), None
  if options.hadamard is not None:
    x = hadamard.transform(x, axis, options.hadamard)
  if options.square is not None:
    square = tuple(map(b.position, options.square))
    lead = tuple(d for d in range(x.ndim) if d not in square)
    merged = blocking.Blocking(
      dims=square, lead=lead, multiple=format.block_size
    )
  blocks = _split(x.astype(jnp.float32), axis, format.block_size)
  return blocks, _Groups(axis=axis + 1, merged=merged)


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None = None,
  *,
  problem: problems.DequantizationProblem,
) -> jax.Array:
  """Returns `values * scale * global_scale`; the scale is linear."""
  result = dequantize_raw(values, scale, problem.format, axis=problem.axis)
  if global_scale is not None:
    result = result * expand_global_scale(global_scale, result.ndim)
  return result.astype(problem.out_dtype)


def expand_global_scale(global_scale: jax.Array, ndim: int) -> jax.Array:
  """Reshapes a global scale to f32[], or appends dimensions up to `ndim`."""
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
  offset: jax.Array | None = None,
) -> jax.Array:
  """Returns f32 `values * repeat(scale, block_size, axis)`.

  If the size of `axis` is not a multiple of the block size, the last scale
  covers the remainder. With the `offset` of a format, the zero points or minima
  of blocks are applied. Values of a format with a codebook index it.
  """
  if format.has_pairs and values.dtype == formats.PACKED:
    values = layouts.unpack_fp4(values, axis=axis, dtype=format.values_dtype)
  size = values.shape[axis]
  whole = scale.shape[axis] * format.block_size
  result = blocking.pad_axis(_as_f32(values, format), axis, whole)
  blocks = _split(result, axis, format.block_size)
  if format.code_offset:
    blocks = blocks + format.code_offset
  if offset is not None:
    offset = jnp.expand_dims(offset.astype(jnp.float32), axis + 1)
    if format.has_zero_points:
      blocks = blocks - offset
  factors: tuple[jax.Array, ...] = (scale.astype(jnp.float32),)
  if format.scale_is_power_of_two:
    factors = codes.decode_e8m0(scale)
  for factor in reversed(factors):
    blocks = blocks * jnp.expand_dims(factor, axis + 1)
  if offset is not None and not format.has_zero_points:
    blocks = blocks + offset
  result = blocks.reshape(result.shape)
  return lax.slice_in_dim(result, 0, size, axis=axis)


def _as_f32(values: jax.Array, format: formats.BlockFormat) -> jax.Array:
  if format.codebook is not None:
    code = values.astype(jnp.int32) - format.code_range[0]
    # Selects keep the sharding of `code`, which a gather would have to repeat.
    entries = (jnp.full_like(code, x, jnp.float32) for x in format.codebook)
    return lax.select_n(code, *entries)
  if format.array_dtype == format.values_dtype:
    unit = jnp.float32(2.0**-format.fraction_bits)
    result = values.astype(jnp.float32)
    return result * unit if format.fraction_bits else result
  return codes.decode(values, format.values_encoding)


def _split(x: jax.Array, axis: int, block_size: int) -> jax.Array:
  """Splits `axis` into two dimensions: blocks, and values of a block."""
  blocks = x.shape[axis] // block_size
  return x.reshape(*x.shape[:axis], blocks, block_size, *x.shape[axis + 1 :])


def two_a_byte(fp4_codes: jax.Array, axis: int) -> jax.Array:
  """Packs 4-bit codes uint8[...] along `axis`, the first in the low nibble."""
  size = fp4_codes.shape[axis]
  if size == 0:
    return fp4_codes
  low, high = (
    lax.slice_in_dim(fp4_codes, first, size, 2, axis) for first in (0, 1)
  )
  return low | (high << 4)


def _block_amax(blocks: jax.Array, axis: int) -> jax.Array:
  """Returns f32 bits of each block's amax, with NaN above Inf; keeps dims."""
  bits = codes.magnitude_bits(blocks)
  return jnp.max(bits, axis=axis, keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Groups:
  """Groups of blocks that share a scale.

  Attributes:
    axis: dimension of the values of a block in the result of `_split`.
    merged: blocking that merges the dimensions of groups in an array with one
      element for each block; None if each block has a separate scale.
  """

  axis: int
  merged: blocking.Blocking | None

  def max(self, per_block: jax.Array) -> jax.Array:
    """Replaces each block's int32 by the maximum over its group."""
    return self._reduce(per_block, lambda x, axis: jnp.max(x, axis=axis))

  def sum(self, per_value: jax.Array) -> jax.Array:
    """Returns f32 for each block: the sum of the values of its group.

    `_tree_sum` first sums each block and then the blocks of a group, so every
    platform rounds alike. The last group is padded with zeros.
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
    # XLA moves operations across a broadcast. A division by a broadcast then
    # becomes a multiply with a rounded reciprocal (`codes.divide`).
    each = lax.optimization_barrier(self.merged.undo(each, x.shape))
    return jnp.expand_dims(each, self.axis)


def _tree_sum(x: jax.Array, axis: int) -> jax.Array:
  """Sums a dimension by adding its second half to its first, recursively."""
  size = x.shape[axis]
  whole = 1 << (size - 1).bit_length()
  x = blocking.pad_axis(x, axis, whole)
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
  scale_rounding: str,
  random_bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the codes of the values and of the E8M0 scale."""
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
  values = codes.with_sign(values, blocks, encoding)
  values = jnp.where(is_nan, jnp.uint8(0), values)
  scale = jnp.where(is_nan, formats.E8M0_NAN, scale)
  return values, scale.astype(jnp.uint8)


def global_scale_of_maxima(
  maxima: jax.Array, format: formats.BlockFormat, four_over_six: bool
) -> jax.Array:
  """Returns f32[...]: the global scale computed from partial amax values.

  `maxima` are uint32[..., n], f32 bits of the amax of n pieces of the array,
  each over blocks without NaN or Inf.
  """
  amax = jnp.max(maxima, axis=-1).astype(jnp.int32)
  return _global_scale_of_amax(amax, format, four_over_six)


def _global_scale_of_amax(
  amax: jax.Array, format: formats.BlockFormat, four_over_six: bool
) -> jax.Array:
  scale_max = format.scale_encoding.max
  if four_over_six:
    scale_max = _FOUR_OVER_SIX_MAX
  range_max = scale_max * format.values_encoding.max
  quotient = codes.divide(codes.from_bits(amax), range_max)
  quotient = jnp.maximum(quotient, _MIN_NORMAL)
  return jnp.where(amax == 0, jnp.float32(1), quotient)


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def finite_amax(
  x: jax.Array, problem: problems.QuantizationProblem
) -> jax.Array:
  """Returns int32[]: f32 bits of the amax over blocks without NaN or Inf."""
  return _finite_amax(*_blocks(x, problem))


def _finite_amax(blocks: jax.Array, groups: _Groups) -> jax.Array:
  amax = groups.max(_block_amax(blocks, groups.axis))
  return jnp.max(jnp.where(amax < codes.INFINITY_BITS, amax, 0), initial=0)


def _quantize_two_level(
  blocks: jax.Array,
  groups: _Groups,
  format: formats.BlockFormat,
  global_scale: jax.Array | None,
  random_bits: jax.Array | None,
  *,
  four_over_six: bool,
  scale_up: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns the codes of the values and of the floating-point scale."""
  encoding = format.values_encoding
  scale_encoding = format.scale_encoding
  bits = codes.magnitude_bits(blocks)
  amax = groups.max(_block_amax(blocks, groups.axis))
  is_zero = amax == 0
  is_nan = amax >= codes.INFINITY_BITS
  least = codes.static_bits(2.0**_TINY_EXPONENT)
  if global_scale is None:
    tiny = amax < least
    divisor = jnp.where(tiny, jnp.float32(2.0**-_TINY_EXPONENT), 1)
  else:
    global_bits = codes.magnitude_bits(global_scale)
    is_nan |= ~(
      (codes.f32_bits(global_scale) > 0) & (global_bits < codes.INFINITY_BITS)
    )
    tiny = global_bits < least
    divisor = _normal_range(global_bits, tiny)
  numerators = _normal_range(bits, tiny)
  amax = _normal_range(amax, tiny)

  def scaled_to(largest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns scale codes, scales as f32, and f32 bits of scaled magnitudes."""
    ideal = codes.divide(codes.divide(amax, largest), divisor)
    # A scale that rounds to 0 would set all values of its block to 0.
    ideal = jnp.maximum(ideal, max(scale_encoding.min_positive, _MIN_NORMAL))
    most = _most(scale_encoding, largest)
    if most < scale_encoding.max:
      ideal = jnp.minimum(ideal, most)
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
  values = codes.with_sign(values, blocks, encoding)
  values = jnp.where(is_nan, jnp.uint8(0), values)
  nan_code = scale_encoding.nan_code
  scale = jnp.where(is_zero, scale.dtype.type(0), scale)
  scale = jnp.where(is_nan, scale.dtype.type(nan_code), scale)
  return values, scale


def _most(scale: formats.Element, values_max: float) -> float:
  """Returns the largest scale whose product with `values_max` is finite."""
  f32_max = float(np.finfo(np.float32).max)
  if scale.max * values_max <= f32_max:
    return scale.max
  step = 2.0**-scale.mantissa_bits
  mantissa, exponent = math.frexp(f32_max / values_max)
  return math.floor(2 * mantissa / step) * step * 2.0 ** (exponent - 1)


def _squared_errors(
  bits: jax.Array, scale: jax.Array, encoding: formats.Element
) -> jax.Array:
  """Returns f32 squared rounding errors, divided by the global scale squared.

  Each is ((x - rounded) * scale)^2, with three f32 roundings.
  """
  rounded = codes.decode(codes.encode(bits, encoding), encoding)
  error = (codes.from_bits(bits) - rounded) * scale
  square = error * error
  # Some platforms flush subnormals. The select also keeps compilers from fusing
  # the square with a later sum, which would change the rounding.
  return jnp.where(square < _MIN_NORMAL, jnp.float32(0), square)


def _normal_range(bits: jax.Array, tiny: jax.Array) -> jax.Array:
  """Returns f32 of magnitude bits, multiplied by 2^64 if `tiny`."""
  exponent = -_TINY_EXPONENT
  ceiling = codes.MAX_FINITE_BITS - (exponent << codes.F32_MANTISSA_BITS)
  scaled = codes.times_power_of_two(
    jnp.minimum(codes.extend(bits), ceiling), exponent
  )
  scaled = jnp.where(bits == 0, 0, scaled)
  return codes.from_bits(jnp.where(tiny, scaled, bits))
