# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors of products against plain loops and the package's oracle."""

from __future__ import annotations

import fractions

import numerics_measure as measure
import numerics_products as products
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import reference

FORMATS = tuple((format.name, format) for format in measure.FORMATS)


class ProductsTest(parameterized.TestCase):
  @parameterized.named_parameters(*FORMATS)
  def test_exact_is_what_the_codes_mean(self, format):
    x = products.quantize(measure.student_t((4, 64), 1), format)
    expected = reference.oracle_dequantize(
      np.asarray(x.unpack().values), np.asarray(x.scale), format
    )
    if format.has_global_scale:
      expected = expected * np.float64(x.global_scale)
    np.testing.assert_array_equal(products.exact(x), expected)
    self.assertEqual(products.exact(x).dtype, np.float64)

  def test_error_is_in_units_of_the_magnitudes(self):
    lhs, rhs = np.array([[3.0, -4.0]]), np.array([[1.0, 1.0], [0.0, 0.0]])
    result = np.array([[-1 + 2.0**-20, 0]])
    # sum|a b| = 7, so 2^-20 is 16 / 7 units of 2^-24; 0 / 0 counts as 0.
    np.testing.assert_allclose(
      products.error_units(result, lhs, rhs), [[16 / 7, 0]]
    )

  @parameterized.parameters(1, 4, 64)
  def test_lanes_dot_adds_in_the_order_it_says(self, lanes):
    lhs, rhs = measure.gaussian((2, 64), 3), measure.gaussian((3, 64), 4)
    actual = products.lanes_dot(lhs, rhs, lanes)
    for i in range(2):
      for j in range(3):
        sums = [np.float32(0)] * lanes
        for k in range(64):
          sums[k % lanes] = sums[k % lanes] + lhs[i, k] * rhs[j, k]
        while len(sums) > 1:
          half = len(sums) // 2
          sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        self.assertEqual(actual[i, j], sums[0])

  def test_one_accumulator_errs_more_than_many(self):
    lhs, rhs = (products.dominated((4, 2048), s, 0) for s in (1, 2))
    exact = [
      [fractions.Fraction(float(v)) for v in row] for row in (lhs[0], rhs[0])
    ]
    total = sum(a * b for a, b in zip(*exact, strict=True))
    errors = [
      abs(
        fractions.Fraction(float(products.lanes_dot(lhs, rhs, n)[0, 0])) - total
      )
      for n in (1, 256)
    ]
    self.assertGreater(errors[0], 4 * errors[1])

  @parameterized.parameters(
    ("b200", "9.13", {"cudnn", "triton", "xla"}),
    ("b200", None, {"triton", "xla"}),
    ("cpu", None, {"xla"}),
  )
  def test_available_asks_the_target(self, name, cudnn, serving):
    with jp.use_target(jp.named_target(name, cudnn=cudnn)):
      reasons = products.available(jp.MXFP8)
    running = {name for name, reason in reasons.items() if reason is None}
    self.assertEqual(running, serving)
    for name, reason in reasons.items():
      if reason is not None:
        self.assertStartsWith(reason, f"{name}: ")
    self.assertEqual(set(reasons), {"cudnn", "triton", "cpu", "xla"})
