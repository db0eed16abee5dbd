# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Floats as registers hold them, and rounding once.

NumPy has no fused multiply-add, and ml_dtypes rounds f64 to bf16 by way of f32.
Both would round twice. Rounding to odd first makes the second rounding the
only one that counts (Boldo, Melquiond: "Emulation of a FMA and correctly
rounded sums", 2008).
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
# What an instruction gives for NaN (PTX ISA, "Floating Point Instructions").
_NAN: Final = {"bf16": 0x7FFF, "f16": 0x7FFF, "f32": 0x7FFFFFFF}


def to_float(bits: np.ndarray, type: str) -> np.ndarray:
  """f64, exactly, of a register's bits."""
  with np.errstate(invalid="ignore"):  # NaN that signals
    found: np.ndarray = bits.view(DTYPES[type]).astype(np.float64)
  return found


def to_bits(x: np.ndarray, type: str) -> np.ndarray:
  """A register's bits of f64 numbers, rounded once to nearest even."""
  dtype = DTYPES[type]
  unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    if dtype in (BF16, F16):
      x = _odd_single(x)
    bits: np.ndarray = x.astype(dtype).view(unsigned)
  if type in _NAN:
    bits = np.where(np.isnan(x), unsigned.type(_NAN[type]), bits)
  return bits


def _odd_single(x: np.ndarray) -> np.ndarray:
  """f64 to f32, rounded to the neighbour whose last bit is one."""
  single = x.astype(np.float32)
  back = single.astype(np.float64)
  bits = single.view(np.uint32)
  finite = np.isfinite(x)
  # Beyond f32's largest stays f32's largest, which any narrower type overflows.
  single = np.where(
    finite & np.isinf(single),
    np.copysign(np.finfo(np.float32).max, x).astype(np.float32),
    single,
  )
  wrong = finite & np.isfinite(back) & (back != x) & ((bits & 1) == 0)
  toward = np.where(x > back, np.float32(np.inf), np.float32(-np.inf))
  return np.where(wrong, np.nextafter(single, toward), single)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """a * b + c of f64 numbers that were f32 or less, rounded to odd.

  Products of such numbers are exact in f64; what the sum drops decides the
  last bit. `to_bits` rounds the result to nearest.
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


def halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The low and the high half of each register: packed pairs."""
  width = 4 * bits.itemsize
  half = np.dtype(f"uint{width}")
  return bits.astype(half), (bits >> bits.dtype.type(width)).astype(half)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """The reverse of `halves`."""
  width = 8 * low.itemsize
  whole = np.dtype(f"uint{2 * width}")
  return low.astype(whole) | high.astype(whole) << whole.type(width)
