# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blackwell's kernels, compiled for sm_100 and executed, keep the contract.

Their products are `tcgen05.mma`, from tensor memory and shared memory.
"""

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.testing.kernels import executed_cases
from jaxplugin.testing.kernels import gpu_operands

pytestmark = pytest.mark.lab

ARCHITECTURE = "sm_100"
# Neither m nor n is a multiple of a tile, nor k of one's k; several steps.
SMALL = {"m": 5, "n": 72, "k": 288}
MIDDLE = {"m": 70, "n": 72, "k": 288}
# The instruction, by the operands' formats; "f16" of what is decoded before.
NATIVE = {
  ("mxfp8", "mxfp8"): "mxf8f6f4.block_scale.block32",
  ("mxfp8", "mxfp4"): "mxf8f6f4.block_scale.block32",
  ("mxfp4", "mxfp4"): "mxf4.block_scale.block32",
  ("nvfp4", "nvfp4"): "mxf4nvf4.block_scale.block16",
}
DECODED = (
  ("bf16", "nvfp4"),
  ("bf16", "mxfp4"),
  ("bf16", "mxfp8"),
  ("f16", "nvfp4"),
)
MORE_PAIRS = (
  ("f32", "mxfp8_e5m2"),
  ("bf16", "mxfp6_e2m3"),
  ("mxfp8", "nvfp4"),
  ("mxfp8_e5m2", "mxfp8"),
  ("mxfp4", "mxfp8"),
)


class Case(executed_cases.Case):
  def check_product(self, lhs, rhs, sizes):
    product = self.check(ARCHITECTURE, *self.make(lhs, rhs, **sizes))
    launch = product.launches[0]
    ptx = product.compiled(launch).assembly
    kind = NATIVE.get((lhs, rhs), "f16")
    self.assertIn(f"tcgen05.mma.cta_group::1.kind::{kind} ", ptx)
    self.assertEqual(product.config.path == "native", kind != "f16")


class DefaultConfigTest(Case):
  @parameterized.parameters(
    ("mxfp8", "mxfp8", MIDDLE),
    ("mxfp8", "mxfp4", SMALL),
    ("mxfp4", "mxfp4", SMALL),
    ("nvfp4", "nvfp4", MIDDLE),
    ("bf16", "nvfp4", SMALL),
    ("bf16", "mxfp4", MIDDLE),
    ("f16", "nvfp4", SMALL),
    ("e4m3_f32_128", "e4m3_f32_128", MIDDLE),
    ("bf16", "int4_f16_32", SMALL),
    ("bf16", "int4_f16_128", SMALL),
    ("int8_f32_288", "int8_f32_288", SMALL),
  )
  def test_product(self, lhs, rhs, sizes):
    self.check_product(lhs, rhs, sizes)

  def test_sums_are_split_and_added(self):
    operands = self.make("mxfp8", "mxfp8", m=16, n=64, k=1024)
    product = self.check(ARCHITECTURE, *operands)
    self.assertLen(product.launches, 2)
    self.assertGreater(product.config.split_k, 1)

  def test_k_that_is_not_minor(self):
    make = gpu_operands.make_operand
    self.check(
      ARCHITECTURE,
      make(self.rng, "mxfp8", (1, 20, 128), k_is_minor=False),
      make(self.rng, "mxfp8", (1, 40, 128), k_is_minor=False),
    )

  def test_epilogue(self):
    operands = self.make("mxfp8", "mxfp8", m=5, n=72, k=160)
    self.check_epilogue(ARCHITECTURE, *operands, "relu", "bf16")


@pytest.mark.full
class ManyConfigsTest(Case):
  @parameterized.product(pair=(*NATIVE, *DECODED), sizes=(SMALL, MIDDLE))
  def test_product(self, pair, sizes):
    self.check_product(*pair, sizes)

  def test_tile_of_all_columns(self):
    # Scale factors of 256 columns take eight columns of tensor memory.
    operands = self.make("mxfp8", "mxfp8", m=130, n=300, k=160)
    product = self.check(ARCHITECTURE, *operands)
    self.assertEqual(product.config.block_n, 256)

  def test_batch_and_swizzled_scale(self):
    make = gpu_operands.make_operand
    lhs = make(self.rng, "nvfp4", (2, 3, 160))
    rhs = make(self.rng, "nvfp4", (2, 40, 160), swizzled=True)
    self.check(ARCHITECTURE, lhs, rhs)

  @parameterized.product(
    lhs=("bf16", "mxfp8"), minor=((True, False), (False, True), (False, False))
  )
  def test_k_that_is_not_minor(self, lhs, minor):
    make = gpu_operands.make_operand
    self.check(
      ARCHITECTURE,
      make(self.rng, lhs, (1, 70, 160), k_is_minor=minor[0]),
      make(self.rng, "mxfp8", (1, 136, 160), k_is_minor=minor[1]),
    )

  @parameterized.parameters(
    ("nvfp4", "nvfp4", "silu", "f16"),
    ("bf16", "mxfp4", "gelu", "f32"),
    ("bf16", "nvfp4", "relu", "bf16"),
  )
  def test_epilogue(self, lhs, rhs, activation, out_dtype):
    operands = self.make(lhs, rhs, m=70, n=72, k=160)
    self.check_epilogue(ARCHITECTURE, *operands, activation, out_dtype)


@pytest.mark.full
class FuzzTest(executed_cases.Case):
  @parameterized.product(pair=(*NATIVE, *DECODED, *MORE_PAIRS))
  def test_random_products(self, pair):
    self.rng = np.random.default_rng([ord(x) for x in "".join(pair)])
    self.check_random(ARCHITECTURE, *pair)


if __name__ == "__main__":
  absltest.main()
