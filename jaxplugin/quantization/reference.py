# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A second implementation of quantization, in NumPy.

The benchmark and `jp.repro.replay` compare the results of kernels with it.
"""

from __future__ import annotations

import numpy as np

from jaxplugin.core import formats


def global_scale_of(
  x: np.ndarray, format: formats.BlockFormat
) -> np.float32 | None:
  """Returns the global scale of nonzero `x`; None if the format has none."""
  if not format.has_global_scale:
    return None
  largest = format.scale_encoding.max * format.values_encoding.max
  return np.float32(np.abs(x).max() / np.float32(largest))


def quantize_rows(
  x: np.ndarray, format: formats.BlockFormat, global_scale: np.float32 | None
) -> tuple[np.ndarray, np.ndarray]:
  """Quantizes finite f32[rows, k] as `quantization.quantize` does.

  Returns:
    Values and scale in the format's dtypes.
  """
  blocks = x.reshape(len(x), -1, format.block_size)
  amax = np.abs(blocks).max(axis=-1, keepdims=True)
  largest = format.values_encoding.max
  if format.scale_is_power_of_two:
    exponent = np.frexp(amax)[1] - 1 - format.values_encoding.max_exponent
    exceeds = amax.astype(np.float64) > np.ldexp(largest, exponent)
    exponent = np.where(amax == 0, -formats.E8M0_BIAS, exponent + exceeds)
    exponent = np.clip(exponent, -formats.E8M0_BIAS, formats.E8M0_BIAS)
    scale = (exponent + formats.E8M0_BIAS).astype(np.uint8).view(formats.E8M0)
    quotient = np.ldexp(blocks.astype(np.float64), -exponent)
  else:
    number = np.float32(1) if global_scale is None else global_scale
    scale = (amax / np.float32(largest) / number).astype(format.scale_dtype)
    step = scale.astype(np.float32) * number
    quotient = blocks / np.where(step == 0, np.float32(np.inf), step)
  values = np.clip(quotient, -largest, largest).astype(np.float32)
  values = values.astype(format.values_dtype).reshape(x.shape)
  return values, scale[..., 0]
