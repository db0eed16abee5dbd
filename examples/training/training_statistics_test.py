# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sentences about differences follow from the seeds' results."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats
import training_runs
import training_statistics
from absl.testing import absltest, parameterized


def runs(**finals):
  """Runs of variants with such final losses, seed by seed."""
  return [
    training_runs.Run(
      variant=variant,
      seed=seed,
      training=[3.0, final],
      validation=[2.5, final],
      accuracy=0.5,
      seconds=1.0,
    )
    for variant, losses in finals.items()
    for seed, final in enumerate(losses)
  ]


class CompareTest(parameterized.TestCase):
  def test_figures_are_those_of_the_paired_differences(self):
    found = training_statistics.compare(
      runs(f32=[2.0, 2.3, 2.1], fp4=[2.1, 2.5, 2.4]), "fp4", "f32"
    )
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1.
    self.assertAlmostEqual(found.difference, 0.2)
    self.assertAlmostEqual(found.standard_error, 0.1 / math.sqrt(3))
    self.assertAlmostEqual(found.mean, 7 / 3)
    # 2.1, 2.5, 2.4 less 7/3: squares add up to 0.26 / 3.
    self.assertAlmostEqual(found.spread, math.sqrt(0.26 / 3 / 2))
    # Student's t of 2 degrees of freedom, 95 %: 4.303 (any table).
    self.assertAlmostEqual(
      found.margin, 4.303 * found.standard_error, delta=1e-4
    )

  def test_significance_is_what_a_paired_t_test_says_at_five_percent(self):
    random = np.random.default_rng(0)
    said = set()
    for _ in range(200):
      ours, theirs = random.normal(size=(2, 4)) + [[1.5], [0]]
      found = training_statistics.compare(
        runs(ours=ours, theirs=theirs), "ours", "theirs"
      )
      is_apart = found.verdict != "not significant"
      p = scipy.stats.ttest_rel(ours, theirs).pvalue
      self.assertEqual(is_apart, p < 0.05)
      said.add(is_apart)
    self.assertEqual(said, {True, False})

  @parameterized.parameters(
    # Differences of 0.1 with hardly a spread, losses that spread by 0.5 or not.
    ((2.0, 2.5, 3.0), (0.100, 0.101, 0.102), "higher, below the seeds' spread"),
    ((2.0, 2.5, 3.0), (-0.100, -0.101, -0.102),
      "lower, below the seeds' spread"),
    ((2.0, 2.01, 2.02), (0.100, 0.101, 0.102),
      "higher, above the seeds' spread"),
    ((2.0, 2.01, 2.02), (-0.10, -0.11, -0.10),
      "lower, above the seeds' spread"),
    # A mean difference of 0.1 that one seed makes alone.
    ((2.0, 2.01, 2.02), (0.3, 0.0, 0.0), "not significant"),
    # One seed says nothing, whatever the difference.
    ((2.0,), (1.0,), "not significant"),
  )  # fmt: skip
  def test_verdict(self, base, differences, expected):
    others = np.add(base, differences)
    found = training_statistics.compare(runs(f32=base, x=others), "x", "f32")
    self.assertEqual(found.verdict, expected)

  def test_only_seeds_of_both_are_compared(self):
    found = training_statistics.compare(
      runs(f32=[2.0, 2.2], x=[2.1, 2.3, 9.0]), "x", "f32"
    )
    self.assertEqual(found.seeds, 2)
    self.assertAlmostEqual(found.difference, 0.1)

  def test_variants_without_a_common_seed_are_an_error(self):
    some = runs(f32=[2.0], x=[2.1, 2.3])
    with self.assertRaisesRegex(ValueError, "no seed has both x and f32"):
      training_statistics.compare(
        [r for r in some if (r.variant, r.seed) != ("x", 0)], "x", "f32"
      )


class TableTest(absltest.TestCase):
  def test_table_says_of_each_difference_what_it_is(self):
    text = training_statistics.table(
      runs(
        f32=[2.0, 2.01, 2.02],
        near=[2.1, 1.9, 2.05],
        worse=[2.2, 2.212, 2.219],
      ),
      "f32",
    )
    rows = {line.split(" | ")[0].strip("| "): line for line in text.split("\n")}
    self.assertIn("| f32 | 3 | 2.0100 | 0.0100 |  |  |", rows["f32"])
    self.assertIn("not significant", rows["near"])
    self.assertIn("higher, above the seeds' spread", rows["worse"])
    self.assertIn("+0.2003", rows["worse"])
    self.assertIn("1 of 2 variants differ significantly from f32", text)
