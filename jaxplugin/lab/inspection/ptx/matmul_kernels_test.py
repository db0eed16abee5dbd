# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul kernels' compiled PTX, executed, is within the contract.

Each block's bytes outside of its arrays, shared memory and registers are
undefined, and using one is a fault; so are races and missing fences.
"""

import dataclasses

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.kernels.gpu import configs
from jaxplugin.testing import contract
from jaxplugin.testing.kernels import executed
from jaxplugin.testing.kernels import executed_cases
from jaxplugin.testing.kernels import gpu_operands

pytestmark = pytest.mark.lab

# Neither m nor n is a multiple of a tile, nor k of one's k; several steps.
SMALL = {"m": 5, "n": 72, "k": 544}
MIDDLE = {"m": 70, "n": 136, "k": 160}
CASES = (
  ("sm_80", "bf16", "nvfp4", SMALL, {}),
  ("sm_80", "bf16", "mxfp4", SMALL, {"interleaved": True}),
  ("sm_80", "mxfp8", "mxfp8", SMALL, {}),
  ("sm_80", "nvfp4", "nvfp4", MIDDLE, {}),
  ("sm_89", "bf16", "mxfp8", SMALL, {}),
  ("sm_90", "bf16", "nvfp4", SMALL, {}),
  ("sm_90", "bf16", "mxfp4", SMALL, {"interleaved": True}),
  ("sm_90", "mxfp8", "mxfp8", MIDDLE, {}),
  ("sm_90", "bf16", "nvfp4", MIDDLE, {}),
  ("sm_120", "mxfp8", "mxfp8", MIDDLE, {}),
  ("sm_120", "nvfp4", "nvfp4", MIDDLE, {}),
  ("sm_120", "mxfp4", "mxfp4", MIDDLE, {}),
  ("sm_120", "bf16", "mxfp4", SMALL, {}),
  # Scales multiply sums of steps or, if there is one for a row, all of them.
  ("sm_80", "e4m3_f32_128", "e4m3_f32_128", MIDDLE, {}),
  ("sm_80", "bf16", "int4_f16_32", SMALL, {}),
  ("sm_80", "int8_f32_544", "int8_f32_544", SMALL, {}),
  ("sm_80", "int8_q6_e8m0_32", "int8_q6_e8m0_32", MIDDLE, {}),
  ("sm_90", "e4m3_f32_128", "e4m3_f32_128", MIDDLE, {}),
  ("sm_90", "e4m3_f32_544", "e4m3_f32_128", SMALL, {}),
  ("sm_90", "bf16", "int8_f16_32", SMALL, {}),
  ("sm_90", "bf16", "int8_f16_32", MIDDLE, {}),
  ("sm_90", "int8_f32_544", "int8_f32_32", SMALL, {}),
  ("sm_90", "bf16", "int4_bf16_128", SMALL, {}),
  ("sm_90", "bf16", "int8_q6_e8m0_32", SMALL, {}),
)
NATIVE = ".block_scale."  # in the names of sm_120's instructions
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_120")
PAIRS = (
  ("bf16", "nvfp4"),
  ("bf16", "mxfp4"),
  ("bf16", "mxfp8"),
  ("f32", "mxfp8_e5m2"),
  ("f16", "nvfp4"),
  ("mxfp8", "mxfp8"),
  ("mxfp4", "mxfp4"),
  ("nvfp4", "nvfp4"),
  ("mxfp8", "mxfp4"),
  ("mxfp8", "nvfp4"),
  ("bf16", "mxfp6_e2m3"),
  ("bf16", "e4m3_f32_128"),
  ("e4m3_f32_128", "e4m3_f32_128"),
  ("bf16", "int4_f16_32"),
  ("f32", "int4_bf16_128"),
  ("int8_f16_32", "int8_f16_32"),
)


class DefaultConfigTest(executed_cases.Case):
  @parameterized.parameters(*CASES)
  def test_product(self, architecture, lhs, rhs, sizes, storage):
    operands = self.make(lhs, rhs, **sizes, **storage)
    product = self.check(architecture, *operands)
    launch = product.launches[0]
    ptx = product.compiled(launch).assembly
    self.assertEqual("wgmma.mma_async" in ptx, architecture == "sm_90")
    native = architecture == "sm_120" and lhs == rhs
    self.assertEqual(NATIVE in ptx, native)
    self.assertEqual(product.config.path == "native", native)

  @parameterized.parameters("sm_80", "sm_90")
  def test_sums_are_split_and_added(self, architecture):
    lhs, rhs = self.make("bf16", "mxfp8", m=16, n=64, k=2048)
    product = self.check(architecture, lhs, rhs)
    self.assertLen(product.launches, 2)
    self.assertGreater(product.config.split_k, 1)

  @parameterized.parameters(("sm_80", "upcast"), ("sm_90", "small_m"))
  def test_lower_pieces_are_summed_before_the_large_product(
    self, architecture, path
  ):
    # The first product is 2^15. The others are negative, and their pieces are
    # less than the spacing of f32 there, so an instruction that subtracts them
    # from the large sum loses almost one unit in the last place.
    x = self.rng.uniform(0, 1.5 * 2.0**-12, (1, 5, 96)).astype(np.float32)
    x[:, :, 0] = 2.0**15
    weights = np.full((1, 72, 96), 0xB8, np.uint8)
    weights[:, :, 0] = 0x38
    scale = np.full((1, 72, 3), 127, np.uint8)
    self.check(
      architecture,
      executed.dense(gpu_operands.store_operand("f32", x, None)),
      executed.dense(gpu_operands.store_operand("mxfp8", weights, scale)),
      truncates=False,
      config=configs.MatmulConfig(
        path=path, block_m=16, block_n=64, block_k=128, swap=True
      ),
    )

  @parameterized.parameters(
    ("sm_80", "f32", "upcast", 32),
    ("sm_80", "f16", "upcast", 32),
    ("sm_90", "f32", "upcast", 32),
    ("sm_90", "f32", "small_m", 128),
  )
  def test_large_sum_is_not_truncated_for_each_piece(
    self, architecture, lhs, path, block_k
  ):
    # The first product is 2^15, and f32 has a spacing of 2^-8 there. The other
    # products of a matrix instruction sum to about 0.75 of the spacing, so an
    # instruction that added them to the large sum would discard all of them.
    x = self.rng.uniform(0, 1.5 * 2.0**-12, (1, 5, 544))
    x[:, :, 0] = 2.0**15
    x = x.astype(gpu_operands.DTYPES[lhs])
    ones = np.full((1, 72, 544), 0x38, np.uint8)
    scale = np.full((1, 72, 17), 127, np.uint8)
    self.check(
      architecture,
      executed.dense(gpu_operands.store_operand(lhs, x, None)),
      executed.dense(gpu_operands.store_operand("mxfp8", ones, scale)),
      truncates=False,
      config=configs.MatmulConfig(
        path=path, block_m=16, block_n=64, block_k=block_k, swap=True
      ),
    )

  @parameterized.parameters("sm_80", "sm_90")
  def test_batch_of_operands_with_room_between_rows(self, architecture):
    make = gpu_operands.make_operand
    lhs = make(self.rng, "mxfp8", (2, 3, 160))
    rhs = make(self.rng, "nvfp4", (2, 40, 160), swizzled=True)
    self.check(architecture, lhs, rhs)

  def test_k_that_is_not_minor(self):
    make = gpu_operands.make_operand
    lhs = make(self.rng, "bf16", (1, 20, 104))
    rhs = make(self.rng, "mxfp8", (1, 40, 104), k_is_minor=False)
    self.check("sm_80", lhs, rhs)

  @parameterized.parameters(
    ("sm_80", "relu", "bf16"),
    ("sm_90", "silu", "f16"),
    ("sm_90", "gelu", "f32"),
  )
  def test_epilogue(self, architecture, activation, out_dtype):
    lhs, rhs = self.make("bf16", "mxfp8", m=5, n=72, k=160)
    self.check_epilogue(architecture, lhs, rhs, activation, out_dtype)

  @parameterized.product(
    architecture=("sm_89", "sm_90"),
    formats=(
      ("e4m3_f32_128", "e4m3_f32_128"),
      ("e4m3_f32_576", "e4m3_f32_576"),
      ("e4m3_e8m0_128", "e4m3_e8m0_128"),
    ),
    rows_per_scale=(1, 128),
  )
  def test_sums_of_fp8_instructions_are_within_their_bound(
    self, architecture, formats, rows_per_scale
  ):
    make = gpu_operands.make_operand
    lhs = make(self.rng, formats[0], (1, 70, 576))
    rhs = make(
      self.rng, formats[1], (1, 136, 576), rows_per_scale=rows_per_scale
    )
    product = executed.product(architecture, lhs, rhs, may_round_sums=True)
    self.assertEqual(product.config.path, "fp8")
    result, _ = product.run()
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    bound = (contract.FP8_SUM_BOUND + contract.DOT_BOUND) * magnitude
    contract.assert_within(result, exact, bound, result.dtype)
    # The model does round.
    error = np.abs(result - exact) / magnitude
    self.assertGreater(error.max(), contract.DOT_BOUND)

  @parameterized.parameters(
    ("sm_80", "int8_f32_160", "int8_f32_160", 5),
    ("sm_80", "int8_f32_160", "int8_bf16_128", 70),
    ("sm_89", "int8_f16_32", "int8_f32_32", 70),
    ("sm_90", "int8_f32_160", "int8_f32_160", 70),
    ("sm_90", "int8_f32_160", "int8_bf16_128", 5),
    ("sm_90", "int8_f16_32", "int8_f32_32", 70),
  )
  def test_int8_instructions_sum_exactly(self, architecture, left, right, m):
    lhs, rhs = self.make(left, right, m=m, n=136, k=160)
    product = self.check(architecture, lhs, rhs)
    self.assertEqual(product.config.path, "int8")
    ptx = product.compiled(product.launches[0]).assembly
    self.assertIn(".s32.s8.s8", ptx)

  def test_conflicts_of_banks_are_counted(self):
    lhs, rhs = self.make("bf16", "mxfp4", **SMALL, interleaved=True)
    _, counts = executed.product("sm_80", lhs, rhs).run()
    # The decoded operand changes its layout through shared memory.
    least = counts["st.shared least wavefronts"]
    self.assertGreater(counts["st.shared wavefronts"], 1.5 * least)
    least = counts["ldmatrix least wavefronts"]
    self.assertEqual(counts["ldmatrix wavefronts"], least)


@pytest.mark.full
class FuzzTest(executed_cases.Case):
  @parameterized.product(architecture=ARCHITECTURES, pair=PAIRS)
  def test_random_products(self, architecture, pair):
    self.rng = np.random.default_rng(
      [ARCHITECTURES.index(architecture), PAIRS.index(pair)]
    )
    self.check_random(architecture, *pair)

  @parameterized.product(
    architecture=("sm_80", "sm_90"),
    path=("upcast", "small_m"),
    tile=((16, 64, 128), (32, 128, 128)),
    split_k=(1, 2),
  )
  def test_other_configs(self, architecture, path, tile, split_k):
    lhs, rhs = self.make("bf16", "nvfp4", m=20, n=100, k=608)
    config = configs.MatmulConfig(
      path=path,
      **dict(zip(("block_m", "block_n", "block_k"), tile, strict=True)),
      split_k=split_k,
    )
    for num_stages in (1, 4):
      self.check(
        architecture,
        lhs,
        rhs,
        config=dataclasses.replace(config, num_stages=num_stages),
      )


if __name__ == "__main__":
  absltest.main()
