# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts between f64 and the bits of registers, with one rounding.

NumPy has no fused multiply-add, so `a * b + c` rounds twice. ml_dtypes also
rounds twice: from f64 to f32, and then to bf16. If the first rounding is to
odd, the second rounding gives the correctly rounded result (Boldo, Melquiond:
"Emulation of a FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

BF16: Final = np.dtype(ml_dtypes.bfloat16)
F16: Final = np.dtype(np.float16)
F32: Final = np.dtype(np.float32)
F64: Final = np.dtype(np.float64)
DTYPES: Final = {"bf16": BF16, "f16": F16, "f32": F32, "f64": F64}
BITS: Final = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
# The NaN that instructions return (PTX ISA, "Floating Point Instructions").
_NAN: Final = {"bf16": 0x7FFF, "f16": 0x7FFF, "f32": 0x7FFFFFFF}


def to_float(bits: np.ndarray, type: str) -> np.ndarray:
  """Converts a register's bits to f64, which is exact."""
  with np.errstate(invalid="ignore"):  # signaling NaN
    return bits.view(DTYPES[type]).astype(np.float64)


def to_bits(x: np.ndarray, type: str) -> np.ndarray:
  """Rounds f64 once, to nearest even, and returns a register's bits."""
  dtype = DTYPES[type]
  unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    if dtype in (BF16, F16):
      x = _odd_single(x)
    bits: np.ndarray = x.astype(dtype).view(unsigned)
  if type in _NAN:
    bits = np.where(np.isnan(x), unsigned.type(_NAN[type]), bits)
  return bits


def truncated_single(x: np.ndarray) -> np.ndarray:
  """Rounds f64 to f32 toward zero. Values that overflow become infinite."""
  single = x.astype(np.float32)
  exceeds = np.isfinite(single) & (
    np.abs(single.astype(np.float64)) > np.abs(x)
  )
  return np.where(exceeds, np.nextafter(single, np.float32(0)), single)


def _odd_single(x: np.ndarray) -> np.ndarray:
  """Rounds f64 to f32 to odd: the last bit of an inexact result is one."""
  single = x.astype(np.float32)
  back = single.astype(np.float64)
  bits = single.view(np.uint32)
  finite = np.isfinite(x)
  # Saturates at the largest f32, which still overflows in bf16 and f16.
  single = np.where(
    finite & np.isinf(single),
    np.copysign(np.finfo(np.float32).max, x).astype(np.float32),
    single,
  )
  wrong = finite & np.isfinite(back) & (back != x) & ((bits & 1) == 0)
  toward = np.where(x > back, np.float32(np.inf), np.float32(-np.inf))
  return np.where(wrong, np.nextafter(single, toward), single)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """Returns a * b + c in f64, rounded to odd.

  The inputs are f32 or narrower, so their product is exact. If the sum is
  inexact, its last bit becomes one. `to_bits` then rounds to nearest even.
  """
  with np.errstate(over="ignore", invalid="ignore", under="ignore"):
    product = a * b
    total = product + c
    part = total - product
    dropped = (product - (total - part)) + (c - part)
  bits = total.view(np.int64)
  wrong = np.isfinite(total) & (dropped != 0) & ((bits & 1) == 0)
  toward = np.where(dropped > 0, np.inf, -np.inf)
  return np.where(wrong, np.nextafter(total, toward), total)
