# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of README.md and of the site are those of the committed results."""

import dataclasses
import json
import re

import readme_table
from absl.testing import absltest

from jaxplugin.lab.bench import results
from jaxplugin.testing import bench_results

CPU_PAGES = (readme_table.README, readme_table.PAGE)


def variant(name, milliseconds, **fields):
  fields = {"is_chosen": name.startswith("cpu"), **fields}
  fields = {"role": "ours" if fields["is_chosen"] else "peer", **fields}
  return bench_results.variant(name, milliseconds, **fields)


def run(*rows):
  """A run of rows (name, formats, variants) with low ceilings."""
  ceilings = dataclasses.replace(bench_results.CEILINGS, warm=40e9)
  return bench_results.run(
    *(
      bench_results.row(*variants, row=name, formats=formats)
      for name, formats, variants in rows
    ),
    ceilings=ceilings,
  )


class ReadmeTableTest(absltest.TestCase):
  def test_pages_have_the_tables_of_each_file_that_they_name(self):
    avx2, gpu = readme_table.AVX2_PAGE, readme_table.GPU_PAGE
    for pages, files, count in (
      (CPU_PAGES, readme_table.linked(*CPU_PAGES), 2),
      ([avx2], readme_table.linked(avx2), 1),
      ([gpu], readme_table.linked(gpu), 9),
      ([readme_table.EXPERTS_PAGE], readme_table.experts_files(), 3),
    ):
      texts = [page.read_text() for page in pages]
      self.assertLen(files, count)
      for path in files:
        *_, text = texts
        self.assertIn(f"results/{path.name}", text)
        *others, last = ("\n".join(x) for x in readme_table.tables(path))
        self.assertIn(last, text)
        for table in others:
          self.assertIn(table, texts[0])

  def test_each_committed_run_has_tables_or_an_error(self):
    refused = []
    for path in (readme_table.DIRECTORY / "results").glob("*.json"):
      try:
        found = readme_table.tables(path)
      except results.ResultError as error:
        self.assertIn(str(path), str(error))
        refused.append(path.stem.rpartition("_")[2])
        continue
      self.assertNotEmpty(found)
      for table in found:
        self.assertGreater(len(table), 2)
    # Runs of examples, and one with other formats.
    kinds = ["serving", "serving", "export", "formats", "layer", "training"]
    self.assertCountEqual(refused, kinds)

  def test_a_cell_has_one_figure(self):
    for path in readme_table.linked(*CPU_PAGES):
      if "_peers" in path.name:
        continue
      run = results.read(path)
      for line in readme_table.summary(run) + readme_table.lines(run):
        self.assertNotIn(" / ", line)

  def test_files_are_named_by_device_instruction_set_and_cores(self):
    files = [*(readme_table.DIRECTORY / "results").glob("*.json")]
    self.assertNotEmpty(files)
    for path in files:
      data = json.loads(path.read_text())
      if "schema" in data:  # of `bench`; others are of examples
        results.read(path)
      if path.name.startswith("gpu"):
        self.assertEqual(data["environment"]["platform"], "gpu")
        continue
      environment = data["environment"]
      kernels = environment["instruction_set"].partition("_")[0]
      self.assertRegex(
        path.name,
        # A file with a part of the rows may have one more word.
        rf"^cpu_\w+_{kernels}_{environment['cores']}_cores(_[a-z]+)?\.json$",
      )
      self.assertTrue(re.fullmatch(r"[a-z0-9_]+\.json", path.name))

  def test_one_sided_rows_are_lines_of_their_own(self):
    table = readme_table.lines(
      run(
        ("1x4096x4096", "mxfp8", [variant("cpu", 2), variant("f32", 5)]),
        ("1x4096x4096", "nvfp4", [variant("cpu", 1), variant("f32", 5)]),
        ("1x4096x4096", "bf16xnvfp4", [variant("cpu", 4), variant("f32", 5)]),
      )
    )
    # 0.1 GB at 50 GB/s, the limit, take 2 ms.
    self.assertEqual(
      table[2:],
      [
        "| 1x4096x4096 | MXFP8 | 2.0 |  | 2.5 |  |  |  | 100 |",
        "| 1x4096x4096 | NVFP4 | 1.0 |  | 5.0 |  |  |  | 200 |",
        "| 1x4096x4096, bf16 x | NVFP4 | 4.0 |  | 1.2 |  |  |  | 50 |",
      ],
    )
    self.assertIn("% of the limit", table[0])
    self.assertEqual(table[0].count("|"), table[2].count("|"))

  def test_libraries_stand_beside_our_fastest_variant_with_one_error(self):
    def timed(name, milliseconds, error, **fields):
      return variant(name, milliseconds, relative_error=error, **fields)

    ours = {"role": "ours", "is_chosen": False}
    rows = [
      timed("cpu", 4, 1.6e-3),
      timed("cpu prepared", 3, 1.6e-3, **ours),
      timed("cpu fastest", 2, 5.3e-3, **ours),
      timed("bf16", 9, 1.6e-3),
      timed("openvino u4", 1.5, 5.2e-3),
      timed("torch int4", 2.4, 2.3e-3),
    ]
    quantized = [
      timed("cpu", 1, 1e-1),
      timed("cpu with quantize", 2, 1e-1, **ours),
      timed("bf16", 9, 1e-1),
    ]
    no_effect = [
      timed("cpu", 4, 1.6e-3),
      timed("cpu fastest", 3, 1.6e-3, **ours),
      timed("bf16", 9, 1.6e-3),
    ]
    rounded = [
      timed("cpu", 4, 9e-8),
      timed("cpu fastest", 2, 1.6e-3, **ours),
      timed("bf16", 9, 1.6e-3),
    ]
    table = readme_table.peers_lines(
      run(
        ("4x64x64", "bf16xmxfp4", rows),
        ("4x64x64", "mxfp4", quantized),
        ("4x64x64", "bf16xmxfp8", no_effect),
        ("4x64x64", "f32xmxfp4", rounded),
      )
    )
    self.assertIn("| 4x64x64 | f32, in bf16 x MXFP4 | 2 |", table[-1])
    self.assertEqual(
      table[2:6],
      [
        "| 4x64x64 | bf16 x MXFP4 | 3 | 1.6e-3 | bf16 | 9 | 1.6e-3 | 3.00 |"
        " openvino u4 | 1.5 | 5.2e-3 | 0.50 |",
        "| 4x64x64 | bf16, in int8 x MXFP4 | 2 | 5.3e-3 | openvino u4 | 1.5 |"
        " 5.2e-3 | 0.75 | openvino u4 | 1.5 | 5.2e-3 | 0.75 |",
        "| 4x64x64 | f32, in MXFP4 x MXFP4 | 2 | 1.0e-1 | bf16 | 9 | 1.0e-1 |"
        " 4.50 |  |  |  |  |",
        "| 4x64x64 | bf16 x MXFP8 | 4 | 1.6e-3 | bf16 | 9 | 1.6e-3 | 2.25 |  |"
        "  |  |  |",
      ],
    )
    self.assertEqual(table[1].count("|"), table[2].count("|"))

  def test_decoders_have_a_line_in_a_scan_beside_the_faster_peers(self):
    variants = [
      variant("cpu", 2),
      variant("cpu in scan", 4),
      variant("f32", 6),
      variant("f32 in scan", 20),
      variant("bf16", 8),
    ]
    table = readme_table.lines(run(("decoder:4x64x96", "mxfp4", variants)))
    self.assertEqual(
      [line.split(" | ")[:6] for line in table[2:]],
      [
        ["| decoder 4x64x96", "MXFP4", "2.0", "", "3.0", "4.0"],
        ["| decoder 4x64x96, in a scan", "MXFP4", "4.0", "", "1.5", "2.0"],
      ],
    )

  def test_a_copy_into_fresh_memory_has_a_column_where_it_was_timed(self):
    codec = [variant("cpu", 2), variant("warm copy", 1)]
    table = readme_table.lines(run(("quantize:64x64", "mxfp8", codec)))
    self.assertNotIn("fresh", table[0])
    codec.append(variant("fresh copy", 3))
    table = readme_table.lines(run(("quantize:64x64", "mxfp8", codec)))
    self.assertIn("| warm copy | copy into fresh memory | %", table[0])
    self.assertIn(" | 0.5 | 1.5 | ", table[2])

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
    table = readme_table.experts_lines(bench_results.run(row, other))
    self.assertEqual(
      table[2:],
      [
        "| a layer, bf16 x | 8 | MXFP4 | 2.0 | 1.05 | 4.5 |  |  | 1300 |  |"
        " 50 |",
        "| a layer, bf16 x | 8 | NVFP4 | 3000 |  |  |  |  |  |  | 25 |",
      ],
    )

  def test_summary_has_medians_of_plain_peers_and_the_faster_chosen_form(self):
    rows = [
      (name, format, [variant("cpu", 2), variant("f32", plain), *bf16])
      for name in readme_table.SUMMARY
      for format, plain, bf16 in (
        ("mxfp8", 5, [variant("bf16", 8)]),
        ("mxfp4", 6, [variant("bf16", 8)]),
        ("nvfp4", 9, [variant("bf16", 80), variant("cpu in scan", 0.5)]),
      )
    ]
    table = readme_table.summary(run(*rows))
    self.assertEqual(
      table[2], "| 1 x 4096 x 4096 | 6.0 | 8.0 | 2.0 | 2.0 | 0.50 |"
    )
    self.assertLen(table, 2 + len(readme_table.SUMMARY))
    whole, *_, other = readme_table.SUMMARY
    some = [row for row in rows if row[0] == whole]
    some.append((other, "nvfp4", [variant("cpu", 1)]))
    self.assertEqual(readme_table.summary(run(*some)), table[:3])
