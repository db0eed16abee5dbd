# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executed instructions give what NumPy and ml_dtypes compute."""

import fractions
import math

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from jaxplugin.lab.inspection.ptx import faults
from jaxplugin.testing.kernels import ptx_programs

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
THREADS = 1024


def integers(rng, dtype):
  bits = rng.integers(0, 256, THREADS * np.dtype(dtype).itemsize, U8)
  x = bits.view(dtype)
  limits = np.iinfo(dtype)
  x[:4] = [limits.min, limits.max, 0, 1]
  return x


def floats(rng, dtype):
  """All exponents, ties, zeros, Inf and NaN."""
  width = np.dtype(dtype).itemsize
  x = rng.integers(0, 256, THREADS * width, U8).view(f"u{width}")
  half = x.dtype.type((1 << (8 * width // 2)) - 1)
  x[::3] &= ~half  # short ones, whose results lie halfway between others
  x = x.view(dtype)
  x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
  return x


def near(rng, dtype):
  """Returns numbers of similar size, so that sums of three cancel."""
  return (
    rng.normal(size=THREADS) * 2.0 ** rng.integers(-5, 5, THREADS)
  ).astype(dtype)


def python(function):
  """`function` on Python's integers, one by one."""
  return lambda *columns: [
    function(*(int(x) for x in row)) for row in zip(*columns, strict=True)
  ]


def wrapped(values, dtype):
  bits = 8 * np.dtype(dtype).itemsize
  return np.array([x & (1 << bits) - 1 for x in values], f"u{bits // 8}").view(
    dtype
  )


def shift_left(bits):
  return lambda x, by: x << by if by < bits else 0


INTEGER_CASES = (
  ("add.s32 y, x0, x1;", (I32, I32), I32, lambda x, y: x + y),
  ("add.s64 y, x0, x1;", (I64, I64), I64, lambda x, y: x + y),
  ("sub.s16 y, x0, x1;", (I16, I16), I16, lambda x, y: x - y),
  ("mul.lo.s32 y, x0, x1;", (I32, I32), I32, lambda x, y: x * y),
  ("mul.hi.s32 y, x0, x1;", (I32, I32), I32, lambda x, y: x * y >> 32),
  ("mul.hi.u32 y, x0, x1;", (U32, U32), U32, lambda x, y: x * y >> 32),
  ("mul.hi.u64 y, x0, x1;", (U64, U64), U64, lambda x, y: x * y >> 64),
  ("mul.wide.u16 y, x0, x1;", (U16, U16), U32, lambda x, y: x * y),
  ("mul.wide.s32 y, x0, x1;", (I32, I32), I64, lambda x, y: x * y),
  ("mad.lo.s32 y, x0, x1, x2;", (I32,) * 3, I32, lambda x, y, z: x * y + z),
  ("mad.wide.s32 y, x0, x1, x2;", (I32, I32, I64), I64,
   lambda x, y, z: x * y + z),
  ("mad.wide.u32 y, x0, x1, x2;", (U32, U32, U64), U64,
   lambda x, y, z: x * y + z),
  ("min.s32 y, x0, x1;", (I32, I32), I32, min),
  ("max.u32 y, x0, x1;", (U32, U32), U32, max),
  ("or.b32 x1, x1, 1; div.s32 y, x0, x1;", (I32, I32), I32,
   lambda x, y: math.trunc(x / (y | 1))),
  ("or.b32 x1, x1, 1; rem.s32 y, x0, x1;", (I32, I32), I32,
   lambda x, y: int(math.fmod(x, y | 1))),
  ("or.b32 x1, x1, 1; div.u32 y, x0, x1;", (U32, U32), U32,
   lambda x, y: x // (y | 1)),
  ("neg.s32 y, x0;", (I32,), I32, lambda x: -x),
  ("abs.s32 y, x0;", (I32,), I32, abs),
  ("and.b32 y, x0, x1;", (U32, U32), U32, lambda x, y: x & y),
  ("or.b64 y, x0, x1;", (U64, U64), U64, lambda x, y: x | y),
  ("xor.b16 y, x0, x1;", (U16, U16), U16, lambda x, y: x ^ y),
  ("not.b32 y, x0;", (U32,), U32, lambda x: ~x),
  ("shl.b32 y, x0, 31;", (U32,), U32, lambda x: x << 31),
  ("shl.b32 y, x0, 32;", (U32,), U32, lambda x: 0),
  ("shl.b64 y, x0, 40;", (U64,), U64, lambda x: x << 40),
  ("shr.s16 y, x0, 8;", (I16,), I16, lambda x: x >> 8),
  ("shr.s32 y, x0, 40;", (I32,), I32, lambda x: x >> 40),
  ("shr.u32 y, x0, 33;", (U32,), U32, lambda x: 0),
  ("and.b32 %r9, x1, 63; shl.b32 y, x0, %r9;", (U32, U32), U32,
   lambda x, y: shift_left(32)(x, y & 63)),
  ("shf.l.wrap.b32 y, x0, x1, 7;", (U32, U32), U32,
   lambda x, y: (y << 32 | x) << 7 >> 32),
  ("shf.r.clamp.b32 y, x0, x1, 40;", (U32, U32), U32, lambda x, y: y),
  ("bfe.u32 y, x0, 4, 12;", (U32,), U32, lambda x: x >> 4 & 0xFFF),
  ("bfe.s32 y, x0, 3, 5;", (U32,), I32,
   lambda x: (x >> 3 & 31) - 2 * (x >> 3 & 16)),
  ("bfi.b32 y, x0, x1, 8, 4;", (U32, U32), U32,
   lambda x, y: y & ~0xF00 | (x & 15) << 8),
  ("prmt.b32 y, x0, x1, 0x7531U;", (U32, U32), U32,
   lambda x, y: (x >> 8 & 0xFF) | (x >> 24) << 8 | (y >> 8 & 0xFF) << 16
   | y >> 24 << 24),
  ("prmt.b32 y, x0, x1, 0x9;", (U32, U32), U32,
   lambda x, y: (x & 0xFF) * 0x01010100 | 0xFF * (x >> 15 & 1)),
  ("lop3.b32 y, x0, x1, x2, 0xE4;", (U32,) * 3, U32,
   lambda x, y, z: x & z | y & ~z),
  ("popc.b32 y, x0;", (U32,), U32, lambda x: bin(x).count("1")),
  ("clz.b32 y, x0;", (U32,), U32, lambda x: 32 - x.bit_length()),
  ("setp.lt.s32 %p1, x0, x1; selp.b32 y, x0, x1, %p1;", (I32, I32), I32, min),
  ("setp.hi.u16 %p1, x0, x1; selp.b16 y, 7, 9, %p1;", (U16, U16), U16,
   lambda x, y: 7 if x > y else 9),
  ("setp.eq.b64 %p1, x0, x1; selp.b32 y, 1, 0, %p1;", (U64, U64), U32,
   lambda x, y: int(x == y)),
  ("setp.lt.s32 %p1, x0, 0; @%p1 mov.b32 y, 1; @!%p1 mov.b32 y, 2;", (I32,),
   U32, lambda x: 1 if x < 0 else 2),
  ("mov.b32 {%rs1, %rs2}, x0; mov.b32 y, {%rs2, %rs1};", (U32,), U32,
   lambda x: x >> 16 | x << 16),
  ("cvt.s32.s8 y, x0;", (U32,), I32, lambda x: (x & 255 ^ 128) - 128),
  ("cvt.u32.u16 y, x0;", (U16,), U32, lambda x: x),
  ("cvt.s64.s32 y, x0;", (I32,), I64, lambda x: x),
  ("cvt.u64.u32 y, x0;", (U32,), U64, lambda x: x),
  ("cvt.u16.u32 y, x0;", (U32,), U16, lambda x: x),
)  # fmt: skip


def name(number, case):
  return f"{number}_{case[0].split()[0].replace('.', '_')}"


def quiet(function):
  def called(*columns):
    with np.errstate(all="ignore"):
      return function(*columns)

  return called


def pairs(dtype, function):
  """`function` on packed pairs."""

  def called(*columns):
    whole = function(*(column.view(dtype) for column in columns))
    return np.asarray(whole).astype(dtype).view(U32)

  return called


FLOAT_CASES = (
  ("add.f32 y, x0, x1;", (F32, F32), F32, np.add),
  ("sub.f32 y, x0, x1;", (F32, F32), F32, np.subtract),
  ("mul.f32 y, x0, x1;", (F32, F32), F32, np.multiply),
  ("div.rn.f32 y, x0, x1;", (F32, F32), F32, np.divide),
  ("max.f32 y, x0, x1;", (F32, F32), F32, np.fmax),
  ("min.f32 y, x0, x1;", (F32, F32), F32, np.fmin),
  ("max.NaN.f32 y, x0, x1;", (F32, F32), F32, np.maximum),
  ("abs.f32 y, x0;", (F32,), F32, np.abs),
  ("neg.f32 y, x0;", (F32,), F32, np.negative),
  ("ex2.approx.f32 y, x0;", (F32,), F32, lambda x: np.exp2(x.astype(float))),
  ("mul.bf16 y, x0, x1;", (BF16, BF16), BF16, np.multiply),
  ("add.f16 y, x0, x1;", (F16, F16), F16, np.add),
  ("add.rn.f32.bf16 y, x0, x1;", (BF16, F32), F32,
   lambda x, y: x.astype(F32) + y),
  ("sub.rn.f32.f16 y, x0, x1;", (F16, F32), F32,
   lambda x, y: x.astype(F32) - y),
  ("fma.rn.f32.bf16 y, x0, x0, x1;", (BF16, F32), F32,
   lambda x, y: (x.astype(float) ** 2 + y).astype(F32)),
  ("cvt.f32.bf16 y, x0;", (BF16,), F32, lambda x: x.astype(F32)),
  ("cvt.f32.f16 y, x0;", (F16,), F32, lambda x: x.astype(F32)),
  ("cvt.rn.bf16.f32 y, x0;", (F32,), BF16, lambda x: x.astype(BF16)),
  ("cvt.rn.f16.f32 y, x0;", (F32,), F16, lambda x: x.astype(F16)),
  ("cvt.rn.f32.s32 y, x0;", (I32,), F32, lambda x: x.astype(F32)),
  ("cvt.rn.f32.u8 y, x0;", (U32,), F32, lambda x: (x & 255).astype(F32)),
  ("cvt.rzi.s32.f32 y, x0;", (F32,), I32,
   lambda x: np.clip(np.nan_to_num(np.trunc(x.astype(float))), -(2**31),
                     2**31 - 1)),
  ("mul.bf16x2 y, x0, x1;", (U32, U32), U32, pairs(BF16, np.multiply)),
  ("abs.bf16x2 y, x0;", (U32,), U32, pairs(BF16, np.abs)),
  ("set.eq.u32.f16x2 y, x0, x1;", (U32, U32), U32,
   lambda x, y: np.where(x.view(F16) == y.view(F16), 0xFFFF, 0).astype(U16)
   .view(U32)),
  ("set.leu.u32.bf16x2 y, x0, x1;", (U32, U32), U32,
   lambda x, y: np.where(~(x.view(BF16) > y.view(BF16)), 0xFFFF, 0)
   .astype(U16).view(U32)),
  ("add.f32x2 y, x0, x1;", (U64, U64), U64,
   lambda x, y: (x.view(F32) + y.view(F32)).view(U64)),
  ("cvt.rn.bf16x2.f32 y, x1, x0;", (F32, F32), U32,
   lambda x, y: np.stack([x, y], 1).astype(BF16).view(U32)[:, 0]),
  ("cvt.rn.f16x2.e4m3x2 y, x0;", (U16,), U32,
   lambda x: x.view(E4M3).astype(F16).view(U32)),
  ("cvt.rn.f16x2.e5m2x2 y, x0;", (U16,), U32,
   lambda x: x.view(E5M2).astype(F16).view(U32)),
)  # fmt: skip
PACKED_CASES = (
  ("add.u16x2", U16, np.add),
  ("min.s16x2", I16, np.minimum),
  ("max.s16x2", I16, np.maximum),
  ("max.u16x2", U16, np.maximum),
)
COMPARISONS = {
  "eq": lambda x, y: x == y,
  "ne": lambda x, y: (x < y) | (x > y),
  "lt": lambda x, y: x < y,
  "leu": lambda x, y: ~(x > y),
  "gtu": lambda x, y: ~(x <= y),
  "neu": lambda x, y: x != y,
  "nan": lambda x, y: np.isnan(x) | np.isnan(y),
  "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}


class InstructionTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(7)

  @parameterized.named_parameters(
    (name(i, case), *case) for i, case in enumerate(INTEGER_CASES)
  )
  def test_integers(self, text, dtypes, out, function):
    inputs = [integers(self.rng, dtype) for dtype in dtypes]
    expected = wrapped(python(function)(*inputs), out)
    got = ptx_programs.apply(text, *inputs, out=out)
    np.testing.assert_array_equal(got, expected)

  @parameterized.named_parameters(
    (name(i, case), *case) for i, case in enumerate(FLOAT_CASES)
  )
  def test_floats(self, text, dtypes, out, function):
    inputs = [
      integers(self.rng, x) if np.dtype(x).kind in "iu" else floats(self.rng, x)
      for x in dtypes
    ]
    with np.errstate(all="ignore"):
      expected = np.asarray(quiet(function)(*inputs)).astype(out)
    got = ptx_programs.apply(text, *inputs, out=out)
    if out in (U32, U64):  # packed: NaN is compared as a number, too
      kinds = {"bf16x2": BF16, "f16x2": F16, "f32x2": F32}
      kind = next(kinds[part] for part in kinds if part in text)
      got, expected = got.view(kind), expected.view(kind)
    self.assert_same(got, expected)

  def assert_same(self, got, expected):
    """The bits, but of NaN, and where a zero's sign is either's."""
    with np.errstate(invalid="ignore"):  # NaN that signals
      got, expected = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(got, expected)

  @parameterized.parameters(*PACKED_CASES)
  def test_packed_integers(self, name, dtype, function):
    x, y = integers(self.rng, U32), integers(self.rng, U32)
    got = ptx_programs.apply(f"{name} y, x0, x1;", x, y, out=U32)
    expected = function(x.view(dtype), y.view(dtype))
    np.testing.assert_array_equal(got.view(dtype), expected)

  @parameterized.parameters(*COMPARISONS)
  def test_comparisons_of_floats(self, name):
    x, y = floats(self.rng, F32), floats(self.rng, F32)
    y[100:200] = x[100:200]
    text = f"setp.{name}.f32 %p1, x0, x1; selp.b32 y, 1, 0, %p1;"
    got = ptx_programs.apply(text, x, y, out=U32)
    np.testing.assert_array_equal(got, COMPARISONS[name](x, y).astype(U32))

  @parameterized.parameters(("f32", F32), ("bf16", BF16), ("f16", F16))
  def test_fma_rounds_once(self, name, dtype):
    a, b, c = (near(self.rng, dtype) for _ in range(3))
    # Sums that lie just beside a tie of the result.
    c[:512] = (-(a.astype(float) * b)[:512]).astype(dtype)
    a[512:600], b[512:600] = dtype(1.0), dtype(2.0**-12)
    got = ptx_programs.apply(
      f"fma.rn.{name} y, x0, x1, x2;", a, b, c, out=dtype
    )
    for row in zip(a, b, c, got, strict=True):
      x, y, z, result = (fractions.Fraction(float(value)) for value in row)
      exact = x * y + z
      error = abs(result - exact)
      for toward in (-np.inf, np.inf):
        other = np.nextafter(row[3], dtype(toward))
        self.assertLessEqual(
          error, abs(fractions.Fraction(float(other)) - exact), row
        )

  def test_fma_of_a_sum_just_below_a_tie(self):
    # 1 + 2^-23 + 2^-24 - 2^-70, which f64 rounds to the tie itself.
    step = 2.0**-23
    a, b, c = (2.0**-24 * (1 + step), 1 - step, 1 + step)
    rows = [np.full(32, x, F32) for x in (a, b, c)]
    got = ptx_programs.apply("fma.rn.f32 y, x0, x1, x2;", *rows, out=F32)
    np.testing.assert_array_equal(got, F32(1 + step))

  @parameterized.parameters(("e4m3x2", E4M3, 448.0), ("e5m2x2", E5M2, 57344.0))
  def test_fp8_is_saturated_and_rounded_to_even(self, name, dtype, largest):
    low, high = floats(self.rng, F32), near(self.rng, F32)
    codes = np.arange(128, dtype=U8).view(dtype).astype(F32)
    ties = (codes[:-1] + codes[1:]) / 2
    high[:127] = np.where(np.isfinite(ties), ties, 0)
    text = f"cvt.rn.satfinite.{name}.f32 y, x1, x0;"
    got = ptx_programs.apply(text, low, high, out=U16).view(dtype)
    expected = np.clip(np.stack([low, high], 1), -largest, largest)
    with np.errstate(invalid="ignore"):
      expected = expected.reshape(-1).astype(dtype)
    self.assert_same(got, expected)

  def test_fp4_is_saturated_and_rounded_to_even(self):
    codes = np.arange(8, dtype=U8).view(ml_dtypes.float4_e2m1fn).astype(F32)
    ties = (codes[:-1] + codes[1:]) / 2
    near_ties = [np.nextafter(ties, F32(x)) for x in (-np.inf, np.inf)]
    mantissas = np.array([1, 1 << 22, (1 << 23) - 1, 0x5A5A5A], U32)
    nan = (0x7F800000 | mantissas).view(F32)
    random = np.exp2(self.rng.uniform(-4, 4, 1000)).astype(F32)
    large = np.array([9, 1e9, np.inf], F32)
    x = np.concatenate([codes, ties, *near_ties, large, nan, random])
    x = np.resize(np.concatenate([x, -x]), 2080)
    with np.errstate(invalid="ignore"):
      expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(U8)
    expected[np.isnan(x)] = 7  # NaN of either sign is the largest value
    text = "cvt.rn.satfinite.e2m1x2.f32 y, x0, x1;"
    got = ptx_programs.apply(text, x, x[::-1].copy(), out=U16)
    np.testing.assert_array_equal(got, expected << 4 | expected[::-1])

  def test_of_three_the_largest_is_taken(self):
    x, y, z = (floats(self.rng, F32) for _ in range(3))
    x[:4], y[:4], z[:4] = (
      np.array(c, F32)
      for c in (
        (-0.0, np.nan, 1, np.nan),
        (0, 2, np.nan, np.nan),
        (-0.0, 1, 3, 5),
      )
    )
    with_nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    wanted = np.fmax(np.fmax(x, y), z)
    got = ptx_programs.apply("max.f32 y, x0, x1, x2;", x, y, z, out=F32)
    self.assert_same(got, wanted)
    got = ptx_programs.apply("max.NaN.f32 y, x0, x1, x2;", x, y, z, out=F32)
    self.assert_same(got, np.where(with_nan, np.nan, wanted))

  @parameterized.parameters(
    ("max.f32", [0.0, -0.0], [-0.0, 0.0], [0, 0]),
    ("min.f32", [0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]),
    # The sign is that of the product, the magnitude at most 2.
    ("min.xorsign.abs.f32", [-5, 5, -0.0, 0.5, -0.5, np.nan, -np.inf], [2] * 7,
     [-2, 2, -0.0, 0.5, -0.5, 2, -2]),
    ("min.xorsign.abs.f32", [-5, 5, -0.0, 0.5, -0.5], [-2] * 5,
     [2, -2, 0.0, -0.5, 0.5]),
    ("mul.ftz.f32", [1e-40, -1e-40, 1.0, 2e-38], [1] * 4, [0, -0.0, 1, 2e-38]),
    ("mul.f32", [1e-40, -1e-40, 1.0, 2e-38], [1] * 4,
     [1e-40, -1e-40, 1.0, 2e-38]),
  )  # fmt: skip
  def test_has_the_bits_of(self, name, *columns):
    x, y, wanted = (np.resize(np.array(c, F32), 64) for c in columns)
    got = ptx_programs.apply(f"{name} y, x0, x1;", x, y, out=F32)
    np.testing.assert_array_equal(got.view(U32), wanted.view(U32))

  @parameterized.parameters(
    ("idx", lambda lane: lane * 0 + 5),
    ("bfly", lambda lane: lane ^ 5),
    ("up", lambda lane: np.where(lane < 5, lane, lane - 5)),
    ("down", lambda lane: np.where(lane > 26, lane, lane + 5)),
  )
  def test_lanes_read_each_other(self, mode, source):
    x = integers(self.rng, U32)[:64]
    clamp = 0 if mode == "up" else 31
    text = f"shfl.sync.{mode}.b32 y, x0, 5, {clamp}, -1;"
    got = ptx_programs.apply(text, x, out=U32).reshape(2, 32)
    np.testing.assert_array_equal(
      got, x.reshape(2, 32)[:, source(np.arange(32))]
    )

  @parameterized.parameters(
    ("max.s32", np.max, I32), ("add.u32", np.sum, U32), ("min.u32", np.min, U32)
  )
  def test_warps_reduce(self, name, function, dtype):
    x = integers(self.rng, dtype)[:64]
    got = ptx_programs.apply(f"redux.sync.{name} y, x0, -1;", x, out=dtype)
    expected = function(x.reshape(2, 32), axis=1).astype(dtype)
    np.testing.assert_array_equal(got, np.repeat(expected, 32))

  @parameterized.parameters(
    "frobnicate.b32 y, x0;",
    "add.sat.f32 y, x0, x0;",
    "cvt.rz.bf16.f32 y, x0;",
    "prmt.b32.f4e y, x0, x0, x0;",
    "shfl.sync.idx.b32 y, x0, 0, 7, -1;",
    "bar.sync 1, 64;",
    "ld.volatile.shared.b32 y, [x0];",
  )
  def test_what_is_not_modelled_is_refused(self, text):
    x = integers(self.rng, U32)[:64]
    with self.assertRaises(faults.NotModelled):
      ptx_programs.apply(text, x, out=U32)
