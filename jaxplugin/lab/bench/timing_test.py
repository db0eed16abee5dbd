# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns and statistics."""

import itertools
import statistics

import numpy as np
from absl.testing import absltest

from jaxplugin.lab.bench import timing


class Clock:
  """A clock that calls advance; each call returns its own milliseconds."""

  def __init__(self):
    self.now = 0.0
    self.calls = []

  def __call__(self):
    return self.now

  def call(self, name, seconds):
    def run():
      self.calls.append(name)
      self.now += seconds
      return seconds * 1e3

    return run


class InTurnsTest(absltest.TestCase):
  def _orders(self, rounds):
    clock = Clock()
    calls = {name: clock.call(name, 1) for name in "abc"}
    timing.in_turns(calls, rounds=rounds, seconds=1e9, clock=clock)
    self.assertLen(clock.calls, 3 * rounds)
    return ["".join(clock.calls[i : i + 3]) for i in range(0, 3 * rounds, 3)]

  def test_every_round_runs_each_once(self):
    for order in self._orders(rounds=20):
      self.assertCountEqual(order, "abc")

  def test_each_follows_each_other_one_about_as_often(self):
    order = "".join(self._orders(rounds=300))
    for before, after in itertools.permutations("abc", 2):
      # 1 in 3 rounds, and 1 in 9 steps from round to round: 133. Binomial,
      # five standard deviations are 49.
      self.assertAlmostEqual(order.count(before + after), 133, delta=49)

  def test_order_is_the_same_in_every_run(self):
    self.assertEqual(self._orders(rounds=9), self._orders(rounds=9))

  def test_slow_one_sits_out_once_its_share_is_spent(self):
    clock = Clock()
    calls = {"slow": clock.call("slow", 2), "fast": clock.call("fast", 0.5)}
    samples = timing.in_turns(
      calls, rounds=20, seconds=8, min_rounds=3, clock=clock
    )
    # A share is 4 s: the slow one goes on to the minimum, the fast one to 8.
    self.assertEqual(samples["slow"], [2000.0] * 3 + [None] * 5)
    self.assertEqual(samples["fast"], [500.0] * 8)

  def test_rounds_are_at_least_the_minimum_and_at_most_the_limit(self):
    for seconds, rounds, expected in ((100, 50, timing.MIN_ROUNDS), (0, 3, 3)):
      clock = Clock()
      samples = timing.in_turns(
        {"a": clock.call("a", seconds)}, rounds=rounds, seconds=1, clock=clock
      )
      self.assertLen(samples["a"], expected)


class StatsTest(absltest.TestCase):
  def test_quartiles_are_those_of_the_statistics_module(self):
    samples = list(np.random.default_rng(0).exponential(size=37))
    found = timing.stats(samples)
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    np.testing.assert_allclose(
      [found.min, found.q1, found.median, found.q3, found.max],
      [min(samples), *quartiles, max(samples)],
      rtol=5e-6,  # six digits are kept
    )
    self.assertEqual(found.count, 37)

  def test_ratio_is_taken_round_by_round(self):
    # Each round is slower than the last; the ratio is 3 in every one.
    fast = [1.0, 10.0, None, 100.0]
    slow = [3.0, 30.0, 300.0, 300.0]
    found = timing.ratio(slow, fast)
    self.assertEqual((found.min, found.median, found.max), (3, 3, 3))
    self.assertEqual(found.count, 3)

  def test_ratio_without_a_common_round_is_none(self):
    self.assertIsNone(timing.ratio([1.0, None], [None, 1.0]))
