# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which ceiling is whose."""

import dataclasses

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.lab.bench import devices, roofline
from jaxplugin.testing import bench_results

CPU = dataclasses.replace(
  bench_results.CEILINGS, read=50e9, copy=8e9, warm=40e9, bf16=300e9, f32=200e9
)


class CeilingsTest(parameterized.TestCase):
  def test_products_read_and_codecs_copy_into_memory_that_is_there(self):
    self.assertEqual(CPU.seconds(50e9, 1), 1)
    self.assertEqual(CPU.seconds(40e9, 0), 1)
    gpu = dataclasses.replace(CPU, is_gpu=True, copy=30e9, warm=0)
    self.assertEqual(gpu.seconds(30e9, 1), 1)
    self.assertEqual(gpu.seconds(30e9, 0), 1)

  @parameterized.parameters(
    ("floats", 0.0, 300e9), ("f32", 0.0, 200e9), ("int8", 0.0, 300e9),
    ("int8", 800e9, 800e9), ("floats", 800e9, 300e9), ("f32", 800e9, 200e9),
  )  # fmt: skip
  def test_operations_have_the_ceiling_of_their_arithmetic(
    self, arithmetic, int8, expected
  ):
    ceilings = dataclasses.replace(CPU, int8=int8)
    self.assertEqual(ceilings.seconds(1, expected, arithmetic), 1)

  @parameterized.parameters(
    ((), 300e9, 0),
    (("sse2", "avx2"), 300e9, 400e9),
    (("avx2", "avx_vnni"), 300e9, 800e9),
    (("avx2", "avx512_vnni", "avx512_bf16"), 400e9, 800e9),
  )
  def test_instructions_say_what_others_do_beside_f32(self, flags, bf16, int8):
    found = roofline.with_factors(CPU, flags)
    self.assertEqual((found.bf16, found.int8), (bf16, int8))
    self.assertEqual(found.f32, CPU.f32)

  def test_ceilings_are_raised_and_not_lowered(self):
    self.assertEqual(CPU.raised("read", 60e9).read, 60e9)
    self.assertEqual(CPU.raised("read", 10e9).read, 50e9)


class MeasureTest(absltest.TestCase):
  @pytest.mark.lab
  def test_every_ceiling_of_a_cpu_is_measured_by_what_its_names_say(self):
    sizes = roofline.CeilingSizes(side=64, product=64, rounds=2)
    found = roofline.measure(devices.find("cpu"), sizes)
    for name in roofline.NAMES:
      self.assertGreater(getattr(found, name), 1e6, name)
    copies = roofline.copy_variants(64, 64)
    names = [roofline.ceiling_of(variant.name) for variant in copies]
    self.assertEqual(names, ["warm", "warm", "fresh"])
    outs = []
    for variant, value in zip(copies, (2, 1, 1), strict=True):
      outs.append(variant.function(*variant.operands(0)))
      np.testing.assert_array_equal(outs[-1], np.full((64, 64), value, "f4"))
      self.assertEqual(variant.num_bytes, 2 * 64 * 64 * 4)
      # The warm copies reuse one array, and the fresh copy maps a new one.
      again = variant.function(*variant.operands(1))
      is_warm = roofline.ceiling_of(variant.name) == "warm"
      self.assertEqual(np.shares_memory(outs[-1], again), is_warm)
    for variant in roofline.read_variants(64, False):
      self.assertEqual(roofline.ceiling_of(variant.name), "read")
