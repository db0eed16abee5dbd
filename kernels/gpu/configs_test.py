# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands are described as they lie, plans are complete."""

import dataclasses
import itertools

from absl.testing import parameterized
from jaxplugin.kernels.gpu import block_scaled_matmul, configs, matmul_plans

from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.testing.kernels import matmul_shapes

CONFIG = matmul_shapes.CONFIG
product = matmul_shapes.product
replace = dataclasses.replace


class FormatTest(parameterized.TestCase):
  """Operands are described as their formats are stored."""

  def test_every_format_is_known(self):
    names = {format.name for format in formats.FORMATS}
    self.assertContainsSubset(names, configs.BLOCK_FORMATS)

  def test_strides_of_a_dense_operand(self):
    kind = configs.operand("mxfp4", 10, 64)
    self.assertEqual(kind.strides, (320, 32, 1))
    self.assertEqual(kind.scale_strides, (20, 2, 1))
    kind = configs.operand("mxfp4", 10, 64, k_is_minor=False)
    self.assertEqual(kind.strides, (320, 1, 10))
    self.assertEqual(kind.scale_strides, (20, 1, 10))

  def test_strides_of_a_swizzled_scale_are_padded(self):
    # 130 rows pad to 2 tiles, 5 columns to 2 tiles of 512 bytes each.
    kind = configs.operand("nvfp4", 130, 80, swizzled=True)
    self.assertEqual(kind.scale_strides, (2048, 1024))
    self.assertTrue(kind.is_swizzled)

  def test_unknown_format_is_refused(self):
    with self.assertRaisesRegex(ValueError, "mxfp6"):
      configs.operand("mxfp6", 8, 32)


class PlanTest(parameterized.TestCase):
  def plan(self, shape, config=CONFIG, architecture=matmul_shapes.SM_90):
    return matmul_plans.plan(shape, config, architecture)

  def test_arguments_are_those_of_the_kernels(self):
    shape = product(has_bias=True)
    for path, split_k in itertools.product(configs.PATHS, (1, 2)):
      config = replace(CONFIG, path=path, split_k=split_k, block_k=128)
      launches = self.plan(shape, config)
      self.assertLen(launches, split_k)
      for launch in launches:
        kernel = block_scaled_matmul.KERNELS[launch.kernel]
        pointers = list(matmul_plans.signature(launch, shape))
        names = [name for name, _ in launch.constexprs]
        self.assertEqual([*pointers, *names], kernel.arg_names)

  def test_absent_arrays_are_given_as_others(self):
    (launch,) = self.plan(product("bf16", "mxfp8", has_bias=True))
    self.assertEqual(
      launch.inputs,
      ("lhs", "lhs", "rhs", "rhs_scale", *["lhs"] * 5, "bias", *["lhs"] * 3),
    )

  @parameterized.product(lhs=("mxfp8", "bf16"), split_k=(1, 4))
  def test_values_are_described_and_scales_are_not(self, lhs, split_k):
    shape = product(lhs, "mxfp8", has_bias=True)
    config = replace(
      matmul_shapes.UPCAST, use_descriptors=True, split_k=split_k
    )
    matmul, *rest = self.plan(shape, config)
    # In `inputs`, lhs replaces each absent array. These are pointers.
    is_described = [spec is not None for spec in matmul.descriptors]
    self.assertEqual(is_described, [True, False, True, *[False] * 10])
    tiling = dict(matmul.constexprs)["TILING"]
    self.assertTrue(tiling.lhs.is_described and tiling.rhs.is_described)
    self.assertEndsWith(matmul.name, "_tma")
    for launch in rest:
      self.assertFalse(any(launch.descriptors))
    element = {"mxfp8": "fp8e4nv", "bf16": "bf16"}[lhs]
    signature = matmul_plans.signature(matmul, shape)
    self.assertEqual(signature["lhs"], f"tensordesc<{element}[1,16,64]>")
    self.assertEqual(signature["rhs"], "tensordesc<fp8e4nv[1,32,64]>")
    self.assertEqual(signature["rhs_scale"], "*u8")
    self.assertEqual(signature["residual"], f"*{element}")

  def test_layer_of_a_stack_is_an_argument_and_in_the_name(self):
    shape = product("bf16", "mxfp4")
    stacked = replace(shape, layers=3)
    for given, name in ((shape, "lhs"), (stacked, "layer")):
      (launch,) = self.plan(given)
      self.assertEqual(launch.inputs[4], name)
      self.assertEqual(launch.name.endswith("_layer"), name == "layer")
      signature = matmul_plans.signature(launch, given)
      dtype = "*i32" if name == "layer" else "*bf16"
      self.assertEqual(signature["layer"], dtype)

  @parameterized.product(steps=(0, 1, 5, 23, 64), split_k=(1, 2, 3, 7))
  def test_splits_have_every_step_once_and_mask_none(self, steps, split_k):
    block_k = CONFIG.block_k
    tiling = configs.Tiling(
      shape=product(k=steps * block_k),
      config=replace(CONFIG, split_k=split_k),
    )
    longer = tiling.longer_splits or split_k
    taken = split_k * tiling.steps - (split_k - longer)
    self.assertEqual(taken, steps)
    self.assertEqual(tiling.lhs.even_k, steps >= split_k)

  def test_k_that_is_no_whole_step_ends_with_one_that_overlaps(self):
    shape = product("bf16", "mxfp4", k=5 * CONFIG.block_k + 32)
    tiling = configs.Tiling(shape=shape, config=CONFIG)
    for tile in (tiling.lhs, tiling.rhs):
      self.assertTrue(tile.even_k)
      self.assertTrue(tile.overlaps)
    self.assertTrue(tiling.lhs.skips_overlap)
    self.assertFalse(tiling.rhs.skips_overlap)
    self.assertFalse(tiling.lhs.shrinks_overlap)
    self.assertTrue(tiling.rhs.shrinks_overlap)

  def test_scales_that_make_no_infinity_need_not_shrink(self):
    shape = product("bf16", "nvfp4", k=5 * CONFIG.block_k + 32)
    tiling = configs.Tiling(shape=shape, config=CONFIG)
    self.assertTrue(tiling.rhs.overlaps)
    self.assertFalse(tiling.rhs.shrinks_overlap)

  @parameterized.parameters(
    {"k": 5 * CONFIG.block_k + 16},  # copies of 16 bytes would not be aligned
    {"k": 32},  # less than a step
    {"rhs": "mxfp8_e5m2"},  # infinity times 0
    {"rhs": "bf16", "lhs": "mxfp8"},
    {"swizzled": True},
    {"use_descriptors": True},
  )
  def test_others_are_masked(
    self,
    k=5 * CONFIG.block_k + 32,
    lhs="bf16",
    rhs="mxfp8",
    swizzled=False,
    **options,
  ):
    operand = configs.operand(rhs, 256, k, swizzled=swizzled)
    shape = replace(product(lhs, rhs, k=k), rhs=operand)
    tiling = configs.Tiling(shape=shape, config=replace(CONFIG, **options))
    for tile in (tiling.lhs, tiling.rhs):
      self.assertFalse(tile.even_k)
      self.assertFalse(tile.overlaps)

  def test_split_writes_a_workspace_that_is_reduced(self):
    shape = product("bf16", "mxfp8", m=70, has_bias=True, out_dtype="bf16")
    matmul, reduce = self.plan(shape, replace(CONFIG, split_k=3))
    self.assertEqual(
      matmul.outputs, (("workspace", (3, 1, 70, 256), "float32"),)
    )
    self.assertEqual(matmul.grid, 3 * 2 * 4)
    self.assertNotIn("bias", matmul.inputs)
    self.assertEqual(
      reduce.inputs, (*["workspace"] * 5, "bias", *["workspace"] * 3)
    )
    self.assertEqual(reduce.outputs, (("out", (1, 70, 256), "bfloat16"),))
    self.assertEqual(reduce.grid, -(-70 * 256 // 128))

  @parameterized.parameters(
    ("sm_80", "upcast", "mxfp8", {"lhs": "u8", "rhs": "u8"}),
    ("sm_90", "upcast", "mxfp8", {"lhs": "e4m3", "rhs": "e4m3"}),
    ("sm_80", "small_m", "nvfp4", {"lhs": "u8", "rhs": "u32"}),
    (
      "sm_90",
      "upcast",
      "nvfp4",
      {"lhs": "u8", "lhs_scale": "e4m3", "rhs": "u8", "rhs_scale": "e4m3"},
    ),
    ("sm_90", "upcast", "mxfp8_e5m2", {"lhs": "u8", "rhs": "u8"}),
  )
  def test_views(self, name, path, format, views):
    config = replace(CONFIG, path=path, block_k=128)
    shape = product(format, format)
    (launch,) = self.plan(shape, config, architectures.by_name(name))
    self.assertEqual(dict(launch.views), views)

  def test_interleaved_values_are_words_and_in_the_name(self):
    shape = replace(
      product("bf16", "nvfp4"),
      rhs=configs.operand("nvfp4", 256, 256, interleaved=True),
    )
    self.assertEqual(shape.rhs.strides, (256 * 32, 32, 1))
    self.assertEqual(shape.rhs.bits, 4)
    (launch,) = self.plan(shape, CONFIG, architectures.by_name("sm_80"))
    self.assertEqual(dict(launch.views), {"rhs": "u32"})
    self.assertIn("_bf16_nvfp4_interleaved_", launch.name)

  def test_small_m_reads_fp4_in_words_that_its_strides_count(self):
    config = replace(CONFIG, path="small_m", block_k=128)
    (launch,) = self.plan(product("mxfp4", "mxfp4"), config)
    tiling = dict(launch.constexprs)["TILING"]
    self.assertTrue(tiling.shape.rhs.in_words)
    self.assertEqual(tiling.shape.rhs.strides, (256 * 32, 32, 1))
    self.assertEqual(tiling.rhs.operand.values_per_element, 8)
    self.assertFalse(tiling.shape.lhs.in_words)
    self.assertTrue(tiling.config.swap)

  def test_names_say_format_tile_and_split(self):
    shape = product("bf16", "nvfp4")
    matmul, reduce = self.plan(shape, replace(CONFIG, split_k=2, swap=True))
    self.assertEqual(
      matmul.name, "block_scaled_upcast_bf16_nvfp4_64x64x64_split2_swap"
    )
    self.assertEqual(reduce.name, "block_scaled_reduce_split2")
