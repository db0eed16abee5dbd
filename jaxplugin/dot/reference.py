# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The f64 reference of the block-scaled dot, in NumPy, and error bounds.

Tests, notebooks and the benchmark compare backends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.core import blocking, formats

# Bound on the error before the final cast, in units of sum(|a * b|): 16
# roundings of f32.
ERROR_BOUND: Final = 16 * 2.0**-24


def rounding_error(dtype: np.typing.DTypeLike) -> float:
  """Returns the largest relative error of rounding to normal numbers.

  With p significant bits, adjacent numbers differ by at most 2^(1 - p) of their
  value (`eps`). The rounding error is at most half of that, 2^-p.
  """
  return float(jnp.finfo(dtype).eps) / 2


def finite_codes(
  rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype
) -> np.ndarray:
  """Returns random codes of a dtype, uniform over all that are finite."""
  codes = np.arange(2 ** formats.encoding(dtype).bits, dtype=np.uint8)
  with np.errstate(invalid="ignore"):
    codes = codes[np.isfinite(codes.view(dtype).astype(np.float64))]
  return codes[rng.integers(0, len(codes), tuple(shape))].view(dtype)


def random_scale(
  rng: np.random.Generator,
  shape: Sequence[int],
  dtype: np.dtype,
  largest_exponent: int,
) -> np.ndarray:
  """Returns random block scales.

  E8M0 scales are 2^-e to 2^e for the largest exponent e. Other scales of one
  byte are all that are not negative, and larger floats 2^-8 to 2^8.
  """
  if dtype == formats.E8M0:
    low, high = 127 - largest_exponent, 128 + largest_exponent
    return rng.integers(low, high, tuple(shape), np.uint8).view(dtype)
  if dtype.itemsize == 1:
    return rng.integers(0, 0x7F, tuple(shape), np.uint8).view(dtype)
  return np.exp2(rng.uniform(-8, 8, tuple(shape))).astype(dtype)


def oracle_dequantize(
  values: np.ndarray,
  scale: np.ndarray,
  format: formats.BlockFormat,
  *,
  axis: int = -1,
) -> np.ndarray:
  """Returns f64 `values * repeat(scale, block_size, axis)`, exactly.

  Integers with fraction_bits count units of 2**-fraction_bits. Values of a
  format with a codebook index it.

  Args:
    values: format.values_dtype[..., k, ...], or uint8 packed along `axis`. FP6
      values may be bytes.
    scale: format.scale_dtype, linear, at least ceil(k / block_size) in `axis`.
    format: the block format.
    axis: the blocked axis.
  """
  values, scale = np.asarray(values), np.asarray(scale)
  axis %= values.ndim
  if values.dtype == formats.PACKED and format.is_fp6:
    values = (values & 0x3F).view(format.values_dtype)
  elif values.dtype == formats.PACKED:
    values = np.moveaxis(values, axis, -1)
    nibbles = np.stack([values & 15, values >> 4], axis=-1)
    nibbles = nibbles.reshape(*values.shape[:-1], 2 * values.shape[-1])
    values = np.moveaxis(nibbles, -1, axis).view(format.values_dtype)
  k = values.shape[axis]
  block_size = format.along(k).block_size
  blocks = blocking.divide_up(k, block_size)
  scale = np.take(scale, np.arange(blocks), axis=axis).astype(np.float64)
  scale = np.repeat(scale, block_size, axis=axis)
  scale = np.take(scale, np.arange(k), axis=axis)
  if format.codebook is not None:
    values = np.asarray(format.codebook)[values.astype(int) + 8]
  with np.errstate(invalid="ignore"):
    return values.astype(np.float64) * scale * 2.0**-format.fraction_bits


def oracle_terms(
  scale: np.ndarray,
  offset: np.ndarray,
  format: formats.BlockFormat,
  size: int,
  *,
  axis: int = -1,
) -> np.ndarray:
  """Returns what zero points or minima add to `size` values in `axis`, in f64.

  Args:
    scale, offset: of the blocks of `axis`.
    format, size, axis: the block format, and the blocked axis.
  """
  scale, offset = (np.asarray(x).astype(np.float64) for x in (scale, offset))
  if format.has_zero_points:
    terms = (format.code_offset - offset) * scale
  else:
    terms = format.code_offset * scale + offset
  return np.repeat(terms, format.block_size, axis).take(range(size), axis)
