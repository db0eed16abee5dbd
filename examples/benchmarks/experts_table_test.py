# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The page on mixtures of experts has the tables of the committed results."""

import experts_table
from absl.testing import absltest

from jaxplugin.lab.bench.report import results
from jaxplugin.testing import bench_results


class ExpertsTableTest(absltest.TestCase):
  def test_page_has_the_table_of_each_file(self):
    page = experts_table.PAGE.read_text()
    files = experts_table.files()
    self.assertNotEmpty(files)
    for path in files:
      table = experts_table.lines(results.read(path))
      self.assertGreater(len(table), 2)
      self.assertTrue("\n".join(table) in page, path.name)
      self.assertIn(f"results/{path.name}", page)

  def test_the_faster_of_two_dtypes_counts(self):
    of = bench_results.variant
    row = bench_results.row(
      of("cpu", 2, is_chosen=True, roof_fraction=0.5),
      of("dense dots", 2.1),
      of("loop f32", 9),
      of("loop bf16", 30),
      of("lax bf16", 2600),
      row="experts:8x4of32x5760x2880",
      kind="experts",
      m=8,
      layer="a layer",
      formats="bf16xmxfp4",
    )
    other = bench_results.row(
      of("cpu", 3000, is_chosen=True, roof_fraction=0.25),
      row="experts:8x4of32x5760x2880",
      kind="experts",
      m=8,
      layer="a layer",
      formats="bf16xnvfp4",
    )
    table = experts_table.lines(bench_results.run(row, other))
    self.assertEqual(
      table[2:],
      [
        "| a layer, bf16 x | 8 | MXFP4 | 2.0 | 1.05 | 4.5 |  |  | 1300 |  |"
        " 50 |",
        "| a layer, bf16 x | 8 | NVFP4 | 3000 |  |  |  |  |  |  | 25 |",
      ],
    )
