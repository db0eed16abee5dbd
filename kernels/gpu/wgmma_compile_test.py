# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""No ptxas at hand breaks what the kernels have Hopper's GPUs multiply.

Nor does one have its matrix instructions wait for each other.
"""

import dataclasses
import functools
import re

import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import (
  configs,
  matmul_plans,
  tiles_by_rule,
)
from jaxplugin.kernels.gpu.ragged import plans

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import compile
from jaxplugin.testing.kernels import assembling, matmul_shapes, wgmma_hazards

pytestmark = pytest.mark.lab

HOPPER = architectures.by_name("sm_90")
CORES = 132
FIXED = (13, 3)  # the first ptxas that keeps what a wgmma reads
N = K = 4096
GROUPS = 8


dense = functools.partial(matmul_shapes.product, n=N, k=K, out_dtype="bf16")
ragged = functools.partial(dense, groups=GROUPS)
FEW = {
  "bf16_nvfp4": dense("bf16", "nvfp4", 4096),
  "ragged_bf16_mxfp4": ragged("bf16", "mxfp4", 4096, k=2880),
  "e4m3_f32_128": dense("e4m3_f32_128", "e4m3_f32_128", 4096),
  "int8_int4_blocks_of_32": dense("int8_f16_32", "int4_f16_32", 256),
}
MANY = {
  "bf16_mxfp4": dense("bf16", "mxfp4", 4096),
  "bf16_mxfp8": dense("bf16", "mxfp8", 4096),
  "bf16_mxfp4_decode": dense("bf16", "mxfp4", 16),
  "mxfp8": dense("mxfp8", "mxfp8", 4096),
  "nvfp4": dense("nvfp4", "nvfp4", 4096),
  "mxfp8_mxfp4": dense("mxfp8", "mxfp4", 4096),
  "f32_mxfp4": dense("f32", "mxfp4", 256),
  "f16_nvfp4": dense("f16", "nvfp4", 256),
  "bf16_mxfp6": dense("bf16", "mxfp6_e2m3", 4096),
  "bf16_nvfp4_65": dense("bf16", "nvfp4", 65),
  "bf16_nvfp4_interleaved": dense("bf16", "nvfp4", 4096, interleaved=True),
  "bf16_k_major": dense("bf16", "mxfp8", 1000, k=4080, k_is_minor=False),
  "bf16_nvfp4_decode": dense("bf16", "nvfp4", 1),
  "bf16_nvfp4_64": dense("bf16", "nvfp4", 64),
  "bf16_mxfp8_decode": dense("bf16", "mxfp8", 16),
  "mxfp8_decode": dense("mxfp8", "mxfp8", 16),
  "f32_mxfp4_decode": dense("f32", "mxfp4", 16),
  "bf16_e4m3_f32_128": dense("bf16", "e4m3_f32_128", 4096),
  "bf16_int8_f16_32": dense("bf16", "int8_f16_32", 4096),
  "bf16_int4_f16_128_decode": dense("bf16", "int4_f16_128", 16),
  "f32_int4_f16_32": dense("f32", "int4_f16_32", 256),
  "e2m1_f32_blocks_of_32": dense("mxfp8", "e2m1_f32_32", 256),
  "fp8_sums": dense("e4m3_f32_128", "e4m3_f32_128", 4096, may_round_sums=True),
  "fp8_sums_square": dataclasses.replace(
    dense("e4m3_f32_128", "e4m3_f32_128", 4096, may_round_sums=True),
    rhs=configs.operand("e4m3_f32_128", N, K, rows_per_scale=128),
  ),
  "int8_rows": dense(f"int8_f32_{K}", f"int8_f32_{K}", 4096),
  "ragged_mxfp8": ragged("mxfp8", "mxfp8", 4096),
  "ragged_decode": ragged("bf16", "mxfp4", 4),
  "ragged_across": ragged("bf16", "mxfp4", 4096, is_across=True),
}
PRODUCTS = {**FEW, **MANY}


@functools.cache
def ptx(key, waits=True):
  """Returns the PTX of the matmul launch with the default config."""
  shape = PRODUCTS[key]
  if isinstance(shape, plans.RaggedShape):
    config = plans.default_config(shape, HOPPER, core_count=CORES)
    launch = plans.plan(shape, config, HOPPER)[0]
  else:
    config = tiles_by_rule.default_config(shape, HOPPER, core_count=CORES)
    launch = matmul_plans.plan(shape, config, HOPPER)[0]
  constexprs = dict(launch.constexprs)
  constexprs["TILING"] = dataclasses.replace(constexprs["TILING"], waits=waits)
  launch = dataclasses.replace(launch, constexprs=tuple(constexprs.items()))
  return compile.compile_matmul(launch, shape, HOPPER).assembly


class Case(parameterized.TestCase):
  def assert_safe(self, key):
    self.assertNotEmpty(assembling.assemblers())
    for version, path in assembling.assemblers().items():
      with self.subTest(ptxas=version):
        kernel = assembling.assembled(ptx(key), HOPPER, path)
        self.assertRegex(kernel.sass, "[HIQ]GMMA")
        found = wgmma_hazards.overwritten_operands(kernel.sass)
        self.assertEqual(found, [])
        self.assertEqual(kernel.wgmma_notes, [])


class DefaultConfigTest(Case):
  @parameterized.parameters(*FEW)
  def test_operands_are_kept_while_they_are_read(self, key):
    self.assert_safe(key)

  def test_old_ptxas_breaks_it_without_waits(self):
    old = {v: p for v, p in assembling.assemblers().items() if v < FIXED}
    if not old:
      self.skipTest("needs a ptxas before CUDA 13.3")
    for path in old.values():
      kernel = assembling.assembled(
        ptx("bf16_nvfp4", waits=False), HOPPER, path
      )
      found = wgmma_hazards.overwritten_operands(kernel.sass)
      self.assertGreater(len(found), 10, found)

  def test_new_ptxas_says_which_products_it_has_wait(self):
    # The accumulator would be read while a wgmma writes it.
    unwaited = re.sub(r"wgmma\.wait_group[^;]*;", "", ptx("bf16_nvfp4"))
    new = [p for v, p in assembling.assemblers().items() if v >= FIXED]
    self.assertNotEmpty(new)
    for path in new:
      notes = assembling.assembled(unwaited, HOPPER, path).wgmma_notes
      self.assertRegex(
        "\n".join(notes), r"C7517\) wgmma.wait_group is injected"
      )


@pytest.mark.full
class ManyConfigsTest(Case):
  @parameterized.parameters(*MANY)
  def test_operands_are_kept_while_they_are_read(self, key):
    self.assert_safe(key)
