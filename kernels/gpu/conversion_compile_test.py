# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every ptxas at hand takes the kernels that are planned for it."""

import dataclasses
import functools
import re

import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import (
  matmul_plans,
  tiles_by_rule,
)

from jaxplugin.kernels import architectures, launching
from jaxplugin.lab.inspection import compile
from jaxplugin.testing.kernels import assembling, matmul_shapes

NEW = architectures.E2M1_CONVERSION_PTXAS
# ptxas assembles each `cvt.rn.bf16x2.e2m1x2` to one such instruction.
INSTRUCTION = "F2FP.BF16.E2M1.UNPACK_B"


@functools.cache
def planned(name, ptxas_version):
  """(the launch of a decode product, its PTX as Triton writes it)."""
  architecture = dataclasses.replace(
    architectures.by_name(name), ptxas_version=ptxas_version
  )
  shape = matmul_shapes.product("bf16", "nvfp4", 4, 1024, 1024)
  config = tiles_by_rule.default_config(shape, architecture, core_count=8)
  launch = matmul_plans.plan(shape, config, architecture)[0]
  return launch, compile.compile_matmul(launch, shape, architecture).assembly


class ConversionCompileTest(parameterized.TestCase):
  @parameterized.parameters("sm_100", "sm_120")
  @pytest.mark.sample(1)
  def test_kernel_for_a_ptxas_is_assembled_by_it(self, name):
    self.assertNotEmpty(assembling.assemblers())
    for version, path in assembling.assemblers().items():
      architecture = dataclasses.replace(
        architectures.by_name(name), ptxas_version=version
      )
      launch, ptx = planned(name, NEW if architecture.converts_e2m1 else None)
      with self.subTest(ptxas=version):
        kernel = assembling.assembled(
          ptx, architecture, path, ptx_version=launch.ptx_version
        )
        self.assertEqual(INSTRUCTION in kernel.sass, version >= NEW)
        self.assertEqual(
          kernel.sass.count(INSTRUCTION), ptx.count("cvt.rn.bf16x2.e2m1x2")
        )

  def test_ptxas_refuses_by_name_what_it_does_not_know(self):
    new = architectures.by_name("sm_120")
    launch, ptx = planned(new.name, NEW)
    for version, path in assembling.assemblers().items():
      with self.subTest(ptxas=version):
        # As what it says to be without `Launch.ptx_version`.
        with self.assertRaisesRegex(
          assembling.AssemblyError, r"(?s)e2m1x2.*PTX ISA .version|Unexpected"
        ):
          assembling.assembled(ptx, new, path)
        if version < NEW:
          with self.assertRaisesRegex(
            assembling.AssemblyError, r"Unsupported .version 9\.2"
          ):
            assembling.assembled(ptx, new, path, ptx_version=launch.ptx_version)

  @parameterized.parameters("sm_80", "sm_90", "gfx950")
  @pytest.mark.full
  def test_other_architectures_have_no_conversion(self, name):
    new = dataclasses.replace(architectures.by_name(name), ptxas_version=NEW)
    self.assertFalse(new.converts_e2m1)
    launch, ptx = planned(name, NEW)
    self.assertEqual(launch.ptx_version, launching.PTX_VERSION)
    self.assertIsNone(re.search(r"\be2m1x2\b", ptx))

  def test_the_first_ptxas_with_it_is_of_cuda_13_2(self):
    # 13.1 has PTX 9.1, which ptxas says has it not.
    for version, expected in (
      (None, False),
      ((12, 9, 86), False),
      ((13, 1, 999), False),
      ((13, 2, 0), True),
      ((14, 0, 0), True),
    ):
      blackwell = dataclasses.replace(
        architectures.by_name("sm_120"), ptxas_version=version
      )
      self.assertEqual(blackwell.converts_e2m1, expected, version)
