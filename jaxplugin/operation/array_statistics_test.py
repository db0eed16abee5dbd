# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated arrays have the statistics of the described ones."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from jaxplugin.operation import array_statistics

RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(7, 96)) * np.exp2(RNG.integers(-9, 9, (7, 1)))
SPECIAL = np.where(RNG.random((7, 96)) < 0.1, np.nan, NORMAL)
SPECIAL.reshape(-1)[:5] = (np.inf, -np.inf, 0, -0.0, np.inf)
CASES = {
  "normal": NORMAL.astype(np.float32),
  "special": SPECIAL.astype(ml_dtypes.bfloat16),
  "positive": np.abs(NORMAL).astype(np.float16),
  "negative": -np.abs(NORMAL).astype(np.float32),
  "scalar": np.float32(3.7),
  "zeros": np.zeros((3, 4), np.float32),
  "e4m3": NORMAL.astype(ml_dtypes.float8_e4m3fn),
  "e8m0": np.exp2(RNG.integers(-120, 120, 40)).astype(ml_dtypes.float8_e8m0fnu),
  "e2m1": NORMAL.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn),
  "packed": RNG.integers(0, 256, (9, 5)).astype(np.uint8),
  "int4": RNG.integers(-8, 8, (9, 5)).astype(ml_dtypes.int4),
  "groups": np.array([5, 0, 0, 11, 3], np.int32),
  "layers": np.arange(-1, 4, dtype=np.int32),
  "one": np.array([5], np.int32),
  "key": RNG.integers(0, 2**32, 2).astype(np.uint32),
  "bool": RNG.random(20) < 0.3,
  "complex": (NORMAL + 1j * NORMAL[::-1]).astype(np.complex64),
  "largest": np.array([1e308, -1e308, 1e308]),
  "empty": np.zeros((0, 4), np.float32),
  "no_integers": np.zeros(0, np.int32),
}
EXACT = ("min", "max", "zeros", "negative", "nan", "positive_inf", "sum")
EXACT += ("negative_inf", "counts", "start")


class ReproDataTest(parameterized.TestCase):
  @parameterized.named_parameters(CASES.items())
  @np.errstate(over="ignore")
  def test_statistics_survive(self, x):
    statistics = array_statistics.describe(x)
    made = array_statistics.generate(
      x.shape, x.dtype, statistics, np.random.default_rng(1)
    )
    self.assertEqual((made.shape, made.dtype), (x.shape, x.dtype))
    found = array_statistics.describe(made)
    json.dumps(found, allow_nan=False)
    for name in EXACT:
      self.assertEqual(found.get(name), statistics.get(name), name)
    if "start" in statistics:
      np.testing.assert_array_equal(made, x)
    if jnp.issubdtype(x.dtype, jnp.floating):
      wide = [np.abs(a.astype(np.float64)) for a in (x, made)]
      exponents = [
        np.sort(np.frexp(a[np.isfinite(a) & (a > 0)])[1]) for a in wide
      ]
      # Rounding to few bits moves a number to the next exponent at most.
      difference = exponents[0] - exponents[1]
      self.assertLessEqual(np.abs(difference).max(initial=0), 1)

  def test_other_order_and_the_same_seed_the_same_numbers(self):
    x = CASES["normal"]
    make = lambda seed: array_statistics.generate(
      x.shape,
      x.dtype,
      array_statistics.describe(x),
      np.random.default_rng(seed),
    )
    np.testing.assert_array_equal(make(3), make(3))
    self.assertLess(np.mean(make(3) == x), 0.1)
    self.assertLess(np.mean(make(3) == make(4)), 0.1)

  def test_unknown_statistics_give_finite_numbers(self):
    for dtype in (np.float32, ml_dtypes.float8_e8m0fnu, np.int32, np.uint8):
      made = array_statistics.generate(
        (64,), np.dtype(dtype), None, np.random.default_rng(0)
      )
      self.assertTrue(np.isfinite(made.astype(np.float64)).all())
