# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays whose quantization, products and sums are exact, whatever the order.

A test of such arrays compares bits: NumPy's f32 products are the expected ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import jaxplugin as jp


def integers(seed: int, *shape: int, most: int = 4) -> np.ndarray:
  """f32 integers of a magnitude of at most `most`, which MXFP8 holds."""
  x = np.random.default_rng(seed).integers(-most, most + 1, shape)
  return x.astype(np.float32)


def fours(seed: int, *shape: int) -> np.ndarray:
  """f32 values of E2M1; each block has a 6, so that every format holds it."""
  choices = [-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6]
  x = np.random.default_rng(seed).choice(choices, shape)
  x[..., ::16] = 6
  return x.astype(np.float32)


def nvfp4(x: Any, **options: Any) -> jp.ScaledArray:
  """NVFP4 of `fours`, without a rounding: the global scale is 1."""
  return jp.quantize(x, jp.NVFP4, global_scale=1.0, **options)
