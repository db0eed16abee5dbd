# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every constraint is checked, and says its numbers."""

import dataclasses

from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, constraints

from jaxplugin.kernels import architectures
from jaxplugin.testing.kernels import matmul_shapes

CONFIG = matmul_shapes.CONFIG
SM_90 = matmul_shapes.SM_90
UPCAST, NATIVE = matmul_shapes.UPCAST, matmul_shapes.NATIVE
product = matmul_shapes.product
replace = dataclasses.replace


class ConfigErrorTest(parameterized.TestCase):
  def test_valid_config_passes(self):
    self.assertIsNone(constraints.config_error(CONFIG, product(), SM_90))

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
    error = constraints.config_error(
      replace(CONFIG, **changes), product(), SM_90
    )
    self.assertRegex(error, message)

  @parameterized.named_parameters(
    ("empty", {"batch": 0}, "sizes must be positive"),
    ("large_m", {"m": 2**31 - 32}, "below 2\\^31"),
    ("programs", {"batch": 2**31, "m": 8192}, "more than 2\\^31 programs"),
  )
  def test_error_of_shape(self, changes, message):
    shape = replace(product(), **changes)
    self.assertRegex(constraints.config_error(CONFIG, shape, SM_90), message)

  @parameterized.parameters(
    ("bf16", "int4_f16_32", 256, "divide the 32 values of a block of rhs"),
    ("int8_f32_32", "bf16", 256, "divide the 32 values of a block of lhs"),
    ("bf16", "e4m3_f32_48", 256, "rhs must have a multiple of 32 .* got 48"),
    ("bf16", "e4m3_f32_48", 48, None),
    ("bf16", "e4m3_f32_100", 100, None),
    ("e4m3_f32_128", "e4m3_f32_192", 256, None),
    ("bf16", "int4_f16_128", 255, "k must be even for INT4, got 255"),
    ("bf16", "mxfp4", 33, "k must be even for FP4, got 33"),
    ("bf16", "mxfp8", 33, None),
  )
  def test_k_has_whole_bytes_and_one_scale_a_step_if_it_multiplies_sums(
    self, lhs, rhs, k, message
  ):
    error = constraints.config_error(CONFIG, product(lhs, rhs, k=k), SM_90)
    self.assertRegex(str(error), str(message))

  def test_tensor_memory_is_512_columns(self):
    config = replace(CONFIG, block_m=256, block_n=256, num_warps=16)
    error = constraints.config_error(config, product(), matmul_shapes.SM_100)
    self.assertRegex(error, "1024 columns of tensor memory, sm_100 has 512")

  @parameterized.parameters(
    ("mxfp8", "mxfp4", "sm_100", None),
    ("mxfp8", "mxfp4", "sm_120", "FP4 only with FP4"),
    ("mxfp8", "mxfp8_e5m2", "sm_120", None),
    ("nvfp4", "nvfp4", "sm_120", None),
    ("nvfp4", "nvfp4", "gfx950", "E4M3 scales"),
    ("nvfp4", "mxfp4", "sm_100", "nvfp4 multiplies only nvfp4"),
    ("mxfp4", "nvfp4", "sm_100", "nvfp4 multiplies only nvfp4"),
    ("bf16", "mxfp8", "sm_100", "both operands"),
    ("mxfp8", "mxfp8", "sm_90", "sm_90 has no block-scaled"),
    ("mxfp8", "mxfp6_e2m3", "sm_100", "dot_scaled does not take e2m3"),
    ("mxfp6_e3m2", "mxfp6_e3m2", "gfx950", "dot_scaled does not take e3m2"),
    ("int8_f32_256", "mxfp8", "sm_100", "dot_scaled does not take int8"),
    ("e4m3_f32_128", "mxfp8", "sm_100", "e4m3 with f32 scales of 128 values"),
  )
  def test_what_is_native(self, lhs, rhs, name, message):
    error = constraints.native_error(
      product(lhs, rhs), architectures.by_name(name)
    )
    self.assertRegex(str(error), str(message))

  @parameterized.parameters(
    ("sm_90", "e4m3_f32_128", {}, None),
    ("sm_89", "e4m3_f32_256", {}, None),
    ("sm_90", "e4m3_e8m0_128", {}, None),
    ("sm_90", "e4m3_f32_128", {"may_round_sums": False}, "fewer bits than f32"),
    ("sm_80", "e4m3_f32_128", {}, "sm_80 has no FP8 matrix instruction"),
    ("sm_100", "e4m3_f32_128", {}, "sm_100 has no FP8 matrix instruction"),
    ("sm_90", "mxfp8", {}, "lhs must be E4M3 with scales that multiply sums"),
    ("sm_90", "int8_f32_128", {}, "lhs must be E4M3"),
    ("sm_90", "e4m3_f32_64", {}, "blocks of lhs must have a multiple of 128"),
    ("sm_90", "e4m3_f32_128", {"k_is_minor": False}, "k must be the minor"),
  )
  def test_fp8_path_is_asked_for(self, name, format, options, message):
    options = {"may_round_sums": True} | options
    shape = product(format, format, **options)
    architecture = architectures.by_name(name)
    error = constraints.fp8_error(shape, architecture)
    self.assertRegex(str(error), str(message))
    config = replace(CONFIG, path="fp8", block_k=128)
    error = constraints.config_error(config, shape, architecture)
    self.assertEqual(error is None, message is None)

  @parameterized.parameters("lhs", "rhs")
  def test_tile_has_rows_of_one_square_block(self, side):
    shape = product("e4m3_f32_128", "e4m3_f32_128")
    square = configs.operand("e4m3_f32_128", 256, 256, rows_per_scale=32)
    shape = replace(shape, **{side: square})
    error = constraints.config_error(CONFIG, shape, SM_90)
    self.assertRegex(error, f"tiles of {side} .* 32 rows .*, got 64 rows")
    config = replace(CONFIG, **{"block_m" if side == "lhs" else "block_n": 32})
    self.assertIsNone(constraints.config_error(config, shape, SM_90))

  @parameterized.parameters(
    ("sm_90", "int8_f32_256", "int8_f32_32", {}, None),
    ("sm_80", "int8_f32_128", "int8_bf16_256", {}, None),
    ("sm_100", "int8_f32_256", "int8_f32_256", {}, "has no INT8 matrix"),
    ("gfx950", "int8_f32_256", "int8_f32_256", {}, "has no INT8 matrix"),
    ("sm_90", "int8_f32_256", "int4_f32_256", {}, "rhs must be INT8"),
    ("sm_90", "bf16", "int8_f32_256", {}, "lhs must be INT8 with scales"),
    ("sm_90", "int8_q6_e8m0_32", "int8_f32_256", {}, "lhs must be INT8"),
    (
      *("sm_90", "int8_f32_256", "int8_f32_256"),
      {"k_is_minor": False},
      "minor",
    ),
    (*("sm_90", "int8_f32_131072", "int8_f32_131072"), {"k": 2**17}, "131071"),
  )
  def test_int8_path(self, name, lhs, rhs, options, message):
    shape = product(lhs, rhs, **options)
    architecture = architectures.by_name(name)
    error = constraints.int8_error(shape, architecture)
    config = replace(CONFIG, path="int8", block_k=32)
    self.assertRegex(str(error), str(message))
    error = constraints.config_error(config, shape, architecture)
    self.assertEqual(error is None, message is None)

  @parameterized.parameters(
    ("sm_90", 256, None),
    ("sm_100", 256, None),
    ("sm_90", 264, "multiple of 16 if values are interleaved, got 264"),
    ("gfx942", 256, "need an NVIDIA GPU, not gfx942"),
  )
  def test_what_takes_interleaved_values(self, name, k, message):
    rhs = configs.operand("mxfp4", 256, k, interleaved=True)
    shape = replace(product("bf16", "mxfp4", k=k), rhs=rhs)
    error = constraints.config_error(CONFIG, shape, architectures.by_name(name))
    self.assertRegex(str(error), str(message))
    self.assertIsNone(constraints.small_m_error(shape))
    native = constraints.native_error(
      replace(shape, lhs=configs.operand("mxfp4", 256, k)), matmul_shapes.SM_100
    )
    self.assertRegex(native, "got interleaved ones")

  @parameterized.parameters(
    ("sm_90", UPCAST, product("mxfp8", "mxfp4"), None),
    ("sm_100", NATIVE, product("nvfp4", "nvfp4"), None),
    ("sm_120", NATIVE, product("mxfp8", "mxfp8_e5m2"), None),
    ("sm_89", UPCAST, product(), "from sm_90 on, not sm_89"),
    ("gfx950", NATIVE, product(), "from sm_90 on, not gfx950"),
    ("sm_100", NATIVE, product("mxfp8", "mxfp4"), "FP4 next to FP8 .* 'mxfp4'"),
    ("sm_100", UPCAST, product("mxfp8", "mxfp4"), None),
    ("sm_90", matmul_shapes.SMALL_M, product("bf16", "mxfp8"),
      "small_m kernel loads values by threads"),
    ("sm_90", UPCAST, product("mxfp8", "mxfp4", k=272),
      "descriptor of rhs: strides must be .*, got 136"),
    (
      "sm_90",
      UPCAST,
      replace(
        product("bf16", "mxfp8"),
        lhs=configs.operand("bf16", 256, 256, k_is_minor=False),
      ),
      "descriptor of lhs: k must be the minor dimension",
    ),
  )  # fmt: skip
  def test_what_takes_descriptors(self, name, config, shape, message):
    config = replace(config, use_descriptors=True)
    error = constraints.config_error(config, shape, architectures.by_name(name))
    self.assertRegex(str(error), str(message))

  @parameterized.parameters(
    # Two stages of loads, and both operands in pieces of bf16.
    ("bf16", "bf16", 2 * (8192 + 8192) + 8192 + 8192),
    ("f32", "bf16", 2 * (16384 + 8192) + 3 * 8192 + 8192),
    ("f32", "mxfp4", 2 * (16384 + 2048 + 128) + 3 * 8192 + 8192),
  )
  def test_bound_of_shared_memory(self, lhs, rhs, num_bytes):
    bound = constraints.shared_memory_bound(CONFIG, product(lhs, rhs), SM_90)
    self.assertEqual(bound, num_bytes)

  @parameterized.parameters(
    ({}, None),
    ({"rhs": configs.operand("bf16", 256, 256)}, "block format, got bf16"),
    ({"rhs": configs.operand("mxfp4", 256, 256, k_is_minor=False)},
      "minor dimension of rhs"),
    ({"lhs": configs.operand("bf16", 256, 256, k_is_minor=False)},
      "minor dimension of lhs"),
    ({"rhs": configs.operand("nvfp4", 256, 252), "k": 252}, "multiple of 8"),
    ({"rhs": configs.operand("int4_f16_128", 256, 256)}, None),
    ({"rhs": configs.operand("int4_f16_32", 256, 256)},
      "blocks of rhs must have a multiple of 128 values, got 32"),
    (
      {
        "rhs": configs.OperandKind(
          format="nvfp4", strides=(0, 130, 1), scale_strides=(0, 16, 1)
        )
      },
      "multiples of 4 bytes",
    ),
  )  # fmt: skip
  def test_what_small_m_takes(self, changes, message):
    error = constraints.small_m_error(
      replace(product("bf16", "nvfp4"), **changes)
    )
    self.assertRegex(str(error), str(message))
