# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Constraints are checked, defaults hold them, plans are complete."""

import dataclasses
import itertools

from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import block_scaled_matmul
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import tuning

from jaxplugin.core import formats
from jaxplugin.kernels import architectures

CONFIG = configs.MatmulConfig(
  path="upcast", block_m=64, block_n=64, block_k=64, num_stages=2
)
SM_90 = architectures.by_name("sm_90")
SM_100 = architectures.by_name("sm_100")
CORES = 132
SIZES = (1, 16, 65, 4096)


def product(lhs="mxfp8", rhs="mxfp8", *, m=256, n=256, k=256, **options):
  return configs.MatmulShape(
    **{
      "batch": 1,
      "m": m,
      "n": n,
      "k": k,
      "lhs": configs.operand(lhs, m, k),
      "rhs": configs.operand(rhs, n, k),
      **options,
    }
  )


def replace(value, **changes):
  return dataclasses.replace(value, **changes)


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


class ConfigErrorTest(parameterized.TestCase):
  def test_valid_config_passes(self):
    self.assertIsNone(tuning.config_error(CONFIG, product(), SM_90))

  @parameterized.named_parameters(
    ("block", {"block_m": 48}, "powers of two"),
    ("warps", {"num_warps": 3}, "powers of two"),
    ("too_many_warps", {"num_warps": 32}, "num_warps must be 1 to 16, got 32"),
    ("split", {"split_k": 0}, "must be positive"),
    ("stages", {"num_stages": 0}, "must be positive"),
    ("group", {"group_m": 0}, "must be positive"),
    ("small_tile", {"block_n": 8}, "at least 16"),
    ("half_a_scale_block", {"block_k": 16}, "block_k must be at least 32"),
    (
      "small_m_group",
      {"path": "small_m", "block_k": 64},
      "block_k must be at least 128",
    ),
    ("shared_memory", {"block_k": 512, "num_stages": 6}, "232448"),
    ("registers", {"block_m": 256, "block_n": 128}, "256 accumulators"),
    ("native", {"path": "native", "block_k": 128}, "no block-scaled matrix"),
  )
  def test_error_of_config(self, changes, message):
    error = tuning.config_error(replace(CONFIG, **changes), product(), SM_90)
    self.assertRegex(error, message)

  @parameterized.named_parameters(
    ("empty", {"batch": 0}, "sizes must be positive"),
    ("large_m", {"m": 2**31 - 32}, "below 2\\^31"),
    ("programs", {"batch": 2**31, "m": 8192}, "more than 2\\^31 programs"),
  )
  def test_error_of_shape(self, changes, message):
    shape = replace(product(), **changes)
    self.assertRegex(tuning.config_error(CONFIG, shape, SM_90), message)

  def test_odd_k_of_fp4_is_refused_and_of_fp8_is_not(self):
    error = tuning.config_error(CONFIG, product("bf16", "mxfp4", k=33), SM_90)
    self.assertRegex(error, "k must be even for FP4, got 33")
    error = tuning.config_error(CONFIG, product("bf16", "mxfp8", k=33), SM_90)
    self.assertIsNone(error)

  def test_tensor_memory_is_512_columns(self):
    config = replace(CONFIG, block_m=256, block_n=256, num_warps=16)
    error = tuning.config_error(config, product(), SM_100)
    self.assertRegex(error, "1024 columns of tensor memory, sm_100 has 512")

  @parameterized.parameters(
    ("mxfp8", "mxfp4", "sm_100", None),
    ("mxfp8", "mxfp4", "sm_120", "FP4 only with FP4"),
    ("mxfp8", "mxfp8_e5m2", "sm_120", None),
    ("nvfp4", "nvfp4", "sm_120", None),
    ("nvfp4", "nvfp4", "gfx950", "E4M3 scales"),
    ("nvfp4", "mxfp4", "sm_100", "nvfp4 multiplies only nvfp4"),
    ("bf16", "mxfp8", "sm_100", "both operands"),
    ("mxfp8", "mxfp8", "sm_90", "sm_90 has no block-scaled"),
    ("mxfp8", "mxfp6_e2m3", "sm_100", "dot_scaled does not take e2m3"),
    ("mxfp6_e3m2", "mxfp6_e3m2", "gfx950", "dot_scaled does not take e3m2"),
  )
  def test_what_is_native(self, lhs, rhs, name, message):
    error = tuning.native_error(product(lhs, rhs), architectures.by_name(name))
    if message is None:
      self.assertIsNone(error)
    else:
      self.assertRegex(error, message)

  @parameterized.parameters(
    ("sm_90", 256, None),
    ("sm_100", 256, None),
    ("sm_90", 264, "multiple of 16 where values are interleaved, got 264"),
    ("gfx942", 256, "need an NVIDIA GPU, not gfx942"),
  )
  def test_what_takes_interleaved_values(self, name, k, message):
    rhs = configs.operand("mxfp4", 256, k, interleaved=True)
    shape = replace(product("bf16", "mxfp4", k=k), rhs=rhs)
    error = tuning.config_error(CONFIG, shape, architectures.by_name(name))
    if message is None:
      self.assertIsNone(error)
    else:
      self.assertRegex(error, message)
    self.assertIsNone(tuning.small_m_error(shape))
    native = tuning.native_error(
      replace(shape, lhs=configs.operand("mxfp4", 256, k)), SM_100
    )
    self.assertRegex(native, "these are interleaved")

  @parameterized.parameters(
    ({}, None),
    ({"rhs": configs.operand("bf16", 256, 256)}, "block format, got bf16"),
    (
      {"rhs": configs.operand("mxfp4", 256, 256, k_is_minor=False)},
      "minor dimension of rhs",
    ),
    (
      {"lhs": configs.operand("bf16", 256, 256, k_is_minor=False)},
      "minor dimension of lhs",
    ),
    ({"rhs": configs.operand("nvfp4", 256, 252), "k": 252}, "multiple of 8"),
    (
      {
        "rhs": configs.OperandKind(
          format="nvfp4", strides=(0, 130, 1), scale_strides=(0, 16, 1)
        )
      },
      "multiples of 4 bytes",
    ),
  )
  def test_what_small_m_takes(self, changes, message):
    error = tuning.small_m_error(replace(product("bf16", "nvfp4"), **changes))
    if message is None:
      self.assertIsNone(error)
    else:
      self.assertRegex(error, message)


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
  def test_default_and_candidates_hold_every_constraint(self, name, pair):
    architecture = architectures.by_name(name)
    for m, n in itertools.product(SIZES, SIZES):
      shape = product(*pair, m=m, n=n, k=4064)
      config = tuning.default_config(shape, architecture, core_count=CORES)
      self.assertIsNone(tuning.config_error(config, shape, architecture))
    candidates = tuning.candidate_configs(shape, architecture, core_count=CORES)
    self.assertEqual(candidates[0], config)
    self.assertGreater(len(candidates), 4)
    self.assertLen(set(candidates), len(candidates))
    for config in candidates:
      self.assertIsNone(tuning.config_error(config, shape, architecture))

  @parameterized.parameters(
    ("sm_100", "mxfp8", "mxfp8", 4096, "native"),
    ("sm_100", "mxfp8", "mxfp8", 1, "native"),
    ("sm_100", "bf16", "mxfp8", 1, "small_m"),
    ("sm_90", "mxfp8", "mxfp8", 4096, "upcast"),
    ("sm_90", "mxfp8", "mxfp8", 64, "small_m"),
    ("sm_90", "mxfp8", "mxfp8", 65, "upcast"),
    ("sm_90", "mxfp8", "bf16", 1, "upcast"),
    ("sm_80", "mxfp8", "mxfp8", 1, "upcast"),
    ("gfx950", "nvfp4", "nvfp4", 4096, "upcast"),
    ("gfx950", "mxfp4", "mxfp8", 4096, "native"),
  )
  def test_path(self, name, lhs, rhs, m, path):
    config = tuning.default_config(
      product(lhs, rhs, m=m),
      architectures.by_name(name),
      core_count=CORES,
    )
    self.assertEqual(config.path, path)

  def test_k_is_split_until_the_gpu_is_full(self):
    def split(n, k):
      shape = product("bf16", "nvfp4", m=1, n=n, k=k)
      return tuning.default_config(shape, SM_90, core_count=CORES).split_k

    self.assertEqual(split(8192, 8192), 8)  # 32 tiles: 256 of 264 programs
    self.assertEqual(split(65536, 8192), 1)
    self.assertEqual(split(128, 1024), 1)  # too short to split

  def test_text_of_a_refusal_has_the_numbers(self):
    # Of the smallest tile: two of 16 x 32 values and a scale for each row, then
    # both as bf16.
    needed = 2 * (16 * 32 + 16) + 2 * (16 * 32) * 2
    message = (
      f"m=256 .* {needed} bytes of shared memory, sm_90 has {needed - 1}$"
    )
    tiny = replace(SM_90, shared_memory_bytes=needed - 1)
    with self.assertRaisesRegex(ValueError, message):
      tuning.default_config(product(), tiny, core_count=CORES)
    enough = replace(SM_90, shared_memory_bytes=needed)
    tuning.default_config(product(), enough, core_count=CORES)

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
      tuning.shared_memory_bound(config, shape, SM_100),
      max(3 * loaded + 16, accumulators),
    )


class PlanTest(parameterized.TestCase):
  def plan(self, shape, config=CONFIG, architecture=SM_90):
    return configs.plan(shape, config, architecture)

  def test_arguments_are_those_of_the_kernels(self):
    shape = product(has_bias=True)
    for path, split_k in itertools.product(configs.PATHS, (1, 2)):
      config = replace(CONFIG, path=path, split_k=split_k, block_k=128)
      launches = self.plan(shape, config)
      self.assertLen(launches, split_k)
      for launch in launches:
        kernel = block_scaled_matmul.KERNELS[launch.kernel]
        pointers = list(configs.signature(launch, shape))
        names = [name for name, _ in launch.constexprs]
        self.assertEqual([*pointers, *names], kernel.arg_names)

  def test_absent_arrays_are_given_as_others(self):
    (launch,) = self.plan(product("bf16", "mxfp8", has_bias=True))
    self.assertEqual(
      launch.inputs,
      ("lhs", "lhs", "rhs", "rhs_scale", "lhs", "bias", "lhs"),
    )

  def test_split_writes_a_workspace_that_is_reduced(self):
    shape = product("bf16", "mxfp8", m=70, has_bias=True, out_dtype="bf16")
    matmul, reduce = self.plan(shape, replace(CONFIG, split_k=3))
    self.assertEqual(matmul.output, "workspace")
    self.assertEqual(matmul.output_shape, (3, 1, 70, 256))
    self.assertEqual(matmul.output_dtype, "f32")
    self.assertEqual(matmul.grid, 3 * 2 * 4)
    self.assertNotIn("bias", matmul.inputs)
    self.assertEqual(
      reduce.inputs, ("workspace", "workspace", "bias", "workspace")
    )
    self.assertEqual((reduce.output, reduce.output_dtype), ("out", "bf16"))
    self.assertEqual(reduce.grid, -(-70 * 256 // 1024))

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


if __name__ == "__main__":
  absltest.main()
