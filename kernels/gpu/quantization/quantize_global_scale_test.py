# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels that compute NVFP4's global scales agree with `jp.quantize`."""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import (
  global_scales,
  quantize_config,
  quantize_plans,
)

import jaxplugin as jp
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
SM_90 = quantize_cases.SM_90
rows_of = quantize_cases.rows_of
setUpModule = interpret.skip_unless_supported


def computed(x, most=quantize_plans.MOST_MAXIMA):
  """Returns the arrays of launches that compute x's global scale.

  At most `most` programs find the maxima.
  """
  batch, rows, k = x.shape
  described = rows_of(rows, k, batch=batch, global_scale="computed")
  with mock.patch.object(quantize_plans, "MOST_MAXIMA", most):
    launches = quantize_plans.plan(described, SM_90)
  return quantize_cases.run(launches, x)


def computed_both(x, row=0, most=quantize_plans.MOST_MAXIMA):
  """Returns the same for both blockings; `row` is that of the columns'."""
  batch, rows, columns = x.shape
  described = quantize_config.Matrices(
    batch=batch,
    rows=rows,
    columns=columns,
    k=columns + -columns % 32,
    k_t=rows + -rows % 32,
    is_transposed=True,
    format="nvfp4",
    global_scale="computed",
    row=row,
  )
  with mock.patch.object(quantize_plans, "MOST_MAXIMA", most):
    launches = quantize_plans.plan(described, SM_90)
  return quantize_cases.run(launches, x)


def global_scale_of_few(x, block_m, block_k):
  """Returns the global scale that one program computes from small tiles."""
  config = quantize_config.QuantizeConfig(
    block_m=block_m, block_k=block_k, num_warps=1, hardware_cast=False
  )
  batch, rows, k = x.shape
  described = rows_of(rows, k, batch=batch, global_scale="computed")
  with mock.patch.object(quantize_config, "config_of_few", return_value=config):
    first, _ = quantize_plans.plan(described, SM_90)
  return quantize_cases.run([first], x)["global_scale"]


@triton.jit
def _scales_for(largest, result, RANGE: tl.constexpr, SIZE: tl.constexpr):
  place = tl.arange(0, SIZE)
  bits = tl.load(largest + place)
  tl.store(result + place, global_scales._scale_for(bits, RANGE))


class ScaleForTest(parameterized.TestCase):
  @parameterized.parameters(2688, 1536)
  def test_it_is_a_division_rounded_once(self, largest_range):
    rng = np.random.default_rng(3)
    bits = rng.integers(0x7F800000, size=1 << 16, dtype=np.int32)
    least = np.float32(2.0**-126) * np.float32(largest_range)
    near = np.arange(-500, 500, dtype=np.int32) + least.view(np.int32)
    edges = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF]
    bits[:1005] = np.r_[near, edges].astype(np.int32)
    result = np.zeros(bits.size, np.float32)
    interpret.launch(
      _scales_for, 1, bits, result, RANGE=float(largest_range), SIZE=bits.size
    )
    wanted = bits.view(np.float32) / np.float32(largest_range)
    wanted = np.maximum(wanted, np.float32(2.0**-126))
    wanted[bits == 0] = 1
    np.testing.assert_array_equal(result, wanted)


class OfFewTest(parameterized.TestCase):
  """One program gives what `jp.quantize` computes."""

  @parameterized.product(
    shape=((1, 1, 16), (1, 7, 48), (2, 5, 96), (3, 16, 32)),
    block=((4, 32), (8, 128)),
    dtype=(np.float32, BF16),
  )
  @pytest.mark.sample(5)
  def test_largest_is_found_in_every_tile(self, shape, block, dtype):
    rng = np.random.default_rng(5)
    for _ in range(4):
      x = rng.normal(size=shape).astype(dtype)
      x.reshape(-1)[rng.integers(x.size)] = 100  # anywhere
      if x.size > 16:
        x.reshape(-1, 16)[rng.integers(x.size // 16), 2] = np.inf
      wanted = jp.quantize(jnp.asarray(x), jp.NVFP4).global_scale
      got = global_scale_of_few(x, *block)
      np.testing.assert_array_equal(got, np.asarray(wanted).reshape(1))

  def test_of_zeros_is_one(self):
    x = np.zeros((1, 3, 32), np.float32)
    self.assertEqual(global_scale_of_few(x, 4, 32), 1)

  @parameterized.parameters(
    ((1, 16, 2048), (16, 2048, 32)),
    ((1, 16, 4096), (8, 4096, 32)),
    ((1, 1, 8192), (1, 8192, 8)),
    ((1, 5, 48), (8, 64, 1)),
    ((1, 17, 4096), None),
    ((3, 1, 32), None),
  )
  def test_two_tiles_are_few(self, shape, wanted):
    batch, rows, k = shape
    for options in (
      quantize_config.NO_OPTIONS,
      quantize_config.QuantizeOptions(four_over_six=True),
    ):
      x = rows_of(rows, k, batch=batch, options=options)
      few = quantize_config.config_of_few(x, SM_90)
      self.assertEqual(
        few and (few.block_m, few.block_k, few.num_warps), wanted
      )
    for change in (
      {"options": quantize_config.QuantizeOptions(hadamard=16)},
      {"k_is_minor": False},
    ):
      other = dataclasses.replace(x, **change)
      self.assertIsNone(quantize_config.config_of_few(other, SM_90))


class GlobalScaleTest(parameterized.TestCase):
  @parameterized.product(
    case=(
      (1.0, np.float32), (1e-37, np.float32), (1e-42, np.float32),
      (3e37, np.float32), (100.0, np.float16), (1e30, BF16), (0.0, np.float32),
    ),
    most=(512, 4, 1),
  )  # fmt: skip
  @pytest.mark.sample(4)
  def test_results_are_those_of_jp_quantize(self, case, most):
    size, dtype = case
    rng = np.random.default_rng(12)
    x = (rng.standard_normal((3, 37, 304)) * size).astype(dtype)
    wanted = jp.quantize(jnp.asarray(x), jp.NVFP4)
    found = computed(x, most)
    self.assertLessEqual(found["maxima"].size, most)
    np.testing.assert_array_equal(
      found["global_scale"], wanted.global_scale.ravel()
    )
    for name, array in zip(
      ("values", "scale"), quantize_cases.expected(x, "nvfp4"), strict=True
    ):
      np.testing.assert_array_equal(found[name], array)

  @parameterized.parameters(512, 5)
  @pytest.mark.sample(1)
  def test_largest_is_found_in_every_tile(self, most):
    rng = np.random.default_rng(5)
    for _ in range(4):
      x = rng.normal(size=(3, 33, 272)).astype(np.float32)
      x.reshape(-1)[rng.integers(x.size)] = -100  # anywhere
      maxima = computed(x, most)["maxima"]
      self.assertEqual(maxima.view(np.float32).max(), 100)

  def test_blocks_with_nan_or_inf_take_no_part(self):
    x = np.ones((3, 40, 64), np.float32)
    x[0, 0, :4] = [np.nan, 1e30, -np.inf, 5]
    x[0, 3, 63] = -2688
    self.assertEqual(computed(x)["global_scale"], 1)

  @parameterized.product(
    bad=(np.nan, np.inf, -np.inf), row=(0, 1), most=(512, 3)
  )
  @pytest.mark.sample(4)
  def test_each_axis_leaves_out_its_own_blocks(self, bad, row, most):
    x = np.random.default_rng(14).standard_normal((2, 75, 96))
    x = x.astype(np.float32)
    x[0, 40, 50] = bad
    x[0, 40, 52] = 200  # in the row's block, in no bad one of a column
    x[0, 44, 50] = -100  # the other way round
    wanted = [
      jp.quantize(jnp.asarray(a), jp.NVFP4).global_scale
      for a in (x, np.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, 5))))
    ]
    self.assertEqual(wanted, [np.float32(g) / 2688 for g in (100, 200)])
    found = computed_both(x, row, most)
    largest = found["maxima"].view(np.float32).max(1)
    self.assertEqual(largest[row], 100)
    self.assertEqual([found["global_scale"], found["global_scale_t"]], wanted)

  def test_tensor_of_zeros_has_global_scale_one(self):
    x = np.zeros((3, 40, 64), BF16)
    found = computed(x)
    self.assertFalse(found["maxima"].any())
    self.assertEqual(found["global_scale"], 1)
    self.assertFalse(computed_both(x)["maxima"].any())


class ProgramsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((16, 4096), 16, (16, 256), 4),
    ((8192, 256), 512, (16, 256), 4),
    ((8208, 256), 512, (16, 256), 4),  # one has two tiles
    ((16384, 256), 512, (32, 256), 8),
    ((8192, 8192), 512, (64, 256), 16),
  )
  def test_many_tiles_have_fewer_and_larger_programs(
    self, shape, programs, block, warps
  ):
    rows, k = shape
    launch = quantize_plans.plan_maxima(rows_of(rows, k), SM_90)
    constants = dict(launch.constexprs)
    self.assertEqual(launch.grid, programs)
    self.assertEqual(constants["PROGRAMS"], programs)
    tile = constants["TILE"]
    self.assertEqual((tile.block_m, tile.block_k), block)
    self.assertEqual(launch.num_warps, warps)
    tiles = -(-rows // block[0]) * (k // block[1])
    self.assertEqual(constants["TILES"], tiles)

  def test_those_that_are_computed_are_read_by_what_quantizes(self):
    x = rows_of(64, 2048)
    first, second = quantize_plans.plan(
      dataclasses.replace(x, global_scale="computed"), SM_90
    )
    (given,) = quantize_plans.plan(
      dataclasses.replace(x, global_scale="of_maxima", num_maxima=first.grid),
      SM_90,
    )
    self.assertEqual(second, given)
    self.assertEqual(first.outputs[0].name, second.inputs[1])
