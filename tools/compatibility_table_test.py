# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The compatibility page has the backends that the package chooses today."""

import compatibility_table
from absl.testing import absltest


class CompatibilityTableTest(absltest.TestCase):
  def test_page_has_the_table_of_today(self):
    page = compatibility_table.PAGE.read_text()
    self.assertEqual(
      page,
      compatibility_table.written(page),
      "run python tools/compatibility_table.py",
    )
    self.assertIn(compatibility_table.table(), page)

  def test_rows_are_at_and_below_the_gates_of_cudnn(self):
    table = compatibility_table.table()
    self.assertIn("| b200, cuDNN 9.13 | cudnn | triton | cudnn |", table)
    self.assertIn("cuDNN 9.12 | cudnn | triton | cudnn, global scale", table)
    self.assertIn("| b200, cuDNN 9.9 | triton | triton | triton |", table)
    self.assertIn("| CPU, kernels not built | xla | xla |", table)
