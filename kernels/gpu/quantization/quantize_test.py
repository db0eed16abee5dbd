# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantize kernel gives the bits of `jp.quantize`, in the interpreter."""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import quantize_config

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.testing.interpreter import interpret, interpret_ops
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
FORMAT_NAMES = quantize_cases.FORMAT_NAMES
expected = quantize_cases.expected
run_quantize = quantize_cases.run_quantize
setUpModule = interpret.skip_unless_supported

# One program for a whole sweep.
SWEEP = quantize_config.QuantizeConfig(
  block_m=256, block_k=1024, num_warps=4, hardware_cast=False
)
CASES = (
  ("mxfp8", "up"),
  ("mxfp8", "floor"),
  ("mxfp8_e5m2", "up"),
  ("mxfp8_e5m2", "floor"),
  ("mxfp6_e2m3", "up"),
  ("mxfp6_e2m3", "floor"),
  ("mxfp6_e3m2", "up"),
  ("mxfp6_e3m2", "floor"),
  ("mxfp4", "up"),
  ("mxfp4", "floor"),
  ("nvfp4", "up"),
)


def casts_of(format_name):
  """Both ways to cast, where there are two."""
  is_cast = format_name.startswith("mxfp8") or format_name.endswith("fp4")
  return (False, True) if is_cast else (False,)


def assert_same(got, wanted):
  """Values and scales are the same."""
  np.testing.assert_array_equal(got[1], wanted[1])
  np.testing.assert_array_equal(got[0], wanted[0])


def global_scale_of(format_name, number=0.003):
  return np.array([number], np.float32) if format_name == "nvfp4" else None


def bf16_codes():
  """Every bf16, in an order that mixes large, small, NaN and Inf."""
  rng = np.random.default_rng(0)
  codes = rng.permutation(2**16).astype(np.uint16)
  return codes.reshape(1, 64, 1024).view(BF16)


def bf16_codes_by_size():
  """Every bf16, neighbours in one block: blocks without NaN of every scale."""
  codes = np.arange(2**15, dtype=np.uint16)
  codes = codes | (np.arange(2**15, dtype=np.uint16) % 2 << 15)
  return codes.reshape(1, 32, 1024).view(BF16)


def f32_patterns():
  """Random bits: all exponents, and NaN or Inf in every eighth MX block."""
  rng = np.random.default_rng(1)
  bits = rng.integers(0, 2**32, (1, 256, 1024), dtype=np.uint32)
  return bits.view(np.float32)


def f32_of_similar_size():
  """Blocks of one magnitude each, from subnormals to the largest."""
  rng = np.random.default_rng(2)
  exponent = rng.integers(0, 255, (1, 256, 64, 1), dtype=np.uint32)
  exponent = np.maximum(
    exponent.astype(np.int64) - rng.integers(0, 6, (1, 256, 64, 16)), 0
  )
  mantissa = rng.integers(0, 2**23, exponent.shape)
  # Short mantissas make quotients that lie halfway between two codes.
  mantissa &= -(1 << rng.integers(0, 24, (1, 256, 64, 1)))
  sign = rng.integers(0, 2, exponent.shape)
  bits = (sign << 31 | exponent << 23 | mantissa).astype(np.uint32)
  return bits.reshape(1, 256, 1024).view(np.float32)


def f16_patterns():
  rng = np.random.default_rng(3)
  bits = rng.permutation(2**16).astype(np.uint16).reshape(1, 64, 1024)
  # Random blocks nearly all have an Inf or a NaN; so only half of them.
  bits[:, ::2] = np.where(
    bits[:, ::2] & 0x7C00 == 0x7C00, bits[:, ::2] ^ 0x4000, bits[:, ::2]
  )
  return bits.view(np.float16)


INPUTS = {
  "every_bf16": bf16_codes,
  "every_bf16_by_size": bf16_codes_by_size,
  "f32_patterns": f32_patterns,
  "f32_of_similar_size": f32_of_similar_size,
  "f16_patterns": f16_patterns,
}


class SweepTest(parameterized.TestCase):
  @parameterized.product(case=CASES, name=tuple(INPUTS))
  @pytest.mark.sample(12)  # each case
  def test_bits_are_those_of_jp_quantize(self, case, name):
    format_name, scale_rounding = case
    x = INPUTS[name]()
    global_scales = [None]
    if format_name == "nvfp4":
      # Below, inside and above the range of those that need no factor.
      global_scales = [1.0, 0.0123, 3e-30, 2**-140, 2.0**-126, 7e25, 3e38]
    for global_scale in global_scales:
      if global_scale is not None:
        global_scale = np.array([global_scale], np.float32)
      wanted = expected(
        x, format_name, scale_rounding=scale_rounding, global_scale=global_scale
      )
      for hardware_cast in casts_of(format_name):
        config = dataclasses.replace(
          SWEEP, block_m=x.shape[1], hardware_cast=hardware_cast
        )
        got = run_quantize(
          x,
          format_name,
          scale_rounding=scale_rounding,
          global_scale=global_scale,
          config=config,
        )
        assert_same(got, wanted)

  @parameterized.parameters(-2, -1, 0, 1, 2)
  def test_last_bits_of_an_approximate_reciprocal_do_not_matter(self, ulps):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    near = [np.nextafter(ties, np.float32(x)) for x in (0, 9)]
    block = np.concatenate([[6.0], ties, near[0], [0.0], [6.0], near[1], ties])
    block = np.pad(block, (0, -len(block) % 16)).astype(np.float32)
    x = np.stack([block * np.float32(2.0**e) for e in range(-8, 8)])[None]

    def approximate(value):
      exact = np.float32(1) / value.data
      return ((exact.view(np.int32) + ulps).view(np.float32),)

    text = "rcp.approx.ftz.f32 $0, $1;"
    # Steps whose significand is all ones are among these.
    for below in range(4):
      global_scale = np.float32(1)
      for _ in range(below):
        global_scale = np.nextafter(global_scale, np.float32(0))
      scales = np.array([global_scale])
      wanted = expected(x, "nvfp4", global_scale=scales)
      config = dataclasses.replace(SWEEP, block_k=32, hardware_cast=True)
      with mock.patch.dict(interpret_ops._ASSEMBLY, {text: approximate}):
        got = run_quantize(x, "nvfp4", global_scale=scales, config=config)
      assert_same(got, wanted)

  def test_sweeps_cover_nan_and_finite_blocks_and_every_scale(self):
    _, scale = expected(bf16_codes_by_size(), "mxfp4")
    self.assertContainsSubset({*range(254), 255}, scale.flatten().tolist())
    for name in ("f32_patterns", "f16_patterns"):
      _, scale = expected(INPUTS[name](), "mxfp8")
      self.assertBetween(np.mean(scale == 255), 0.05, 0.6)

  @parameterized.product(
    format_name=("mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"),
    dtype=(np.float32, np.float16, BF16),
  )
  def test_values_next_to_ties_round_as_ml_dtypes_casts(
    self, format_name, dtype
  ):
    format = formats.by_name(format_name)
    values_dtype, bits = format.values_dtype, format.facts.element.sign_shift
    codes = np.arange(2**bits, dtype=np.uint8).view(values_dtype)
    numbers = codes.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(dtype)
    unsigned = f"uint{8 * middles.itemsize}"
    ulps = np.arange(-2, 3).astype(unsigned)  # wraps, as the sum does
    x = (middles.view(unsigned)[:, None] + ulps).view(dtype).reshape(-1)
    x = np.pad(x, (0, -x.size % 31)).reshape(1, -1, 31)
    # The largest value makes the scale 1.
    largest = np.full((*x.shape[:2], 1), numbers[-1], dtype)
    x = np.concatenate([x, largest], axis=-1)
    wanted = x.astype(np.float32).astype(values_dtype).view(np.uint8)
    if bits == 3:
      wanted = wanted[..., ::2] | wanted[..., 1::2] << 4
    for hardware_cast in casts_of(format_name):
      config = dataclasses.replace(
        SWEEP, block_k=32, hardware_cast=hardware_cast
      )
      values, scale = run_quantize(x, format_name, config=config)
      np.testing.assert_array_equal(scale, 127)
      np.testing.assert_array_equal(values, wanted)

  def test_nvfp4_rounds_quotients_next_to_ties_as_division_does(self):
    rng = np.random.default_rng(4)
    global_scale = rng.uniform(0.5, 2, (8, 1, 1)).astype(np.float32)
    scale = rng.integers(0x30, 0x7E, (8, 512, 1), dtype=np.uint8)
    step = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    step = step * global_scale
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    x = step * np.tile(middles, 2)[None, None, :14]
    ulps = rng.integers(-2, 3, x.shape, dtype=np.int32)
    x = (x.view(np.int32) + ulps).view(np.float32)
    x = np.concatenate([x, np.broadcast_to(6 * step, (8, 512, 2))], axis=-1)
    x = x.reshape(8, 8, 1024)
    for row, one in zip(x, global_scale.reshape(8, 1), strict=True):
      got = run_quantize(row[None], "nvfp4", global_scale=one)
      assert_same(got, expected(row[None], "nvfp4", global_scale=one))


class SpecialValueTest(parameterized.TestCase):
  @parameterized.parameters(*FORMAT_NAMES)
  def test_zeros_keep_their_sign_and_get_scale_zero(self, format_name):
    x = np.zeros((1, 2, 64), np.float32)
    x[:, 1] = -0.0
    one = global_scale_of(format_name, 1)
    values, scale = run_quantize(x, format_name, global_scale=one)
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(values[0, 0], 0)
    facts = formats.by_name(format_name).facts
    minus_zero = 1 << facts.element.sign_shift
    if facts.is_packed:
      minus_zero |= minus_zero << 4
    np.testing.assert_array_equal(values[0, 1], minus_zero)

  @parameterized.parameters(0.0, -1.0, -0.0, np.inf, np.nan)
  def test_nvfp4_with_a_bad_global_scale_is_nan(self, global_scale):
    x = np.ones((1, 2, 32), np.float32)
    values, scale = run_quantize(
      x, "nvfp4", global_scale=np.array([global_scale], np.float32)
    )
    np.testing.assert_array_equal(scale, 0x7F)
    np.testing.assert_array_equal(values, 0)


class ShapeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(5)

  def normal(self, shape, dtype=np.float32):
    return self.rng.standard_normal(shape).astype(dtype)

  def test_input_with_strides_is_read_between_poison(self):
    base = np.full((4, 9, 400), np.nan, np.float32)
    x = base[::2, 1:8, 3:99]
    x[...] = self.normal(x.shape)
    assert_same(run_quantize(x, "mxfp8"), expected(x, "mxfp8"))

  @parameterized.parameters(*FORMAT_NAMES)
  @pytest.mark.sample(2)
  def test_padded_values_of_a_swizzled_scale_are_zeros(self, format_name):
    x = self.normal((2, 131, 160))
    one = global_scale_of(format_name)
    values, scale = run_quantize(
      x, format_name, global_scale=one, swizzled=True, pads_values=True
    )
    wanted = expected(x, format_name, global_scale=one)
    swizzled = layouts.swizzle_scale(jnp.asarray(wanted[1]))
    assert_same((values[:, :131], scale), (wanted[0], np.asarray(swizzled)))
    self.assertEqual(values.shape[1], 256)
    np.testing.assert_array_equal(values[:, 131:], 0)

  def test_offsets_past_2_to_the_31_are_64_bit(self):
    stride = 2**30 + 32  # fits in 32 bits; twice that does not
    wide = np.zeros(2 * stride + 32, np.float16)  # mapped, and hardly touched
    x = np.lib.stride_tricks.as_strided(
      wide, (1, 3, 32), (0, 2 * stride, wide.itemsize)
    )
    x[0] = self.normal((3, 32))
    got = run_quantize(x, "mxfp8", check_races=False)
    assert_same(got, expected(x.copy(), "mxfp8"))
