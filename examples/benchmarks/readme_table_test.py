# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md's figures are those of the committed results."""

import readme_table
from absl.testing import absltest

from jaxplugin.bench.report import results

README = readme_table.DIRECTORY.parents[1] / "README.md"


class ReadmeTableTest(absltest.TestCase):
  def test_readme_has_the_table_of_the_results(self):
    table = readme_table.lines(results.read(str(readme_table.RESULTS)))
    self.assertGreater(len(table), len(readme_table.HEADER))
    self.assertIn("\n".join(table), README.read_text())


if __name__ == "__main__":
  absltest.main()
