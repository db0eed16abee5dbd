# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures and data against arithmetic by hand, ml_dtypes and jaxplugin."""

from __future__ import annotations

import importlib.util
import math

import ml_dtypes
import numerics_measure as measure
import numpy as np
import scipy.linalg
import scipy.special
from absl.testing import absltest, parameterized

import jaxplugin as jp

DTYPES = (
  ml_dtypes.float8_e4m3fn,
  ml_dtypes.float8_e5m2,
  ml_dtypes.float4_e2m1fn,
)
minilm = measure.minilm
FORMATS = tuple((format.name, format) for format in measure.FORMATS)
has_model = absltest.skipUnless(
  importlib.util.find_spec(minilm.MODEL_PACKAGE),
  f"{minilm.REQUIREMENTS[minilm.MODEL_PACKAGE]} is not installed",
)


def mixed(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
  """f32 of magnitudes from 2^-20 to 2^20, with zeros and one block of zeros."""
  random = np.random.default_rng(seed)
  x = random.normal(size=shape) * np.exp2(random.uniform(-20, 20, shape))
  x[..., ::7] = 0
  x[0, :32] = 0
  return x.astype(np.float32)


class DataTest(parameterized.TestCase):
  def test_stream_is_the_frozen_one(self):
    x = measure.gaussian((1, 2), 0)
    # RandomState(0) as printed in any NumPy tutorial since 2005.
    np.testing.assert_allclose(x[0], [1.76405235, 0.40015721], rtol=1e-7)

  @parameterized.parameters(measure.gaussian, measure.laplace)
  def test_variance_is_one(self, make):
    x = make((500, 1000), 1).astype(np.float64)
    # Standard error of a variance of N values: sqrt((kurtosis - 1) / N); the
    # kurtosis is at most Laplace's 6.
    self.assertAlmostEqual(np.mean(x**2), 1, delta=4 * math.sqrt(5 / x.size))

  def test_student_t_has_the_tail_of_its_degrees(self):
    x = np.abs(measure.student_t((1000, 1000), 2))
    # P(|t| > 10) with 3 degrees of freedom, from its distribution function.
    expected = 2 * (1 - scipy.special.stdtr(3, 10))
    self.assertAlmostEqual(
      np.mean(x > 10), expected, delta=4 * math.sqrt(expected / x.size)
    )

  def test_outlier_channels_enlarge_one_column_in_each_hundred_and_28(self):
    plain = measure.gaussian((4, 256), 3)
    x = measure.outlier_channels((4, 256), 3, factor=8)
    changed = np.flatnonzero((x != plain).any(axis=0))
    self.assertEqual(changed.tolist(), [42, 170])
    np.testing.assert_array_equal(x[:, changed], 8 * plain[:, changed])

  def test_octave_rows_spread_evenly_over_an_octave(self):
    x = measure.octave_rows(np.ones((4, 3), np.float32))
    np.testing.assert_allclose(
      np.log2(x[:, 0].astype(np.float64)),
      [1 / 8, 3 / 8, 5 / 8, 7 / 8],
      atol=1e-7,
    )
    np.testing.assert_array_equal(x[:, 0], x[:, 2])


class MeasureTest(parameterized.TestCase):
  def test_sqnr_of_a_known_error(self):
    self.assertAlmostEqual(
      measure.sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 3.0])),
      10 * math.log10(25),
    )
    self.assertEqual(measure.sqnr_db(np.ones(2), np.ones(2)), math.inf)

  def test_crest_factor_is_a_mean_over_blocks_that_are_not_zero(self):
    x = np.array([[1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0]])
    self.assertEqual(measure.crest_factor(x, 4), (1 + 2) / 2)

  @parameterized.parameters(*DTYPES)
  def test_round_to_levels_is_the_cast_of_ml_dtypes(self, dtype):
    levels = measure.positive_levels(np.dtype(dtype))
    middles = (levels[:-1] + levels[1:]) / 2
    random = np.random.default_rng(1).uniform(0, 1.5 * levels[-1], 5000)
    x = np.concatenate([levels, middles, random, random * 2.0**-12])
    x = np.concatenate([x, -x]).astype(np.float32)
    clipped = np.clip(x, -levels[-1], levels[-1])
    expected = clipped.astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(
      measure.round_to_levels(x, np.dtype(dtype)), expected
    )

  def test_unknown_rule_is_refused(self):
    with self.assertRaisesRegex(ValueError, "unknown rule 'e8m0'"):
      measure.block_scale(np.ones(1), np.dtype(DTYPES[0]), "e8m0")

  @parameterized.named_parameters(*FORMATS)
  def test_second_quantizer_gives_the_numbers_of_the_first(self, format):
    x = mixed((16, 256))
    rules = {"up": "e8m0_up", "floor": "e8m0_floor"}
    if format.has_global_scale:
      rules = {"up": "e4m3"}
    for rounding, rule in rules.items():
      ours = measure.block_round_trip(
        x,
        values_dtype=format.values_dtype,
        block_size=format.block_size,
        rule=rule,
        has_global_scale=format.has_global_scale,
      )
      theirs = measure.round_trip(x, format, scale_rounding=rounding)
      np.testing.assert_array_equal(ours.astype(np.float32), theirs)
      self.assertGreater(np.count_nonzero(ours), 100)

  def test_given_global_scale_is_used(self):
    x = measure.gaussian((4, 64), 5)
    # Every value is far below the least step, 2^-9 * 1e6.
    np.testing.assert_array_equal(
      measure.round_trip(x, jp.NVFP4, global_scale=1e6), np.zeros_like(x)
    )

  def test_exact_scale_keeps_each_largest_value(self):
    x = measure.gaussian((4, 64), 6)
    y = measure.block_round_trip(
      x, values_dtype=jp.MXFP4.values_dtype, block_size=16, rule="exact"
    )
    largest = np.abs(x.reshape(-1, 16)).argmax(axis=1)
    rows = np.arange(len(largest))
    np.testing.assert_allclose(
      y.reshape(-1, 16)[rows, largest],
      x.reshape(-1, 16)[rows, largest],
      rtol=2.0**-22,
    )

  @parameterized.parameters(*DTYPES[:2])
  def test_tensor_round_trip_scales_once_and_never_overflows(self, dtype):
    x = mixed((8, 64), seed=7)
    y = measure.tensor_round_trip(x, dtype)
    self.assertTrue(np.isfinite(y).all())
    self.assertAlmostEqual(np.abs(y).max() / np.abs(x).max(), 1, delta=1e-6)
    # All are multiples of the smallest number times the one scale.
    quantum = np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)
    quantum *= float(ml_dtypes.finfo(dtype).smallest_subnormal)
    multiples = y / quantum
    np.testing.assert_allclose(multiples, np.round(multiples), rtol=1e-5)

  def test_bits_per_value_count_the_scale(self):
    bits = [measure.bits_per_value(format) for format in measure.FORMATS]
    self.assertEqual(bits, [8.25, 8.25, 6.25, 6.25, 4.25, 4.5])


@has_model
class ModelTest(absltest.TestCase):
  def test_there_are_all_weights_and_all_activations(self):
    weights, activations = measure.model_weights(), measure.model_activations()
    self.assertLen(weights, 36)
    self.assertLen(activations, 24)
    for name in activations:
      self.assertIn(name.split(" ", 1)[1], measure.ACTIVATIONS)

  def test_gelu_of_the_first_ffn_product_is_the_second_ones_input(self):
    activations = measure.model_activations()
    _, params, _ = measure.model()
    for layer in (0, 5):
      linear = params["layers"][layer]["ffn_in"]
      x = activations[f"{layer} ffn in"].astype(np.float64)
      y = x @ np.asarray(linear["weight"], np.float64).T
      y += np.asarray(linear["bias"])
      expected = y * (1 + scipy.special.erf(y / math.sqrt(2))) / 2
      actual = activations[f"{layer} ffn out"]
      error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
      self.assertLess(error, 1e-5)


class HadamardTest(parameterized.TestCase):
  @parameterized.parameters(2, 16, 32)
  def test_transform_is_orthogonal_and_undone(self, size):
    x = measure.gaussian((3, 64), 0)
    y = measure.hadamard(x, size)
    np.testing.assert_allclose(measure.unhadamard(y, size), x, atol=1e-12)
    squares = [np.square(a).reshape(-1, size).sum(axis=1) for a in (x, y)]
    np.testing.assert_allclose(*squares, rtol=1e-6)

  def test_matrix_is_the_one_of_scipy_and_groups_are_apart(self):
    size = 16
    x = np.zeros((1, 2 * size))
    for place in range(size):
      x[:] = 0
      x[0, size + place] = 4  # so that all results are 1 or -1
      y = measure.hadamard(x, size, seed=3)
      np.testing.assert_array_equal(y[0, :size], 0)
      row = scipy.linalg.hadamard(size)[place]
      self.assertIn(y[0, size:].tolist(), [row.tolist(), (-row).tolist()])

  def test_signs_are_of_the_seed_and_of_both_kinds(self):
    x = np.eye(32, dtype=np.float32)
    first, other = (measure.hadamard(x, 32, seed) for seed in (0, 1))
    self.assertFalse(np.array_equal(first, other))
    # H[:, 0] is all ones, so the first column has the signs.
    self.assertEqual(set(np.sign(first[:, 0])), {-1, 1})
