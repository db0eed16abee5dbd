# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes to the formats of checkpoints and compares with NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract

NEW = (
  *(
    format
    for format in formats.NAMED[len(formats.KNOWN) :]
    if format.scales_codes
  ),
  contract.block_format("int4_64", ml_dtypes.int4, np.float32, 64),
  contract.block_format("fp8_1x64_bf16", formats.E4M3, formats.BF16, 64),
)
F32_MAX = float(np.finfo(np.float32).max)
F32_TINY = float(np.finfo(np.float32).tiny)


def largest(format):
  """Returns the largest value of a format, from its dtype."""
  if not format.is_integer:
    return float(ml_dtypes.finfo(format.values_dtype).max)
  return float(ml_dtypes.iinfo(format.values_dtype).max) * unit(format)


def unit(format):
  return 2.0**-format.fraction_bits


def nearest_scale(amax, format):
  """Returns f32 scales of f32 maxima: rounded, neither 0 nor too large."""
  ideal = amax / np.float32(largest(format))
  info = ml_dtypes.finfo(format.scale_dtype)
  lowest = max(float(info.smallest_subnormal), F32_TINY)
  ideal = np.clip(ideal, lowest, float(info.max)).astype(np.float32)
  scale = ideal.astype(format.scale_dtype)
  # The largest value times the scale must be finite in f32.
  codes = scale.view(f"uint{8 * scale.dtype.itemsize}").copy()
  codes[scale.astype(np.float64) * largest(format) > F32_MAX] -= 1
  scale = codes.view(format.scale_dtype).astype(np.float32)
  return np.where(amax > 0, scale, np.float32(0))


def power_of_two_scale(amax, format):
  with np.errstate(divide="ignore"):
    exponent = np.ceil(np.log2(amax.astype(np.float64) / largest(format)))
  return (2.0 ** np.clip(exponent, -127, 127)).astype(np.float32)


def oracle(x, format):
  """Returns f64 codes, f32 scales, and f32 products of both, by NumPy.

  x is in blocks along the last axis. All divisions are in f32, like
  `jp.quantize`.
  """
  x = np.asarray(x, np.float32)
  *lead, n, k = x.shape
  size, rows = format.along(k).block_size, format.block_rows
  padded = np.pad(x, [(0, 0)] * len(lead) + [(0, -n % rows), (0, -k % size)])
  blocks = padded.reshape(*lead, -1, rows, padded.shape[-1] // size, size)
  amax = np.abs(blocks).max((-1, -3), keepdims=True)  # NaN if a value is NaN
  is_nan = ~np.isfinite(amax)
  amax = np.where(is_nan, np.float32(0), amax)
  rule = nearest_scale
  if format.scale_is_power_of_two:
    rule = power_of_two_scale
  scale = rule(amax, format)
  with np.errstate(all="ignore"):
    quotient = np.where(scale == 0, np.float32(0), blocks / scale)
  quotient = np.where(is_nan, np.float32(0), quotient)
  quotient = np.clip(quotient, -largest(format), largest(format))
  if format.is_integer:
    codes = np.rint(quotient / unit(format)).astype(np.float64)
  else:
    codes = quotient.astype(format.values_dtype).astype(np.float64)
  scale = np.where(is_nan, np.float32(np.nan), scale)
  with np.errstate(all="ignore"):
    values = (codes * unit(format) * scale).astype(np.float32)
  codes, values = (
    a.reshape(padded.shape)[..., :n, :k] for a in (codes, values)
  )
  return codes, scale[..., 0, :, 0], values


def odd_numbers(n, k):
  """Returns f32[n, k], n > 135, with special rows from row 128 on."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, k)) * np.exp(2 * rng.normal(size=(n, k)))
  x = x.astype(np.float32)
  x[:2] = 0
  x[0, 1] = -0.0
  x[128] = np.sign(x[128]) * F32_MAX
  x[129] *= 1e-37
  x[130, -1] = np.nan
  x[131, 0] = -np.inf
  x[132] *= 1e8
  x[133] *= 1e-10
  return x


@jax.jit
def codes_of(x):
  """Returns the values as f32, the scales as f32, and the product."""
  values = x.unpack().values.astype(jnp.float32)
  return values, x.scale.astype(jnp.float32), jp.dequantize(x)


class FormatsOfCheckpointsTest(parameterized.TestCase):
  def assert_is_oracle(self, found, x, format):
    for actual, wanted in zip(found, oracle(x, format), strict=True):
      # XLA:CPU flushes products below F32_TINY.
      np.testing.assert_allclose(actual, wanted, 0, F32_TINY)

  def test_codes_are_those_of_numpy(self):
    normal = np.random.default_rng(1).normal
    rows = [(f, odd_numbers(140, 576 if f.fits(33) else 64)) for f in NEW]
    rows += [  # Sizes need not be multiples of blocks.
      (format, normal(size=shape).astype(np.float32))
      for format, shape in (
        (jp.FP8_1X128, (2, 3, 200)),
        (jp.FP8_128X128, (2, 130, 3)),
        (jp.FP8_ROW, (5, 1)),
        (jp.INT4_128, (3, 33)),  # odd, so not packed
      )
    ]

    @jax.jit
    def run(given):
      results = []
      for (format, _), x in zip(rows, given, strict=True):
        found = jp.quantize(x, format)
        self.assertEqual(found.shape, x.shape)
        results.append(codes_of(found))
      return results

    given = [x for _, x in rows]
    for (format, x), found in zip(rows, run(given), strict=True):
      with self.subTest(f"{format.name} {x.shape}"):
        self.assert_is_oracle(found, x, format)

  def test_other_axes_have_the_same_codes(self):
    cases = jp.INT8_32, jp.INT4_128_BF16, jp.INT8_ROW
    x = np.random.default_rng(2).normal(size=(140, 6)).astype(np.float32)
    both = lambda x, format: map(
      codes_of, jp.quantize_both(x, format, axes=(0, 1))
    )
    run = jax.jit(lambda x: [tuple(both(x, format)) for format in cases])
    for format, (found, along_rows) in zip(cases, run(x), strict=True):
      with self.subTest(format.name):
        self.assert_is_oracle([a.T for a in found], x.T, format)
        self.assert_is_oracle(along_rows, x, format)

  def test_both_axes_take_all_arguments(self):
    x = np.random.default_rng(4).normal(size=(256, 128)).astype(np.float32)
    format = contract.block_format(
      "e2m1_e4m3_128", formats.E2M1, formats.E4M3, 128, has_global_scale=True
    )
    for array in jp.quantize_both(x, format, global_scale=0.5):
      np.testing.assert_array_equal(array.global_scale, np.full((1, 1), 0.5))
    with self.assertRaisesRegex(ValueError, "^quantize_both: packed must be"):
      jp.quantize_both(x[:, :127], jp.INT4_128, packed=True)

  def test_square_blocks_are_those_of_the_transpose(self):
    x = np.random.default_rng(3).normal(size=(2, 130, 200)).astype(np.float32)

    @jax.jit
    def run(x):
      found = jp.quantize(x, jp.FP8_128X128)
      other = jp.quantize(x.transpose(0, 2, 1), jp.FP8_128X128)
      along_rows = jp.quantize(x, jp.FP8_128X128, axis=1)
      transposed = codes_of(found.transpose(0, 2, 1))
      return (*transposed, found.scale), (*codes_of(other), along_rows.scale)

    jax.tree.map(np.testing.assert_array_equal, *run(x))

  @parameterized.parameters(jp.INT4_32, jp.FP8_128X128)
  def test_stochastic_rounding_is_unbiased(self, format):
    num_keys, standard_errors = 512, 5
    x = jnp.linspace(-1, 1, 128).reshape(1, 128)

    @jax.jit
    @jax.vmap
    def rounded(key):
      return jp.dequantize(jp.quantize(x, format, key=key))

    found = np.asarray(rounded(jax.random.split(jax.random.key(0), num_keys)))
    error = standard_errors * found.std(0) / num_keys**0.5 + 1e-3
    np.testing.assert_array_less(np.abs(found.mean(0) - x), error)
    self.assertGreater(found.std(0).max(), 0)

  @parameterized.parameters(
    (jp.INT8_32, {"scale_layout": "swizzled_128x4"}, '"linear" for int8_32'),
    (jp.FP8_128X128_E8M0, {"scale_layout": "swizzled_128x4"}, "of one row"),
    (jp.FP8_128X128, {"axis": 0}, r"one of the last two .* got axis 0"),
    (jp.INT8_ROW, {"scale_rounding": "floor"}, "got 'floor' for int8_row"),
  )
  def test_bad_argument_is_named(self, format, arguments, message):
    with self.assertRaisesRegex(ValueError, f"^quantize: .*{message}"):
      jp.quantize(jnp.ones((2, 128, 128)), format, **arguments)

  def test_square_blocks_need_two_dimensions(self):
    with self.assertRaisesRegex(
      TypeError, r"rank must be 2 or more .*\(128,\)"
    ):
      jp.quantize(jnp.ones(128), jp.FP8_128X128)
