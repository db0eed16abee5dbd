# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize` in JAX operations, for every platform.

What they compute is said in `api`, which checks the arguments.
"""

from __future__ import annotations

import functools
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.quantization import codes

ScaleRounding = Literal["up", "floor"]

# Tensors with a global scale below 2^-64 are quantized as if multiplied by
# 2^64: quotients keep their bits, and no intermediate is an f32 subnormal.
_TINY_GLOBAL_EXPONENT: Final = -64
_MIN_GLOBAL_SCALE: Final = 2.0**-126


# Traced once for each signature, and yet no function of its own in a module.
@functools.partial(
  jax.jit,
  static_argnames=(
    "format",
    "axis",
    "scale_rounding",
    "packed",
    "scale_layout",
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
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Values, scale and global scale of `quantize`.

  Args:
    packed: whether values, of an FP4 format with an even block size, are uint8
      with two of them a byte along `axis`.
    scale_layout: of the scale; for one that is swizzled axis is the last.
  """
  blocks = _split(x.astype(jnp.float32), axis, format.block_size)
  random_bits = None
  if key is not None:
    random_bits = jax.random.bits(key, blocks.shape, jnp.uint32)
  if format.scale_is_power_of_two:
    values, scale = _quantize_mx(
      blocks, axis + 1, format, scale_rounding, random_bits
    )
  else:
    if not format.has_global_scale:
      global_scale = None
    elif global_scale is None:
      global_scale = _computed_global_scale(blocks, axis + 1, format)
    one = jnp.float32(1)
    values, scale = _quantize_two_level(
      blocks,
      axis + 1,
      format,
      one if global_scale is None else global_scale,
      random_bits,
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
  """`values * scale * global_scale`, of linear scales.

  Args:
    global_scale: None, or as of `ScaledArray`.
  """
  result = dequantize_raw(values, scale, format, axis=axis)
  if global_scale is not None:
    result = result * expand_global_scale(global_scale, result.ndim)
  return result.astype(dtype)


def expand_global_scale(global_scale: jax.Array, ndim: int) -> jax.Array:
  """A `ScaledArray`'s global scale as f32[] or with rank `ndim`."""
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


def _quantize_mx(
  blocks: jax.Array,
  axis: int,
  format: formats.BlockFormat,
  scale_rounding: ScaleRounding,
  random_bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Codes of the values and of the scale, for E8M0 scales."""
  encoding = format.values_encoding
  amax = _block_amax(blocks, axis)
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


def _computed_global_scale(
  blocks: jax.Array, axis: int, format: formats.BlockFormat
) -> jax.Array:
  """f32[]: amax of the finite blocks / (scale max * values max)."""
  amax = _block_amax(blocks, axis)
  amax = jnp.max(jnp.where(amax < codes.INFINITY_BITS, amax, 0), initial=0)
  range_max = format.scale_encoding.max * format.values_encoding.max
  quotient = codes.divide(codes.from_bits(amax), range_max)
  quotient = jnp.maximum(quotient, _MIN_GLOBAL_SCALE)
  return jnp.where(amax == 0, jnp.float32(1), quotient)


def _quantize_two_level(
  blocks: jax.Array,
  axis: int,
  format: formats.BlockFormat,
  global_scale: jax.Array,
  random_bits: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Codes of the values and of the scale, for floating-point scales."""
  encoding = format.values_encoding
  scale_encoding = format.scale_encoding
  bits = codes.magnitude_bits(blocks)
  amax = _block_amax(blocks, axis)
  global_bits = codes.magnitude_bits(global_scale)
  is_nan = (amax >= codes.INFINITY_BITS) | ~(
    (codes.f32_bits(global_scale) > 0) & (global_bits < codes.INFINITY_BITS)
  )

  tiny = global_bits < codes.static_bits(2.0**_TINY_GLOBAL_EXPONENT)
  numerators = _normal_range(bits, tiny)
  divisor = _normal_range(global_bits, tiny)
  ideal = codes.divide(
    codes.divide(_normal_range(amax, tiny), encoding.max), divisor
  )
  scale = codes.encode(codes.magnitude_bits(ideal), scale_encoding)
  scale_value = codes.from_codes(scale, format.scale_dtype).astype(jnp.float32)
  step = jnp.where(scale == 0, jnp.float32(1), scale_value * divisor)
  quotient = codes.divide(numerators, jnp.broadcast_to(step, blocks.shape))
  quotient = codes.flush(codes.magnitude_bits(quotient))
  quotient = jnp.where(scale == 0, 0, quotient)
  values = codes.encode(quotient, encoding, random_bits)
  values = codes.with_sign(values, blocks, encoding.sign_shift)
  values = jnp.where(is_nan, jnp.uint8(0), values)
  nan_code = scale_encoding.nan_code
  scale = jnp.where(is_nan, jnp.uint8(nan_code), scale)
  return values, scale


def _normal_range(bits: jax.Array, tiny: jax.Array) -> jax.Array:
  """The magnitudes `bits` as f32, times 2^64 where `tiny`, subnormals too."""
  exponent = -_TINY_GLOBAL_EXPONENT
  ceiling = codes.MAX_FINITE_BITS - (exponent << codes.F32_MANTISSA_BITS)
  scaled = codes.times_power_of_two(
    jnp.minimum(codes.extend(bits), ceiling), exponent
  )
  scaled = jnp.where(bits == 0, 0, scaled)
  return codes.from_bits(jnp.where(tiny, scaled, bits))
