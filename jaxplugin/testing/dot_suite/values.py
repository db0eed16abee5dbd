# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the dot: NaN, Inf, and scales and values at the extremes."""

from __future__ import annotations

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases

FORMATS: Final = formats.FORMATS


class DotValuesTestCase(dot_cases.DotTestCase):
  """Special values reach what they multiply, and every scale counts."""

  @parameterized.product(format=FORMATS, side=("lhs", "rhs"), value=(0.0, 1.0))
  def test_block_under_a_nan_scale_is_nan_in_its_row_alone(
    self, format, side, value
  ):
    # Zeros too. A scale that became Inf would pass with zeros, and one that
    # became finite with ones.
    rng = np.random.default_rng(0)
    made = self.operand(rng, format, (5, 96))
    other = self.operand(rng, format, (4, 96))
    if value:  # of one sign, so that Inf would stay Inf
      positive = np.ones((4, 96), format.values_dtype)
      other = dataclasses.replace(
        other,
        operand=jnp.asarray(positive),
        exact=contract.dequantize(positive, np.asarray(other.scale), format, 1),
      )
    values = np.asarray(made.operand).copy()
    scale = np.asarray(made.scale).copy()
    block = format.block_size
    values[3, block : 2 * block] = value
    scale.view(np.uint8)[3, 1] = 0xFF if format.scale_is_power_of_two else 0x7F
    operands = [
      (jnp.asarray(values), other.operand),
      (jnp.asarray(scale), other.scale),
    ]
    exact = [contract.dequantize(values, scale, format, 1), other.exact]
    if side == "rhs":
      operands = [pair[::-1] for pair in operands]
      exact.reverse()
    actual = self.dot(*operands[0], *operands[1])
    expected, _ = contract.dot(*exact)
    nans = np.isnan(np.asarray(actual))
    nans = nans if side == "lhs" else nans.T
    row = np.zeros((5, 4), bool)
    row[3] = True
    np.testing.assert_array_equal(nans, row)
    contract.assert_exact(actual, expected, contract.F32)

  def test_zeros_under_negative_nan_e4m3_scale_are_nan(self):
    rng = np.random.default_rng(0)
    rhs = self.operand(rng, jp.NVFP4, (4, 32))
    scale = np.array([[0xFF, 0x38], [0x38, 0x38]], np.uint8)
    actual = self.dot(
      jnp.zeros((2, 32), formats.E2M1),
      rhs.operand,
      jnp.asarray(scale.view(formats.E4M3)),
      rhs.scale,
    )
    np.testing.assert_array_equal(
      np.asarray(actual), np.array([[np.nan] * 4, [0] * 4], np.float32)
    )

  @parameterized.product(
    value=(float("nan"), float("inf"), float("-inf")), side=("lhs", "rhs")
  )
  def test_special_values_propagate(self, value, side):
    rng = np.random.default_rng(0)
    format = jp.MXFP8_E5M2
    made = self.operand(rng, format, (3, 32))
    other = self.operand(rng, jp.MXFP4, (7, 32))
    values = np.asarray(made.operand).copy()
    values[1, 5] = value
    exact = contract.dequantize(values, np.asarray(made.scale), format, 1)
    made = dataclasses.replace(made, operand=jnp.asarray(values), exact=exact)
    pair = (made, other) if side == "lhs" else (other, made)
    actual = self.call(*pair)
    contract.assert_exact(
      actual, contract.dot(pair[0].exact, pair[1].exact)[0], contract.F32
    )

  @parameterized.parameters(
    (jp.MXFP8, 0x7F), (jp.MXFP8, 0xFF), (jp.MXFP8_E5M2, 0x7E)
  )
  def test_nan_codes_propagate(self, format, code):
    rng = np.random.default_rng(0)
    made = self.operand(rng, format, (3, 32))
    other = self.operand(rng, jp.MXFP8, (7, 32))
    values = np.asarray(made.operand).copy()
    values.view(np.uint8)[1, 5] = code
    actual = np.asarray(
      self.dot(jnp.asarray(values), other.operand, made.scale, other.scale)
    )
    self.assertTrue(np.isnan(actual[1]).all())
    self.assertTrue(np.isfinite(actual[[0, 2]]).all())

  @parameterized.product(lhs=FORMATS[:3], rhs=FORMATS[:3])
  def test_every_e8m0_scale_counts(self, lhs, rhs):
    # Row b of lhs has scale 2^(b - 127), row b of rhs the reciprocal, so the
    # diagonal of the product is exact. Byte 0 is 2^-127, an f32 subnormal: its
    # values are 2, so that what XLA:CPU would flush does not come up.
    code = np.arange(255, dtype=np.uint8)
    rows = []
    for format, codes in ((lhs, code), (rhs, 254 - code)):
      values = np.where(codes == 0, 2.0, 1.0)[:, None] * np.ones((1, 32))
      scale = codes[:, None].copy().view(formats.E8M0)
      rows += [values.astype(format.values_dtype), scale]
    lhs_values, lhs_scale, rhs_values, rhs_scale = map(jnp.asarray, rows)
    actual = self.dot(lhs_values, rhs_values, lhs_scale, rhs_scale)
    expected = np.full(255, 32.0)
    expected[[0, 254]] = 64.0
    np.testing.assert_array_equal(np.diagonal(np.asarray(actual)), expected)

  @parameterized.parameters(*FORMATS[:3])
  def test_largest_and_smallest_scale_bytes_are_exact_in_normal_range(
    self, format
  ):
    # Against a plain f32 identity, so each result is one dequantized value.
    codes = np.arange(16 if format.is_fp4 else 256, dtype=np.uint8)
    values = np.tile(codes.view(format.values_dtype)[:, None], (1, 32))
    for byte in (0, 1, 2, 253, 254):
      scale = np.full((len(codes), 1), byte, np.uint8).view(formats.E8M0)
      actual = np.asarray(
        self.dot(
          jnp.asarray(values),
          jnp.asarray(np.eye(1, 32, dtype=np.float32)),
          jnp.asarray(scale),
        )
      )[:, 0].astype(np.float64)
      exact = contract.dequantize(values, scale, format, 1)[:, 0]
      f32 = np.finfo(np.float32)
      magnitude = np.abs(exact)
      in_range = (exact == 0) | (magnitude >= float(f32.tiny))
      in_range &= magnitude <= float(f32.max)
      # 0 * Inf and 0 * NaN of the identity's zeros make the rest NaN.
      in_range |= np.isnan(exact)
      np.testing.assert_array_equal(actual[in_range], exact[in_range])
      small = ~in_range & (magnitude < 1)
      error = np.abs(actual - exact)
      flushed = (actual == 0) | (error <= self.subnormal_spacing / 2)
      self.assertTrue(flushed[small].all(), "below 2^-126: exact or 0")
      large = ~in_range & (magnitude > 1) & np.isfinite(exact)
      self.assertTrue((~np.isfinite(actual[large])).all(), "above: Inf or NaN")

  def test_values_beyond_f32_are_exact_where_promised(self):
    if not self.exact_beyond_f32:
      self.skipTest("this implementation leaves them to the platform")
    code = np.arange(255, dtype=np.uint8)
    values = np.full((255, 32), 448, formats.E4M3)
    scale = code[:, None].copy().view(formats.E8M0)
    back = code[::-1, None].copy().view(formats.E8M0)
    actual = self.dot(*map(jnp.asarray, (values, values, scale, back)))
    np.testing.assert_array_equal(
      np.diagonal(np.asarray(actual)), np.full(255, 448.0 * 448 * 32)
    )
