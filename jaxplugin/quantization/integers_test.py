# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes to integers by the rules of other packages, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract

INT8_64 = contract.block_format(
  "int8_64", np.int8, np.float32, 64, offset_dtype=np.int8
)
INT4_64_MIN = contract.block_format(
  "int4_64_min", ml_dtypes.int4, ml_dtypes.bfloat16, 64, offset_dtype=np.float32
)
UINT8_ROW = contract.block_format(
  "uint8_row", np.int8, np.float32, 0, offset_dtype=np.uint8, code_offset=128
)
FORMATS = (
  jp.UINT4_128,
  jp.UINT4_128_BF16,
  jp.UINT4_32_MIN,
  INT8_64,
  INT4_64_MIN,
  UINT8_ROW,
)
F32_MAX = np.finfo(np.float32).max
F32_TINY = np.finfo(np.float32).tiny


def flushed(x):
  return np.where(np.abs(x) < F32_TINY, np.float32(0), x)


def oracle(x, format):
  """Returns codes, scales and offsets of x, in blocks along the last axis.

  All arithmetic is in f32, one operation at a time.
  """
  x = flushed(np.asarray(x, np.float32))
  size = format.along(x.shape[-1]).block_size
  bits = ml_dtypes.iinfo(format.values_dtype).bits
  lowest = format.code_offset - 2 ** (bits - 1)
  highest = lowest + 2**bits - 1
  found = []
  for start in range(0, x.shape[-1], size):
    block = x[:, start : start + size]
    found.append(_oracle_of_block(block, format, lowest, highest))
  codes, scale, offset = zip(*found, strict=True)
  return (
    np.concatenate(codes, -1),
    np.concatenate(scale, -1),
    np.concatenate(offset, -1),
  )


@np.errstate(all="ignore")
def _oracle_of_block(block, format, lowest, highest):
  is_bad = ~np.isfinite(block).all(-1, keepdims=True)
  block = np.where(is_bad, np.float32(0), block)
  low, high = block.min(-1, keepdims=True), block.max(-1, keepdims=True)
  has_zero_points = np.dtype(format.offset_dtype).kind in "iu"
  if has_zero_points:
    low, high = np.minimum(low, 0), np.maximum(high, 0)
  steps = np.float32(highest - lowest)
  extent = flushed(high - low)
  step = np.where(np.isinf(extent), high / steps - low / steps, extent / steps)
  info = ml_dtypes.finfo(format.scale_dtype)
  smallest = max(np.float32(info.smallest_subnormal), F32_TINY)
  step = np.clip(step, smallest, np.float32(info.max))
  step = np.where(extent == 0, np.float32(0), step)
  scale = step.astype(format.scale_dtype)
  rounded = scale.astype(np.float32)
  divisor = np.where(rounded == 0, np.float32(1), rounded)
  if has_zero_points:
    offset = np.clip(lowest + np.rint(-low / divisor), lowest, highest)
    codes = np.clip(np.rint(block / divisor) + offset, lowest, highest)
  else:
    inverse = np.float32(1) / np.where(step == 0, np.float32(1), step)
    inverse = np.where(step == 0, np.float32(0), inverse)
    quotient = flushed(block - low) * inverse
    codes = np.floor(quotient + np.float32(0.5)) + lowest
    codes = np.clip(codes, lowest, highest)
    largest = np.float32(ml_dtypes.finfo(format.offset_dtype).max)
    half = np.float32(-lowest / 2) * rounded
    offset = np.clip((low + half) + half, -largest, largest)
  codes = np.where(is_bad, format.code_offset, codes)
  scale = np.where(is_bad, np.nan, rounded).astype(format.scale_dtype)
  offset = np.where(is_bad, 0, offset).astype(format.offset_dtype)
  return codes, scale, offset


def odd_numbers(n, k):
  """Returns f32[n, k], n > 12, with special first rows."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, k)) * np.exp(2 * rng.normal(size=(n, k)))
  x = x.astype(np.float32)
  x[0] = 0
  x[1] = 3.0
  x[2] = np.abs(x[2])
  x[3] = -np.abs(x[3])
  x[4] = np.sign(x[4]) * F32_MAX
  x[5] *= 1e-37
  x[6, -1] = np.nan
  x[7, 0] = -np.inf
  x[8] *= 1e8
  x[9] *= 1e-10
  x[10] += 100
  x[11] = np.float32(1e-40)
  return x


class AsymmetricTest(parameterized.TestCase):
  def assert_is_oracle(self, found, x):
    codes, scale, offset = oracle(x, found.format)
    stored = np.asarray(found.unpack().values).astype(np.float64)
    np.testing.assert_array_equal(stored + found.format.code_offset, codes)
    for actual, expected in ((found.scale, scale), (found.offset, offset)):
      self.assertEqual(actual.dtype, expected.dtype)
      np.testing.assert_array_equal(
        np.asarray(actual, np.float32), expected.astype(np.float32)
      )

  def test_bits_are_those_of_numpy(self):
    x = odd_numbers(30, 580)  # the last block is short
    run = jax.jit(lambda x: [jp.quantize(x, f).unpack() for f in FORMATS])
    for found in run(x):
      with self.subTest(found.format.name):
        self.assert_is_oracle(found, x)

  def test_size_zero_gives_an_empty_array(self):
    rows = (((3, 0), 1), ((0, 3), 0), ((0, 128), 1))

    @jax.jit
    def run():
      arrays = [
        jp.quantize(jnp.zeros(shape), format, axis=axis)
        for format in FORMATS
        for shape, axis in rows
      ]
      return [(array, array.dequantize()) for array in arrays]

    shapes = [shape for shape, _ in rows] * len(FORMATS)
    for shape, results in zip(shapes, run(), strict=True):
      for array in results:
        self.assertEqual(array.shape, shape)

  @parameterized.parameters(*FORMATS)
  @pytest.mark.sample(2)
  def test_any_axis_and_stacks(self, format):
    x = odd_numbers(30, 320)[12:].reshape(2, 9, 320)

    @jax.jit
    def run(x):
      columns = jp.quantize(x.transpose(0, 2, 1), format, axis=1)
      both = jp.quantize_both(x, format, axes=(1, 2))
      self.assertEqual([w.axis for w in (columns, *both)], [1, 1, 2])
      rows = jp.quantize(x, format)
      same = [w.unpack() for w in (columns.transpose(0, 2, 1), rows, both[1])]
      return same, [rows[i] for i in range(2)]

    (columns, rows, of_both), layers = run(x)
    for found in (columns, of_both):
      jax.tree.map(np.testing.assert_array_equal, found, rows)
    for w, layer in zip(layers, x, strict=True):
      self.assert_is_oracle(w, layer)

  def test_bits_are_those_of_gguf(self):
    quants = pytest.importorskip("gguf.quants")
    x = odd_numbers(30, 320)[12:]
    data = quants.quantize(x, quants.GGMLQuantizationType.Q4_1)
    blocks = data.reshape(x.shape[0], -1, 20)  # f16, f16, 16 bytes of codes
    w = jp.quantize(x, jp.UINT4_32_MIN)
    for leaf, columns in ((w.scale, slice(0, 2)), (w.offset, slice(2, 4))):
      exact = np.ascontiguousarray(blocks[..., columns]).view(np.float16)
      np.testing.assert_array_equal(leaf, exact[..., 0])
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    found = np.asarray(w.unpack().values).astype(int) + 8
    np.testing.assert_array_equal(found, codes.reshape(x.shape))

  def test_exact_values_are_kept_by_stochastic_rounding(self):
    @jax.jit
    def run(x, key):
      arrays = [jp.quantize(x, f, key=key) for f in FORMATS[:3:2]]
      return [array.dequantize() for array in arrays]

    x = np.tile(np.arange(16, dtype=np.float32), 8)[None]
    for result in run(x, jax.random.key(1)):
      np.testing.assert_array_equal(result, x)

  @parameterized.parameters(
    (dict(offset_dtype=np.int32), TypeError, "offset_dtype must be"),
    (dict(values_dtype=np.int8), ValueError, "code_offset must be 0 for sign"),
    (dict(code_offset=0), ValueError, "must hold all codes, .*uint8.* from -8"),
    (dict(offset_dtype=None), ValueError, "code_offset must be 0 without"),
    (dict(block_rows=128, values_dtype=np.int8), ValueError, "of one row"),
    (dict(scale_dtype=ml_dtypes.float8_e8m0fnu), ValueError, "float16 scales"),
    (dict(values_dtype=ml_dtypes.float8_e4m3fn), ValueError, "are integers"),
  )
  def test_bad_format_is_refused(self, fields, error, message):
    fields = {
      "name": "f",
      "values_dtype": ml_dtypes.int4,
      "scale_dtype": np.float16,
      "block_size": 128,
      "offset_dtype": np.uint8,
      "code_offset": 8,
    } | fields
    with self.assertRaisesRegex(error, message):
      jp.BlockFormat(**fields)

  def test_bad_array_is_refused(self):
    w = jp.quantize(jnp.ones((4, 256)), jp.UINT4_128)
    leaves = w.values, w.scale, None, w.format
    for offset in (None, w.offset[:1], w.offset.astype(jnp.int8)):
      with self.assertRaisesRegex(
        TypeError, r"offset .* must be uint8\[4, 2\]"
      ):
        jp.ScaledArray(*leaves, offset=offset)
    with self.assertRaisesRegex(TypeError, "offset must be None for int4_128"):
      jp.ScaledArray(w.values, w.scale, None, jp.INT4_128, offset=w.offset)
    with self.assertRaisesRegex(TypeError, "global_scale must be None"):
      jp.ScaledArray(w.values, w.scale, 2.0, w.format, offset=w.offset)


PACKAGE_RULES = (
  ("ggml", jp.INT4_32),
  ("ggml", jp.INT8_32),
  ("ggml", jp.INT8_ROW),
  ("compressed_tensors", jp.INT8_ROW),
  ("compressed_tensors", jp.INT4_128),
  ("compressed_tensors", jp.INT4_128_BF16),
)


@np.errstate(all="ignore")
def package_oracle(x, rule, format):
  """Returns codes and scales of x, whose last axis has whole blocks.

  All arithmetic is in f32, one operation at a time.
  """
  size = format.along(x.shape[-1]).block_size
  blocks = flushed(x).reshape(*x.shape[:-1], -1, size)
  is_bad = ~np.isfinite(blocks).all(-1, keepdims=True)
  blocks = np.where(is_bad, np.float32(0), blocks)
  bits = ml_dtypes.iinfo(format.values_dtype).bits
  half = 2 ** (bits - 1)
  amax = np.abs(blocks).max(-1, keepdims=True)
  first = np.argmax(np.abs(blocks), -1)[..., None]
  largest = np.take_along_axis(blocks, first, -1)
  info = ml_dtypes.finfo(format.scale_dtype)
  smallest = max(np.float32(info.smallest_subnormal), F32_TINY)
  if rule == "compressed_tensors":
    step = amax / np.float32(half - 0.5)
  else:
    step = amax / np.float32(half if bits == 4 else half - 1)
  step = np.clip(step, smallest, np.float32(info.max))
  step = np.where(amax == 0, np.float32(0), step)
  if rule == "ggml" and bits == 4:
    step = np.where(largest < 0, step, -step)
  scale = step.astype(format.scale_dtype)
  if rule == "compressed_tensors":
    divisor = scale.astype(np.float32)
    codes = np.rint(blocks / np.where(divisor == 0, np.float32(1), divisor))
  else:
    inverse = np.float32(1) / np.where(step == 0, np.float32(1), step)
    quotient = blocks * np.where(step == 0, np.float32(0), inverse)
    if bits == 4:
      codes = np.trunc(quotient + np.float32(8.5)) - 8
    else:
      codes = np.trunc(quotient)
      codes += np.sign(quotient) * (np.abs(quotient - codes) >= 0.5)
  codes = np.clip(codes, -half, half - 1).reshape(x.shape)
  scale = np.where(is_bad, np.nan, scale.astype(np.float32))
  return codes, scale[..., 0]


class PackageRulesTest(parameterized.TestCase):
  def numbers(self):
    x = odd_numbers(30, 640)
    # Halves, where the largest magnitude of each block gives the scale 1.
    for row, largest in ((12, 127), (13, -8), (14, 127.5), (15, 7.5)):
      x[row] = (np.arange(640) % 13 - 6) + 0.5
      x[row, ::32] = largest
    x[16, ::2] = -x[16, 1::2]  # two numbers have the largest magnitude
    return x

  def test_bits_are_those_of_numpy(self):
    @jax.jit
    def run(x):
      return [
        jp.quantize(x, format, scale_rounding=rule).unpack()
        for rule, format in PACKAGE_RULES
      ]

    x = self.numbers()
    for (rule, format), found in zip(PACKAGE_RULES, run(x), strict=True):
      with self.subTest(f"{rule}, {format.name}"):
        codes, scale = package_oracle(x, rule, format)
        self.assertEqual((found.format, found.offset), (format, None))
        np.testing.assert_array_equal(
          np.asarray(found.values).astype(int), codes
        )
        found_scale = np.asarray(found.scale).astype(np.float32)
        np.testing.assert_array_equal(found_scale, scale)
        is_number = ~np.isnan(scale)
        np.testing.assert_array_equal(
          np.signbit(found_scale)[is_number], np.signbit(scale)[is_number]
        )

  @parameterized.parameters((jp.INT8_32, "Q8_0"), (jp.INT4_32, "Q4_0"))
  def test_bits_are_those_of_gguf(self, format, name):
    quants = pytest.importorskip("gguf.quants")
    x = np.delete(self.numbers(), [4, 5, 6, 7, 8, 9, 11], 0)
    data = quants.quantize(x, quants.GGMLQuantizationType[name])
    blocks = data.reshape(x.shape[0], x.shape[1] // 32, -1)
    found = jp.quantize(x, format, scale_rounding="ggml")
    np.testing.assert_array_equal(
      np.asarray(found.scale).view(np.uint16),
      np.ascontiguousarray(blocks[..., :2]).view(np.uint16)[..., 0],
    )
    codes = blocks[..., 2:]
    if format is jp.INT4_32:
      codes = np.concatenate([codes & 15, codes >> 4], -1) ^ 8
      codes = (codes << 4).view(np.int8) >> 4
    np.testing.assert_array_equal(
      np.asarray(found.unpack().values).astype(np.int8),
      codes.view(np.int8).reshape(x.shape),
    )

  @parameterized.parameters(*PACKAGE_RULES)
  @pytest.mark.sample(2)
  def test_any_axis_and_short_blocks(self, rule, format):
    @jax.jit
    def run(x):
      arrays = (
        jp.quantize(x, format, scale_rounding=rule),
        jp.quantize(x.T, format, axis=0, scale_rounding=rule),
        jp.quantize(x[:, :512], format, scale_rounding=rule),
      )
      self.assertEqual([w.axis for w in arrays], [1, 0, 1])
      wanted, found, whole = arrays
      return wanted.unpack(), found.T.unpack(), whole.unpack().values

    wanted, found, whole = run(self.numbers()[12:, :576])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    if format.block_size:
      np.testing.assert_array_equal(np.asarray(wanted.values)[:, :512], whole)

  def test_products_and_derivatives_are_those_of_the_numbers(self):
    def results(x, rule, format):
      def product(w):
        w = jp.quantize(
          w, format, scale_rounding=rule, derivative="straight_through"
        )
        return jp.block_scaled_dot(x, w)

      w = jp.quantize(x, format, scale_rounding=rule)
      gradient = jax.grad(lambda w: jnp.sum(product(w)))(x)
      return w.dequantize(), jp.block_scaled_dot(x, w), gradient

    run = jax.jit(lambda x: [results(x, *row) for row in PACKAGE_RULES])
    x = self.numbers()[12:]
    wide = x.astype(np.float64)
    for row, (w, y, gradient) in zip(PACKAGE_RULES, run(x), strict=True):
      with self.subTest(str(row)):
        exact = np.asarray(w, np.float64)
        unit = 2.0**-24 * (np.abs(wide) @ np.abs(exact).T)
        error = np.abs(np.asarray(y) - wide @ exact.T)
        self.assertLess((error / unit).max(), 16)
        error = np.abs(np.asarray(gradient) - wide.sum(0))
        self.assertLess((error / (2.0**-24 * np.abs(wide).sum(0))).max(), 16)

  def test_stochastic_rounding_has_the_mean(self):
    # A zero point, a minimum, and rules without either.
    cases = (*(("up", f) for f in FORMATS[1:3]), *PACKAGE_RULES[::4])

    @jax.jit
    def run(x, keys):
      results = []
      for rule, format in cases:
        draw = lambda key, rule=rule, format=format: jp.quantize(
          x, format, scale_rounding=rule, key=key
        ).dequantize()
        results.append(jnp.mean(jax.vmap(draw)(keys), 0))
      return results

    x = self.numbers()[20:21]
    results = run(x, jax.random.split(jax.random.key(0), 2000))
    for (rule, format), mean in zip(cases, results, strict=True):
      _, scale, *_ = (
        oracle(x, format) if rule == "up" else package_oracle(x, rule, format)
      )
      scale = np.abs(scale.astype(np.float32))
      step = np.repeat(scale, format.along(640).block_size, -1)
      error = np.sort(np.abs(np.asarray(mean - x) / step)[0])
      # The extremes of a block may saturate.
      self.assertLess(error[: -2 * scale.size].max(), 0.06)

  @parameterized.parameters(
    ("nearest", jp.INT8_32, "must be one of .*'ggml'"),
    (np.array(["ggml", "up"]), jp.INT8_32, "must be one of .*'ggml'"),
    ("ggml", jp.MXFP8, "for mxfp8"),
    ("ggml", jp.MXINT8, "for mxint8"),
    ("compressed_tensors", jp.UINT4_128, "for uint4_128"),
  )
  def test_bad_rule_is_refused(self, rule, format, message):
    with self.assertRaisesRegex(ValueError, f"^quantize: .*{message}"):
      jp.quantize(jnp.ones((2, 128)), format, scale_rounding=rule)

  def test_other_functions_refuse_the_rules(self):
    x = jnp.ones((128, 128))
    message = r"scale_rounding must be one of \('up', 'floor'\), got 'ggml'"
    with self.assertRaisesRegex(ValueError, f"quantize_both: {message}"):
      jp.quantize_both(x, jp.INT8_32, axes=(0, 1), scale_rounding="ggml")
    with self.assertRaisesRegex(ValueError, f"Recipe: {message}"):
      dataclasses.replace(jp.training.INT8_RECIPE, scale_rounding="ggml")
