# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tables a call uses, and in which order."""

from absl.testing import absltest

from jaxplugin.tables import resolution
from jaxplugin.testing.measured import dot_tables


class TuningTest(absltest.TestCase):
  def test_tables_of_the_inner_context_come_first(self):
    first, second, inner = (
      dot_tables.table(dot_tables.faster(m=m)) for m in (1, 2, 4)
    )
    with resolution.tuning(first, second), resolution.tuning(inner):
      self.assertEqual(resolution.overlay().tables, (inner, first, second))
    self.assertIsNone(resolution.overlay())
