# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP6 as the quantize kernels make it, against NumPy in f64 and ml_dtypes."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
run_quantize = quantize_cases.run_quantize
setUpModule = interpret.skip_unless_supported

BLOCK = 32
# OCP MX v1.0, table 1: dtype, emax.
ELEMENTS = {
  "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2),
  "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4),
}


def expected(x, format_name, scale_rounding):
  """(values, scale): uint8 codes of x[..., k]."""
  dtype, emax = ELEMENTS[format_name]
  largest = float(ml_dtypes.finfo(dtype).max)
  *lead, k = x.shape
  blocks = x.astype(np.float64).reshape(*lead, k // BLOCK, BLOCK)
  amax = np.abs(blocks).max(-1, keepdims=True)
  is_nan = ~np.isfinite(amax)
  amax = np.where(is_nan, 1, amax)
  fraction, exponent = np.frexp(amax)  # in [0.5, 1)
  exponent = exponent - 1 - emax
  if scale_rounding == "up":
    exponent += np.ldexp(fraction, emax + 1) > largest
  exponent = np.where(amax == 0, -127, np.maximum(exponent, -127))
  quotient = np.where(is_nan, 0, blocks) / np.exp2(exponent)
  quotient = np.clip(quotient, -largest, largest)
  # f64 holds the quotient exactly, and so does f32.
  codes = quotient.astype(np.float32).astype(dtype).view(np.uint8)
  codes = np.where(is_nan, 0, codes)
  scale = np.where(is_nan, 255, exponent + 127).astype(np.uint8)
  return codes.reshape(x.shape), scale[..., 0]


def numbers(kind, dtype):
  rng = np.random.default_rng(3)
  if kind == "normal":
    return rng.standard_normal((2, 33, 96)).astype(dtype)
  if kind == "halves":
    # Quotients of few bits: many lie halfway between two codes.
    x = rng.integers(-64, 65, (1, 16, 128)) * 2.0 ** rng.integers(-9, 9)
    return x.astype(dtype)
  x = rng.standard_normal((1, 64, 64)) * np.exp2(
    rng.integers(-100, 100, (1, 64, 1))
  )
  x = x.astype(dtype)
  x[0, 1, 3], x[0, 2, 40], x[0, 3, :32] = np.nan, -np.inf, 0
  return x


class Mxfp6Test(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(
      ELEMENTS,
      ("up", "floor"),
      ("normal", "halves", "wide"),
      (np.float32, BF16),
    )
  )
  @pytest.mark.sample(13)
  def test_codes_and_scales(self, format_name, scale_rounding, kind, dtype):
    x = numbers(kind, dtype)
    values, scale = run_quantize(x, format_name, scale_rounding=scale_rounding)
    wanted = expected(x, format_name, scale_rounding)
    np.testing.assert_array_equal(scale, wanted[1])
    np.testing.assert_array_equal(values, wanted[0])
