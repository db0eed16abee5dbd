# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` and `dequantize`: block-scaled arrays from floats, and back."""

from __future__ import annotations

import functools
from typing import Any
from typing import Final
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin import codes
from jaxplugin import formats
from jaxplugin import scaled_array

ScaleRounding = Literal["up", "floor"]
SCALE_ROUNDINGS: Final = ("up", "floor")

# Tensors with a global scale below 2^-64 are quantized as if multiplied by
# 2^64: quotients keep their bits, and no intermediate is an f32 subnormal.
_TINY_GLOBAL_EXPONENT: Final = -64
_MIN_GLOBAL_SCALE: Final = 2.0**-126

_FLOATS: Final = ("float32", "bfloat16", "float16", "float64")


def quantize(
  x: jax.Array,
  format: formats.BlockFormat,
  *,
  axis: int = -1,
  scale_rounding: ScaleRounding = "up",
  global_scale: jax.Array | float | None = None,
  key: jax.Array | None = None,
) -> scaled_array.ScaledArray:
  """Quantizes `x` to a block-scaled format along `axis`.

  MX formats, per block of 32, with amax the largest magnitude of the block:
    scale  = 2^ceil(log2(amax / max))                 scale_rounding="up"
    scale  = 2^(floor(log2(amax)) - emax)             scale_rounding="floor"
    values = cast(clip(x / scale, -max, max))
  NVFP4, per block of 16:
    global_scale = max(|x|) / (448 * 6), at least 2^-126; 1 when x is all zero
    scale  = e4m3(amax / 6 / global_scale)
    values = e2m1(clip(x / (scale * global_scale), -6, 6))

  Everything is computed in f32 whatever the input dtype, divisions correctly
  rounded, exponents by integer operations, f32 subnormals honoured: the bits
  are the same on every platform. Casts round to nearest even, and saturate.

  A block that holds a NaN or an Inf gets a NaN scale (E8M0 255, E4M3 0x7F) and
  zero values, so all of it dequantizes to NaN; it takes no part in NVFP4's
  global scale. An all-zero block gets scale code 0 and dequantizes to 0. So
  does an NVFP4 block whose scale underflows. Zeros keep their sign.

  Args:
    x: f32, bf16 or f16[..., k, ...] (f64 is rounded to f32 first), with k a
      multiple of the block size.
    format: e.g. `jp.MXFP8`.
    axis: the axis to block; for an operand, the one that a dot contracts.
    scale_rounding: "up" never saturates (NVIDIA's recipe, also JAX's and
      Transformer Engine's); "floor" is OCP MX v1.0 section 6.3, where values
      above max saturate. NVFP4 scales are rounded to nearest always.
    global_scale: f32[], positive and finite, to use instead of the computed
      one. Only for formats with a global scale.
    key: a `jax.random` key for stochastic rounding of the values: up with a
      probability equal to the discarded fraction, so unbiased inside the range.

  Returns:
    `ScaledArray` with values of the logical shape, a linear scale, and f32[]
    global scale (None for MX formats).

  Raises:
    TypeError: x is no float array, or k is no multiple of the block size.
    ValueError: axis, scale_rounding or global_scale is not acceptable.

  Sources: OCP MX v1.0 section 6.3; NVIDIA "Recipes for Pre-training LLMs with
  MXFP8" (2025) for rounding up; cuDNN block scaling for NVFP4.
  """
  x = _float_array("quantize", x)
  axis = scaled_array.canonical_axis("quantize", axis, x.ndim)
  if not isinstance(format, formats.BlockFormat):
    raise TypeError(f"quantize: format must be a BlockFormat, got {format!r}")
  if scale_rounding not in SCALE_ROUNDINGS:
    raise ValueError(
      f"quantize: scale_rounding must be one of {SCALE_ROUNDINGS},"
      f" got {scale_rounding!r}"
    )
  if x.shape[axis] % format.block_size != 0:
    raise TypeError(
      f"quantize: the size of axis {axis} must be a multiple of"
      f" {format.block_size} for {format.name.upper()}, got k={x.shape[axis]}"
      f" in shape {x.shape}; pad x"
    )
  if global_scale is not None and not format.has_global_scale:
    raise ValueError(
      f"quantize: {format} has no global scale, got {global_scale!r}; leave"
      " global_scale out"
    )
  if format.has_global_scale and global_scale is not None:
    global_scale = _given_global_scale(global_scale)
  values, scale, global_scale = _quantize(
    x, global_scale, key, format, axis, scale_rounding
  )
  return scaled_array.ScaledArray(values, scale, global_scale, format)


# Jitted as one, so that an eager call compiles one program and not forty.
@functools.partial(
  jax.jit, static_argnames=("format", "axis", "scale_rounding")
)
def _quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  scale_rounding: ScaleRounding,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Values, scale and global scale of `quantize`."""
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
  return (
    codes.from_codes(values.reshape(x.shape), format.values_dtype),
    codes.from_codes(jnp.squeeze(scale, axis + 1), format.scale_dtype),
    global_scale,
  )


def dequantize(
  x: scaled_array.ScaledArray, dtype: Any = jnp.float32
) -> jax.Array:
  """Returns `values * scale * global_scale`, computed in f32, then cast.

  Exact in f32 for MX formats; for NVFP4 the product with the global scale is
  rounded once. A NaN scale makes its whole block NaN. Results below 2^-126 are
  flushed to zero where the platform does so (XLA:CPU).

  Args:
    x: a `ScaledArray` of any layout, packed or not.
    dtype: the result's dtype, rounded to once at the end.

  Returns:
    dtype[x.shape].
  """
  if not isinstance(x, scaled_array.ScaledArray):
    raise TypeError(f"dequantize: x must be a ScaledArray, got {type(x)}")
  return _dequantize(x, np.dtype(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(x: scaled_array.ScaledArray, dtype: np.dtype) -> jax.Array:
  result = dequantize_raw(x.values, linear_scale(x), x.format, axis=x.axis)
  if x.global_scale is not None:
    # One number, or one for each index of the leading dimensions.
    trailing = (1,) * (result.ndim - x.global_scale.ndim)
    result = result * x.global_scale.reshape(*x.global_scale.shape, *trailing)
  return result.astype(dtype)


def linear_scale(x: scaled_array.ScaledArray) -> jax.Array:
  """The scale of `x` in the linear layout, without padding."""
  if x.scale_layout == scaled_array.LINEAR:
    return x.scale
  rows, k = x.shape[-2:]
  return scaled_array.unswizzle_scale(
    x.scale, (rows, -(-k // x.format.block_size))
  )


def dequantize_raw(
  values: jax.Array,
  scale: jax.Array,
  format: formats.BlockFormat,
  *,
  axis: int,
) -> jax.Array:
  """f32 `values * repeat(scale, block_size, axis)`; see `dequantize`.

  The size of `axis` need not be a multiple of the block size: the last scale
  then covers the remainder.
  """
  if values.dtype == formats.PACKED:
    values = scaled_array.unpack_fp4(values, axis=axis)
  size = values.shape[axis]
  padding = scale.shape[axis] * format.block_size - size
  widths = [(0, 0)] * values.ndim
  widths[axis] = (0, padding)
  result = values.astype(jnp.float32)
  result = jnp.pad(result, widths)
  blocks = _split(result, axis, format.block_size)
  factors = (scale.astype(jnp.float32),)
  if format.scale_is_power_of_two:
    factors = codes.decode_e8m0(scale)
  for factor in reversed(factors):
    blocks = blocks * jnp.expand_dims(factor, axis + 1)
  result = blocks.reshape(result.shape)
  return lax.slice_in_dim(result, 0, size, axis=axis)


def _float_array(who: str, x: Any) -> jax.Array:
  if isinstance(x, scaled_array.ScaledArray):
    raise TypeError(f"{who}: x is a ScaledArray already, got {x!r}")
  x = jnp.asarray(x)
  if x.dtype.name not in _FLOATS:
    raise TypeError(
      f"{who}: x must be float32, bfloat16, float16 or float64, got"
      f" {x.dtype}[{','.join(map(str, x.shape))}]; cast it first"
    )
  if x.ndim == 0:
    raise TypeError(f"{who}: x must have rank 1 or more, got a scalar")
  return x


def _split(x: jax.Array, axis: int, block_size: int) -> jax.Array:
  """Splits `axis` in two: blocks, and the values in a block."""
  blocks = x.shape[axis] // block_size
  return x.reshape(*x.shape[:axis], blocks, block_size, *x.shape[axis + 1 :])


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
    scale = exponent_field - max_exponent + exceeds
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


def _given_global_scale(global_scale: jax.Array | float) -> jax.Array:
  global_scale = jnp.asarray(global_scale)
  if global_scale.size != 1 or global_scale.dtype.kind not in "fiV":
    raise ValueError(
      "quantize: global_scale must be one float32, got"
      f" {global_scale.dtype}{list(global_scale.shape)}"
    )
  global_scale = global_scale.reshape(()).astype(jnp.float32)
  if not isinstance(global_scale, jax.core.Tracer):
    number = float(global_scale)
    if not (0 < number < np.inf):
      raise ValueError(
        f"quantize: global_scale must be positive and finite, got {number}"
      )
  return global_scale


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
