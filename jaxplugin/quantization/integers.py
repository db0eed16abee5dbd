# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes to integers by the rules of other packages, in XLA ops.

The page "Numerics" documents the rules. Zero points follow torchao's
`choose_qparams_affine`, and minima follow ggml's `quantize_row_q4_1_ref`.
Codebooks follow bitsandbytes' `quantize_4bit`. Other formats without an offset
follow one of `PACKAGE_RULES`: ggml's `quantize_row_q8_0_ref` and
`quantize_row_q4_0_ref`, or compressed-tensors' `calculate_qparams`.
"""

from __future__ import annotations

import functools
from typing import Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import blocking, formats
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import codes, operations

PackageRule = Literal["ggml", "compressed_tensors"]
PACKAGE_RULES: Final = get_args(PackageRule)

_MIN_NORMAL: Final = 2.0**-126
# An f32 holds the sum of an 8-bit quotient and a random fraction of 16 bits.
_RANDOM_BITS: Final = 16


# `explain` finds this call in a traced function by its name.
@functools.partial(
  jax.jit, static_argnames=("format", "axis", "packed", "rule")
)
def quantize_integers(
  x: jax.Array,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  packed: bool,
  rule: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns values, scale and offset of `quantize`.

  Args:
    key: key for stochastic rounding, or None.
    format: a format of integers with a known block size.
    packed: whether two 4-bit values are packed a byte along `axis`.
    rule: one of `PACKAGE_RULES`; None if the format has an `offset_dtype` or
      a `codebook`.
  """
  with jax.named_scope(f"{x.dtype.name} to {format} by xla"):
    return _quantize(x, key, format, axis, packed, rule)


def _quantize(
  x: jax.Array,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  packed: bool,
  rule: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  x = mesh_axes.divided(x, axis, format.block_size)
  size = x.shape[axis]
  count = blocking.divide_up(size, format.block_size)
  x = _flushed(x.astype(jnp.float32))
  if missing := count * format.block_size - size:
    # A short last block repeats its last value, which changes no extremum.
    last = lax.slice_in_dim(x, size - 1, size, axis=axis)
    shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
    x = jnp.concatenate([x, jnp.broadcast_to(last, shape)], axis)
  blocks = x.reshape(
    *x.shape[:axis], count, format.block_size, *x.shape[axis + 1 :]
  )
  noise = None
  if key is not None:
    bits = jax.random.bits(key, blocks.shape, jnp.uint16)
    noise = bits.astype(jnp.float32) * jnp.float32(2.0**-_RANDOM_BITS)
  is_bad = ~jnp.all(jnp.isfinite(blocks), axis + 1, keepdims=True)
  low = jnp.min(blocks, axis + 1, keepdims=True)
  high = jnp.max(blocks, axis + 1, keepdims=True)
  offset: jax.Array | None = None
  if format.codebook is not None:
    amax = jnp.maximum(high, -low)
    code, scale_codes = _nearest_entries(blocks, amax, format)
  elif rule == "ggml":
    code, scale_codes = _by_ggml(blocks, axis + 1, noise, format)
  elif rule == "compressed_tensors":
    amax = jnp.maximum(high, -low)
    scale_codes, _ = _scale(-amax, amax, format)
    code = _divided(blocks, scale_codes, noise, format)
  elif format.has_zero_points:
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    scale_codes, _ = _scale(low, high, format)
    zero_point = _divided(-low, scale_codes, None, format)
    offset = jnp.clip(format.code_range[0] + zero_point, *format.code_range)
    code = _divided(blocks, scale_codes, noise, format) + offset
  else:
    code, scale_codes, offset = _with_minima(blocks, low, high, noise, format)
  stored = jnp.clip(code, *format.code_range) - format.code_offset
  stored = jnp.where(is_bad, 0, stored).astype(jnp.int8).reshape(x.shape)
  if missing:
    stored = lax.slice_in_dim(stored, 0, size, axis=axis)
  values = lax.bitcast_convert_type(stored, jnp.uint8)
  if format.has_pairs:
    values &= 15
  values = (
    operations.two_a_byte(values, axis)
    if packed
    else codes.from_codes(values, format.values_dtype)
  )
  nan = scale_codes.dtype.type(format.scale_encoding.nan_code)
  scale = codes.from_codes(
    jnp.where(is_bad, nan, scale_codes), format.scale_dtype
  )
  scale = jnp.squeeze(scale, axis + 1)
  if offset is not None:
    offset = jnp.where(is_bad, 0, offset).astype(format.offset_dtype)
    offset = jnp.squeeze(offset, axis + 1)
  return values, scale, offset


def _divided(
  x: jax.Array,
  scale_codes: jax.Array,
  noise: jax.Array | None,
  format: formats.BlockFormat,
) -> jax.Array:
  """Returns x / scale, rounded to nearest even, or stochastically by noise."""
  step = codes.from_codes(scale_codes, format.scale_dtype).astype(jnp.float32)
  quotient = codes.divide(x, jnp.broadcast_to(step, x.shape))
  return jnp.round(quotient) if noise is None else jnp.floor(quotient + noise)


def _nearest_entries(
  blocks: jax.Array, amax: jax.Array, format: formats.BlockFormat
) -> tuple[jax.Array, jax.Array]:
  """Returns codes and scale codes such that the largest entry becomes amax.

  A quotient between two entries gets the lower one, unless it is above their
  midpoint.
  """
  entries = np.asarray(format.codebook, np.float32)
  largest = float(np.abs(entries).max())
  scale_codes, _ = _scale_of(amax, largest, format)
  scale = codes.from_codes(scale_codes, format.scale_dtype).astype(jnp.float32)
  # The reciprocal of a large scale would be subnormal.
  unit = jnp.where(scale > 2.0**64, jnp.float32(2.0**-64), jnp.float32(1))
  inverse = codes.divide(jnp.where(scale == 0, jnp.float32(0), 1), scale * unit)
  quotient = (blocks * unit) * inverse
  order = np.argsort(entries, stable=True).astype(np.int32)
  ordered = entries[order]
  code = jnp.full_like(quotient, order[0], jnp.int32)
  # The midpoints ascend, so the last one below the quotient decides.
  for i, midpoint in enumerate((ordered[:-1] + ordered[1:]) / np.float32(2)):
    code = jnp.where(quotient > midpoint, order[i + 1], code)
  return code + format.code_range[0], scale_codes


def _by_ggml(
  blocks: jax.Array,
  axis: int,
  noise: jax.Array | None,
  format: formats.BlockFormat,
) -> tuple[jax.Array, jax.Array]:
  """Returns codes and scale codes of Q8_0 for int8 and of Q4_0 for int4.

  Q8_0 makes the largest magnitude of a block 127 or -127. Q4_0 makes it -8, so
  that the scale has the other sign.
  """
  lowest, highest = format.code_range
  magnitude = jnp.abs(blocks)
  amax = jnp.max(magnitude, axis, keepdims=True)
  steps = float(-lowest if format.has_pairs else highest)
  scale_codes, ideal = _scale_of(amax, steps, format)
  inverse = codes.divide(jnp.where(ideal == 0, jnp.float32(0), 1), ideal)
  if format.has_pairs:
    first = jnp.argmax(magnitude == amax, axis, keepdims=True)
    is_positive = jnp.take_along_axis(blocks, first, axis) >= 0
    inverse = jnp.where(is_positive, -inverse, inverse)
    sign = is_positive.astype(scale_codes.dtype)
    scale_codes |= sign << format.scale_encoding.sign_shift
  quotient = _unfused(blocks * inverse)
  if noise is not None:
    return jnp.floor(quotient + noise), scale_codes
  if format.has_pairs:
    half = jnp.float32(0.5 - lowest)
    return jnp.floor(quotient + half) + lowest, scale_codes
  # Halves are rounded away from zero.
  whole = jnp.trunc(quotient)
  is_half = jnp.abs(quotient - whole) >= 0.5
  return whole + jnp.where(is_half, jnp.sign(quotient), 0), scale_codes


def _with_minima(
  blocks: jax.Array,
  low: jax.Array,
  high: jax.Array,
  noise: jax.Array | None,
  format: formats.BlockFormat,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns codes, scale codes and minima, from the extrema of the blocks."""
  lowest = format.code_range[0]
  scale_codes, ideal = _scale(low, high, format)
  scale = codes.from_codes(scale_codes, format.scale_dtype)
  inverse = codes.divide(jnp.where(ideal == 0, jnp.float32(0), 1), ideal)
  quotient = _unfused(_flushed(blocks - low) * inverse)
  code = lowest + jnp.floor(quotient + (0.5 if noise is None else noise))
  largest = float(jnp.finfo(format.offset_dtype).max)
  # The whole product may exceed f32.
  half = (-lowest / 2) * scale.astype(jnp.float32)
  return code, scale_codes, jnp.clip((low + half) + half, -largest, largest)


def _unfused(product: jax.Array) -> jax.Array:
  """Keeps compilers from fusing a product with a sum. NaN becomes 0."""
  return jnp.where(jnp.isnan(product), jnp.float32(0), product)


def _scale(
  low: jax.Array, high: jax.Array, format: formats.BlockFormat
) -> tuple[jax.Array, jax.Array]:
  """Returns `_scale_of` of the difference, over all codes of the format."""
  lowest, highest = format.code_range
  steps = float(highest - lowest)
  extent = _flushed(high - low)
  # The difference of two large numbers may exceed f32.
  parts = codes.divide(high, steps) - codes.divide(low, steps)
  return _scale_of(extent, steps, format, parts)


def _scale_of(
  extent: jax.Array,
  steps: float,
  format: formats.BlockFormat,
  quotient_of_infinity: jax.Array | float = jnp.inf,
) -> tuple[jax.Array, jax.Array]:
  """Returns the codes of extent / steps, and the quotient in f32."""
  ideal = jnp.where(
    jnp.isinf(extent), quotient_of_infinity, codes.divide(extent, steps)
  )
  encoding = format.scale_encoding
  # A scale that rounds to 0 would lose all values of its block.
  smallest = max(encoding.min_positive, _MIN_NORMAL)
  ideal = jnp.clip(ideal, smallest, encoding.max)
  ideal = jnp.where(extent == 0, jnp.float32(0), ideal)
  return codes.encode(codes.magnitude_bits(ideal), encoding), ideal


def _flushed(x: jax.Array) -> jax.Array:
  """Replaces f32 subnormals by 0, as some platforms do."""
  is_small = codes.magnitude_bits(x) < codes.MIN_NORMAL_BITS
  return jnp.where(is_small, np.float32(0), x)
