# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows and formats by name."""

from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.lab.bench import workloads


def texts(found):
  return [str(row) for row in found]


class RowsTest(parameterized.TestCase):
  def test_sizes_and_kinds_are_read(self):
    dot, codec = workloads.parse_rows("512x4096x1024, dequantize:64x96")
    self.assertEqual(dot, workloads.BenchRow(kind="dot", m=512, n=4096, k=1024))
    self.assertEqual(codec, workloads.BenchRow(kind="dequantize", m=64, k=96))

  def test_sets_hold_the_shapes_that_targets_are_stated_for(self):
    self.assertEqual(
      texts(workloads.SETS["cpu-table"]),
      [
        "1x4096x4096",
        "1x8192x8192",
        "16x4096x4096",
        "128x4096x4096",
        "1024x1024x1024",
        "2048x2048x2048",
        "decoder:4x2048x5632",
        "quantize:4096x4096",
        "dequantize:4096x4096",
      ],
    )
    gpu = texts(workloads.SETS["gpu-table"])
    for m in (1, 4, 8, 16, 64, 512, 8192):
      self.assertIn(f"{m}x8192x8192", gpu)
    self.assertIn("quantize:8192x8192", gpu)

  def test_rows_that_read_weights_are_one_sided_too_in_a_table(self):
    one_sided = {
      str(row)
      for row in workloads.SETS["cpu-table"]
      if workloads.ONE_SIDED in row.formats
    }
    self.assertEqual(one_sided, {"1x4096x4096", "16x4096x4096"})
    decoder = workloads.SETS["cpu-table"][6]
    self.assertEqual(decoder.kind, "decoder")
    self.assertEndsWith(decoder.formats, "nvfp4,f32xmxfp8,f32xnvfp4")
    (row,) = workloads.parse_rows("decoder")
    self.assertEqual(row.formats, "mxfp8,mxfp4,nvfp4")
    for pair in workloads.parse_pairs(workloads.ONE_SIDED):
      self.assertIsNone(pair.lhs)
      workloads.check(row, pair)

  @parameterized.parameters(
    ("decoder:2x64x96", 1, "decoder:2x64x96"),
    ("decoder:2x64x96x1", 1, "decoder:2x64x96"),
    ("decoder:2x64x96x16", 16, "decoder:2x64x96x16"),
  )
  def test_decoders_have_layers_channels_hidden_ones_and_rows(
    self, text, m, name
  ):
    (row,) = workloads.parse_rows(text)
    self.assertEqual((row.layers, row.k, row.n, row.m), (2, 64, 96, m))
    self.assertEqual(str(row), name)
    self.assertEqual(workloads.parse_rows(name), (row,))
    (row,) = workloads.parse_rows(text, [4])
    self.assertEqual(str(row), "decoder:2x64x96x4")

  def test_decoders_need_quantized_weights_and_whole_blocks(self):
    (row,) = workloads.parse_rows("decoder:2x64x80")
    mxfp8xf32, mxfp8, nvfp4 = workloads.parse_pairs("mxfp8xf32,mxfp8,nvfp4")
    workloads.check(row, nvfp4)
    with self.assertRaisesRegex(ValueError, "multiple of 32.*k=80"):
      workloads.check(row, mxfp8)
    with self.assertRaisesRegex(ValueError, "weights of decoder:2x64x80 must"):
      workloads.check(row, mxfp8xf32)

  def test_training_has_tokens_channels_and_hidden_ones(self):
    (row,) = workloads.parse_rows("training:32x64x96")
    self.assertEqual((row.kind, row.m, row.k, row.n), ("training", 32, 64, 96))
    self.assertEqual(workloads.parse_rows(str(row)), (row,))
    (default,) = workloads.parse_rows("training")
    self.assertEqual(str(default), "training:512x512x2048")
    for pair in workloads.parse_pairs(default.formats):
      workloads.check(row, pair)
    for name in ("mxfp8xmxfp4", "f32xnvfp4", "mxfp8_e5m2"):
      (pair,) = workloads.parse_pairs(name)
      with self.assertRaisesRegex(ValueError, f"must be among .*got {name}"):
        workloads.check(row, pair)
    (row,) = workloads.parse_rows("training:32x64x80")
    with self.assertRaisesRegex(ValueError, "multiple of 32.*k=80"):
      workloads.check(row, workloads.parse_pairs("mxfp8")[0])

  def test_experts_have_tokens_a_choice_and_sizes(self):
    (row,) = workloads.parse_rows("experts:8x4of32x96x64")
    self.assertEqual(
      (row.m, row.top, row.experts, row.n, row.k), (8, 4, 32, 96, 64)
    )
    self.assertEqual(workloads.parse_rows(str(row)), (row,))
    (other,) = workloads.parse_rows("experts:8x4of32x96x64", [2])
    self.assertEqual(str(other), "experts:2x4of32x96x64")
    for pair in workloads.parse_pairs(row.formats):
      self.assertIsNone(pair.lhs)
      workloads.check(row, pair)
    with self.assertRaisesRegex(ValueError, "weights of experts:.* quantized"):
      workloads.check(row, workloads.parse_pairs("mxfp8xf32")[0])

  def test_models_of_experts_have_published_sizes(self):
    self.assertEqual(
      texts(workloads.SETS["gpt-oss-20b-moe"])[::4],
      ["experts:1x4of32x5760x2880", "experts:1x4of32x2880x2880"],
    )
    self.assertEqual(
      texts(workloads.SETS["qwen3-30b-moe"])[3::4],
      ["experts:512x8of128x1536x2048", "experts:512x8of128x2048x768"],
    )

  def test_m_replaces_the_rows_of_products_only(self):
    found = workloads.parse_rows("llama3-8b,quantize", [3, 5])
    products = [row for row in found if row.kind == "dot"]
    self.assertEqual({row.m for row in products}, {3, 5})
    # Four products of a layer, each of two m.
    self.assertLen(products, 8)
    self.assertIn("quantize:4096x4096", texts(found))

  def test_rows_named_twice_are_measured_once(self):
    found = texts(workloads.parse_rows("decode,1x8192x8192,decode"))
    self.assertEqual(found, [f"{m}x8192x8192" for m in (1, 4, 8, 16)])

  def test_layers_can_be_quantized_to_every_format(self):
    for name, layers in workloads.LAYERS.items():
      for layer, n, k in layers:
        self.assertEqual((n % 32, k % 32), (0, 0), f"{name} {layer}")

  @parameterized.parameters(
    ("llama9", "unknown shape 'llama9'; known: llama3-8b, .*startup"),
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
      workloads.parse_sizes("--m", text)


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

  @parameterized.parameters(
    ("int3", "unknown formats 'int3'; known: mxfp8, mxfp8_e5m2, mxfp4, nvfp4"),
    ("bf16", "unknown formats 'bf16'"),
    ("bf16xf32", "one side must be quantized, got 'bf16xf32'"),
    ("mxfp8x", "unknown formats 'mxfp8x'"),
  )
  def test_bad_formats_are_named(self, text, pattern):
    with self.assertRaisesRegex(ValueError, pattern):
      workloads.parse_pairs(text)

  def test_k_that_has_no_whole_blocks_is_refused(self):
    (row,) = workloads.parse_rows("1x64x48")
    mxfp8, nvfp4 = workloads.parse_pairs("mxfp8,nvfp4")
    workloads.check(row, nvfp4)
    with self.assertRaisesRegex(ValueError, "multiple of 32 for mxfp8.*k=48"):
      workloads.check(row, mxfp8)

  def test_last_block_may_be_short_if_the_format_allows_it(self):
    (row,) = workloads.parse_rows("1x64x48")
    for text in ("bf16xint4_128", "int8_row", "fp8_1x128xfp8_128x128"):
      workloads.check(row, *workloads.parse_pairs(text))

  @parameterized.parameters(
    "quantize:4x256", "decoder:1x64x64", "experts:2x1of3x64x128"
  )
  def test_only_dots_have_formats_of_checkpoints(self, text):
    (row,) = workloads.parse_rows(text)
    with self.assertRaisesRegex(ValueError, "must be among mxfp8, .*int8_32"):
      workloads.check(row, *workloads.parse_pairs("bf16xint8_32"))


if __name__ == "__main__":
  absltest.main()
