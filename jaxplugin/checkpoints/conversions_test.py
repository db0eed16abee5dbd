# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Other tools' tensors convert to the numbers that their bytes mean."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files

ERROR = jp.checkpoints.CheckpointError
F8, numbers_of = files.F8, files.numbers_of
E = 3
N, K = 5, 192

# Error of f32 sums in `block_scaled_dot`, and of a divisor's f32 reciprocal.
SUM_TOLERANCE = 16 * 2.0**-24
RECIPROCAL = 2.0**-23

M, C, T = (
  jp.checkpoints.from_modelopt,
  jp.checkpoints.from_compressed_tensors,
  jp.checkpoints.from_torchao,
)
MLX, DEEPSEEK, GPT_OSS = (
  jp.checkpoints.from_mlx,
  jp.checkpoints.from_deepseek,
  jp.checkpoints.from_gpt_oss,
)
SWIZZLED = functools.partial(T, is_swizzled=True)
FORMATS = ("nvfp4", "mxfp4", "mxfp8")
G = 2.0**-12


def finite_e4m3(rng, shape, last=0x7E):
  codes = rng.integers(0, last + 1, shape, np.uint8)
  return codes | rng.choice(np.array([0, 128], np.uint8), shape)


def tensors(format, *lead, n=N):
  """Returns values and scale as uint8, and value * scale in f64."""
  rng = np.random.default_rng(0)
  shape, block = (*lead, n, K), 16 if format == "nvfp4" else 32
  if format == "mxfp8":
    values = finite_e4m3(rng, shape)
    numbers = files.fp8(values)
  else:
    values = rng.integers(0, 256, (*shape[:-1], K // 2), np.uint8)
    numbers = files.fp4(values)
  scale_shape = (*shape[:-1], K // block)
  if format == "nvfp4":
    scale = rng.integers(1, 0x7F, scale_shape, np.uint8)
    scales = files.fp8(scale)
  else:
    scale = rng.integers(110, 140, scale_shape, np.uint8)
    scales = files.e8m0(scale)
  return values, scale, numbers * np.repeat(scales, block, axis=-1)


def as_stored(values, scale, format):
  """Returns the arrays with the dtypes of files."""
  if format == "mxfp8":
    values = values.view(F8)
  if format == "nvfp4":
    scale = scale.view(F8)
  return values, scale


def is_view(array, *of):
  leaves = (array.values, array.scale)
  return all(np.shares_memory(x, y) for x, y in zip(leaves, of, strict=True))


def cases():
  """Returns conversions, their arrays, the format and the numbers."""
  found = []
  for format, lead in itertools.product(FORMATS, ((), (E,))):
    values, scale, numbers = tensors(format, *lead)
    typed = as_stored(values, scale, format)
    seconds = ((), (), ())
    if format == "nvfp4":  # powers of two have an exact reciprocal
      seconds = ((np.float32(G),), (np.float32(1 / G),), (np.float32(1),))
    g, divisor, one = seconds
    scaled = numbers * G if g else numbers
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    found += [
      (M, (values, scale, *g), format, scaled),
      (M, (*typed, *g), format, scaled),
      (C, (values, scale, *divisor), format, scaled),
      (T, (*typed, *g), format, scaled),
      *((x, (*typed, *one), format, numbers) for x in (M, C, T)),
      (MLX, (values.view(np.uint32), scale), format, numbers),
    ]
    if format == "mxfp4":
      given = values.view(np.int8), scale.view(files.E8)
      found += [
        (DEEPSEEK, given, format, numbers),
        (DEEPSEEK, (values, scale), format, numbers),
        (GPT_OSS, (blocks, scale), format, numbers),
      ]
    if lead:  # each matrix has whole tiles
      values, scale, scaled = (
        np.concatenate([x] * 128, axis=1) for x in (*typed, scaled)
      )
    else:
      values, scale = typed
    tiles = files.tiled(scale)
    tiles = tiles.reshape(*lead, tiles.shape[-2] // 4, -1)
    found.append((SWIZZLED, (values, tiles, *g), format, scaled))
  return found


class NumbersTest(absltest.TestCase):
  def test_numbers_are_those_of_the_layout(self):
    found = cases()
    given = [arrays for _, arrays, *_ in found]
    traced = jax.jit(
      lambda given: [
        convert(*x) for (convert, *_), x in zip(found, given, strict=True)
      ]
    )(given)
    for i, (convert, arrays, format, want) in enumerate(found):
      with self.subTest(f"{convert} {format} {want.shape}"):
        array = convert(*arrays)
        self.assertTrue(is_view(array, *arrays[:2]))
        for x in (array, traced[i]):
          self.assertEqual((str(x.format), x.shape), (format, want.shape))
          is_swizzled = x.scale_layout == "swizzled_128x4"
          self.assertEqual(is_swizzled, convert is SWIZZLED)
          np.testing.assert_array_equal(numbers_of(x), want)


class ModeloptTest(parameterized.TestCase):
  def test_products_are_those_of_the_numbers(self):
    values, scale, expected = tensors("nvfp4")
    x = np.random.default_rng(1).standard_normal((4, K)).astype(np.float32)
    for convert, factor, g in ((M, 1.7e-4, 1.7e-4), (C, 5.1e3, 1 / 5.1e3)):
      array = convert(values, scale, np.float32([factor]))
      w = expected * g
      y = np.asarray(jp.block_scaled_dot(x, array), np.float64)
      bound = (SUM_TOLERANCE + RECIPROCAL) * (np.abs(x) @ np.abs(w).T)
      self.assertTrue((np.abs(y - x.astype(float) @ w.T) <= bound).all())

  @parameterized.parameters(
    (M, 5.1e3), (C, 1.7e-4), (T, 5.1e3), (M, 0.0), (M, np.nan), (M, -1e-4)
  )
  def test_global_scale_used_the_wrong_way_is_refused(self, convert, given):
    values, scale, _ = tensors("nvfp4")
    for xp in (np, jnp):
      with self.assertRaisesRegex(ERROR, f"got {given:g}.*range=None"):
        convert(values, scale, xp.float32(given))
      array = convert(values, scale, xp.float32(given), global_scale_range=None)
      self.assertEqual(array.global_scale.shape, (1, 1))

  @parameterized.parameters(M, C)
  def test_global_scale_is_there_just_for_nvfp4(self, convert):
    values, scale, _ = tensors("nvfp4")
    with self.assertRaisesRegex(TypeError, "must be given for nvfp4"):
      convert(values, scale)
    values, scale, _ = tensors("mxfp4")
    with self.assertRaisesRegex(TypeError, "must be None for mxfp4"):
      convert(values, scale, np.float32(1e-4))

  def test_global_scale_of_another_shape_is_an_error(self):
    values, scale, _ = tensors("nvfp4", E)
    for shape in ((2,), (3, 0), (3, 2), (3, 4), (2, 5), (3, 5, 1)):
      with self.assertRaisesRegex(
        TypeError, r"dimensions \(3,\).* of the 5 rows, \[3, 'p'\], got float32"
      ):
        M(values, scale, np.full(shape, 1e-4, np.float32))

  def test_block_scales_of_wider_floats_and_of_groups_of_32(self):
    values, scale, expected = tensors("nvfp4", E)
    scale, numbers = scale.view(F8), files.fp4(values)
    g = np.float32(2.0**-12)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
      wide = scale.astype(dtype)
      for convert, xp in itertools.product((M, T), (np, jnp)):
        array = convert(values, xp.asarray(wide), g)
        np.testing.assert_array_equal(numbers_of(array), expected * g)
      wide[1, 2, 3] = 1.0625  # E4M3 has 1 and 1.125
      with self.assertRaisesRegex(
        ERROR, "must be representable in E4M3.* got 1.0625"
      ):
        M(values, wide, g)
    with self.assertRaisesRegex(TypeError, "float32 must be concrete"):
      jax.jit(lambda x: M(values, x, g))(scale.astype(np.float32))
    codes = np.ascontiguousarray(scale[..., ::2])
    want = numbers * np.repeat(files.fp8(codes.view(np.uint8)), 32, -1) * g
    for convert in (M, T):
      np.testing.assert_array_equal(numbers_of(convert(values, codes, g)), want)

  def test_equal_parts_of_the_rows_have_a_global_scale_each(self):
    values, scale, expected = tensors("nvfp4")
    values, scale, expected = (
      np.concatenate([x, x[:1]]) for x in (values, scale, expected)
    )  # 6 rows
    parts = np.float32([2.0**-12, 3 * 2.0**-12, 5 * 2.0**-14])
    rows = np.repeat(parts, 2)[:, None]
    for given in (parts, jnp.asarray(parts)):
      array = M(values, scale, given)
      self.assertEqual(array.global_scale.shape, (6, 1))
      np.testing.assert_array_equal(numbers_of(array), expected * rows)
    array = C(values, scale, np.float32([2.0**12, 2.0**13]))
    rows = np.repeat([2.0**-12, 2.0**-13], 3)[:, None]
    np.testing.assert_array_equal(numbers_of(array), expected * rows)
    array = M(values, scale, np.float32([2.0**-12] * 3))
    self.assertEqual(array.global_scale.shape, (1, 1))
    with self.assertRaisesRegex(TypeError, "of the 6 rows"):
      M(values, scale, np.float32([2.0**-12] * 4))
    # A part without data: its values and its scale are 0.
    values[2:4] = 0
    array = M(values, scale, np.float32([2.0**-12, 0, 2.0**-12]))
    want = expected * 2.0**-12
    want[2:4] = 0
    np.testing.assert_array_equal(numbers_of(array), want)

  def test_parts_of_experts_share_a_global_scale_where_that_is_exact(self):
    values, scale, expected = tensors("nvfp4", E)
    values, scale = (np.concatenate([x, x[:, :1]], 1) for x in (values, scale))
    expected = np.concatenate([expected, expected[:, :1]], 1)
    scale = scale & 0x78 | 0x40  # powers of two from 2 on
    expected = files.fp4(values) * np.repeat(files.fp8(scale), 16, -1)
    parts = np.float32([[1, 2], [4, 1], [1, 1.125]]) * np.float32(2.0**-12)
    rows = np.repeat(parts, 3, -1)[..., None]
    array = M(values, scale, parts[:2].repeat(2, 0)[:E])
    self.assertEqual(array.global_scale.shape, (E, 1, 1))
    want = expected * rows[[0, 0, 1]]
    np.testing.assert_array_equal(numbers_of(array), want)
    y = jp.ragged_dot(np.eye(K, dtype=np.float32), array, jnp.int32([K, 0, 0]))
    np.testing.assert_array_equal(np.asarray(y), want[0].T)
    array = M(values, scale, parts)  # E4M3 cannot represent 1 / 1.125
    self.assertEqual(array.global_scale.shape, (E, 6, 1))
    np.testing.assert_array_equal(numbers_of(array), expected * rows)


class ComfyuiTest(parameterized.TestCase):
  def parts(self, format, n):
    """Returns the tensors of [n, 192] with padded rows, and the numbers."""
    values, scale, numbers = tensors(format, n=n)
    unit = 32
    if format == "nvfp4":
      unit, values = 16, values << 4 | values >> 4  # high nibble first
    values = np.pad(values, ((0, -n % unit), (0, 0)))
    return values, files.tiled(scale), numbers

  @parameterized.product(format=("nvfp4", "mxfp8"), n=(128, 96, 90, 130))
  @pytest.mark.sample(1)
  def test_numbers_are_those_of_the_layout(self, format, n):
    values, tiles, expected = self.parts(format, n)
    second = () if format == "mxfp8" else (np.float32(2.0**-12),)
    expected = expected * (2.0**-12 if second else 1)
    stored_values, stored_tiles = as_stored(values, tiles, format)
    for given in (
      (stored_values, stored_tiles),
      (stored_values, tiles.reshape(-1)),
      (jnp.asarray(stored_values), jnp.asarray(tiles)),
    ):
      array = jp.checkpoints.from_comfyui(*given, *second, rows=n)
      self.assertEqual(array.shape, (n, K))
      self.assertEqual(array.scale_layout, "swizzled_128x4")
      np.testing.assert_array_equal(numbers_of(array), expected)
    whole = jp.checkpoints.from_comfyui(stored_values, tiles, *second)
    self.assertEqual(whole.shape, (len(values), K))
    np.testing.assert_array_equal(numbers_of(whole)[:n], expected)
    self.assertFalse(numbers_of(whole)[n:].any())

  def test_other_shapes_dtypes_and_rows_are_an_error(self):
    values, tiles, _ = self.parts("nvfp4", 96)
    second = np.float32(2.0**-12)
    read = jp.checkpoints.from_comfyui
    for given in (
      (values, tiles[:96], second),
      (values, tiles.astype(np.float32), second),
      (values[None], tiles, second),
      (values, tiles),  # bytes of MXFP8 would be [96, 32]
      (values[:, :3], tiles, second),
    ):
      with self.assertRaisesRegex(TypeError, "tiles of 128 rows .* got"):
        read(*given)
    for rows in (0, 97):
      with self.assertRaisesRegex(ValueError, f"at most 96 .* got {rows}"):
        read(values, tiles, second, rows=rows)
    values, tiles, _ = self.parts("nvfp4", 130)
    with self.assertRaisesRegex(ValueError, "as many tiles .* got 128"):
      read(values, tiles, second, rows=128)
    with self.assertRaisesRegex(ERROR, "got 5000"):
      read(values, tiles, np.float32(5000))

  def test_unusable_global_scale_of_a_part_is_an_error(self):
    values, tiles, _ = self.parts("nvfp4", 32)
    with self.assertRaisesRegex(ERROR, "weight_scale_2 multiplies.*got 0"):
      jp.checkpoints.from_comfyui(values, tiles, np.float32([1e-4, 0]))


class DeepseekTest(absltest.TestCase):
  def test_fp8_with_a_scale_for_rows_and_columns(self):
    rng = np.random.default_rng(7)
    for n, rows, columns in (
      *((5, 1, 32), (33, 32, 32), (200, 128, 128), (2, 1, 128)),
      (129, 128, 32),
    ):
      values = finite_e4m3(rng, (n, K))
      shape = (-(-n // rows), -(-K // columns))
      scale = rng.integers(110, 140, shape, np.uint8)
      i, j = np.indices((n, K))
      want = files.e8m0(scale)[i // rows, j // columns] * files.fp8(values)
      array = DEEPSEEK(values.view(F8), scale)
      self.assertEqual(array.format, jp.MXFP8)
      np.testing.assert_array_equal(numbers_of(array), want)


class MlxTest(absltest.TestCase):
  def test_affine_codes_have_a_scale_and_a_bias_for_each_group(self):
    rng = np.random.default_rng(8)
    for bits, dtype, group, format in (
      (4, np.float16, 32, "uint4_32_min"),
      (4, ml_dtypes.bfloat16, 64, "uint4_64_min_bfloat16"),
      (8, ml_dtypes.bfloat16, 64, "uint8_64_min_bfloat16"),
    ):
      codes = rng.integers(0, 1 << bits, (N, K))
      scales = rng.standard_normal((N, K // group)).astype(dtype)
      biases = rng.standard_normal((N, K // group)).astype(dtype)
      parts = codes.reshape(N, -1, 32 // bits).astype(np.uint64)
      places = np.arange(0, 32, bits, dtype=np.uint64)
      words = (parts << places).sum(-1).astype(np.uint32)
      wide = [x.astype(np.float32).repeat(group, 1) for x in (scales, biases)]
      want = codes.astype(np.float32) * wide[0] + wide[1]
      for xp in (np, jnp):
        array = MLX(*map(xp.asarray, (words, scales, biases)), bits=bits)
        self.assertEqual(str(array.format), format)
        got = np.asarray(jp.dequantize(array, jnp.float32))
        np.testing.assert_array_equal(got, want)
    with self.assertRaisesRegex(ValueError, "bits must be 4 or 8, got 3"):
      MLX(words, scales, biases, bits=3)
    with self.assertRaisesRegex(TypeError, "floats .*of one dtype, got uint32"):
      MLX(words, scales, biases.astype(np.float16), bits=8)


U8, I8, F32 = np.uint8, np.int8, np.float32
# Shapes and dtypes of values and scales that fit no format.
WRONG = {
  "from_modelopt: values and scales": (M, (((5, 96), U8), ((5, 11), U8)),
    (((5, 96), U8), ((4, 12), U8)), (((96,), U8), ((12,), U8)),
    (((5, 0), U8), ((5, 0), U8)), (((5, 96), I8), ((5, 12), U8)),
    (((5, 96), U8), ((5, 6), F32)), (((5, 96), U8), ((5, 12), np.int32)),
    (((5, 96), U8), ((5, 12), files.E8)), (((5, 96), U8), ((5, 3), F8))),
  "from_gpt_oss: blocks must be": (GPT_OSS,
    (((E, N, 6, 16), U8), ((E, N, 5), U8)), (((E, N, 6, 16), U8), ((E, N), U8)),
    (((E, N, 6, 16), U8), ((E, N, 6, 1), U8))),
  "must fit one format": (SWIZZLED, (((N, 96), U8), ((128, 12), U8))),
  "from_deepseek: weight and scale": (DEEPSEEK, (((4, 64), I8), ((4, 2), F32)),
    (((4, 64), F8), ((4, 4), U8)), (((4, 48), F8), ((4, 2), U8)),
    (((4, 64), I8), ((4, 2), U8)), (((4, 64), np.int32), ((4, 4), U8))),
  "from_mlx: weight and scales": (MLX, (((4, 16), np.uint32), ((4, 16), U8)),
    (((4, 16), np.uint32), ((4, 4), np.float16)),
    (((4, 16), np.int32), ((4, 4), U8)), (((4, 16), np.uint32), ((3, 4), U8))),
}  # fmt: skip


class WrongTest(absltest.TestCase):
  def test_other_shapes_and_dtypes_are_an_error(self):
    for rule, (convert, *cases) in WRONG.items():
      for values, scale in cases:
        with (
          self.subTest(rule, values=values, scale=scale),
          self.assertRaisesRegex(TypeError, rule),
        ):
          convert(np.zeros(*values), np.zeros(*scale))

  def test_what_is_no_array_is_named(self):
    """A tensor that is missing in a dict is None."""
    codes, scales = np.zeros((4, 64), F8), np.ones((4, 1), F32)
    words, halves = np.zeros((32, 8), np.int32), np.ones((2, 8), np.float16)
    for name, given in (
      ("from_modelopt", {"weight": codes, "weight_scale": scales}),
      (
        "from_compressed_tensors",
        {"weight_packed": codes, "weight_scale": scales},
      ),
      ("from_comfyui", {"weight": codes, "weight_scale": scales}),
      ("from_deepseek", {"weight": codes, "scale": scales}),
      ("from_mlx", {"weight": codes, "scales": scales, "biases": scales}),
      ("from_gptq", {"qweight": words, "scales": halves, "qzeros": words}),
      ("from_gptq", {"qweight": words, "scales": halves, "g_idx": words}),
      ("from_awq", {"qweight": words, "scales": halves, "qzeros": words}),
      ("from_gpt_oss", {"blocks": codes, "scales": scales}),
      ("from_torchao", {"qdata": codes, "scale": scales}),
      ("from_gguf", {"blocks": codes}),
    ):
      convert = getattr(jp.checkpoints, name)
      if name == "from_gguf":
        convert = functools.partial(convert, format="mxfp4")
      for part in given:
        is_optional = part in ("biases", "qzeros", "g_idx")
        for wrong in ([1, 2],) if is_optional else ([1, 2], None):
          rule = (
            rf"{name}: {part} must be an array .* got {re.escape(str(wrong))}"
          )
          with self.subTest(rule), self.assertRaisesRegex(TypeError, rule):
            convert(**{**given, part: wrong})
    with self.assertRaisesRegex(
      TypeError, r"from_deepseek: .* matrix \[n, k\], .*e4m3fn\[4\]"
    ):
      DEEPSEEK(np.zeros(4, F8), np.ones(1, F32))

  def test_parts_of_a_stack_that_share_tiles_are_refused(self):
    with self.assertRaisesRegex(NotImplementedError, "a multiple of 128"):
      SWIZZLED(np.zeros((E, 320, 96), U8), np.zeros((128, 8), U8))


class ActivationScaleTest(absltest.TestCase):
  def test_layouts_say_whether_it_divides(self):
    read = jp.checkpoints.activation_scale
    for layout, given, want in (
      ("modelopt", np.float32(0.25), 0.25),
      ("comfyui", np.float32([0.25]), 0.25),
      ("torchao", jnp.bfloat16(0.25), 0.25),
      ("compressed-tensors", np.float32([64]), 1 / 64),
    ):
      scale = read(layout, given)
      self.assertEqual((scale.dtype, scale.shape), (jnp.float32, ()))
      self.assertEqual(float(scale), want)

  def test_other_layouts_and_arrays_are_an_error(self):
    read = jp.checkpoints.activation_scale
    with self.assertRaisesRegex(ValueError, "layout must be .* got 'gguf'"):
      read("gguf", 1.0)
    for given in (np.float32([1, 2]), np.int32(1)):
      with self.assertRaisesRegex(TypeError, "must be one float, got"):
        read("modelopt", given)
    for given in (None, "0.5", [0.5]):
      with self.assertRaisesRegex(TypeError, "scale must be an array .* got"):
        read("modelopt", given)
