# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels that convert FP4 by an instruction, compiled and executed."""

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.kernels import architectures
from jaxplugin.kernels import launching
from jaxplugin.testing.kernels import executed
from jaxplugin.testing.kernels import executed_cases

pytestmark = pytest.mark.lab

NEW = architectures.E2M1_CONVERSION_PTXAS
OLD = (13, 1, 115)
CONVERSION = "cvt.rn.bf16x2.e2m1x2"
# Neither m nor n is a multiple of a tile, nor k of one's k; several steps.
SMALL = {"m": 5, "n": 72, "k": 288}
MIDDLE = {"m": 70, "n": 72, "k": 160}
# Both a small_m and an upcast kernel of sm_100; sm_120's are upcast ones.
CASES = (
  ("sm_100", "bf16", "mxfp4", SMALL, "small_m"),
  ("sm_100", "f16", "nvfp4", SMALL, "small_m"),
  ("sm_100", "bf16", "nvfp4", MIDDLE, "upcast"),
  ("sm_120", "bf16", "mxfp4", SMALL, "upcast"),
  ("sm_120", "bf16", "nvfp4", MIDDLE, "upcast"),
  ("sm_120", "mxfp8", "mxfp4", MIDDLE, "upcast"),
  ("sm_120", "nvfp4", "mxfp8", SMALL, "upcast"),
)


class ConversionKernelsTest(executed_cases.Case):
  @parameterized.parameters(*CASES)
  def test_product(self, architecture, lhs, rhs, sizes, path):
    operands = self.make(lhs, rhs, **sizes)
    product = self.check(architecture, *operands, ptxas_version=NEW)
    launch = product.launches[0]
    self.assertEqual(product.config.path, path)
    self.assertIn(CONVERSION, product.compiled(launch).assembly)
    self.assertEqual(launch.ptx_version, launching.E2M1_CONVERSION_PTX_VERSION)

  @parameterized.parameters("mxfp4", "nvfp4")
  def test_sums_in_the_same_order_have_the_same_bits(self, format):
    lhs, rhs = self.make("bf16", format, **SMALL)
    results = [
      executed.product("sm_120", lhs, rhs, ptxas_version=version).run()[0]
      for version in (None, NEW)
    ]
    np.testing.assert_array_equal(*results)

  @parameterized.parameters("sm_100", "sm_120")
  def test_older_and_unknown_ptxas_get_the_same_kernel(self, architecture):
    lhs, rhs = self.make("bf16", "nvfp4", **SMALL)
    old, unknown = (
      executed.product(architecture, lhs, rhs, ptxas_version=version)
      for version in (OLD, None)
    )
    self.assertEqual(old.launches, unknown.launches)
    for launch in old.launches:
      self.assertEqual(launch.ptx_version, launching.PTX_VERSION)
      self.assertNotIn(CONVERSION, old.compiled(launch).assembly)

  @parameterized.parameters(
    ("sm_90", "bf16", "nvfp4", False),
    ("sm_80", "bf16", "mxfp4", True),
    ("sm_120", "nvfp4", "nvfp4", False),
    ("sm_120", "bf16", "mxfp8", False),
  )
  def test_what_decodes_no_fp4_is_the_same_for_all(
    self, architecture, lhs, rhs, interleaved
  ):
    operands = self.make(lhs, rhs, **SMALL, interleaved=interleaved)
    old, new = (
      executed.product(architecture, *operands, ptxas_version=version)
      for version in (None, NEW)
    )
    self.assertEqual(old.launches, new.launches)


if __name__ == "__main__":
  absltest.main()
