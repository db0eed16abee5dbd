# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configs ragged products get, and why some cannot be computed."""

import dataclasses

from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, tiles_by_rule
from jaxplugin.kernels.gpu.ragged import plans

from jaxplugin.kernels import architectures
from jaxplugin.testing.kernels import matmul_shapes

CORES = 132


def product(lhs="bf16", rhs="mxfp4", **options):
  sizes = {"groups": 32, "n": 5760, "k": 2880}
  return matmul_shapes.product(lhs, rhs, **(sizes | options))


def config_of(shape, name="sm_90"):
  architecture = architectures.by_name(name)
  return plans.default_config(shape, architecture, core_count=CORES)


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 16), (8, 16), (128, 16), (1024, 32), (2048, 64), (16384, 128)
  )
  def test_tiles_have_as_many_rows_as_a_group_on_average(self, m, block_m):
    self.assertEqual(config_of(product(m=m)).block_m, block_m)

  @parameterized.parameters(
    ("sm_90", "bf16", "mxfp4", 8, "small_m"),
    ("sm_90", "mxfp8", "mxfp8", 8192, "upcast"),
    ("sm_80", "bf16", "mxfp4", 8, "upcast"),
    ("sm_100", "mxfp8", "mxfp4", 8, "native"),
    ("sm_100", "bf16", "mxfp4", 8, "small_m"),
    ("sm_120", "mxfp8", "mxfp4", 8, "upcast"),
    ("gfx950", "mxfp4", "mxfp4", 8, "native"),
    ("gfx950", "nvfp4", "nvfp4", 8, "upcast"),
  )
  def test_path_is_the_dense_products(self, name, lhs, rhs, m, path):
    shape = product(lhs, rhs, m=m)
    config = config_of(shape, name)
    self.assertEqual(config.path, path)
    dense = tiles_by_rule.default_config(
      shape.of_groups(), architectures.by_name(name), core_count=CORES
    )
    self.assertEqual(config, dense)

  def test_k_is_split_while_programs_are_few(self):
    few = config_of(product(m=1, n=512, k=8192))
    self.assertGreater(few.split_k, 1)
    self.assertEqual(config_of(product(m=64, k=8192)).split_k, 1)

  @parameterized.parameters(
    (1, (16, 64, 256)), (32, (16, 128, 512, 2048, 8192))
  )
  def test_planned_m_grows_with_groups(self, groups, expected):
    self.assertEqual(plans.planned_m(groups), expected)
    for m in expected:
      few = {"groups": groups, "m": m, "n": 16, "k": 65536}
      config = config_of(product(**few, reads_m=True))
      static = config_of(product(**few))
      split_k = 1 if m == expected[-1] else static.split_k
      self.assertEqual(config, dataclasses.replace(static, split_k=split_k))

  def test_across_its_blocks_a_weight_is_the_right_operand(self):
    config = config_of(product("f32", m=4, is_across=True, n=2880, k=5760))
    self.assertEqual((config.path, config.swap), ("upcast", False))
    self.assertEqual(config.block_n % 32, 0)
    # Blocks of one tile, though the result has fewer columns.
    config = config_of(product("f32", "mxfp8", m=4, is_across=True, n=8, k=64))
    self.assertEqual(config.block_n, 32)


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"groups": 5000}, {}, "groups must be 1 to 4095, got 5000"),
    ({}, {"use_descriptors": True}, "by threads, not TMA descriptors"),
    ({"rhs": "bf16"}, {}, "rhs must have a block format, got bf16"),
    ({"is_across": True}, {"path": "small_m"}, "small_m needs rhs blocked"),
    ({"is_across": True}, {"block_n": 16}, "multiple of a block, got 16"),
    ({}, {"num_stages": 64}, "bytes of shared memory, sm_90 has 232448"),
    ({"k": 2881}, {}, "k must be even for FP4, got 2881"),
    (
      {"is_across": True, "rhs": "e4m3_f32_128"},
      {},
      "scales of e4m3_f32_128 multiply sums",
    ),
    ({"n": 2**31}, {}, "m, n and k must be below"),
  )
  def test_says_what_and_the_numbers(self, shape, config, text):
    shape = product(**{"m": 4096} | shape)
    usual = configs.MatmulConfig(
      path="upcast", block_m=64, block_n=64, block_k=64
    )
    error = plans.config_error(
      dataclasses.replace(usual, **config),
      shape,
      architectures.by_name("sm_90"),
    )
    self.assertIn(text, str(error))

  def test_swizzled_lhs_is_refused(self):
    shape = dataclasses.replace(
      product("mxfp8", m=256),
      lhs=configs.operand("mxfp8", 256, 2880, swizzled=True),
    )
    with self.assertRaisesRegex(ValueError, "lhs must be linear"):
      config_of(shape, "sm_100")

  def test_rule_that_finds_nothing_says_why(self):
    little = dataclasses.replace(
      architectures.by_name("sm_90"), shared_memory_bytes=1024
    )
    with self.assertRaisesRegex(ValueError, "shared memory, sm_90 has 1024"):
      plans.default_config(product(m=4), little, core_count=CORES)
