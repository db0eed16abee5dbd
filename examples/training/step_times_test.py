# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each variant of a step is timed in a process, and compared."""

import sys

import pytest
import step_times
from absl.testing import absltest

pytestmark = pytest.mark.full


class StepTimesTest(absltest.TestCase):
  def test_variants_are_timed_and_compared_in_rounds(self):
    variants = ["f32", "mxfp8", "mxfp8:dots", "mxfp8:fused"]
    found = step_times.measure("quick", variants, sys.executable, 2)
    self.assertEqual(list(found), [*variants, "mxfp8 before"])
    self.assertEqual(found["mxfp8:fused"]["speedup_over_separate"]["count"], 2)
    self.assertEqual(found["f32"]["speedup_over_f32"]["median"], 1)
    ratio = found["mxfp8"]["speedup_over_before"]
    self.assertEqual(ratio["count"], 2)
    times = [found[n]["ms"] for n in ("mxfp8 before", "mxfp8")]
    self.assertBetween(
      ratio["median"],
      times[0]["min"] / times[1]["max"],
      times[0]["max"] / times[1]["min"],
    )
