# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` to the MX formats, bitwise, against NumPy in f64."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.core import formats
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_oracle as oracle

MXFP8 = formats.MXFP8
MXFP8_E5M2 = formats.MXFP8_E5M2
MXFP4 = formats.MXFP4


def bit_patterns(_):
  words = np.random.default_rng(1).integers(0, 2**32, (4096, 32), np.uint32)
  words[:1024] &= 0x807FFFFF  # subnormal
  words[1024:2048] &= 0x81FFFFFF
  return words.view(np.float32)


def blocks_of_every_magnitude(_):
  top = np.repeat(np.arange(-149, 128), 8)[:, None]
  return oracle.random_f32(2, (len(top), 32), top)


def subnormals(_):
  random = np.random.default_rng(3)
  words = random.integers(0, 2 ** random.integers(1, 24, (512, 1)), (512, 32))
  return words.astype(np.uint32).view(np.float32)


def amax_around_powers_of_two(format):
  """Returns max * 2^e and 2^e, and what is 1 or 2 f32 ulps to either side."""
  info, _ = oracle.VALUES[format]
  x = np.concatenate(
    [
      np.ldexp(factor, np.arange(-120, 112)).astype(np.float32)
      for factor in (1.0, info.max, info.max / 2, 1.5)
    ]
  )
  bits = x.view(np.int32)[:, None] + np.arange(-2, 3)
  blocks = np.zeros((bits.size, 32), np.float32)
  blocks[:, 5] = bits.astype(np.int32).view(np.float32).ravel()
  return blocks


INPUTS = {
  "every_bf16": lambda _: oracle.every_value(ml_dtypes.bfloat16, 32),
  "every_f16": lambda _: oracle.every_value(np.float16, 32),
  "bit_patterns": bit_patterns,
  "blocks_of_every_magnitude": blocks_of_every_magnitude,
  "subnormals": subnormals,
  "amax_around_powers_of_two": amax_around_powers_of_two,
}


class QuantizeMxTest(parameterized.TestCase):
  @parameterized.product(
    name=tuple(INPUTS),
    format=oracle.MX_FORMATS,
    scale_rounding=oracle.ROUNDINGS,
  )
  @pytest.mark.sample(24)
  def test_bits_are_those_of_numpy(self, name, format, scale_rounding):
    x = INPUTS[name](format)
    result = oracle.jitted(format, scale_rounding)(x)
    expected = oracle.reference_mx(x.astype(np.float32), format, scale_rounding)
    oracle.assert_codes(result, *expected)

  def test_inputs_have_every_value_of_16_bits_and_subnormals(self):
    for name in ("every_bf16", "every_f16"):
      first = INPUTS[name](MXFP8)[:, 0].view(np.uint16)
      self.assertLen(np.unique(first), 65536)
    x = subnormals(MXFP8)
    self.assertLess(x.max(), oracle.F32_MIN_NORMAL)
    for format, rounding in itertools.product(
      oracle.MX_FORMATS, oracle.ROUNDINGS
    ):
      codes, _ = oracle.reference_mx(x, format, rounding)
      self.assertTrue(codes.any())

  @parameterized.parameters(
    # By hand: (format, amax, byte for "up", byte for "floor"); 127 is 2^0.
    (MXFP8, 448.0, 127, 127),
    (MXFP8, 449.0, 128, 127),
    (MXFP8, 511.0, 128, 127),
    (MXFP8, 512.0, 128, 128),
    (MXFP8, 256.0, 127, 127),
    (MXFP8, 224.0, 126, 126),
    (MXFP8, 225.0, 127, 126),
    (MXFP8, 1.0, 119, 119),
    (MXFP8_E5M2, 57344.0, 127, 127),
    (MXFP8_E5M2, 57345.0, 128, 127),
    (MXFP8_E5M2, 32768.0, 127, 127),
    (MXFP4, 6.0, 127, 127),
    (MXFP4, 6.5, 128, 127),
    (MXFP4, 4.0, 127, 127),
    (MXFP4, 3.5, 127, 126),
    (MXFP4, 3.0, 126, 126),
  )
  @pytest.mark.sample(2)
  def test_scale_rounds_up_or_down_as_asked(self, format, amax, up, floor):
    x = jnp.zeros(32).at[7].set(-amax)
    for scale_rounding, expected in (("up", up), ("floor", floor)):
      result = oracle.jitted(format, scale_rounding)(x)
      self.assertEqual(oracle.as_codes(result.scale)[0], expected)

  @parameterized.parameters(*oracle.MX_FORMATS)
  @pytest.mark.sample(2)
  def test_up_is_the_default_and_never_saturates(self, format):
    x = oracle.every_value(ml_dtypes.bfloat16, 32).astype(np.float32)
    x = x[np.isfinite(x).all(-1)]
    result = oracle.jitted(format)(x)
    oracle.assert_codes(
      quantization.quantize(x[::99], format),
      *oracle.reference_mx(x[::99], format, "up"),
    )
    scale = np.ldexp(1.0, oracle.as_codes(result.scale).astype(int) - 127)
    info, _ = oracle.VALUES[format]
    self.assertLessEqual((np.abs(x).max(-1) / scale[:, 0]).max(), info.max)

  @parameterized.product(
    format=oracle.MX_FORMATS,
    scale_rounding=oracle.ROUNDINGS,
    special=(np.nan, -np.nan, np.inf, -np.inf),
  )
  @pytest.mark.sample(5)
  def test_nan_or_inf_spoils_its_own_block_and_no_other(
    self, format, scale_rounding, special
  ):
    x = np.random.default_rng(4).normal(size=(3, 96)).astype(np.float32)
    clean = oracle.jitted(format, scale_rounding)(x)
    spoiled = x.copy()
    spoiled[1, 40] = special
    result = oracle.jitted(format, scale_rounding)(spoiled)
    expected_scale = oracle.as_codes(clean.scale).copy()
    expected_scale[1, 1] = 255
    np.testing.assert_array_equal(oracle.as_codes(result.scale), expected_scale)
    is_spoiled = np.zeros(x.shape, bool)
    is_spoiled[1, 32:64] = True
    restored = np.asarray(oracle.dequantize(result))
    np.testing.assert_array_equal(np.isnan(restored), is_spoiled)
    np.testing.assert_array_equal(
      oracle.as_codes(result.unpack().values)[~is_spoiled],
      oracle.as_codes(clean.unpack().values)[~is_spoiled],
    )


class OperationsMxTest(lowerings.WithOperations, QuantizeMxTest):
  pass
