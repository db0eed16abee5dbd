# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The baseline raises when an error grows, and only then."""

from __future__ import annotations

import json
import math
import os
from unittest import mock

import numerics_baseline
import numpy as np
from absl.testing import parameterized

from jaxplugin.testing import folders


class BaselineTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folders.new(self) / "baseline.json"
    self.path.write_text('{"mine": {"a": 20.0, "b": 4.0}, "other": {"a": 1}}')

  def tracker(self, section="mine", **settings):
    return numerics_baseline.Tracker(section, path=self.path, **settings)

  def measured(self, a=20.0, b=4.0):
    tracker = self.tracker()
    self.assertEqual(tracker.sqnr("a", a), a)
    self.assertEqual(tracker.error("b", b), b)
    return tracker

  @parameterized.parameters(
    (20.0, 4.0), (30.0, 4.0), (20.0, 1.0), (19.99, 4.0), (20.0, 7.9)
  )
  def test_equal_better_and_within_tolerance_pass(self, a, b):
    message = self.measured(a, b).finish()
    self.assertIn("2 figures: none worse", message)

  def test_smaller_sqnr_raises_with_its_name_alone(self):
    with self.assertRaises(numerics_baseline.GrownError) as raised:
      self.measured(a=19.9).finish()
    message = str(raised.exception)
    self.assertIn("1 of 2 figures of mine", message)
    self.assertIn("a: SQNR 19.900 dB, was 20.000", message)
    self.assertNotIn("b:", message)
    self.assertIn("--write-baseline", message)

  @parameterized.parameters(
    # A larger error, a new figure, one that is not measured, and a section.
    ("mine", {"b": 11.4}, r"b: error 11.4, was 4, limit x 2\.83"),
    ("mine", {"b": 4.0, "c": 3.0}, "c: 3, not in the baseline"),
    ("mine", {}, r"b: in the baseline \(4\), but not measured"),
    ("typo", {}, ""),
  )
  def test_other_figures_raise(self, section, errors, message):
    tracker = self.tracker(section)
    tracker.sqnr("a", 20.0)
    for name, error in errors.items():
      tracker.error(name, error)
    with self.assertRaisesRegex(numerics_baseline.GrownError, f".*{message}"):
      tracker.finish()

  def test_figure_said_to_be_absent_need_not_be_measured(self):
    tracker = self.tracker()
    tracker.sqnr("a", 20.0)
    tracker.absent("b", "no compiler")
    self.assertIn("b not measured: no compiler", tracker.finish())

  def test_writing_replaces_the_section_and_no_other(self):
    tracker = self.tracker(write=True)
    tracker.sqnr("new", 12.3456789)
    tracker.finish()
    self.assertEqual(
      json.loads(self.path.read_text()),
      {"mine": {"new": 12.3457}, "other": {"a": 1}},
    )

  def test_environment_asks_for_writing(self):
    variable = {numerics_baseline.WRITE_VARIABLE: "1"}
    with mock.patch.dict(os.environ, variable):
      tracker = self.tracker()
    tracker.sqnr("a", 1.0)
    tracker.finish()
    self.assertEqual(json.loads(self.path.read_text())["mine"], {"a": 1.0})

  def test_incomplete_baseline_is_not_written(self):
    before = self.path.read_text()
    tracker = self.tracker(write=True)
    tracker.absent("cpu", "no compiler")
    with self.assertRaisesRegex(numerics_baseline.GrownError, "no compiler"):
      tracker.finish()
    self.assertEqual(self.path.read_text(), before)

  @parameterized.parameters(math.nan, math.inf, -math.inf)
  def test_figures_that_no_comparison_catches_are_refused(self, value):
    with self.assertRaisesRegex(ValueError, "a must be finite"):
      self.tracker().sqnr("a", value)

  def test_second_figure_of_a_name_is_refused(self):
    with self.assertRaisesRegex(ValueError, "a is recorded already"):
      self.measured().sqnr("a", 1.0)

  def test_tolerance_is_what_the_worst_change_of_the_data_does(self):
    x = np.random.default_rng(0).normal(size=100_000)
    error = x - np.round(x * 16) / 16
    perturbation = 1e-4

    def sqnr(x):
      error = x - np.round(x * 16) / 16
      return 20 * math.log10(np.linalg.norm(x) / np.linalg.norm(error))

    # In the direction of the error: every one of them grows.
    change = error * perturbation * np.linalg.norm(x) / np.linalg.norm(error)
    fall = sqnr(x) - sqnr(x + change)
    tolerance = numerics_baseline.sqnr_tolerance_db(sqnr(x), perturbation)
    self.assertLess(fall, tolerance)
    # But for values that the change carries over a boundary.
    share = tolerance - numerics_baseline.FLIPPED_BLOCKS_DB
    self.assertGreater(fall, 0.9 * share)

  def test_committed_baseline_is_complete(self):
    sections = json.loads(numerics_baseline.BASELINE.read_text("utf-8"))
    names = {"formats": 40, "scales": 40, "contract": 40, "training": 30}
    self.assertEqual(set(sections), set(names))
    for name, figures in names.items():
      self.assertGreater(len(sections[name]), figures, name)
