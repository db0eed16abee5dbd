# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Other tools' tensors mean what their layouts say, decoded here by tables."""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E2M1 = np.array([*E2M1, *(-x for x in E2M1)])
E = 3
N, K = 5, 192

# f32 sums of `block_scaled_dot`, and the f32 reciprocal of a divisor.
SUM_TOLERANCE = 16 * 2.0**-24
RECIPROCAL = 2.0**-23

M, C, T = (
  jp.checkpoints.from_modelopt,
  jp.checkpoints.from_compressed_tensors,
  jp.checkpoints.from_torchao,
)


def e4m3(codes):
  """OCP E4M3: 4 exponent bits of bias 7, 3 of mantissa, no infinities."""
  codes = codes.astype(np.int64)
  exponent, mantissa = codes >> 3 & 15, codes & 7
  subnormal = np.ldexp(mantissa.astype(float), -9)
  normal = np.ldexp(1 + mantissa / 8, exponent - 7)
  magnitude = np.where(exponent == 0, subnormal, normal)
  return np.where(codes & 128, -magnitude, magnitude)


def e8m0(codes):
  return np.ldexp(1.0, codes.astype(np.int64) - 127)


def nibbles(packed):
  pairs = np.stack([packed & 15, packed >> 4], axis=-1)
  return E2M1[pairs.reshape(*packed.shape[:-1], -1)]


def finite_e4m3(rng, shape, last=0x7E):
  codes = rng.integers(0, last + 1, shape, np.uint8)
  return codes | rng.choice(np.array([0, 128], np.uint8), shape)


def tensors(format, *lead, seed=0):
  """values u8, scale u8, and value * scale in f64."""
  rng = np.random.default_rng(seed)
  shape, block = (*lead, N, K), 16 if format == "nvfp4" else 32
  if format == "mxfp8":
    values = finite_e4m3(rng, shape)
    numbers = e4m3(values)
  else:
    values = rng.integers(0, 256, (*shape[:-1], K // 2), np.uint8)
    numbers = nibbles(values)
  scale_shape = (*shape[:-1], K // block)
  if format == "nvfp4":
    scale = rng.integers(1, 0x7F, scale_shape, np.uint8)
    scales = e4m3(scale)
  else:
    scale = rng.integers(110, 140, scale_shape, np.uint8)
    scales = e8m0(scale)
  return values, scale, numbers * np.repeat(scales, block, axis=-1)


def as_stored(values, scale, format):
  """With the dtypes of files."""
  if format == "mxfp8":
    values = values.view(ml_dtypes.float8_e4m3fn)
  if format == "nvfp4":
    scale = scale.view(ml_dtypes.float8_e4m3fn)
  return values, scale


def numbers_of(array):
  """What a `ScaledArray` means, in f64, by the tables above."""
  values = np.asarray(array.values)
  codes = values.view(np.uint8)
  numbers = nibbles(codes) if array.format.is_fp4 else e4m3(codes)
  scale = np.asarray(array.linear_scale()).view(np.uint8)
  decode = e8m0 if array.format.scale_is_power_of_two else e4m3
  block = array.format.block_size
  numbers = numbers * np.repeat(decode(scale), block, axis=-1)
  if array.global_scale is not None:
    numbers = numbers * np.asarray(array.global_scale, np.float64)
  return numbers


def is_view(array, *of):
  leaves = (array.values, array.scale)
  return all(np.shares_memory(x, y) for x, y in zip(leaves, of, strict=True))


class ModeloptTest(parameterized.TestCase):
  @parameterized.product(
    format=("nvfp4", "mxfp4", "mxfp8"),
    lead=((), (E,)),
    convert=(M, C),
    raw=(False, True),
    xp=(np, jnp),
  )
  def test_numbers_are_those_of_the_layout(
    self, format, lead, convert, raw, xp
  ):
    values, scale, expected = tensors(format, *lead)
    given = (values, scale)
    if not raw:
      given = as_stored(values, scale, format)
    given = tuple(map(xp.asarray, given))
    if format == "nvfp4":
      # Powers of two have an exact reciprocal.
      divisor = np.float32(2.0**12)
      factor = divisor if convert is C else 1 / divisor
      given = (*given, xp.asarray(factor, np.float32))
      expected = expected * 2.0**-12
    array = convert(*given)
    self.assertEqual(array.format, getattr(jp, format.upper()))
    self.assertEqual(array.shape, (*lead, N, K))
    np.testing.assert_array_equal(numbers_of(array), expected)
    if xp is np:
      self.assertTrue(is_view(array, values, scale))
    else:
      self.assertIsInstance(array.values, jax.Array)

  def test_products_are_those_of_the_numbers(self):
    values, scale, expected = tensors("nvfp4")
    x = np.random.default_rng(1).standard_normal((4, K)).astype(np.float32)
    for convert, factor, g in ((M, 1.7e-4, 1.7e-4), (C, 5.1e3, 1 / 5.1e3)):
      array = convert(values, scale, np.float32([factor]))
      w = expected * g
      y = np.asarray(jp.block_scaled_dot(x, array), np.float64)
      bound = (SUM_TOLERANCE + RECIPROCAL) * (np.abs(x) @ np.abs(w).T)
      self.assertTrue((np.abs(y - x.astype(float) @ w.T) <= bound).all())

  def test_experts_have_a_global_scale_each(self):
    values, scale, expected = tensors("nvfp4", E)
    g = np.float32([2.0**-12, 2.0**-13, 2.0**-11])
    for given in (g, g.reshape(E, 1, 1)):
      array = M(values, scale, given)
      np.testing.assert_array_equal(
        numbers_of(array), expected * g.reshape(E, 1, 1)
      )

  @parameterized.parameters(
    (M, 5.1e3), (C, 1.7e-4), (T, 5.1e3), (M, 0.0), (M, np.nan), (M, -1e-4)
  )
  def test_global_scale_used_the_wrong_way_is_refused(self, convert, given):
    values, scale, _ = tensors("nvfp4")
    for xp in (np, jnp):
      with self.assertRaisesRegex(
        jp.checkpoints.CheckpointError, f"got {given:g}.*range=None"
      ):
        convert(values, scale, xp.float32(given))
      array = convert(values, scale, xp.float32(given), global_scale_range=None)
      self.assertEqual(array.global_scale.shape, (1, 1))

  def test_one_says_that_there_is_none(self):
    values, scale, expected = tensors("nvfp4")
    for convert in (M, C, T):
      array = convert(values, scale, 1.0)
      np.testing.assert_array_equal(numbers_of(array), expected)

  def test_traced_arrays_are_taken(self):
    values, scale, expected = tensors("nvfp4")
    f = jax.jit(lambda *x: M(*x, jnp.float32(2.0**-12)))
    np.testing.assert_array_equal(
      numbers_of(f(values, scale)), expected * 2.0**-12
    )

  @parameterized.parameters(M, C)
  def test_global_scale_is_there_just_for_nvfp4(self, convert):
    values, scale, _ = tensors("nvfp4")
    with self.assertRaisesRegex(TypeError, "nvfp4 needs weight_"):
      convert(values, scale)
    values, scale, _ = tensors("mxfp4")
    with self.assertRaisesRegex(TypeError, "mxfp4 has no weight_"):
      convert(values, scale, np.float32(1e-4))

  @parameterized.parameters(
    ((5, 96), np.uint8, (5, 11), np.uint8),
    ((5, 96), np.uint8, (4, 12), np.uint8),
    ((96,), np.uint8, (12,), np.uint8),
    ((5, 0), np.uint8, (5, 0), np.uint8),
    ((5, 96), np.int8, (5, 12), np.uint8),
    ((5, 96), np.uint8, (5, 12), np.float32),
    ((5, 96), np.uint8, (5, 12), ml_dtypes.float8_e8m0fnu),
    ((5, 96), np.uint8, (5, 6), ml_dtypes.float8_e4m3fn),
  )
  def test_other_shapes_and_dtypes_are_an_error(self, v_shape, v, s_shape, s):
    with self.assertRaisesRegex(TypeError, "from_modelopt: values and scales"):
      M(np.zeros(v_shape, v), np.zeros(s_shape, s), np.float32(1e-4))

  def test_global_scale_of_another_shape_is_an_error(self):
    values, scale, _ = tensors("nvfp4", E)
    with self.assertRaisesRegex(TypeError, r"\(3,\), got float32\[2\]"):
      M(values, scale, np.float32([1e-4, 1e-4]))


class GptOssTest(absltest.TestCase):
  def test_experts_are_views_that_ragged_dot_takes(self):
    values, scale, expected = tensors("mxfp4", E)
    expected = expected[:, : N - 1] * 2.0**-6  # rows are gates and values
    values, scale = values[:, : N - 1], scale[:, : N - 1] - 6
    values, scale = values.copy(), scale.copy()
    blocks = values.reshape(E, N - 1, K // 32, 16)
    array = jp.checkpoints.from_gpt_oss(blocks, scale)
    self.assertTrue(is_view(array, blocks, scale))
    np.testing.assert_array_equal(numbers_of(array), expected)
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((6, K)) / 64).astype(np.float32)
    sizes = [2, 0, 4]
    y = jp.ragged_dot(x, array, jnp.int32(sizes), activation="swigluoai")
    group = np.repeat(np.arange(E), sizes)
    dots = np.einsum("mk,mnk->mn", x.astype(float), expected[group])
    gate = np.minimum(dots[:, 0::2], 7)
    value = np.clip(dots[:, 1::2], -7, 7)
    want = gate / (1 + np.exp(-1.702 * gate)) * (value + 1)
    # Sums of f32, of numbers of this size, through an activation of slope 8.
    sums = np.einsum("mk,mnk->mn", np.abs(x), np.abs(expected[group])).max()
    bound = 16 * SUM_TOLERANCE * sums + 1e-5 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(y), want, rtol=0, atol=bound)

  def test_other_shapes_are_an_error(self):
    blocks = np.zeros((E, N, 6, 16), np.uint8)
    for scale_shape in ((E, N, 5), (E, N), (E, N, 6, 1)):
      with self.assertRaisesRegex(TypeError, "from_gpt_oss: blocks must be"):
        jp.checkpoints.from_gpt_oss(blocks, np.zeros(scale_shape, np.uint8))


class TorchaoTest(parameterized.TestCase):
  @parameterized.product(
    format=("nvfp4", "mxfp4", "mxfp8"), swizzled=(False, True), lead=((), (E,))
  )
  def test_numbers_are_those_of_the_layout(self, format, swizzled, lead):
    values, scale, expected = tensors(format, *lead)
    if lead and swizzled:  # rows of a stack in whole tiles
      values, scale, expected = (
        np.concatenate([x] * 128, axis=1) for x in (values, scale, expected)
      )
    values, scale = as_stored(values, scale, format)
    rows, columns = scale.shape[-2:]
    if swizzled:
      # PTX's 128 x 4 tiles, written out: one byte after another.
      tiles = (-(-rows // 128), -(-columns // 4))
      flat = np.zeros((*lead, tiles[0] * tiles[1] * 512), scale.dtype)
      for r in range(rows):
        for c in range(columns):
          tile = r // 128 * tiles[1] + c // 4
          at = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
          flat[..., at] = scale[..., r, c]
      scale = flat.reshape(*lead, 32 * tiles[0], 16 * tiles[1])
    per_tensor = np.float32(2.0**-12) if format == "nvfp4" else None
    array = T(values, scale, per_tensor, is_swizzled=swizzled)
    if format == "nvfp4":
      expected = expected * 2.0**-12
    layout = "swizzled_128x4" if swizzled else "linear"
    self.assertEqual(array.scale_layout, layout)
    np.testing.assert_array_equal(numbers_of(array), expected)
    self.assertTrue(is_view(array, values, scale))

  def test_parts_of_a_stack_that_share_tiles_are_refused(self):
    values, _, _ = tensors("mxfp4", E)
    with self.assertRaisesRegex(NotImplementedError, "multiples of 128"):
      T(values, np.zeros((128, 8), np.uint8), is_swizzled=True)

  def test_swizzled_scale_of_another_size_is_an_error(self):
    values, _, _ = tensors("mxfp4")
    with self.assertRaisesRegex(TypeError, "fit no format"):
      T(values, np.zeros((128, 12), np.uint8), is_swizzled=True)


class GgufTest(parameterized.TestCase):
  def blocks(self, format, scale_last=254):
    """Blocks by their definition, and the numbers, in f64."""
    rng = np.random.default_rng(3)
    rows = []
    numbers = np.zeros((N, K))
    size = 32 if format == "mxfp4" else 64
    for row in range(N):
      data = []
      for b in range(K // size):
        if format == "mxfp4":
          codes = rng.integers(0, 16, 32)
          exponent = int(rng.integers(0, scale_last + 1))
          data += [exponent]
          data += [codes[j] | codes[j + 16] << 4 for j in range(16)]
          # A table of doubled numbers, times 2^(e - 128).
          block = np.ldexp(2 * E2M1[codes], exponent - 128)
        else:
          codes = rng.integers(0, 16, 64)
          scales = rng.integers(0, 0x80, 4)
          scales[b] = 0x7F  # no NaN there, but 0
          data += [*scales]
          for s in range(4):
            sub = codes[16 * s : 16 * s + 16]
            data += [sub[j] | sub[j + 8] << 4 for j in range(8)]
          of_scales = np.where(scales == 0x7F, 0, e4m3(scales))
          block = E2M1[codes] * np.repeat(of_scales, 16)
        numbers[row, b * size : (b + 1) * size] = block
      rows.append(data)
    return np.array(rows, np.uint8), numbers

  @parameterized.product(format=("mxfp4", "nvfp4"), xp=(np, jnp))
  def test_numbers_are_those_of_the_blocks(self, format, xp):
    blocks, expected = self.blocks(format)
    scale = None
    if format == "nvfp4":
      scale = np.float32([2.0**-12])
      expected = expected * 2.0**-12
    array = jp.checkpoints.from_gguf(xp.asarray(blocks), format, scale)
    self.assertEqual(array.shape, (N, K))
    np.testing.assert_array_equal(numbers_of(array), expected)

  @parameterized.parameters("mxfp4", "nvfp4")
  def test_numbers_are_those_of_the_gguf_package(self, format):
    if importlib.util.find_spec("gguf") is None:
      self.skipTest("the gguf package is not installed")
    import gguf

    blocks, _ = self.blocks(format)
    kind = gguf.GGMLQuantizationType[format.upper()]
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      want = gguf.quants.dequantize(blocks, kind)
      array = jp.checkpoints.from_gguf(blocks, format)
    np.testing.assert_array_equal(numbers_of(array).astype(np.float32), want)

  def test_scale_with_a_sign_is_refused(self):
    blocks, _ = self.blocks("nvfp4")
    blocks[2, 3] |= 0x80
    with self.assertRaisesRegex(jp.checkpoints.CheckpointError, "no sign"):
      jp.checkpoints.from_gguf(blocks, "nvfp4")

  def test_other_shapes_and_formats_are_an_error(self):
    with self.assertRaisesRegex(TypeError, r"n, 17 \* k / 32\], got uint8\[5"):
      jp.checkpoints.from_gguf(np.zeros((5, 18), np.uint8), jp.MXFP4)
    with self.assertRaisesRegex(ValueError, "mxfp4 or nvfp4, got mxfp8"):
      jp.checkpoints.from_gguf(np.zeros((5, 17), np.uint8), "mxfp8")
    with self.assertRaisesRegex(TypeError, "mxfp4 has no scale"):
      jp.checkpoints.from_gguf(np.zeros((5, 17), np.uint8), "mxfp4", 1.0)


if __name__ == "__main__":
  absltest.main()
