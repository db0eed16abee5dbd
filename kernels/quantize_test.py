# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantize kernels give the bits of `jp.quantize`, in the interpreter.

`jp.quantize` itself is tested against NumPy. Every byte outside the arrays is
poison, and touching one is an error (`interpret`); outputs are filled with a
value that no test expects everywhere, so that bytes left out are seen.
"""

import dataclasses
import unittest

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import formats
from jaxplugin import scaled_array
from jaxplugin.kernels import architectures
from jaxplugin.kernels import interpret
from jaxplugin.kernels import quantize
from jaxplugin.kernels import quantize_config

BF16 = np.dtype(ml_dtypes.bfloat16)
UNWRITTEN = 0xA5
SM_90 = architectures.by_name("sm_90")
SM_80 = architectures.by_name("sm_80")
# One program for a whole sweep.
SWEEP = quantize_config.QuantizeConfig(
  block_m=256, block_k=1024, num_warps=4, hardware_cast=False
)
CASES = (
  ("mxfp8", "up"),
  ("mxfp8", "floor"),
  ("mxfp8_e5m2", "up"),
  ("mxfp8_e5m2", "floor"),
  ("mxfp4", "up"),
  ("mxfp4", "floor"),
  ("nvfp4", "up"),
)
FORMAT_NAMES = tuple(quantize_config.ENCODINGS)


def element_strides(x):
  return tuple(stride // x.itemsize for stride in x.strides)


def casts_of(format_name):
  """Both ways to cast, where there are two."""
  return (False, True) if format_name.startswith("mxfp8") else (False,)


def run_quantize(
  x,
  format_name,
  *,
  global_scale=None,
  scale_rounding="up",
  swizzled=False,
  config=None,
  k_axis=2,
  check_races=True,
):
  """Values and scale, uint8, of x[batch, rows, k], the axis of k given.

  Both have the axes of `x`; a swizzled scale is [batch, rows, k].
  """
  order = {2: (0, 1, 2), 1: (0, 2, 1)}[k_axis]
  batch, rows, k = (x.shape[axis] for axis in order)
  encoding = quantize_config.encoding(format_name)
  grid_rows, grid_k = quantize_config.covered(
    rows, k, format_name, swizzled=swizzled
  )
  if config is None:
    config = quantize_config.default_config(
      format_name, SM_90, grid_rows, grid_k, k_is_contiguous=k_axis == 2
    )
  shape = (batch, rows, -(-k // encoding.values_per_byte))
  values = np.full([shape[i] for i in order], UNWRITTEN, np.uint8)
  shape = (batch, rows, -(-k // encoding.vec_size))
  if swizzled:
    shape = (batch, *scaled_array.swizzled_shape(shape[1:]))
    scale = np.full(shape, UNWRITTEN, np.uint8)
    scale_strides = (shape[1] * shape[2], 0, 0)
  else:
    scale = np.full([shape[i] for i in order], UNWRITTEN, np.uint8)
    scale_strides = [element_strides(scale)[i] for i in order]
  interpret.launch(
    quantize.quantize,
    quantize_config.launch_grid(config, batch, grid_rows, grid_k),
    x,
    global_scale,
    values,
    scale,
    rows,
    k,
    grid_rows,
    grid_k,
    *(element_strides(values)[i] for i in order),
    *scale_strides,
    *(element_strides(x)[i] for i in order),
    check_races=check_races,
    **quantize_config.constexprs(
      config, format_name, scale_rounding=scale_rounding, swizzled=swizzled
    ),
  )
  return values, scale


def expected(x, format_name, *, axis=-1, global_scale=None, **kwargs):
  """(values, scale) of `jp.quantize`, as bytes, FP4 packed along `axis`."""
  if global_scale is not None:
    kwargs["global_scale"] = jnp.asarray(global_scale).reshape(())
  quantized = jp.quantize(
    jnp.asarray(x), formats.by_name(format_name), axis=axis, **kwargs
  )
  values = quantized.values
  if quantized.format.is_fp4:
    values = scaled_array.pack_fp4(values, axis=axis)
  values = jax.lax.bitcast_convert_type(values, jnp.uint8)
  return np.asarray(values), np.asarray(quantized.scale).view(np.uint8)


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


def setUpModule():
  if (reason := interpret.unsupported()) is not None:
    raise unittest.SkipTest(reason)


class SweepTest(parameterized.TestCase):
  @parameterized.product(case=CASES, name=tuple(INPUTS))
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
        values, scale = run_quantize(
          x,
          format_name,
          scale_rounding=scale_rounding,
          global_scale=global_scale,
          config=config,
        )
        np.testing.assert_array_equal(scale, wanted[1])
        np.testing.assert_array_equal(values, wanted[0])

  def test_sweeps_cover_nan_and_finite_blocks_and_every_scale(self):
    _, scale = expected(bf16_codes_by_size(), "mxfp4")
    self.assertContainsSubset({*range(254), 255}, scale.flatten().tolist())
    for name in ("f32_patterns", "f16_patterns"):
      _, scale = expected(INPUTS[name](), "mxfp8")
      self.assertBetween(np.mean(scale == 255), 0.05, 0.6)

  @parameterized.product(
    format_name=("mxfp8", "mxfp8_e5m2", "mxfp4"),
    dtype=(np.float32, np.float16, BF16),
  )
  def test_values_next_to_ties_round_as_ml_dtypes_casts(
    self, format_name, dtype
  ):
    values_dtype = formats.by_name(format_name).values_dtype
    bits = 7 if format_name != "mxfp4" else 3
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
      values, scales = run_quantize(row[None], "nvfp4", global_scale=one)
      wanted = expected(row[None], "nvfp4", global_scale=one)
      np.testing.assert_array_equal(scales, wanted[1])
      np.testing.assert_array_equal(values, wanted[0])


class SpecialValueTest(parameterized.TestCase):
  @parameterized.parameters(*FORMAT_NAMES)
  def test_zeros_keep_their_sign_and_get_scale_zero(self, format_name):
    x = np.zeros((1, 2, 64), np.float32)
    x[:, 1] = -0.0
    one = np.ones(1, np.float32) if format_name == "nvfp4" else None
    values, scale = run_quantize(x, format_name, global_scale=one)
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(values[0, 0], 0)
    minus_zero = (
      0x88 if quantize_config.encoding(format_name).mantissa_bits == 1 else 0x80
    )
    np.testing.assert_array_equal(values[0, 1], minus_zero)

  @parameterized.product(
    format_name=FORMAT_NAMES, bad=(np.nan, np.inf, -np.inf)
  )
  def test_block_with_nan_or_inf_is_nan_and_its_neighbour_is_not(
    self, format_name, bad
  ):
    x = np.ones((1, 1, 64), np.float32)
    x[0, 0, 5] = bad
    one = np.ones(1, np.float32) if format_name == "nvfp4" else None
    values, scale = run_quantize(x, format_name, global_scale=one)
    encoding = quantize_config.encoding(format_name)
    nan_code = 0x7F if format_name == "nvfp4" else 0xFF
    self.assertEqual(scale[0, 0, 0], nan_code)
    self.assertNotEqual(scale[0, 0, 1], nan_code)
    bytes_of_block = encoding.vec_size // encoding.values_per_byte
    np.testing.assert_array_equal(values[0, 0, :bytes_of_block], 0)
    self.assertTrue((values[0, 0, bytes_of_block:] != 0).all())

  @parameterized.parameters(0.0, -1.0, -0.0, np.inf, np.nan)
  def test_nvfp4_with_a_bad_global_scale_is_nan(self, global_scale):
    x = np.ones((1, 2, 32), np.float32)
    values, scale = run_quantize(
      x, "nvfp4", global_scale=np.array([global_scale], np.float32)
    )
    np.testing.assert_array_equal(scale, 0x7F)
    np.testing.assert_array_equal(values, 0)


class ShapeTest(parameterized.TestCase):
  @parameterized.product(
    format_name=FORMAT_NAMES,
    shape_and_dtype=(
      ((1, 1, 32), BF16),
      ((3, 5, 96), np.float32),
      ((2, 33, 288), BF16),
    ),
  )
  def test_tails_and_batches(self, format_name, shape_and_dtype):
    shape, dtype = shape_and_dtype
    rng = np.random.default_rng(5)
    x = rng.standard_normal(shape).astype(dtype)
    one = np.array([0.003], np.float32) if format_name == "nvfp4" else None
    got = run_quantize(x, format_name, global_scale=one)
    wanted = expected(x, format_name, global_scale=one)
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])

  @parameterized.parameters(*FORMAT_NAMES)
  def test_last_block_that_is_cut_short_counts_zeros(self, format_name):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((1, 3, 77)).astype(np.float32)
    one = np.array([0.003], np.float32) if format_name == "nvfp4" else None
    values, scale = run_quantize(x, format_name, global_scale=one)
    padded = np.pad(x, ((0, 0), (0, 0), (0, 96 - 77)))
    wanted = expected(padded, format_name, global_scale=one)
    np.testing.assert_array_equal(values, wanted[0][..., : values.shape[-1]])
    np.testing.assert_array_equal(scale, wanted[1][..., : scale.shape[-1]])

  @parameterized.parameters(*FORMAT_NAMES)
  def test_axis_in_the_middle_is_read_and_written_in_place(self, format_name):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 96, 39)).astype(np.float16)
    one = np.array([0.003], np.float32) if format_name == "nvfp4" else None
    got = run_quantize(x, format_name, global_scale=one, k_axis=1)
    wanted = expected(x, format_name, global_scale=one, axis=1)
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])

  def test_input_with_strides_is_read_between_poison(self):
    rng = np.random.default_rng(8)
    base = np.full((4, 9, 400), np.nan, np.float32)
    x = base[::2, 1:8, 3:99]
    x[...] = rng.standard_normal(x.shape)
    got = run_quantize(x, "mxfp8")
    wanted = expected(x, "mxfp8")
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])

  @parameterized.product(
    format_name=FORMAT_NAMES, shape=((1, 1, 32), (2, 131, 288))
  )
  def test_swizzled_scale_is_that_of_swizzle_scale(self, format_name, shape):
    rng = np.random.default_rng(9)
    x = rng.standard_normal(shape).astype(np.float32)
    one = np.array([0.003], np.float32) if format_name == "nvfp4" else None
    got = run_quantize(x, format_name, global_scale=one, swizzled=True)
    wanted = expected(x, format_name, global_scale=one)
    swizzled = scaled_array.swizzle_scale(jnp.asarray(wanted[1]))
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], np.asarray(swizzled))

  def test_offsets_past_2_to_the_31_are_64_bit(self):
    stride = 2**30 + 32  # fits in 32 bits; twice that does not
    wide = np.zeros(2 * stride + 32, np.float16)  # mapped, and hardly touched
    x = np.lib.stride_tricks.as_strided(
      wide, (1, 3, 32), (0, 2 * stride, wide.itemsize)
    )
    x[0] = np.random.default_rng(10).standard_normal((3, 32))
    got = run_quantize(x, "mxfp8", check_races=False)
    wanted = expected(x.copy(), "mxfp8")
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


def run_both(
  x,
  format_name,
  *,
  global_scales=(None, None),
  padded=(None, None),
  transposed=True,
  swizzled=False,
  config=None,
):
  """(values, scale, values_t, scale_t), uint8, of x[batch, rows, columns].

  `padded` are rows and columns with the zeros that are quantized after them.
  """
  batch, rows, columns = x.shape
  k_t, k = (p or size for p, size in zip(padded, (rows, columns), strict=True))
  encoding = quantize_config.encoding(format_name)
  outputs = []
  for n, size, in_place in ((rows, k, False), (columns, k_t, not transposed)):
    packing, blocks = encoding.values_per_byte, size // encoding.vec_size
    shape = (batch, n, size // packing)
    if in_place and packing == 1:
      shape = (batch, size, n)
    scale_shape = (batch, blocks, n) if in_place else (batch, n, blocks)
    if swizzled:
      scale_shape = (batch, *scaled_array.swizzled_shape(scale_shape[1:]))
    outputs += [np.full(s, UNWRITTEN, np.uint8) for s in (shape, scale_shape)]
  grid_sizes = quantize_config.covered_by_both(
    k_t, k, format_name, swizzled=swizzled
  )
  if config is None:
    config = quantize_config.default_config(
      format_name, SM_80, *grid_sizes, both=True
    )
  interpret.launch(
    quantize.quantize_both,
    quantize_config.launch_grid(config, batch, *grid_sizes),
    x,
    *global_scales,
    *outputs,
    rows,
    columns,
    k,
    k_t,
    *grid_sizes,
    *element_strides(x)[:2],
    **quantize_config.constexprs(config, format_name, swizzled=swizzled),
    TRANSPOSED=transposed,
  )
  return outputs


class BothTest(parameterized.TestCase):
  @parameterized.product(
    format_name=FORMAT_NAMES,
    case=(
      ((1, 64, 64), False, np.float32),
      ((2, 96, 160), False, BF16),
      ((2, 96, 160), True, np.float32),
    ),
  )
  def test_rows_and_columns_are_quantized_from_one_read(
    self, format_name, case
  ):
    shape, swizzled, dtype = case
    rng = np.random.default_rng(11)
    base = rng.standard_normal((shape[0], shape[1], shape[2] + 5)).astype(dtype)
    x = base[:, :, : shape[2]]
    x[0, 3, 7] = np.nan
    x[0, 40, 60] = 1000
    ones = [None, None]
    if format_name == "nvfp4":  # each of its own
      ones = [np.array([g], np.float32) for g in (0.4, 0.07)]
    wanted = expected(x, format_name, global_scale=ones[0])
    x_t = np.swapaxes(x, 1, 2)
    wanted += expected(x_t, format_name, global_scale=ones[1])
    if swizzled:
      wanted = tuple(
        np.asarray(scaled_array.swizzle_scale(jnp.asarray(part))) if i % 2
        else part
        for i, part in enumerate(wanted)
      )  # fmt: skip
    actual = run_both(x, format_name, global_scales=ones, swizzled=swizzled)
    for got, part in zip(actual, wanted, strict=True):
      np.testing.assert_array_equal(got, part)

  @parameterized.product(
    format_name=FORMAT_NAMES, shape=((1, 1, 1), (2, 33, 77), (1, 70, 128)),
    transposed=(False, True),
  )  # fmt: skip
  def test_tails_are_padded_with_zeros_that_no_other_axis_sees(
    self, format_name, shape, transposed
  ):
    x = np.random.default_rng(13).standard_normal(shape).astype(np.float32)
    one = np.array([0.3], np.float32) if format_name == "nvfp4" else None
    _, rows, columns = shape
    # Also more than a block of zeros.
    k_t, k = rows + -rows % 32 + 32, columns + -columns % 32
    along_k = np.pad(x, ((0, 0), (0, 0), (0, k - columns)))
    along_rows = np.pad(x, ((0, 0), (0, k_t - rows), (0, 0)))
    wanted = expected(along_k, format_name, global_scale=one)
    values_t, scale_t = expected(
      along_rows, format_name, axis=1, global_scale=one
    )
    is_packed = quantize_config.encoding(format_name).values_per_byte == 2
    if transposed or is_packed:
      values_t = np.swapaxes(values_t, 1, 2)
    if transposed:
      scale_t = np.swapaxes(scale_t, 1, 2)
    actual = run_both(
      x,
      format_name,
      global_scales=(one, one),
      padded=(k_t, k),
      transposed=transposed,
    )
    for got, part in zip(actual, (*wanted, values_t, scale_t), strict=True):
      np.testing.assert_array_equal(got, part)


def computed_global_scale(x):
  config = quantize_config.default_config(
    "nvfp4", SM_90, x.shape[1], x.shape[2]
  )
  grid = quantize_config.launch_grid(config, *x.shape)
  partial = np.full(grid, -1, np.int32)
  interpret.launch(
    quantize.finite_amax,
    grid,
    x,
    partial,
    *x.shape[1:],
    *element_strides(x),
    BLOCK_M=config.block_m,
    BLOCK_K=config.block_k,
    VEC_SIZE=16,
  )
  partial.flags.writeable = False
  result = np.full(1, np.nan, np.float32)
  interpret.launch(
    quantize.reduce_global_scale,
    1,
    partial,
    result,
    partial.size,
    CHUNK=4,
  )
  return result


def computed_global_scales(x):
  """Those of blocks along rows and along columns, from one read."""
  config = quantize_config.default_config(
    "nvfp4", SM_90, *x.shape[1:], both=True
  )
  grid = quantize_config.launch_grid(config, *x.shape)
  partial = [np.full(grid, -1, np.int32) for _ in range(2)]
  interpret.launch(
    quantize.finite_amax_both,
    grid,
    x,
    *partial,
    *x.shape[1:],
    *element_strides(x)[:2],
    BLOCK_M=config.block_m,
    BLOCK_K=config.block_k,
    VEC_SIZE=16,
  )
  results = [np.full(1, np.nan, np.float32) for _ in range(2)]
  interpret.launch(
    quantize.reduce_global_scales,
    1,
    *partial,
    *results,
    partial[0].size,
    CHUNK=4,
  )
  return results


class GlobalScaleTest(parameterized.TestCase):
  @parameterized.parameters(
    (1.0, np.float32), (1e-37, np.float32), (1e-42, np.float32),
    (3e37, np.float32), (100.0, np.float16), (1e30, BF16), (0.0, np.float32),
  )  # fmt: skip
  def test_it_is_that_of_jp_quantize(self, size, dtype):
    rng = np.random.default_rng(12)
    x = (rng.standard_normal((3, 37, 560)) * size).astype(dtype)
    wanted = jp.quantize(jnp.asarray(x), jp.NVFP4).global_scale
    np.testing.assert_array_equal(computed_global_scale(x), [wanted])

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

  def test_tensor_of_zeros_has_global_scale_one(self):
    self.assertEqual(computed_global_scales(np.zeros((1, 2, 32), BF16)), [1, 1])
    self.assertEqual(computed_global_scale(np.zeros((1, 2, 32), BF16)), 1)


if __name__ == "__main__":
  absltest.main()
