# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and pictures of plans that are written by hand."""

import dataclasses

from absl.testing import absltest

from jaxplugin.lab.planning import collectives, plans, report


def moved(num_bytes, dtype="bf16", axes=("tp",), times=1, **more):
  return collectives.Collective(
    kind="all-gather",
    dtype=dtype,
    axes=axes,
    group=8,
    num_bytes=num_bytes,
    times=times,
    **more,
  )


PLAIN = plans.ModelPlan(
  name="a <layer>",
  layout="tp=8",
  format="bf16",
  target="b200",
  devices=8,
  collectives=(moved(2e6, times=3), moved(4e6), moved(10.0, dtype="s32")),
  argument_bytes=10**9,
  output_bytes=1,
  temp_bytes=25 * 10**8,
  seconds=1.25,
)
QUANTIZED = dataclasses.replace(
  PLAIN,
  format="mxfp8",
  collectives=(moved(3e6, dtype="u8"), moved(2e6, axes=("fsdp", "tp"))),
)


class TableTest(absltest.TestCase):
  def test_rows_are_axes_kinds_and_types_in_megabytes(self):
    rows = {}
    for line in report.table([PLAIN, QUANTIZED]).splitlines():
      name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
      rows[name] = cells
    self.assertEqual(rows["MB received"], ["bf16", "mxfp8"])
    self.assertEqual(rows["tp: all-gather bf16"], ["10.0", ""])
    self.assertEqual(rows["tp: all-gather u8"], ["", "3.0"])
    self.assertEqual(rows["fsdp and tp: all-gather bf16"], ["", "2.0"])
    self.assertEqual(rows["all"], ["10.0", "5.0"])
    self.assertEqual(rows["to the first"], ["1.00", "0.50"])
    self.assertEqual(rows["temporary, GB"], ["2.5", "2.5"])
    self.assertNotIn("tp: all-gather s32", rows)  # ten bytes

  def test_columns_beyond_80_follow_in_another_table(self):
    names = [f"a_format_of_{i}" for i in range(7)]
    found = [dataclasses.replace(PLAIN, format=name) for name in names]
    first, *rest = tables = report.table(found).split("\n\n")
    self.assertNotEmpty(rest)
    headers = []
    for lines in map(str.splitlines, tables):
      self.assertLessEqual(max(map(len, lines)), 80)
      self.assertLen({len(line) for line in lines}, 1)
      self.assertLen(lines, len(first.splitlines()))
      title, *header = (x.strip() for x in lines[0].strip("|").split("|"))
      self.assertEqual(title, "MB received")
      headers += header
    self.assertEqual(headers, names)

  def test_each_layout_has_a_table(self):
    other = dataclasses.replace(PLAIN, layout="fsdp=8")
    text = report.text([PLAIN, other, QUANTIZED])
    self.assertEqual(text.count("| MB received"), 2)
    self.assertIn("a <layer>, tp=8: 8 x b200", text)
    self.assertIn("compiled in 1.2 s (bf16), 1.2 s (mxfp8)", text)
    self.assertNotIn("compiled", report.text([PLAIN], times=False))

  def test_what_is_a_bound_is_said(self):
    self.assertNotIn("known count", report.text([PLAIN]))
    unknown = dataclasses.replace(
      PLAIN, collectives=(moved(1e6, is_bound=True),)
    )
    self.assertIn("without a known count", report.text([unknown]))

  def test_nothing_to_compare_with(self):
    alone = dataclasses.replace(PLAIN, collectives=())
    self.assertNotIn("to the first", report.text([alone, QUANTIZED]))

  def test_json_comes_back(self):
    found = [PLAIN, QUANTIZED]
    self.assertEqual(report.from_json(report.to_json(found)), found)
