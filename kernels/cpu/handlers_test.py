# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The FFI handlers against NumPy float64 and ml_dtypes.

Set JAXPLUGIN_CPU_LIBRARY to test a library built elsewhere (README.md has the
sanitizer builds); otherwise CMake builds one into a temporary directory.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import testing

# The contract's bound before the final cast (DESIGN.md section 2).
DOT_ERROR_ULPS = 16 * 2.0**-24

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
E2M1 = ml_dtypes.float4_e2m1fn
E8M0 = ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16

# name -> (values dtype, scale dtype, block size)
FORMATS = {
  "mxfp8": (E4M3, E8M0, 32),
  "mxfp8_e5m2": (E5M2, E8M0, 32),
  "mxfp4": (E2M1, E8M0, 32),
  "nvfp4": (E2M1, E4M3, 16),
  "f32": (np.float32, None, 32),
  "bf16": (BF16, None, 32),
  "f16": (np.float16, None, 32),
}
QUANTIZED = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")
PAIRS = tuple(itertools.product(FORMATS, FORMATS))


def isa_number(test: absltest.TestCase, name: str) -> int:
  if name not in testing.isa_levels():
    test.skipTest(f"this machine has no {name}")
  return testing.ISA_LEVELS[name]


def e8m0_value(code: np.ndarray) -> np.ndarray:
  value = np.ldexp(1.0, code.astype(np.int64) - 127)
  return np.where(code == 255, np.nan, value)


class Side:
  """An operand: what a handler gets, and its exact value in float64."""

  def __init__(self, name, values, scale, packed=False):
    dtype, scale_dtype, self.block = FORMATS[name]
    self.values = values.astype(dtype)
    exact = self.values.astype(np.float64)
    self.scale = None
    if scale_dtype is not None:
      self.scale = scale.astype(np.uint8).view(scale_dtype)
      factor = (
        e8m0_value(scale)
        if scale_dtype == E8M0
        else self.scale.astype(np.float64)
      )
      factor = np.repeat(factor, self.block, axis=-1)[..., : values.shape[-1]]
      with np.errstate(invalid="ignore"):
        exact = exact * factor
    self.exact = exact
    if packed and dtype == E2M1:
      codes = self.values.view(np.uint8) & 15
      self.values = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def integers(name, shape, rng, packed=False) -> Side:
  """Small integers and power-of-two scales: every sum is exact in f32."""
  values = rng.integers(-4, 5, shape).astype(np.float64)
  values = np.where(np.abs(values) == 5, 4, values)
  block = FORMATS[name][2]
  scale_shape = (*shape[:-1], -(-shape[-1] // block))
  if FORMATS[name][1] == E4M3:
    scale = rng.choice(np.array([0x30, 0x38, 0x40]), scale_shape)
  else:
    scale = rng.integers(126, 129, scale_shape)
  return Side(name, values, scale, packed)


def gaussians(name, shape, rng, spread=0, packed=False) -> Side:
  """Normal values, rounded to the format, with scales over 2^+-spread."""
  values = rng.standard_normal(shape) * (1 if FORMATS[name][1] is None else 2)
  if FORMATS[name][0] == E2M1:
    values = np.clip(values, -6, 6)
  block = FORMATS[name][2]
  scale_shape = (*shape[:-1], -(-shape[-1] // block))
  if FORMATS[name][1] == E4M3:
    scale = rng.integers(1, 0x7F, scale_shape)
  else:
    scale = rng.integers(127 - spread, 128 + spread, scale_shape)
  return Side(name, values, scale, packed)


def call(lhs: Side, rhs: Side, *args, **kwargs) -> np.ndarray:
  return np.asarray(
    testing.dot(
      lhs.values,
      lhs.scale,
      rhs.values,
      rhs.scale,
      *args,
      lhs_block_size=lhs.block,
      rhs_block_size=rhs.block,
      shape=(*lhs.exact.shape[:2], rhs.exact.shape[1]),
      **kwargs,
    )
  )


def oracle(lhs: Side, rhs: Side) -> np.ndarray:
  with np.errstate(invalid="ignore", over="ignore"):
    return lhs.exact @ np.swapaxes(rhs.exact, -1, -2)


class DotTest(parameterized.TestCase):
  def assert_exact(self, got, expected):
    np.testing.assert_array_equal(got, expected.astype(np.float32))

  def assert_bounded(self, got, lhs, rhs):
    magnitude = np.abs(lhs.exact) @ np.abs(np.swapaxes(rhs.exact, -1, -2))
    # 2^-149: what rounding a subnormal result may cost.
    bound = DOT_ERROR_ULPS * magnitude + 2.0**-149
    error = np.abs(got.astype(np.float64) - oracle(lhs, rhs))
    self.assertTrue(np.all(error <= bound), f"{np.max(error / bound)} x bound")

  @parameterized.product(pair=PAIRS, isa=ISAS)
  def test_integer_dots_are_exact_for_every_pair_of_formats(self, pair, isa):
    rng = np.random.default_rng(0)
    for m, n, k in ((1, 37, 96), (19, 70, 576)):
      lhs = integers(pair[0], (1, m, k), rng)
      rhs = integers(pair[1], (1, n, k), rng, packed=True)
      got = call(lhs, rhs, isa=isa_number(self, isa))
      self.assert_exact(got, oracle(lhs, rhs))

  @parameterized.product(seed=tuple(range(6)), isa=ISAS)
  def test_fuzzed_shapes_are_exact_on_integers(self, seed, isa):
    rng = np.random.default_rng(seed)
    number = isa_number(self, isa)
    for _ in range(8):
      batch = int(rng.choice([1, 1, 2, 5]))
      rhs_batch = int(rng.choice([1, batch]))
      m = int(rng.choice([1, 2, 3, 4, 6, 12, 13, 31, 65]))
      n = int(rng.choice([1, 2, 3, 8, 31, 32, 33, 64, 100]))
      k = int(rng.choice([2, 16, 32, 48, 64, 96, 130, 512, 544, 1056]))
      names = rng.choice(list(FORMATS), 2)
      lhs = integers(names[0], (batch, m, k), rng, bool(rng.integers(2)))
      rhs = integers(names[1], (rhs_batch, n, k), rng, bool(rng.integers(2)))
      got = call(lhs, rhs, isa=number)
      with self.subTest(f"{names} {batch} {rhs_batch} {m} {n} {k}"):
        self.assert_exact(got, oracle(lhs, rhs))

  @parameterized.product(
    pair=(
      ("mxfp8", "mxfp8"),
      ("mxfp8_e5m2", "mxfp4"),
      ("nvfp4", "nvfp4"),
      ("mxfp8", "nvfp4"),
      ("bf16", "nvfp4"),
      ("f32", "mxfp8"),
      ("mxfp4", "f16"),
    ),
    isa=ISAS,
    m=(1, 3, 40),
  )
  def test_random_dots_are_within_the_bound(self, pair, isa, m):
    rng = np.random.default_rng(1)
    for spread in (0, 30):
      lhs = gaussians(pair[0], (1, m, 1568), rng, spread)
      rhs = gaussians(pair[1], (1, 45, 1568), rng, spread)
      got = call(lhs, rhs, isa=isa_number(self, isa))
      self.assert_bounded(got, lhs, rhs)

  @parameterized.product(isa=ISAS, m=(1, 20))
  def test_scale_bytes_b_against_254_minus_b_give_32(self, isa, m):
    number = isa_number(self, isa)
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp4"):
      ones = np.ones((255, m, 32))
      code = np.broadcast_to(np.arange(255)[:, None, None], (255, m, 1))
      lhs = Side(name, ones, code)
      rhs = Side(name, np.ones((255, 3, 32)), (254 - code)[:, :1].repeat(3, 1))
      got = call(lhs, rhs, isa=number)
      np.testing.assert_array_equal(got, np.full((255, m, 3), 32, np.float32))
      # All of them in one row, and against subnormal codes of the values.
      one_row = Side(
        name, np.ones((1, m, 255 * 32)), code.reshape(1, 255, m).swapaxes(1, 2)
      )
      other = Side(
        name,
        np.full((1, 2, 255 * 32), 0.5),
        np.broadcast_to(254 - np.arange(255), (1, 2, 255)),
      )
      got = call(one_row, other, isa=number)
      np.testing.assert_array_equal(
        got, np.full((1, m, 2), 255 * 16, np.float32)
      )

  @parameterized.product(isa=ISAS, m=(1, 20))
  def test_e8m0_byte_zero_is_a_subnormal_and_counts(self, isa, m):
    lhs = Side("mxfp8", np.ones((1, m, 32)), np.zeros((1, m, 1), int))
    rhs = Side("f32", np.ones((1, 2, 32)), None)
    got = call(lhs, rhs, isa=isa_number(self, isa))
    np.testing.assert_array_equal(got, np.full((1, m, 2), 2.0**-122, "f4"))

  @parameterized.product(isa=ISAS, m=(1, 3, 20), name=QUANTIZED)
  def test_nan_scale_over_zero_values_is_nan(self, isa, m, name):
    rng = np.random.default_rng(2)
    nan_code = 0x7F if name == "nvfp4" else 255
    for side in (0, 1):
      sides = [
        integers(name, (1, m, 160), rng),
        integers(name, (1, 35, 160), rng),
      ]
      block = FORMATS[name][2]
      scale = sides[side].scale.view(np.uint8).copy()
      values = sides[side].values.astype(np.float64)
      row = values.shape[1] - 1
      scale[0, row, 1] = nan_code
      values[0, row, block : 2 * block] = 0
      sides[side] = Side(name, values, scale)
      got = call(*sides, isa=isa_number(self, isa))
      expected = oracle(*sides)
      self.assertTrue(np.isnan(expected).any())
      self.assert_exact(got, expected)

  @parameterized.product(isa=ISAS, m=(1, 20))
  def test_nan_and_inf_values_propagate(self, isa, m):
    rng = np.random.default_rng(3)
    number = isa_number(self, isa)
    for name, special in (
      ("mxfp8", np.nan),
      ("mxfp8_e5m2", np.nan),
      ("mxfp8_e5m2", np.inf),
      ("bf16", -np.inf),
      ("f32", np.nan),
    ):
      lhs = integers(name, (1, m, 96), rng)
      values = lhs.values.astype(np.float64)
      values[0, 0, 70] = special
      lhs = Side(
        name, values, None if lhs.scale is None else lhs.scale.view(np.uint8)
      )
      rhs = integers("mxfp8", (1, 9, 96), rng)
      rhs = Side("mxfp8", np.abs(rhs.exact).clip(1, 4), rhs.scale.view("u1"))
      got = call(lhs, rhs, isa=number)
      self.assert_exact(got, oracle(lhs, rhs))

  @parameterized.product(isa=ISAS, m=(1, 20))
  def test_zero_blocks_under_scale_zero_stay_fast_and_right(self, isa, m):
    rng = np.random.default_rng(4)
    lhs = integers("mxfp8", (1, m, 128), rng)
    values, scale = lhs.values.astype(float), lhs.scale.view("u1").copy()
    values[..., 32:64] = -0.0
    scale[..., 1] = 0
    lhs = Side("mxfp8", values, scale)
    got = call(lhs, lhs, isa=isa_number(self, isa))
    self.assert_exact(got, oracle(lhs, lhs))

  @parameterized.product(isa=ISAS, m=(1, 20), exponent=(-130, -73, 62, 127))
  def test_plain_bf16_of_any_size_is_exact(self, isa, m, exponent):
    """Subnormals too; against scales that bring the products back."""
    values = np.full((1, m, 32), 2.0**exponent)
    values[0, 0, 5] = 2.0 ** (exponent - 3)
    lhs = Side("bf16", values, None)
    scale = 127 + int(np.clip(-exponent, -46, 46))
    rhs = Side("mxfp8", np.ones((1, 40, 32)), np.full((1, 40, 1), scale))
    got = call(lhs, rhs, isa=isa_number(self, isa))
    self.assert_exact(got, oracle(lhs, rhs))

  @parameterized.product(isa=ISAS, m=(1, 20), exponent=(-55, -64, -70))
  def test_subnormal_products_of_bf16_count(self, isa, m, exponent):
    lhs = Side("bf16", np.full((1, m, 32), 1.9921875 * 2.0**exponent), None)
    rhs = Side("bf16", np.full((1, 40, 32), 2.0**exponent), None)
    got = call(lhs, rhs, isa=isa_number(self, isa))
    self.assert_exact(got, oracle(lhs, rhs))

  @parameterized.product(
    isa=ISAS,
    m=(1, 21),
    activation=(0, 1, 2, 3),
    dtype=("float32", "bfloat16", "float16"),
  )
  def test_epilogue_is_f32_before_one_cast(self, isa, m, activation, dtype):
    rng = np.random.default_rng(5)
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    lhs = integers("mxfp8", (2, m, 64), rng)
    rhs = integers("nvfp4", (2, 150, 64), rng)
    bias = rng.standard_normal(150).astype(np.float32)
    scale = np.float32(0.0173)
    for residual_dtype in {np.dtype(np.float32), dtype}:
      residual = rng.standard_normal((2, m, 150)).astype(residual_dtype)
      got = call(
        lhs,
        rhs,
        scale,
        bias,
        residual,
        activation=activation,
        dtype=dtype,
        isa=isa_number(self, isa),
      )
      x = oracle(lhs, rhs) * np.float64(scale) + bias
      y = {
        0: lambda x: x,
        1: lambda x: np.maximum(x, 0),
        2: lambda x: (
          x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        ),
        3: lambda x: x / (1 + np.exp(-x)),
      }[activation](x)
      expected = y + residual.astype(np.float64)
      # A few f32 roundings, then one of the result's dtype.
      eps = float(ml_dtypes.finfo(dtype).eps) / 2
      bound = 32 * 2.0**-24 * (np.abs(x) + np.abs(residual.astype(float)) + 1)
      bound = bound + 1.01 * eps * np.abs(expected)
      error = np.abs(got.astype(np.float64) - expected)
      self.assertTrue(np.all(error <= bound), np.max(error / bound))

  @parameterized.product(isa=ISAS, dtype=("bfloat16", "float16"))
  def test_results_are_rounded_once_to_nearest_even(self, isa, dtype):
    rng = np.random.default_rng(6)
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    lhs = integers("mxfp8", (1, 24, 512), rng)
    rhs = integers("mxfp8", (1, 96, 512), rng)
    for factor in (1, 2.0**9, 2.0**-12, 2.0**-27, 2.0**-30):
      got = call(
        lhs, rhs, np.float32(factor), dtype=dtype, isa=isa_number(self, isa)
      )
      with np.errstate(over="ignore"):
        expected = (oracle(lhs, rhs) * factor).astype(np.float32).astype(dtype)
      np.testing.assert_array_equal(got.view("u2"), expected.view("u2"))

  @parameterized.product(isa=ISAS)
  def test_f16_results_overflow_to_infinity(self, isa):
    lhs = Side("mxfp8", np.full((1, 2, 64), 448.0), np.full((1, 2, 2), 127))
    got = call(lhs, lhs, dtype=np.float16, isa=isa_number(self, isa))
    np.testing.assert_array_equal(got, np.full((1, 2, 2), np.inf, np.float16))

  @parameterized.product(
    shape=((0, 3, 64), (2, 0, 64), (2, 3, 0), (20, 40, 0)), isa=ISAS
  )
  def test_zero_sizes_give_empty_or_zero_results(self, shape, isa):
    m, n, k = shape
    rng = np.random.default_rng(7)
    for name in ("mxfp8", "nvfp4", "f32"):
      lhs = integers(name, (2, m, k), rng, packed=True)
      rhs = integers(name, (2, n, k), rng)
      bias = np.arange(n, dtype=np.float32)
      got = call(lhs, rhs, None, bias, isa=isa_number(self, isa))
      expected = np.zeros((2, m, n)) + (oracle(lhs, rhs) + bias)
      np.testing.assert_array_equal(got, expected)

  @parameterized.product(isa=ISAS)
  def test_calls_from_many_threads_give_the_same_bits(self, isa):
    rng = np.random.default_rng(8)
    number = isa_number(self, isa)
    cases = []
    for m, n, k in ((1, 2048, 1024), (40, 512, 1024), (3, 100, 4096)):
      lhs = gaussians("mxfp8", (1, m, k), rng, 4)
      rhs = gaussians("nvfp4", (1, n, k), rng)
      cases.append((lhs, rhs, call(lhs, rhs, isa=number)))

    def once(i):
      lhs, rhs, expected = cases[i % len(cases)]
      return np.array_equal(call(lhs, rhs, isa=number), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      self.assertTrue(all(pool.map(once, range(60))))

  def test_many_handlers_in_one_jitted_function(self):
    rng = np.random.default_rng(9)
    lhs = integers("mxfp8", (1, 7, 256), rng)
    sides = [integers("mxfp4", (1, 50 + i, 256), rng) for i in range(6)]

    @jax.jit
    def f(values, scale, others):
      return [testing.dot(values, scale, v, s) for v, s in others]

    results = f(lhs.values, lhs.scale, [(s.values, s.scale) for s in sides])
    for got, side in zip(results, sides, strict=True):
      self.assert_exact(np.asarray(got), oracle(lhs, side))


class DotErrorTest(parameterized.TestCase):
  """Malformed calls are errors that name the rule and what was given."""

  def good(self):
    values = np.ones((2, 3, 64), E4M3)
    scale = np.full((2, 3, 2), 127, np.uint8).view(E8M0)
    return {
      "lhs": values, "lhs_scale": scale, "rhs": values, "rhs_scale": scale,
    }  # fmt: skip

  def test_the_good_call_is_good(self):
    got = np.asarray(testing.dot(**self.good()))
    np.testing.assert_array_equal(got, np.full((2, 3, 3), 64, np.float32))

  @parameterized.named_parameters(
    ("lhs_rank", {"lhs": np.ones((3, 64), E4M3), "shape": (2, 3, 3)}, "rank 3"),
    ("rhs_rank", {"rhs": np.ones((64,), E4M3), "shape": (2, 3, 3)}, "rank 3"),
    ("lhs_dtype", {"lhs": np.ones((2, 3, 64), np.int32)}, "lhs must be"),
    ("rhs_dtype", {"rhs": np.ones((2, 3, 64), np.int8)}, "rhs must be"),
    ("k", {"rhs": np.ones((2, 3, 32), E4M3)}, "rhs_scale must have"),
    (
      "k_both",
      {
        "rhs": np.ones((2, 3, 32), E4M3),
        "rhs_scale": np.ones((2, 3, 1), E8M0),
      },
      "same k",
    ),
    (
      "batch",
      {
        "rhs": np.ones((3, 3, 64), E4M3),
        "rhs_scale": np.ones((3, 3, 2), E8M0),
      },
      "batch of lhs",
    ),
    ("scale_rows", {"lhs_scale": np.ones((2, 4, 2), E8M0)}, "lhs_scale must"),
    ("scale_cols", {"lhs_scale": np.ones((2, 3, 1), E8M0)}, "2 columns"),
    ("scale_rank", {"rhs_scale": np.ones((2, 3), E8M0)}, "rhs_scale must"),
    ("scale_dtype", {"rhs_scale": np.ones((2, 3, 2), "f4")}, "f8e8m0fnu or"),
    ("scale_missing", {"lhs_scale": None}, "lhs_scale must be f8e8m0fnu"),
    ("scale_extra", {"lhs": np.ones((2, 3, 64), "f4")}, "empty scale"),
    ("block_size", {"lhs_block_size": 48}, "must be 16 or 32"),
    ("block_zero", {"rhs_block_size": 0}, "must be 16 or 32"),
    ("block_huge", {"rhs_block_size": -(2**63)}, "must be 16 or 32"),
    ("block_16", {"lhs_block_size": 16}, "4 columns for block size 16"),
    ("global_shape", {"global_scale": np.ones(2, "f4")}, "global_scale must"),
    ("global_dtype", {"global_scale": np.ones((), BF16)}, "global_scale must"),
    ("bias_shape", {"bias": np.ones(4, "f4")}, "bias must be"),
    ("bias_rank", {"bias": np.ones((1, 3), "f4")}, "bias must be"),
    ("bias_dtype", {"bias": np.ones(3, BF16)}, "bias must be"),
    ("residual_shape", {"residual": np.ones((2, 3, 4), "f4")}, "residual must"),
    ("residual_dtype", {"residual": np.ones((2, 3, 3), BF16)}, "residual must"),
    ("activation", {"activation": 4}, "activation must be"),
    ("activation_negative", {"activation": -1}, "activation must be"),
    ("isa", {"isa": 5}, "isa must be"),
    ("isa_negative", {"isa": -1}, "isa must be"),
    ("result_shape", {"shape": (2, 3, 4)}, "the result must be"),
    ("result_rank", {"shape": (2, 9)}, "the result must be"),
    ("result_dtype", {"dtype": np.int32}, "the result must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    arguments = self.good() | change
    with self.assertRaisesRegex(Exception, message):
      jax.block_until_ready(testing.dot(**arguments))

  def test_fp4_with_odd_k_is_an_error(self):
    values = np.ones((1, 2, 33), E2M1)
    scale = np.ones((1, 2, 2), E8M0)
    with self.assertRaisesRegex(Exception, "even k"):
      jax.block_until_ready(testing.dot(values, scale, values, scale))


def quantized_reference(x, name, rounding, global_scale):
  """(codes u8, scale u8, global) by NumPy in float64 and float32."""
  dtype, _, block = FORMATS[name]
  limit = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}[dtype]
  blocks = x.astype(np.float32)
  blocks = blocks.reshape(*x.shape[:-1], x.shape[-1] // block, block)
  with np.errstate(all="ignore"):
    bad = ~np.isfinite(blocks).all(-1, keepdims=True)
    clean = np.where(bad, np.float32(0), blocks)
    amax = np.abs(clean).max(-1, keepdims=True)
    if name == "nvfp4":
      if global_scale is None:
        top = np.float32(amax.max(initial=0))
        global_scale = np.float32(top / np.float32(2688))
        global_scale = max(global_scale, np.float32(2.0**-126))
        if top == 0:
          global_scale = np.float32(1)
      ideal = amax / np.float32(6) / global_scale
      code = np.minimum(ideal, np.float32(448)).astype(E4M3).view(np.uint8)
      step = code.view(E4M3).astype(np.float32) * global_scale
      quotient = np.where(code == 0, np.float32(0), clean / step)
      nan_code = 0x7F
    else:
      exponent = np.frexp(amax.astype(np.float64))[1] - 1  # floor(log2)
      exponent = np.where(amax == 0, -1000, exponent)
      scale_exponent = exponent - int(np.log2(limit))
      if rounding == 0:
        over = amax.astype(np.float64) > np.ldexp(limit, scale_exponent)
        scale_exponent = scale_exponent + over
      code = np.clip(scale_exponent + 127, 0, 254).astype(np.uint8)
      quotient = np.ldexp(clean.astype(np.float64), 127 - code.astype(int))
      quotient = quotient.astype(np.float32)
      nan_code = 255
    # The sign of a zero or of what underflows is kept.
    magnitude = np.minimum(np.abs(quotient), np.float32(limit))
    codes = np.copysign(magnitude, blocks).astype(dtype).view(np.uint8)
    codes = np.where(bad, 0, codes & (15 if dtype == E2M1 else 255))
    scale = np.where(bad, nan_code, code)[..., 0]
  return codes.reshape(x.shape).astype(np.uint8), scale, global_scale


class QuantizeTest(parameterized.TestCase):
  def inputs(self, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 544)).astype(np.float32)
    x[1] *= np.exp2(rng.integers(-60, 60, 544)).astype(np.float32)
    x[2] = 0
    x[2, 40] = -0.0
    x[3, 5] = np.nan
    x[3, 50] = np.inf
    x[3, 70:80] = -1e30
    x[4] = rng.integers(-12, 13, 544) / 4  # ties
    x[5, :32] = np.float32(2.0**-149) * rng.integers(0, 1000, 32)
    x[5, 32:64] = 448.0 * 2.0 ** rng.integers(-3, 3, 32)
    x[6] *= 1e-38
    return x.astype(dtype)

  @parameterized.product(
    name=QUANTIZED,
    dtype=("float32", "bfloat16", "float16"),
    rounding=(0, 1),
    isa=ISAS,
  )
  def test_bits_equal_the_reference(self, name, dtype, rounding, isa):
    dtype = getattr(ml_dtypes, dtype, None) or dtype
    x = self.inputs(dtype)
    number = QUANTIZED.index(name)
    globals_ = [None, 0.01, 3.7] if name == "nvfp4" else [None]
    for rows, given in itertools.product((x, x[4:5], x[:0]), globals_):
      given = None if given is None else np.float32(given)
      values, scale, global_scale = testing.quantize(
        rows,
        given,
        format=number,
        rounding=rounding,
        compute_global=int(name == "nvfp4" and given is None),
        isa=isa_number(self, isa),
      )
      expected = quantized_reference(rows, name, rounding, given)
      values = np.asarray(values)
      if number >= 2:
        values = np.stack([values & 15, values >> 4], -1).reshape(rows.shape)
      np.testing.assert_array_equal(values, expected[0])
      np.testing.assert_array_equal(np.asarray(scale), expected[1])
      if name == "nvfp4":
        self.assertEqual(np.asarray(global_scale), np.float32(expected[2]))

  @parameterized.product(name=QUANTIZED, rounding=(0, 1), isa=ISAS)
  def test_every_bf16_value_beside_one(self, name, rounding, isa):
    """65536 inputs, each the first of a block whose second value is 1."""
    block = FORMATS[name][2]
    x = np.zeros((65536, block), np.float32)
    x[:, 0] = np.arange(65536, dtype=np.uint16).view(BF16).astype(np.float32)
    x[:, 1] = 1
    given = np.float32(0.125) if name == "nvfp4" else None
    number = QUANTIZED.index(name)
    values, scale, _ = testing.quantize(
      x, given, format=number, rounding=rounding, isa=isa_number(self, isa)
    )
    expected = quantized_reference(x, name, rounding, given)
    values = np.asarray(values)
    if number >= 2:
      values = np.stack([values & 15, values >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(np.asarray(scale), expected[1])

  @parameterized.parameters(0.0, -1.0, np.inf, np.nan)
  def test_nvfp4_under_a_bad_global_scale_is_nan(self, given):
    x = np.ones((2, 32), np.float32)
    values, scale, _ = testing.quantize(x, np.float32(given), format=3)
    self.assertTrue(np.all(np.asarray(values) == 0))
    self.assertTrue(np.all(np.asarray(scale) == 0x7F))

  @parameterized.product(name=QUANTIZED, isa=ISAS)
  def test_bits_equal_the_python_quantize(self, name, isa):
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    try:
      import jaxplugin as jp
    except ImportError as error:
      self.skipTest(f"jaxplugin does not import: {error}")
    x = self.inputs(np.float32)
    for factor in (1, 1e-30, 1e-38, 1e30):
      with np.errstate(over="ignore"):
        y = x * np.float32(factor)
      for rounding, word in enumerate(("up", "floor")):
        expected = jp.quantize(
          jnp.asarray(y), getattr(jp, name.upper()), scale_rounding=word
        )
        number = QUANTIZED.index(name)
        values, scale, global_scale = testing.quantize(
          y,
          format=number,
          rounding=rounding,
          compute_global=int(name == "nvfp4"),
          isa=isa_number(self, isa),
        )
        values = np.asarray(values)
        if number >= 2:
          values = np.stack([values & 15, values >> 4], -1).reshape(y.shape)
        their_values = np.asarray(expected.values).view(np.uint8)
        np.testing.assert_array_equal(values, their_values & (
          15 if number >= 2 else 255
        ))  # fmt: skip
        np.testing.assert_array_equal(
          np.asarray(scale), np.asarray(expected.scale).view(np.uint8)
        )
        if name == "nvfp4":
          self.assertEqual(
            np.asarray(global_scale), np.asarray(expected.global_scale)
          )

  @parameterized.named_parameters(
    ("rank", {"x": np.ones((2, 2, 32), "f4")}, "x must be"),
    ("dtype", {"x": np.ones((2, 32), np.int32)}, "x must be"),
    ("k", {"x": np.ones((2, 40), "f4")}, "multiple of the block size 32"),
    ("format", {"format": 4}, "format must be"),
    ("rounding", {"rounding": 2}, "rounding must be"),
    ("compute", {"compute_global": 1}, "compute_global must be"),
    ("global", {"global_scale": np.ones(3, "f4")}, "global_scale must be"),
    ("values", {"values": ((2, 33), "u1")}, "values must be"),
    ("values_dtype", {"values": ((2, 32), E5M2)}, "values must be"),
    ("scale", {"scale": ((2, 2), "u1")}, "scale must be"),
    ("scale_dtype", {"scale": ((2, 1), E4M3)}, "scale must be"),
    ("global_result", {"global_result": ((2,), "f4")}, "global scale result"),
    ("isa", {"isa": 9}, "isa must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    results = tuple(
      jax.ShapeDtypeStruct(*change.pop(name, default))
      for name, default in (
        ("values", ((2, 32), "u1")),
        ("scale", ((2, 1), "u1")),
        ("global_result", ((), "f4")),
      )
    )
    arguments = {"x": np.ones((2, 32), "f4"), "format": 0} | change
    with self.assertRaisesRegex(Exception, message):
      jax.block_until_ready(testing.quantize(**arguments, results=results))


class EightBitPairTest(parameterized.TestCase):
  """Sides of 8-bit codes with E4M3 scales for each 16, which no format has."""

  @parameterized.product(
    dtype=(E4M3, E5M2), k=(48, 528, 1040), is_finite=(True, False), isa=ISAS
  )
  def test_dot_is_within_the_bound(self, dtype, k, is_finite, isa):
    rng = np.random.default_rng(0)
    sides, exact = [], []
    for rows in (17, 70):
      values = rng.standard_normal((1, rows, k)).astype(dtype)
      scale = rng.uniform(0.5, 2, (1, rows, k // 16)).astype(E4M3)
      if not is_finite:
        values[0, 3, 5] = np.inf if dtype == E5M2 else np.nan
        values[0, 9, 40] = np.nan
      sides += [values, scale]
      exact.append(
        values.astype(np.float64) * np.repeat(scale.astype(np.float64), 16, -1)
      )
    got = np.asarray(
      testing.dot(
        *sides,
        lhs_block_size=16,
        rhs_block_size=16,
        isa=isa_number(self, isa),
      )
    )
    lhs, rhs = exact[0], np.swapaxes(exact[1], -1, -2)
    with np.errstate(invalid="ignore"):
      expected = lhs @ rhs
      bound = 16 * 2.0**-24 * (np.abs(lhs) @ np.abs(rhs))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    np.testing.assert_array_less(
      np.abs(got[finite] - expected[finite]), bound[finite]
    )


class DequantizeTest(parameterized.TestCase):
  @parameterized.product(
    name=QUANTIZED,
    dtype=("float32", "bfloat16", "float16"),
    isa=ISAS,
    packed=(False, True),
  )
  def test_every_code_under_every_scale(self, name, dtype, isa, packed):
    values_dtype, scale_dtype, block = FORMATS[name]
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    codes = np.arange(16 if values_dtype == E2M1 else 256, dtype=np.uint8)
    k = 288  # every code, and a tail
    values = np.resize(codes, (256, k))
    scale = np.arange(256, dtype=np.uint8)[:, None].repeat(k // block, 1)
    factor = (
      e8m0_value(scale)
      if scale_dtype == E8M0
      else scale.view(E4M3).astype(np.float64)
    )
    given = values.view(values_dtype)
    if packed and values_dtype == E2M1:
      given = values[:, 0::2] | values[:, 1::2] << 4
    for global_scale in (None, np.float32(0.37)):
      got = testing.dequantize(
        given,
        scale.view(scale_dtype),
        global_scale,
        k=k,
        block_size=block,
        isa=isa_number(self, isa),
        dtype=dtype,
      )
      with np.errstate(all="ignore"):
        expected = values.view(values_dtype).astype(np.float64) * np.repeat(
          factor, block, 1
        )
        expected = expected.astype(np.float32)
        if global_scale is not None:
          expected = expected * global_scale
        expected = expected.astype(dtype).astype(np.float32)
      self.assertEqual(got.dtype, dtype)
      np.testing.assert_array_equal(np.asarray(got, np.float32), expected)

  def test_result_of_megabytes_is_that_of_its_rows(self):
    # Huge pages are asked for from 8 MiB on.
    rng = np.random.default_rng(0)
    values = rng.integers(0, 127, (2500, 1056), np.uint8).view(E4M3)
    scale = rng.integers(100, 150, (2500, 33), np.uint8).view(E8M0)
    got = testing.dequantize(values, scale, k=1056, block_size=32)
    self.assertGreater(got.nbytes, 10 << 20)
    parts = [
      testing.dequantize(values[i], scale[i], k=1056, block_size=32)
      for i in (slice(0, 1250), slice(1250, 2500))
    ]
    np.testing.assert_array_equal(got, np.concatenate(parts))

  def test_partial_last_block(self):
    values = np.ones((3, 40), E4M3)
    scale = np.array([[127, 130]] * 3, np.uint8).view(E8M0)
    got = testing.dequantize(values, scale, k=40, block_size=32)
    expected = np.repeat([[1, 8]], 32, axis=1)[:, :40].repeat(3, 0)
    np.testing.assert_array_equal(np.asarray(got), expected)

  @parameterized.named_parameters(
    ("k", {"k": 63}, "the result must be"),
    ("block", {"block_size": 8}, "must be 16 or 32"),
    ("scale", {"scale": np.ones((3, 3), E8M0)}, "values_scale must have"),
    ("dtype", {"dtype": np.uint8}, "the result must be"),
    ("isa", {"isa": 7}, "isa must be"),
  )
  def test_malformed_call_is_an_error(self, change, message):
    arguments = {
      "values": np.ones((3, 64), E4M3),
      "scale": np.ones((3, 2), E8M0),
      "k": 64,
      "block_size": 32,
    } | change
    with self.assertRaisesRegex(Exception, message):
      jax.block_until_ready(testing.dequantize(**arguments))


class LibraryTest(absltest.TestCase):
  def test_isa_is_one_of_the_levels(self):
    name = testing.library().jaxplugin_cpu_isa().decode()
    self.assertIn(name, (*testing.ISA_LEVELS, "baseline_neon"))

  def test_ffi_api_version_is_major_and_minor(self):
    version = testing.library().jaxplugin_cpu_ffi_api_version()
    self.assertEqual(version // 1000, 0)
    self.assertGreaterEqual(version % 1000, 1)


if __name__ == "__main__":
  absltest.main()
