# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP6 as the quantize kernels make it, against NumPy in f64."""

import itertools

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases
from jaxplugin.testing.oracles import quantization_oracle

run_quantize = quantize_cases.run_quantize
setUpModule = interpret.skip_unless_supported

FORMATS = (formats.MXFP6_E2M3, formats.MXFP6_E3M2)


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
      FORMATS,
      ("up", "floor"),
      ("normal", "halves", "wide"),
      (np.float32, quantize_cases.BF16),
    )
  )
  @pytest.mark.sample(13)
  def test_codes_and_scales(self, format, scale_rounding, kind, dtype):
    x = numbers(kind, dtype)
    values, scale = run_quantize(x, format.name, scale_rounding=scale_rounding)
    wanted = quantization_oracle.reference_mx(
      x.astype(np.float32), format, scale_rounding
    )
    np.testing.assert_array_equal(scale, wanted[1])
    np.testing.assert_array_equal(values, wanted[0])
