# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs that rules choose satisfy every constraint, and fill a GPU."""

import dataclasses
import itertools
from unittest import mock

from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, constraints, tiles_by_rule

from jaxplugin.kernels import architectures, toolkits
from jaxplugin.testing.kernels import matmul_shapes

CONFIG = matmul_shapes.CONFIG
SM_90 = matmul_shapes.SM_90
CORES = matmul_shapes.CORES
SIZES = matmul_shapes.SIZES
product = matmul_shapes.product
replace = dataclasses.replace


def described_config(shape, name):
  return tiles_by_rule.default_config(
    shape, architectures.by_name(name), core_count=CORES, use_descriptors=True
  )


class DefaultConfigTest(parameterized.TestCase):
  @parameterized.product(
    name=tuple(architectures.ARCHITECTURES),
    pair=(
      ("mxfp8", "mxfp8"),
      ("nvfp4", "nvfp4"),
      ("bf16", "mxfp4"),
      ("f32", "mxfp8"),
      ("nvfp4", "mxfp8"),
      ("mxfp8_e5m2", "f16"),
    ),
  )
  def test_default_holds_every_constraint(self, name, pair):
    architecture = architectures.by_name(name)
    for m, n in itertools.product(SIZES, SIZES):
      shape = product(*pair, m=m, n=n, k=4064)
      config = tiles_by_rule.default_config(
        shape, architecture, core_count=CORES
      )
      self.assertIsNone(constraints.config_error(config, shape, architecture))

  @parameterized.parameters(
    ("mxfp8", "mxfp8", False, (3, 7), (128, 4)),
    ("mxfp8", "mxfp8", False, (3, 8), (256, 8)),
    ("mxfp8", "mxfp8", False, None, (256, 8)),
    ("mxfp8", "mxfp8", True, (3, 7), (256, 8)),
    ("mxfp8", "mxfp4", False, (3, 6), (128, 4)),
    ("mxfp4", "mxfp4", False, (3, 6), (256, 8)),
    ("nvfp4", "nvfp4", False, (3, 6), (256, 8)),
  )
  def test_older_triton_gets_four_warps_for_few_scales(
    self, lhs, rhs, swizzled, version, expected
  ):
    shape = product(lhs, rhs, m=512, n=512, swizzled=swizzled)
    with mock.patch.object(toolkits, "triton_version", lambda: version):
      config = tiles_by_rule.default_config(
        shape, architectures.by_name("sm_100"), core_count=CORES
      )
    self.assertEqual((config.block_n, config.num_warps), expected)

  @parameterized.parameters(
    ("sm_100", "mxfp8", "mxfp8", 4096, "native"),
    ("sm_100", "mxfp8", "mxfp8", 1, "native"),
    ("sm_100", "bf16", "mxfp8", 1, "small_m"),
    ("sm_90", "mxfp8", "mxfp8", 4096, "upcast"),
    ("sm_90", "mxfp8", "mxfp8", 64, "small_m"),
    ("sm_90", "mxfp8", "mxfp8", 65, "upcast"),
    ("sm_90", "mxfp8", "bf16", 1, "upcast"),
    ("sm_80", "mxfp8", "mxfp8", 1, "upcast"),
    ("sm_80", "int8_f32_128", "int8_f32_4096", 1, "int8"),
    ("sm_90", "int8_f32_32", "int8_f32_32", 4096, "int8"),
    ("sm_90", "bf16", "int8_f32_128", 1, "small_m"),
    ("sm_120", "int8_f32_128", "int8_f32_128", 4096, "upcast"),
    ("gfx950", "nvfp4", "nvfp4", 4096, "upcast"),
    ("gfx950", "mxfp4", "mxfp8", 4096, "native"),
  )
  def test_path(self, name, lhs, rhs, m, path):
    config = tiles_by_rule.default_config(
      product(lhs, rhs, m=m),
      architectures.by_name(name),
      core_count=CORES,
    )
    self.assertEqual(config.path, path)

  @parameterized.parameters(
    (8192, 8192, 1, 8),  # 64 tiles: 512 of 528 programs
    (8192, 8192, 64, 4),  # 256 of 264
    (10240, 8192, 1, 6),  # 80 tiles: 480 of 528, where 4 would be 320
    (65536, 8192, 1, 1),
    (2880, 4096, 1, 11),  # 23 tiles: 253 of 264, where 8 would be 184
    # To add up parts would take longer than all cores save.
    (8192, 1024, 1, 1),
    (28672, 4096, 1, 1),
    (128, 1024, 1, 1),
    (128, 1024, 64, 3),
    (128, 512, 1, 1),  # too short to split
  )
  def test_k_is_split_until_the_gpu_is_full(self, n, k, m, split):
    shape = product("bf16", "nvfp4", m=m, n=n, k=k)
    config = tiles_by_rule.default_config(shape, SM_90, core_count=CORES)
    self.assertEqual(config.split_k, split)

  @parameterized.product(
    # Weights of Llama 3 8B and 70B, of the latter on 8 GPUs too, and gpt-oss.
    weight=(
      *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
      *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
      *((1280, 8192), (5760, 2880), (5120, 2880), (2880, 4096), (2880, 2880)),
    ),
    m=(1, 16, 64),
  )
  def test_programs_of_real_layers_fill_the_cores(self, weight, m):
    # Cores work as long as the one with the most programs. Powers of two left
    # 52 to 65 % of their time to half of these layers.
    n, k = weight
    shape = product("bf16", "nvfp4", m=m, n=n, k=k)
    config = tiles_by_rule.default_config(shape, SM_90, core_count=CORES)
    programs = configs.Tiling(shape=shape, config=config).programs
    used = programs / (CORES * configs.cdiv(programs, CORES))
    self.assertGreaterEqual(used, 0.84, config)

  @parameterized.parameters(
    ("bf16", "int8_f16_32", 16, (16, 128)),
    ("bf16", "int8_f16_32", 64, (64, 64)),
    ("bf16", "int8_f16_32", 512, (128, 64)),
    ("int8_f32_32", "bf16", 512, (64, 128)),
    ("int8_f32_32", "int4_f16_32", 512, (64, 128)),
    ("f32", "int4_f16_32", 512, (64, 64)),
  )
  def test_sums_of_32_values_have_small_tiles(self, lhs, rhs, m, tile):
    config = tiles_by_rule.default_config(
      product(lhs, rhs, m=m), SM_90, core_count=CORES
    )
    self.assertEqual((config.block_m, config.block_n), tile)
    self.assertEqual(config.block_k, 32)

  def test_descriptors_are_asked_for_never_the_default(self):
    for name in architectures.ARCHITECTURES:
      architecture = architectures.by_name(name)
      default = tiles_by_rule.default_config(
        product(), architecture, core_count=CORES
      )
      self.assertFalse(default.use_descriptors)
      if name not in ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121"):
        message = f"m=256 .* sm_90 on, not {name}"
        with self.assertRaisesRegex(ValueError, message):
          described_config(product(), name)

  @parameterized.parameters(
    ("sm_90", "mxfp8", 4096, "upcast"),
    ("sm_90", "bf16", 1, "upcast"),  # small_m without them
    ("sm_100", "mxfp8", 1, "native"),
    ("sm_103", "mxfp8", 256, "native"),
    ("sm_120", "mxfp8", 256, "native"),
    ("sm_121", "mxfp8", 256, "native"),
  )
  def test_config_by_rule_that_is_to_have_descriptors(self, name, lhs, m, path):
    shape = product(lhs, m=m)
    config = described_config(shape, name)
    self.assertTrue(config.use_descriptors)
    self.assertEqual(config.path, path)
    architecture = architectures.by_name(name)
    self.assertIsNone(constraints.config_error(config, shape, architecture))

  def test_text_of_a_refusal_has_the_numbers(self):
    # The smallest tiles are two of 16 x 32 values with a scale for each row,
    # and the same values in bf16.
    needed = 2 * (16 * 32 + 16) + 2 * (16 * 32) * 2
    message = (
      f"m=256 .* {needed} bytes of shared memory, sm_90 has {needed - 1}$"
    )
    tiny = replace(SM_90, shared_memory_bytes=needed - 1)
    with self.assertRaisesRegex(ValueError, message):
      tiles_by_rule.default_config(product(), tiny, core_count=CORES)
    enough = replace(SM_90, shared_memory_bytes=needed)
    tiles_by_rule.default_config(product(), enough, core_count=CORES)

  @parameterized.parameters("mxfp8", "mxfp4", "nvfp4")
  def test_bound_of_shared_memory_holds_the_barriers_of_tensor_memory(
    self, format
  ):
    # What Triton 3.9 allocates: three loads and two barriers of 8 bytes.
    shape = product(format, format, m=128, n=128, k=4096)
    config = replace(
      CONFIG, path="native", block_m=128, block_n=128, block_k=128, num_stages=3
    )
    kind = shape.lhs
    values = 128 * 128
    loaded = 2 * (values * kind.bits // 8 + values // kind.values_per_scale)
    accumulators = 128 * 128 * 4
    self.assertEqual(
      constraints.shared_memory_bound(config, shape, matmul_shapes.SM_100),
      max(3 * loaded + 16, accumulators),
    )
