# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels that compute NVFP4's global scales agree with `jp.quantize`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import global_scales
from jaxplugin.kernels.gpu.quantization import quantize_config
from jaxplugin.kernels.interpreter import interpret

import jaxplugin as jp
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
SM_90 = quantize_cases.SM_90
element_strides = quantize_cases.element_strides
QUANTIZED = quantize_config.measured("nvfp4", quantize_config.NO_EXTRAS)
setUpModule = quantize_cases.skip_unless_interpreted


def computed_global_scale(x, none=1.0):
  config = quantize_config.default_config(
    "nvfp4", SM_90, x.shape[1], x.shape[2]
  )
  grid = quantize_config.launch_grid(config, *x.shape)
  partial = np.full(grid, -1, np.int32)
  interpret.launch(
    global_scales.finite_amax,
    grid,
    x,
    partial,
    *x.shape[1:],
    element_strides(x),
    BLOCK_M=config.block_m,
    BLOCK_K=config.block_k,
    QUANTIZED=QUANTIZED,
  )
  partial.flags.writeable = False
  result = np.full(1, np.nan, np.float32)
  interpret.launch(
    global_scales.reduce_global_scale,
    1,
    partial,
    result,
    partial.size,
    RANGE=448 * 6.0,
    CHUNK=4,
    NONE=none,
  )
  return result


def global_scale_of_few(x, block_m, block_k, none=1.0):
  result = np.full(1, np.nan, np.float32)
  batch, rows, k = x.shape
  interpret.launch(
    global_scales.global_scale_of_few,
    1,
    x,
    result,
    rows,
    k,
    element_strides(x),
    TILES=batch * -(-rows // block_m) * -(-k // block_k),
    BLOCK_M=block_m,
    BLOCK_K=block_k,
    QUANTIZED=QUANTIZED,
    RANGE=448 * 6.0,
    NONE=none,
  )
  return result


class OfFewTest(parameterized.TestCase):
  """One program gives what `jp.quantize` computes."""

  @parameterized.product(
    shape=((1, 1, 16), (1, 7, 48), (2, 5, 96), (3, 16, 32)),
    block=((4, 32), (8, 128)),
    dtype=(np.float32, BF16),
  )
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

  def test_of_zeros_is_what_is_asked_for(self):
    x = np.zeros((1, 3, 32), np.float32)
    self.assertEqual(global_scale_of_few(x, 4, 32), 1)
    self.assertEqual(global_scale_of_few(x, 4, 32, none=0.0), 0)

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
    for extras in (
      quantize_config.NO_EXTRAS,
      quantize_config.Extras(four_over_six=True),
    ):
      x = quantize_config.Rows(
        batch=batch,
        rows=rows,
        k=k,
        k_is_minor=True,
        format="nvfp4",
        extras=extras,
      )
      few = quantize_config.config_of_few(x, SM_90)
      self.assertEqual(
        few and (few.block_m, few.block_k, few.num_warps), wanted
      )
    for change in (
      {"extras": quantize_config.Extras(hadamard=16)},
      {"k_is_minor": False},
    ):
      other = dataclasses.replace(x, **change)
      self.assertIsNone(quantize_config.config_of_few(other, SM_90))


def partial_amax_both(x):
  """What `finite_amax_both` writes."""
  config = quantize_config.default_config(
    "nvfp4", SM_90, *x.shape[1:], both=True
  )
  grid = quantize_config.launch_grid(config, *x.shape)
  partial = [np.full(grid, -1, np.int32) for _ in range(2)]
  interpret.launch(
    global_scales.finite_amax_both,
    grid,
    x,
    *partial,
    *x.shape[1:],
    element_strides(x),
    BLOCK_M=config.block_m,
    BLOCK_K=config.block_k,
    QUANTIZED=QUANTIZED,
    QUANTIZED_T=QUANTIZED,
  )
  return partial


def computed_global_scales(x):
  """Those of blocks along rows and along columns, from one read."""
  partial = partial_amax_both(x)
  results = [np.full(1, np.nan, np.float32) for _ in range(2)]
  interpret.launch(
    global_scales.reduce_global_scales,
    1,
    *partial,
    *results,
    partial[0].size,
    RANGE=448 * 6.0,
    CHUNK=4,
  )
  return results


def partial_scales(x, place):
  """What a part of an array asks for, that of rows first if place is 0."""
  partial = partial_amax_both(x)
  result = np.full(2, np.nan, np.float32)
  interpret.launch(
    global_scales.reduce_partial_scales,
    1,
    *partial,
    result,
    partial[0].size,
    RANGE=448 * 6.0,
    CHUNK=4,
    PLACE=place,
  )
  return result


class GlobalScaleTest(parameterized.TestCase):
  @parameterized.parameters(
    (1.0, np.float32), (1e-37, np.float32), (1e-42, np.float32),
    (3e37, np.float32), (100.0, np.float16), (1e30, BF16), (0.0, np.float32),
  )  # fmt: skip
  def test_it_is_that_of_jp_quantize(self, size, dtype):
    rng = np.random.default_rng(12)
    x = (rng.standard_normal((3, 37, 560)) * size).astype(dtype)
    wanted = jp.quantize(jnp.asarray(x), jp.NVFP4).global_scale
    np.testing.assert_array_equal(computed_global_scale(x), wanted.ravel())

  def test_blocks_with_nan_or_inf_take_no_part(self):
    x = np.ones((1, 4, 64), np.float32)
    x[0, 0, :4] = [np.nan, 1e30, -np.inf, 5]
    x[0, 3, 63] = -2688
    self.assertEqual(computed_global_scale(x), 1)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_each_axis_leaves_out_its_own_blocks(self, bad):
    x = np.random.default_rng(14).standard_normal((2, 75, 96))
    x = x.astype(np.float32)
    x[1, 40, 50] = bad
    x[1, 40, 52] = 200  # in the row's block, in no bad one of a column
    x[1, 44, 50] = -100  # the other way round
    wanted = [
      jp.quantize(jnp.asarray(a), jp.NVFP4).global_scale
      for a in (x, np.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, 5))))
    ]
    self.assertEqual(wanted, [np.float32(g) / 2688 for g in (100, 200)])
    self.assertEqual(computed_global_scales(x), wanted)

  @parameterized.parameters(0, 1)
  def test_parts_have_both_in_one_array_or_0_for_none(self, place):
    x = np.zeros((1, 40, 48), np.float32)
    self.assertEqual(computed_global_scale(x, none=0.0), 0)
    np.testing.assert_array_equal(partial_scales(x, place), [0, 0])
    x[0, 0, 0], x[0, 0, 1], x[0, 20, 1] = np.nan, 448, 2 * 448
    x[0, 20, 0] = -np.inf  # leaves 896 to columns, and nothing to rows
    expected = [0, 1 / 3][:: 1 - 2 * place]
    np.testing.assert_array_equal(
      partial_scales(x, place), np.float32(expected)
    )

  def test_tensor_of_zeros_has_global_scale_one(self):
    self.assertEqual(computed_global_scales(np.zeros((1, 2, 32), BF16)), [1, 1])
    self.assertEqual(computed_global_scale(np.zeros((1, 2, 32), BF16)), 1)


if __name__ == "__main__":
  absltest.main()
