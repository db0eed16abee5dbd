# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls have the same number in both phases of an export."""

from absl.testing import absltest

from jaxplugin.runtime import exporting


class NumbersTest(absltest.TestCase):
  def test_platforms_of_an_export_share_the_number_of_a_call(self):
    export = exporting.Export(targets={}, num_platforms=2)
    numbers = lambda: [export.next_number() for _ in range(4)]
    export.begin("listening")  # compiles for one platform
    self.assertEqual(numbers(), [0, 1, 2, 3])
    export.begin("exporting")
    self.assertEqual(numbers(), [0, 0, 1, 1])
