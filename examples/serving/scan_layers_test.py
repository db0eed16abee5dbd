# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of scans runs, and refuses a variant that is wrong."""

from unittest import mock

import pytest
import scan_layers
from absl.testing import absltest

SHAPE = (2, 32, 64)


class ScanLayersTest(absltest.TestCase):
  @pytest.mark.full
  def test_every_variant_is_timed(self):
    times = scan_layers.measure(SHAPE, 2)
    self.assertLen(times, 2 + 3 * 9)
    self.assertEqual({len(samples) for samples in times.values()}, {2})
    lines = scan_layers.table({"f32": [2.0, 4.0], "other": [1.0, 1.0]})
    self.assertEqual(lines[2].split(), ["other", "1.00", "1.00", "0.38"])

  def test_a_wrong_variant_is_an_error(self):
    wrong = lambda weights: {"f32": (lambda x, w: 0 * x @ w[0].T, weights)}
    refused = self.assertRaisesRegex(ValueError, "f32 is wrong by")
    with mock.patch.object(scan_layers, "variants", wrong), refused:
      scan_layers.measure(SHAPE, 1)
