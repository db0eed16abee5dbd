# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes to formats with zero points or minima, in XLA ops.

`api.quantize` documents the rules. Zero points follow torchao's
`choose_qparams_affine`, and minima follow ggml's `quantize_row_q4_1_ref`.
"""

from __future__ import annotations

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.quantization import codes
from jaxplugin.quantization import operations

_MIN_NORMAL: Final = 2.0**-126
# An f32 holds the sum of an 8-bit quotient and a random fraction of 16 bits.
_RANDOM_BITS: Final = 16


@functools.partial(
  jax.jit, static_argnames=("format", "axis", "packed"), inline=True
)
def quantize(
  x: jax.Array,
  key: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  packed: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns values, scale and offset of `quantize`.

  Args:
    x: floats[..., k, ...].
    key: key for stochastic rounding, or None.
    format: a format with an `offset_dtype` and a known block size.
    axis: the blocked axis, at least 0.
    packed: whether two 4-bit values are packed a byte along `axis`.
  """
  size = x.shape[axis]
  count = extents.divide_up(size, format.block_size)
  x = _flushed(x.astype(jnp.float32))
  if missing := count * format.block_size - size:
    # A short last block repeats its last value, which changes no extremum.
    last = lax.slice_in_dim(x, size - 1, size, axis=axis)
    shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
    x = jnp.concatenate([x, jnp.broadcast_to(last, shape)], axis)
  blocks = x.reshape(
    *x.shape[:axis], count, format.block_size, *x.shape[axis + 1 :]
  )
  noise = jnp.float32(0.5)
  if key is not None:
    bits = jax.random.bits(key, blocks.shape, jnp.uint16)
    noise = bits.astype(jnp.float32) * jnp.float32(2.0**-_RANDOM_BITS)
  is_bad = ~jnp.all(jnp.isfinite(blocks), axis + 1, keepdims=True)
  low = jnp.min(blocks, axis + 1, keepdims=True)
  high = jnp.max(blocks, axis + 1, keepdims=True)
  if format.has_zero_points:
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
  scale_codes, ideal = _scale(low, high, format)
  scale = codes.from_codes(scale_codes, format.scale_dtype)
  lowest, highest = format.code_range
  if format.has_zero_points:
    step = scale.astype(jnp.float32)
    zero_point = lowest + jnp.round(codes.divide(-low, step))
    offset = jnp.clip(zero_point, lowest, highest)
    quotient = codes.divide(blocks, jnp.broadcast_to(step, blocks.shape))
    rounded = (
      jnp.round(quotient) if key is None else jnp.floor(quotient + noise)
    )
    code = rounded + offset
  else:
    inverse = codes.divide(jnp.where(ideal == 0, jnp.float32(0), 1), ideal)
    quotient = _flushed(blocks - low) * inverse
    # The select keeps compilers from fusing the product with the sum.
    quotient = jnp.where(jnp.isnan(quotient), jnp.float32(0), quotient)
    code = lowest + jnp.floor(quotient + noise)
    largest = float(jnp.finfo(format.offset_dtype).max)
    # The whole product may exceed f32.
    half = (-lowest / 2) * scale.astype(jnp.float32)
    offset = jnp.clip((low + half) + half, -largest, largest)
  stored = jnp.clip(code, lowest, highest) - format.code_offset
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
  offset = jnp.where(is_bad, 0, offset).astype(format.offset_dtype)
  return values, jnp.squeeze(scale, axis + 1), jnp.squeeze(offset, axis + 1)


def _scale(
  low: jax.Array, high: jax.Array, format: formats.BlockFormat
) -> tuple[jax.Array, jax.Array]:
  """Returns the codes of the scale, and the scale in f32 before rounding."""
  lowest, highest = format.code_range
  steps = float(highest - lowest)
  extent = _flushed(high - low)
  # The difference of two large numbers may exceed f32.
  ideal = jnp.where(
    jnp.isinf(extent),
    codes.divide(high, steps) - codes.divide(low, steps),
    codes.divide(extent, steps),
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
