# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Choices of a race in simulations with a known answer."""

import itertools
import math
from typing import Final

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.lab.tuning import race

ROUNDS: Final = 512  # the tuner's default, of two processes
SIMULATIONS: Final = 100
NOISE: Final = 0.05


def choice(samples, default="default"):
  ratios = race.Race(samples, default, ROUNDS).ratios()
  faster = [key for key, ratio in ratios.items() if ratio.high < 0]
  return min(faster, key=lambda k: ratios[k].estimate, default=default)


def simulate(seed, medians, outliers=0.0, rounds=ROUNDS):
  """Returns the samples of a race. Outliers take three times as long."""
  rng = np.random.default_rng(seed)

  def call(median):
    slow = 3.0 if rng.random() < outliers else 1.0
    return slow * median * math.exp(NOISE * rng.standard_normal())

  samples = {key: [] for key in medians}
  race.run(
    {key: (lambda m=m: call(m)) for key, m in medians.items()},
    samples,
    "default",
    rounds=rounds,
    all_rounds=ROUNDS,
    seconds=math.inf,
  )
  return samples


class RaceTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("of_two", {"a": 0.98}, 0.0, ("a",)),
    ("with_outliers", {"a": 0.98}, 0.02, ("a",)),
    ("of_six", {"a": 0.98, "b": 1.0, "c": 1.01, "d": 1.05, "e": 1.3}, 0.0,
     ("a",)),
    ("among_much_faster_ones", {"a": 0.58, "b": 0.6, "c": 0.7, "d": 0.8}, 0.0,
     ("a",)),
    ("of_a_tie_with_outliers", {"a": 1.0}, 0.05, ("default",)),
    ("if_all_are_slower", {"a": 1.02, "b": 1.1}, 0.0, ("default",)),
    ("of_a_tie", {"a": 1.0}, 0.0, ("default",)),
  )  # fmt: skip
  @pytest.mark.sample(3)
  def test_choice_is_right_with_the_stated_confidence(
    self, others, outliers, right
  ):
    runs = [
      simulate(seed, {"default": 1.0, **others}, outliers)
      for seed in range(SIMULATIONS)
    ]
    rounds = [len(samples["default"]) for samples in runs]
    share = np.mean([choice(samples) in right for samples in runs])
    print(
      f"right in {share:.1%}; median {np.median(rounds):.0f} rounds, 90 %"
      f" within {np.percentile(rounds, 90):.0f}"
    )
    self.assertGreaterEqual(share, race.CONFIDENCE)

  def test_slow_candidates_leave_early(self):
    medians = {"default": 1.0, "a": 0.9, "b": 1.2, "c": 2.0}
    samples = simulate(0, medians)
    self.assertLen(samples["c"], race.MIN_ROUNDS)
    self.assertLess(len(samples["b"]), 20)
    self.assertLess(len(samples["a"]), ROUNDS)
    self.assertEqual(choice(samples), "a")

  def test_interval_is_that_of_the_signed_rank_test(self):
    # Every sign pattern of n ranks is equally likely: NumPy counts them all.
    n, cut_off = 14, 0.02
    ranks = np.arange(1, n + 1)
    sums = np.array(
      [np.dot(ranks, signs) for signs in itertools.product((0, 1), repeat=n)]
    )
    rng = np.random.default_rng(0)
    logs = rng.normal(-0.1, 0.1, n)
    found = race.ratio_of(np.exp(logs), np.ones(n), cut_off)
    for shift, side in ((found.low, 1), (found.high, -1)):
      p = []
      for nudge in (1e-6, -1e-6):  # inside of the interval, and outside
        moved = side * (logs - shift - side * nudge)
        order = np.argsort(np.argsort(np.abs(moved))) + 1
        p.append(np.mean(sums >= order[moved > 0].sum()))
      # The test rejects what lies outside. The normal approximation differs a
      # little from the exact test.
      self.assertGreater(p[0], 0.95 * cut_off)
      self.assertLess(p[1], 1.05 * cut_off)

  def test_candidate_that_left_is_not_faster_than_the_one_that_beat_it(self):
    # The default was fast only after "b" had left, which ran in fewer rounds.
    medians = {"default": 1.0, "a": 0.5, "b": 0.6, "c": 0.505}
    samples = simulate(1, medians)
    left = len(samples["b"])
    self.assertLess(left, len(samples["a"]))
    samples["default"][left:] = [0.7 * x for x in samples["default"][left:]]
    ratios = race.Race(samples, "default", ROUNDS).ratios()
    self.assertLess(ratios["a"].estimate, ratios["b"].estimate)

  def test_a_second_process_continues_the_race(self):
    medians = {"default": 1.0, "a": 0.98, "b": 1.5}
    calls = {k: (lambda m=m: m) for k, m in medians.items()}
    samples = simulate(0, medians, rounds=8)
    self.assertEqual([len(x) for x in samples.values()], [8, 8, 5])
    now = iter(range(1000))
    race.run(
      calls,
      samples,
      "default",
      rounds=100,
      all_rounds=ROUNDS,
      seconds=0,
      clock=lambda: next(now),
    )
    self.assertEqual([len(x) for x in samples.values()], [13, 13, 5])
