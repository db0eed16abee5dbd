# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every code of every format decodes as ml_dtypes has it."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs, decode

from jaxplugin.core import formats
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import gpu_operands

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
CODES = np.arange(256, dtype=np.uint8)

setUpModule = interpret.skip_unless_supported


@triton.jit
def values_kernel(
  codes,
  out,
  OPERAND: tl.constexpr,
  DECODING: tl.constexpr,
  ROWS: tl.constexpr,
  COLUMNS: tl.constexpr,
):
  """out[ROWS, ...] = bf16 of codes[ROWS, COLUMNS]."""
  rows = tl.arange(0, ROWS)[:, None]
  tile = tl.load(codes + rows * COLUMNS + tl.arange(0, COLUMNS)[None, :])
  values = decode.values_to_bf16(tile, OPERAND, DECODING)
  width: tl.constexpr = values.shape[1]
  tl.store(out + rows * width + tl.arange(0, width)[None, :], values)


@triton.jit
def scale_kernel(
  codes,
  out,
  OPERAND: tl.constexpr,
  DECODING: tl.constexpr,
  SIZE: tl.constexpr,
):
  offsets = tl.arange(0, SIZE)
  scale = decode.scale_to_bf16(tl.load(codes + offsets), OPERAND, DECODING)
  tl.store(out + offsets, scale)


@triton.jit
def words_kernel(
  words,
  out,
  OPERAND: tl.constexpr,
  DECODING: tl.constexpr,
  I: tl.constexpr,
  SIZE: tl.constexpr,
):
  """out[SIZE, 2] = nibbles I and I + 4 of words[SIZE]."""
  offsets = tl.arange(0, SIZE)
  words = tl.load(words + offsets)
  pairs = decode.words_to_bf16(words, I, OPERAND, DECODING)
  tl.store(out + offsets[:, None] * 2 + tl.arange(0, 2)[None, :], pairs)


@triton.jit
def converted_words_kernel(
  words, out, DECODING: tl.constexpr, WORDS: tl.constexpr
):
  """out[1, 8 * WORDS] of words[WORDS], in their order."""
  words = tl.load(words + tl.arange(0, WORDS)[None, :])
  values = decode.converted_e2m1_words(words, DECODING)
  tl.store(out + tl.arange(0, 8 * WORDS)[None, :], values)


@triton.jit
def dequantize_kernel(
  codes, scale, out, OPERAND: tl.constexpr, DECODING: tl.constexpr
):
  """out[programs, 64] = bf16 of the codes under each program's scale codes."""
  pid = tl.program_id(0)
  vec_size: tl.constexpr = OPERAND.values_per_scale
  size: tl.constexpr = 64 // OPERAND.values_per_element
  row = tl.arange(0, 1)[:, None]
  code = tl.load(codes + row + tl.arange(0, size)[None, :])
  scale += pid * (64 // vec_size)
  factor = tl.load(scale + row + tl.arange(0, 64 // vec_size)[None, :])
  values = decode.dequantize(code, factor, OPERAND, DECODING)
  tl.store(out + pid * 64 + row + tl.arange(0, 64)[None, :], values)


@triton.jit
def pieces_kernel(x, out, SIZE: tl.constexpr, PIECES: tl.constexpr):
  """out[PIECES, SIZE]: bf16 pieces of f32 x, the leading one first."""
  offsets = tl.arange(0, SIZE)
  rest = tl.load(x + offsets)
  for piece in tl.static_range(PIECES):
    tl.store(out + piece * SIZE + offsets, decode.leading_bf16(rest))
    rest = decode.without_leading_bf16(rest)


PLAIN = configs.Decoding()
PTX = configs.Decoding(has_ptx=True)
IN_F32 = configs.Decoding(in_f32=True)
PACKED = configs.Decoding(has_ptx=True, packs=True)
WORDS = configs.Decoding(has_ptx=True, reads_words=True)
# By an instruction.
CONVERTED = {"converted": PTX, "converted in f32": IN_F32}


def kind(format, **options):
  return configs.operand(format, 16, 256, **options)


# Dtypes of the values, by the name of the format.
DTYPES = {
  "mxfp8": formats.E4M3,
  "mxfp8_e5m2": formats.E5M2,
  "mxfp6_e2m3": formats.E2M3,
  "mxfp6_e3m2": formats.E3M2,
  "int8_f32_128": np.int8,
  "int8_q6_e8m0_32": np.int8,
  "int4_f16_32": formats.INT4,
  "mxfp4": formats.E2M1,
  "nvfp4": formats.E2M1,
}


def launch_values(codes, out, operand, decoding):
  interpret.launch(
    values_kernel,
    1,
    codes,
    out,
    OPERAND=operand,
    DECODING=decoding,
    ROWS=16,
    COLUMNS=16,
  )


def scales(format, decoding):
  """Returns what every scale code decodes to."""
  out = np.ones(256, BF16)
  options = {"OPERAND": kind(format), "DECODING": decoding, "SIZE": 256}
  interpret.launch(scale_kernel, 1, CODES, out, **options)
  return out


def unrepaired(values, format):
  """Returns the result of `decode.values_to_bf16` for f64 `values`."""
  return values * 2.0**-126 if format == "nvfp4" else values


def same(actual, expected):
  """Equality of bits, but for NaN's and the sign of zero."""
  np.testing.assert_array_equal(
    actual.astype(np.float64), expected.astype(np.float64), strict=True
  )


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(("mxfp8", "mxfp8_e5m2"), (PLAIN, PACKED)),
    *itertools.product(("mxfp6_e2m3", "mxfp6_e3m2"), (PLAIN,)),
    *itertools.product(("int8_f32_128", "int8_q6_e8m0_32"),
      (PLAIN, PTX, WORDS)),
    *itertools.product(("int4_f16_32", "mxfp4", "nvfp4"), (PLAIN, PTX)),
  )  # fmt: skip
  def test_every_code(self, format, decoding):
    dtype = DTYPES[format]
    codes = CODES & 63 if "fp6" in format else CODES
    if kind(format).values_per_element == 2:
      codes = np.stack([CODES & 15, CODES >> 4], axis=-1)
    expected = codes.view(dtype).astype(np.float64).reshape(16, -1)
    if format == "int8_q6_e8m0_32":
      expected = expected * 2.0**-6
    for given in (CODES, CODES.view(dtype))[: 1 + ("mxfp8" in format)]:
      out = np.zeros(expected.shape, BF16)
      launch_values(given, out, kind(format), decoding)
      same(out, unrepaired(expected, format))

  @parameterized.parameters("mxfp4", "nvfp4")
  def test_interleaved_fp4_codes(self, format):
    codes = np.random.default_rng(0).integers(0, 16, (16, 128), np.uint8)
    out = np.zeros((16, 128), BF16)
    words = gpu_operands.interleave(codes)
    launch_values(words, out, kind(format, interleaved=True), PTX)
    same(out, unrepaired(codes.view(formats.E2M1).astype(np.float64), format))

  @parameterized.product(
    place=(0, 1, 2, 3),
    format=("mxfp4", "nvfp4", "int4_f16_128"),
    decoding=(PLAIN, PTX),
  )
  def test_each_nibble_of_words(self, place, format, decoding):
    rng = np.random.default_rng(place)
    words = rng.integers(0, 2**32, 256, np.uint32)
    out = np.zeros((256, 2), BF16)
    interpret.launch(
      words_kernel,
      1,
      words,
      out,
      OPERAND=kind(format),
      DECODING=decoding,
      I=place,
      SIZE=256,
    )
    nibbles = np.stack(
      [words >> 4 * place & 15, words >> 4 * (place + 4) & 15], axis=-1
    ).astype(np.uint8)
    dtype = formats.INT4 if format.startswith("int4") else formats.E2M1
    expected = nibbles.view(dtype).astype(np.float64)
    same(out, unrepaired(expected, format))

  @parameterized.parameters(
    ("mxfp8", formats.E8M0, PLAIN),
    ("mxfp4", formats.E8M0, PLAIN),
    ("nvfp4", formats.E4M3, PLAIN),
    ("nvfp4", formats.E4M3, PACKED),
    ("e4m3_e5m2_32", formats.E5M2, PLAIN),
    ("e4m3_e5m2_32", formats.E5M2, PACKED),
    ("e5m2_e4m3_16", formats.E4M3, PACKED),
  )
  def test_every_scale_code(self, format, dtype, decoding):
    out = scales(format, decoding)
    same(out, CODES.view(dtype).astype(BF16))

  @parameterized.product(
    name=[f.name for f in formats.FORMATS],
    decoding=(PLAIN, PTX, PACKED, IN_F32),
  )
  def test_each_scale_multiplies_its_own_block(self, name, decoding):
    format = formats.by_name(name)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 8 if format.is_fp4 else 0x60, 64, np.uint8)
    scale = rng.integers(0x20, 0x70, 64 // format.block_size, np.uint8)
    exact = values.view(format.values_dtype).astype(np.float64)
    exact = exact * np.repeat(
      scale.view(format.scale_dtype).astype(np.float64), format.block_size
    )
    if format.is_fp4:
      values = values[0::2] | values[1::2] << 4
    self.assert_dequantized(exact, name, values, scale, decoding)

  def test_converted_words_are_in_order(self):
    codes = np.resize(np.arange(16, dtype=np.uint8), 64)
    codes = np.random.default_rng(0).permutation(codes)
    words = (codes[0::2] | codes[1::2] << 4).view(np.uint32)
    out = np.zeros(64, BF16)
    interpret.launch(
      converted_words_kernel, 1, words, out, DECODING=PTX, WORDS=8
    )
    same(out.astype(np.float64), codes.view(formats.E2M1).astype(np.float64))

  @parameterized.product(
    name=("nvfp4", "mxfp4"),
    decoding=(PLAIN, PTX, PACKED, IN_F32, *CONVERTED),
  )
  @pytest.mark.sample(4)
  def test_fp4_with_every_scale(self, name, decoding):
    # The products that are largest and smallest, subnormals, zeros and NaN.
    format = formats.by_name(name)
    values = np.tile(np.arange(16, dtype=np.uint8), 4)
    packed = values[0::2] | values[1::2] << 4
    factor = CODES.view(format.scale_dtype).astype(np.float64)
    exact = np.repeat(factor, format.block_size).reshape(-1, 64)
    exact = exact * values.view(formats.E2M1).astype(np.float64)
    with np.errstate(over="ignore"):  # 3 * 2^127, 4 * 2^127, 6 * 2^127
      exact = exact.astype(np.float32).astype(np.float64)
    self.assert_dequantized(exact, name, packed, CODES, decoding)

  def assert_dequantized(self, exact, name, values, scale, decoding):
    operand = kind(name)
    if decoding in CONVERTED:
      operand = dataclasses.replace(operand, is_converted=True)
      decoding = CONVERTED[decoding]
    codes = [scale]
    if name == "nvfp4":  # as other GPUs are given them
      codes.append(scale.view(formats.E4M3))
    for scale_codes in codes:
      out = np.zeros(exact.shape, BF16)
      interpret.launch(
        dequantize_kernel,
        exact.size // 64,
        values,
        scale_codes,
        out,
        OPERAND=operand,
        DECODING=decoding,
      )
      actual = out.astype(np.float64) * 2.0**operand.missing_exponent
      same(actual, exact)

  def test_nvfp4_is_short_of_what_e4m3_leaves_no_room_for(self):
    # 448 * 2^119 is bf16's largest exponent, 0.5 is read as 2^-127.
    self.assertEqual(kind("nvfp4").missing_exponent, 7)
    self.assertEqual(kind("mxfp4").missing_exponent, 0)
    self.assertEqual(kind("mxfp8").missing_exponent, 0)
    converted = dataclasses.replace(kind("nvfp4"), is_converted=True)
    self.assertEqual(converted.missing_exponent, 0)

  @parameterized.parameters((np.float32, 3), (np.float16, 2))
  def test_pieces_sum_up_to_the_number(self, dtype, pieces):
    rng = np.random.default_rng(0)
    bits = 8 * np.dtype(dtype).itemsize
    x = rng.integers(0, 2**bits, 512, np.uint64).astype(f"u{bits // 8}")
    x = x.view(dtype).astype(np.float32)
    # Pieces of numbers near the smallest normal would be below it.
    x = np.where(np.abs(x) > 2.0**-90, x, np.float32(1))
    x = np.where(np.isfinite(x), x, np.float32(1))
    x[:2] = np.inf, np.finfo(dtype).max
    out = np.zeros((pieces, 512), BF16)
    interpret.launch(pieces_kernel, 1, x, out, SIZE=512, PIECES=pieces)
    same(out.astype(np.float64).sum(axis=0), x.astype(np.float64))
