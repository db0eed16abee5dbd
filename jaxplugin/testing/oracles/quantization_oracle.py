# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A reference of `quantize` in NumPy, and inputs that reveal errors.

The reference follows the table of the numerical contract. It shares no code
with jaxplugin: codes come from gfloat's decoder and a search for the nearest,
exponents from a search in a table of powers of two, and f32 results from f64
ones rounded to 24 bits (innocuous for one product or quotient of f32 numbers,
since 53 >= 2 * 24 + 2), which also has no subnormals to lose.
"""

import functools

import gfloat
import gfloat.formats
import jax
import ml_dtypes
import numpy as np

from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.testing import contract

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
MXFP6_E2M3, MXFP6_E3M2 = formats.MXFP6_E2M3, formats.MXFP6_E3M2
MX_FORMATS = (MXFP8, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4)
ROUNDINGS = ("up", "floor")

# OCP MX v1.0, section 5.3: (gfloat's format, emax).
VALUES = {
  MXFP8: (gfloat.formats.format_info_ocp_e4m3, 8),
  MXFP8_E5M2: (gfloat.formats.format_info_ocp_e5m2, 15),
  MXFP6_E2M3: (gfloat.formats.format_info_ocp_e2m3, 2),
  MXFP6_E3M2: (gfloat.formats.format_info_ocp_e3m2, 4),
  MXFP4: (gfloat.formats.format_info_ocp_e2m1, 2),
  NVFP4: (gfloat.formats.format_info_ocp_e2m1, 2),
}
E4M3_INFO = gfloat.formats.format_info_ocp_e4m3
E4M3_NAN = 0x7F
E4M3_MIN_POSITIVE = 2.0**-9
F32_MIN_NORMAL = 2.0**-126
F32_MAX = float(np.finfo(np.float32).max)


def finite_values(info):
  """f64, ascending: the finite values >= 0; the index is the code."""
  values = gfloat.decode_ndarray(info, np.arange(2 ** (info.bits - 1)))
  return values[np.isfinite(values)]


def nearest_code(magnitude, info):
  """Code of the nearest value, ties to the even code; saturates."""
  values = finite_values(info)
  ties = (values[1:] + values[:-1]) / 2
  code = np.searchsorted(ties, magnitude, side="left")
  is_tie = ties[np.minimum(code, len(ties) - 1)] == magnitude
  return (code + (is_tie & (code % 2 == 1))).astype(np.uint8)


def signed_code(magnitude, x, info):
  sign = np.signbit(x).astype(np.uint8) << (info.bits - 1)
  return nearest_code(magnitude, info) | sign


def split(x, block_size):
  with np.errstate(invalid="ignore"):  # signalling NaNs
    blocks = (*x.shape[:-1], x.shape[-1] // block_size, block_size)
    return x.reshape(blocks).astype(np.float64)


def reference_mx(x, format, scale_rounding="up"):
  """(codes, scale bytes) of f32[..., k] by the contract's table."""
  info, emax = VALUES[format]
  shape, x = x.shape, split(x, 32)
  amax = np.max(np.abs(x), axis=-1, keepdims=True)
  is_bad = ~np.isfinite(amax)
  amax = np.where(is_bad, 0, amax)
  powers = np.ldexp(1.0, np.arange(-127, 128))
  if scale_rounding == "up":  # the least scale with amax / scale <= max
    scale = np.searchsorted(info.max * powers, amax, side="left")
  else:  # the greatest with 2^emax * scale <= amax
    scale = np.searchsorted(2.0**emax * powers, amax, side="right") - 1
  scale = np.clip(scale, 0, 254)
  codes = signed_code(np.abs(x) / powers[scale], x, info)
  codes = np.where(is_bad, 0, codes).astype(np.uint8)
  scale = np.where(is_bad, 255, scale).astype(np.uint8)
  return codes.reshape(shape), scale[..., 0]


def rounded_to_24_bits(x):
  mantissa, exponent = np.frexp(x)
  return np.ldexp(np.rint(np.ldexp(mantissa, 24)), exponent - 24)


def reference_nvfp4(x, global_scale=None):
  """(codes, scale bytes, global scale) of f32[..., k]."""
  info = VALUES[NVFP4][0]
  shape, x = x.shape, split(x, 16)
  amax = np.max(np.abs(x), axis=-1, keepdims=True)
  is_bad = ~np.isfinite(amax)
  amax = np.where(is_bad, 0, amax)
  if global_scale is None:
    largest = np.max(amax, initial=0)
    global_scale = max(rounded_to_24_bits(largest / (448 * 6)), F32_MIN_NORMAL)
    global_scale = 1.0 if largest == 0 else float(global_scale)
  ideal = rounded_to_24_bits(rounded_to_24_bits(amax / 6) / global_scale)
  # The least positive scale, except in a block of zeros.
  ideal = np.where(amax == 0, 0, np.maximum(ideal, E4M3_MIN_POSITIVE))
  scale = nearest_code(ideal, E4M3_INFO)
  step = rounded_to_24_bits(finite_values(E4M3_INFO)[scale] * global_scale)
  quotient = rounded_to_24_bits(np.abs(x) / np.where(amax == 0, 1, step))
  codes = signed_code(quotient, x, info)
  codes = np.where(is_bad, 0, codes).astype(np.uint8)
  scale = np.where(is_bad, E4M3_NAN, scale).astype(np.uint8)
  return codes.reshape(shape), scale[..., 0], np.float32(global_scale)


def reference(x, format):
  return reference_nvfp4(x) if format is NVFP4 else reference_mx(x, format)


def rounded_to(x, format, global_scale=None):
  """f64 values of f32[..., k] in a format."""
  if format is NVFP4:
    codes, scale, global_scale = reference_nvfp4(x, global_scale)
  else:
    (codes, scale), global_scale = reference_mx(x, format), 1
  values = codes.view(format.array_dtype).astype(np.float64)
  scale = scale.view(format.scale_dtype).astype(np.float64)
  return values * np.repeat(scale * global_scale, format.block_size, axis=-1)


def as_codes(array):
  return np.asarray(array).view(np.uint8)


def assert_codes(actual, codes, scale, global_scale=None):
  np.testing.assert_array_equal(as_codes(actual.scale), scale)
  np.testing.assert_array_equal(contract.codes(actual), codes)
  if global_scale is not None:
    np.testing.assert_array_equal(
      np.asarray(actual.global_scale), np.float32(global_scale)
    )


def assert_same(actual, expected):
  """Two `ScaledArray`s, bitwise, FP4 packed or not."""
  assert_codes(actual, contract.codes(expected), as_codes(expected.scale))
  if expected.global_scale is None:
    assert actual.global_scale is None
  else:
    np.testing.assert_array_equal(
      np.asarray(actual.global_scale).view(np.int32),
      np.asarray(expected.global_scale).view(np.int32),
    )


@functools.cache
def jitted(format, scale_rounding="up", axis=-1):
  """`quantize` under jit: eager calls compile each operation for each shape."""

  def f(x, global_scale=None, key=None):
    return quantization.quantize(
      x,
      format,
      axis=axis,
      scale_rounding=scale_rounding,
      global_scale=global_scale,
      key=key,
    )

  return jax.jit(f)


dequantize = jax.jit(quantization.dequantize, static_argnames="dtype")


def every_value(dtype, block_size, magnitudes=range(2**15)):
  """16-bit blocks: each value once as the amax, and among smaller values.

  Block i of either sign starts with the value of magnitude bits i. The other
  members have the bits i - offset, for offsets of up to 12 binades and
  alternating signs, so every value is also a lesser member of 15 or more
  blocks.
  """
  top = np.asarray(magnitudes)
  binade = 2 ** ml_dtypes.finfo(dtype).nmant
  offsets = np.rint(np.geomspace(1, 12 * binade, block_size - 1)).astype(int)
  bits = np.maximum(top[:, None] - np.array([0, *offsets]), 0)
  signs = np.where(np.arange(block_size) % 2, 0x8000, 0)
  bits = np.concatenate([bits | signs, bits | (signs ^ 0x8000)])
  return bits.astype(np.uint16).view(dtype)


def random_f32(seed, shape, top_exponent):
  """f32 of random sign and mantissa over 24 binades below `top_exponent`."""
  random = np.random.default_rng(seed)
  mantissa = random.uniform(1, 2, shape)
  exponent = np.asarray(top_exponent) - random.integers(0, 24, shape)
  sign = random.choice([-1.0, 1.0], shape)
  x = np.ldexp(sign * mantissa, exponent)
  return np.clip(x, -F32_MAX, F32_MAX).astype(np.float32)


def special_blocks(block_size):
  """f32[n, block_size]: random blocks, some with NaN, Inf, zeros, extremes."""
  top = np.random.default_rng(8).integers(-149, 128, (512, 1))
  x = random_f32(9, (512, block_size), top)
  x[::11, 3] = np.nan
  x[1::11, 0] = np.inf
  x[2::11, -1] = -np.inf
  x[3::11] = 0
  x[4::11, ::2] = -0.0
  x[5::11, 1] = F32_MAX
  return x
