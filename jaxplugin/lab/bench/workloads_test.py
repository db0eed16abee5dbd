# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows and formats by name."""

import dataclasses

from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads
from jaxplugin.testing import bench_results

ROWS = {
  "512x4096x1024": dict(kind="dot", m=512, n=4096, k=1024),
  "dequantize:64x96": dict(kind="dequantize", m=64, k=96),
  "decoder:2x64x96": dict(kind="decoder", layers=2, k=64, n=96, m=1),
  "decoder:2x64x96x16": dict(kind="decoder", layers=2, k=64, n=96, m=16),
  "training:32x64x96": dict(kind="training", m=32, k=64, n=96),
  "experts:8x4of32x96x64": dict(
    kind="experts", m=8, top=4, experts=32, n=96, k=64
  ),
}


def texts(found):
  return [str(row) for row in found]


class RowsTest(parameterized.TestCase):
  def test_sizes_are_read_and_written(self):
    for text, fields in ROWS.items():
      with self.subTest(text):
        (row,) = workloads.parse_rows(f"{text}, {text}")
        expected = workloads.BenchRow(**fields, formats=row.formats)
        self.assertEqual((row, str(row)), (expected, text))
        for pair in workloads.parse_pairs(row.formats):
          workloads.check(row, pair)
    # The number 1 of a decoder's sequences is not written.
    rows = workloads.parse_rows("decoder:2x64x96x1,training")
    self.assertEqual(texts(rows), ["decoder:2x64x96", "training:512x512x2048"])

  def test_m_replaces_the_rows_of_products_only(self):
    found = texts(workloads.parse_rows(",".join(ROWS), [3, 5]))
    expected = []
    for text in (
      "{}x4096x1024",
      "dequantize:64x96",
      "decoder:2x64x96x{}",
      "training:{}x64x96",
      "experts:{}x4of32x96x64",
    ):
      expected += dict.fromkeys(text.format(m) for m in (3, 5))
    self.assertEqual(found, expected)

  def test_sets_support_their_own_formats(self):
    for name, rows in workloads.SETS.items():
      found = workloads.pairs_of(rows, None)
      self.assertEqual({row for row, _ in found}, {*rows}, name)
    # In a table, rows that read weights have one-sided formats as well.
    by_row = {str(row): row.formats for row in workloads.SETS["cpu-table"]}
    for row in ("1x4096x4096", "16x4096x4096"):
      self.assertEndsWith(by_row[row], workloads.ONE_SIDED)

  def test_models_of_experts_have_published_sizes(self):
    self.assertEqual(
      texts(workloads.SETS["gpt-oss-20b-moe"])[::4],
      ["experts:1x4of32x5760x2880", "experts:1x4of32x2880x2880"],
    )
    self.assertEqual(
      texts(workloads.SETS["qwen3-30b-moe"])[3::4],
      ["experts:512x8of128x1536x2048", "experts:512x8of128x2048x768"],
    )

  def test_rows_named_twice_are_measured_once(self):
    found = texts(workloads.parse_rows("decode,1x8192x8192,decode"))
    self.assertEqual(found, [f"{m}x8192x8192" for m in (1, 4, 8, 16)])

  def test_layers_can_be_quantized_to_every_format(self):
    pairs = workloads.parse_pairs(",".join(f.name for f in formats.KNOWN))
    for name in workloads.LAYERS:
      workloads.pairs_of(workloads.SETS[name], pairs)

  @parameterized.parameters(
    ("llama9", "unknown shape 'llama9'; known: llama3-8b, .*quick"),
    ("1x2", "unknown shape '1x2'"),
    ("1x0x32", "at least 1, got '1x0x32'"),
    ("quantize:0x32", "at least 1"),
    ("decoder:2x64x96x0", "at least 1"),
    ("decoder:2x100x96", "multiple of 64, got 100 in 'decoder:2x100x96'"),
    ("training:2x100x96", "multiple of 64, got 100 in 'training:2x100x96'"),
    ("experts:1x5of4x32x32", "at most 4 experts, got 'experts:1x5of4x32x32'"),
    ("experts:1x0of4x32x32", "at least 1"),
    ("minilm,,decode", "--shapes has an empty item"),
  )
  def test_bad_shapes_are_named(self, text, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      workloads.parse_rows(text)

  @parameterized.parameters("1,x", "0", "-1", "1.5")
  def test_bad_sizes_are_named(self, text):
    with self.assertRaisesRegex(ValueError, "--m must be positive integers"):
      workloads.parse_m(text)


class PairsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("nvfp4", formats.NVFP4, formats.NVFP4),
    ("mxfp8xmxfp4", formats.MXFP8, formats.MXFP4),
    ("bf16xnvfp4", None, formats.NVFP4),
    ("mxfp8_e5m2xf32", formats.MXFP8_E5M2, None),
    ("mxfp6_e2m3xmxfp6_e3m2", formats.MXFP6_E2M3, formats.MXFP6_E3M2),
    ("fp8_1x128xfp8_128x128", formats.FP8_1X128, formats.FP8_128X128),
    ("bf16xuint4_128", None, formats.UINT4_128),
  )
  def test_sides_are_told_apart(self, text, lhs, rhs):
    (pair,) = workloads.parse_pairs(text)
    self.assertEqual((pair.name, pair.lhs, pair.rhs), (text, lhs, rhs))

  def test_plain_side_has_its_dtype(self):
    (pair,) = workloads.parse_pairs("f16xmxfp4")
    self.assertEqual(pair.plain, "float16")

  def test_equal_sides_have_the_short_name(self):
    self.assertEqual(
      workloads.parse_pairs("mxfp8xmxfp8,mxfp8"), workloads.parse_pairs("mxfp8")
    )

  def test_rows_have_formats_of_their_own_unless_others_are_asked_for(self):
    dot, quantize = workloads.parse_rows("1x32x32,quantize:32x32")
    rows = (
      dataclasses.replace(dot, formats="mxfp8,f32xnvfp4"),
      dataclasses.replace(quantize, formats="mxfp4,f32xnvfp4"),
    )
    for pairs, expected in (
      (None, ["1x32x32 mxfp8", "1x32x32 f32xnvfp4", "quantize:32x32 mxfp4"]),
      ("nvfp4", ["1x32x32 nvfp4", "quantize:32x32 nvfp4"]),
    ):
      asked = pairs and workloads.parse_pairs(pairs)
      found = workloads.pairs_of(rows, asked)
      self.assertEqual([f"{row} {pair}" for row, pair in found], expected)

  @parameterized.parameters(
    ("int3", "unknown formats 'int3'; known: mxfp8, mxfp8_e5m2, mxfp4, nvfp4"),
    ("bf16", "unknown formats 'bf16'"),
    ("bf16xf32", "one side must be quantized, got 'bf16xf32'"),
    ("mxfp8x", "unknown formats 'mxfp8x'"),
  )
  def test_bad_formats_are_named(self, text, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      workloads.parse_pairs(text)

  @parameterized.parameters(
    ("1x64x48", "mxfp8", "multiple of 32 for mxfp8.*k=48"),
    ("1x64x48", "nvfp4", None),
    # The last block may be short if the format allows it.
    ("1x64x48", "bf16xint4_128", None),
    ("1x64x48", "int8_row", None),
    ("1x64x48", "fp8_1x128xfp8_128x128", None),
    ("decoder:2x64x80", "nvfp4", None),
    ("decoder:2x64x80", "mxfp8", "multiple of 32.*k=80"),
    ("decoder:2x64x80", "mxfp8xf32", "weights of decoder:2x64x80 must"),
    ("training:32x64x80", "mxfp8", "multiple of 32.*k=80"),
    ("training", "mxfp8xmxfp4", "must be among .*got mxfp8xmxfp4"),
    ("training", "f32xnvfp4", "must be among .*got f32xnvfp4"),
    ("training", "mxfp8_e5m2", "must be among .*got mxfp8_e5m2"),
    ("experts:8x4of32x96x64", "mxfp8xf32", "weights of experts:.* quantized"),
    # Only dots have formats of checkpoints.
    ("quantize:4x256", "bf16xint8_32", "must be among mxfp8, .*int8_32"),
    ("decoder:1x64x64", "bf16xint8_32", "must be among mxfp8, .*int8_32"),
    ("experts:2x1of3x64x128", "bf16xint8_32", "must be among mxfp8, .*int8_32"),
  )
  def test_rows_refuse_formats_that_they_do_not_support(
    self, row, pair, pattern
  ):
    row, pair = bench_results.parsed(row, pair)
    if pattern is None:
      workloads.check(row, pair)
    else:
      with self.assertRaisesRegex(ValueError, pattern):
        workloads.check(row, pair)
