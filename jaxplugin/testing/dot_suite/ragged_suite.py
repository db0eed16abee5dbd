# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the ragged dot must do, as one suite of tests.

A test file of an implementation subclasses `RaggedSuite` and sets its name. The
oracle is NumPy in f64, a loop over rows.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import epilogue

# Results of `preferred_element_type` that the fuzzed cases take in turns.
_DTYPES: Final = contract.RESULT_DTYPES

# (rhs, lhs, groups, m, n, k): every format; pairs, mixed and one-sided; n and k
# with tails of every kernel's tiles; fewer rows than groups and many more.
FUZZED: Final = (
  (jp.MXFP8, jp.MXFP8, 5, 23, 48, 64),
  (jp.MXFP8, contract.F32, 4, 7, 33, 96),
  (jp.MXFP8, contract.BF16, 3, 90, 17, 32),
  (jp.MXFP8_E5M2, jp.MXFP8, 2, 40, 31, 160),
  (jp.MXFP8_E5M2, contract.F16, 6, 12, 64, 64),
  (jp.MXFP4, jp.MXFP4, 8, 4, 70, 128),
  (jp.MXFP4, jp.MXFP8, 5, 61, 40, 64),
  (jp.MXFP4, contract.BF16, 32, 4, 24, 96),
  (jp.MXFP4, contract.F32, 3, 35, 66, 32),
  (jp.NVFP4, jp.NVFP4, 7, 50, 36, 48),
  (jp.NVFP4, jp.NVFP4, 2, 130, 20, 80),
  (jp.NVFP4, contract.BF16, 16, 9, 130, 64),
  (jp.NVFP4, contract.F32, 4, 33, 16, 112),
  (jp.NVFP4, contract.F16, 1, 6, 50, 16),
  (jp.MXFP6_E2M3, jp.MXFP6_E2M3, 3, 20, 18, 64),
  (jp.MXFP6_E3M2, jp.MXFP4, 4, 11, 22, 32),
  (jp.MXFP6_E3M2, contract.F32, 2, 19, 35, 64),
  (jp.MXFP8, jp.NVFP4, 3, 28, 26, 32),
  (jp.NVFP4, jp.MXFP8, 6, 17, 34, 64),
  (jp.MXFP4, contract.F16, 9, 70, 12, 64),
)


def random_sizes(
  rng: np.random.Generator, groups: int, m: int, kind: int
) -> np.ndarray:
  """i32[groups] of a sum of at most m; of each kind something goes wrong."""
  sizes = np.zeros(groups, np.int64)
  if kind == 0:  # all in the last
    sizes[-1] = m
  elif kind == 1:  # none at all
    pass
  elif kind == 2:  # one row somewhere, rows left over
    sizes[rng.integers(groups)] = 1
  elif kind == 3:  # all in one
    sizes[rng.integers(groups)] = m
  else:
    total = m if kind % 2 else int(rng.integers(0, m + 1))
    weights = rng.dirichlet(np.full(groups, 0.3))
    sizes = rng.multinomial(total, weights)
  return sizes.astype(np.int32)


def group_of_rows(sizes: np.ndarray, m: int) -> np.ndarray:
  """Each row's group, -1 of none."""
  groups = np.repeat(np.arange(len(sizes)), np.maximum(sizes, 0))[:m]
  return np.pad(groups, (0, m - len(groups)), constant_values=-1)


def oracle(
  lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """f64 sums, and the same of magnitudes; zeros in no group's rows."""
  m = len(lhs)
  result, magnitude = np.zeros((2, m, rhs.shape[1]))
  for i, group in enumerate(group_of_rows(sizes, m)):
    if group >= 0:
      result[i] = rhs[group] @ lhs[i]
      magnitude[i] = np.abs(rhs[group]) @ np.abs(lhs[i])
  return result, magnitude


def expected_of(
  lhs: np.ndarray,
  rhs: np.ndarray,
  sizes: np.ndarray,
  bias: np.ndarray | None = None,
  activation: str | None = None,
) -> np.ndarray:
  """The result in f64; zeros in rows of no group."""
  result, _ = oracle(lhs, rhs, sizes)
  of_row = group_of_rows(sizes, len(lhs))
  if bias is not None:
    result = result + bias[of_row]
  result = activate(result, activation)
  return np.where((of_row >= 0)[:, None], result, 0)


def by_rows(
  x: jax.Array,
  weights: jax.Array,
  bias: jax.Array | None,
  sizes: np.ndarray,
  activation: str | None = None,
) -> jax.Array:
  """The result by JAX's operations, which have derivatives."""
  of_row = group_of_rows(sizes, len(x))
  z = jnp.einsum("mk,mnk->mn", x, weights[of_row], precision="highest")
  if bias is not None:
    z = z + bias[of_row]
  if activation == "swiglu":
    gate, value = jnp.split(z, 2, axis=1)
    z = jax.nn.silu(gate) * value
  elif activation == "swigluoai":
    gate, value = jnp.minimum(z[:, ::2], 7), jnp.clip(z[:, 1::2], -7, 7)
    z = gate * jax.nn.sigmoid(1.702 * gate) * (value + 1)
  elif activation is not None:
    z = getattr(jax.nn, activation)(z)
  return jnp.where((of_row >= 0)[:, None], z, 0)


def operand(
  rng: np.random.Generator,
  format: Any,
  shape: tuple[int, ...],
  axis: int = -1,
  **options: Any,
) -> tuple[Any, np.ndarray]:
  """An argument of `ragged_dot`, and its exact values."""
  made = contract.operand(rng, format, shape, axis, **options)
  return made.operand, made.exact


class RaggedSuite(parameterized.TestCase):
  """The numerical contract of one implementation.

  Attributes:
    implementation: its name.
    has_loop: whether a loop of `block_scaled_dot` by the same implementation
      has its bits.
    loop_bound: what it may differ by all the same, in units of sum(|a * b|).
    sizes_of_each: how many kinds of sizes each fuzzed case takes; with 16 there
      are more than 500 products.
  """

  implementation = ""
  has_loop = False
  loop_bound = 0.0
  sizes_of_each = 16

  def setUp(self):
    super().setUp()
    if type(self) is RaggedSuite:
      self.skipTest("the suite itself")

  def dot(self, *args: Any, **options: Any) -> jax.Array:
    return jp.ragged_dot(*args, implementation=self.implementation, **options)

  def dense_dot(self, *args: Any) -> jax.Array:
    return jp.block_scaled_dot(*args, implementation=self.implementation)

  @parameterized.parameters(*enumerate(FUZZED))
  def test_fuzzed_sizes(self, seed, case):
    rhs_format, lhs_format, groups, m, n, k = case
    rng = np.random.default_rng(seed)
    dtype = _DTYPES[seed % len(_DTYPES)]
    # One program for all: both kinds of data, and every kind of sizes.
    dot = jax.jit(lambda *args: self.dot(*args, preferred_element_type=dtype))
    for integers in (True, False):
      if dtype == contract.F16 and not integers:
        continue  # scales of 2^30 overflow it
      made = functools.partial(operand, rng, integers=integers)
      rhs, exact_rhs = made(rhs_format, (groups, n, k))
      lhs, exact_lhs = made(lhs_format, (m, k))
      for kind in range(self.sizes_of_each):
        sizes = random_sizes(rng, groups, m, kind)
        actual = dot(lhs, rhs, sizes)
        expected = oracle(exact_lhs, exact_rhs, sizes)
        contract.assert_dot(actual, *expected, dtype, integers=integers)

  def test_nothing_leaks_between_groups(self):
    # NaN in every row and every weight that a row must not see.
    rng = np.random.default_rng(0)
    groups, m, n, k = 4, 14, 20, 64
    rhs, exact = operand(rng, jp.MXFP8, (groups, n, k), integers=True)
    lhs = rng.integers(-4, 5, (m, k)).astype(np.float32)
    sizes = np.array([3, 0, 5, 2], np.int32)
    of_row = group_of_rows(sizes, m)
    for own in (0, 2, 3, -1):
      is_own = of_row == own
      poisoned = np.where(is_own[:, None], lhs, np.float32(np.nan))
      scale = np.asarray(rhs.scale).view(np.uint8).copy()
      scale[np.arange(groups) != own] = 0xFF
      weights = jp.ScaledArray(
        rhs.values, jnp.asarray(scale.view(formats.E8M0)), None, jp.MXFP8
      )
      actual = self.dot(poisoned, weights, sizes)
      expected, _ = oracle(lhs, exact, sizes)
      contract.assert_exact(
        np.asarray(actual)[is_own], expected[is_own], contract.F32
      )

  @parameterized.parameters(
    ([9, 0, 0], [6, 0, 0]), ([2, 9, 1], [2, 4, 0]), ([2, -3, 2], [2, 0, 2])
  )
  def test_sizes_that_do_not_fit_end_with_the_rows(self, given, meant):
    rng = np.random.default_rng(2)
    rhs, exact = operand(rng, jp.MXFP4, (3, 8, 32), integers=True)
    lhs = rng.integers(-4, 5, (6, 32)).astype(np.float32)
    expected, _ = oracle(lhs, exact, np.array(meant))
    actual = self.dot(lhs, rhs, np.array(given, np.int32))
    contract.assert_exact(actual, expected, contract.F32)

  @parameterized.product(
    activation=(None, "relu", "gelu", "silu", "swiglu", "swigluoai"),
    dtype=_DTYPES,
  )
  def test_epilogue(self, activation, dtype):
    rng = np.random.default_rng(3)
    groups, m, n, k = 3, 21, 150, 32
    rhs, exact = operand(rng, jp.NVFP4, (groups, n, k), integers=True)
    scales = np.array([0.5, 3.0, 0.037], np.float32)
    rhs = jp.ScaledArray(
      rhs.values, rhs.scale, scales.reshape(-1, 1, 1), jp.NVFP4
    )
    lhs = rng.integers(-4, 5, (m, k)).astype(np.float32) / 8
    bias = rng.normal(size=(groups, n)).astype(np.float32)
    sizes = np.array([10, 0, 6], np.int32)
    actual = self.dot(
      lhs,
      rhs,
      sizes,
      bias=bias,
      activation=activation,
      preferred_element_type=dtype,
    )
    of_row = group_of_rows(sizes, m)
    is_own = (of_row >= 0)[:, None]
    exact = exact * scales[:, None, None].astype(np.float64)
    before = expected_of(lhs, exact, sizes, bias)
    # Every limit of an activation is exceeded, and by few.
    for part in (before[:, ::2], before[:, 1::2]):
      self.assertGreater((part[:16] > 8).sum(), 20)
      self.assertGreater((part[:16] < -8).sum(), 20)
      self.assertGreater((np.abs(part[:16]) < 6).sum(), 200)
    expected = expected_of(lhs, exact, sizes, bias, activation)
    # Roundings of f32 on the way, of numbers up to a hundred.
    bound = np.where(is_own, 64 * 2.0**-24 * (1 + np.abs(expected)), 0)
    contract.assert_within(actual, expected, bound * 100, dtype)

  @parameterized.parameters(
    ((1, 1), (4, 1, 1)),
    ((1, 1), (1, 1, 1)),
    ((9, 1), (1, 1, 1)),
    ((9, 1), (4, 1, 1)),
  )
  def test_global_scales_multiply_whatever_they_vary_over(self, lhs_s, rhs_s):
    rng = np.random.default_rng(4)
    rhs, exact_rhs = operand(rng, jp.NVFP4, (4, 10, 32), integers=True)
    lhs, exact_lhs = operand(rng, jp.NVFP4, (9, 32), integers=True)
    of_lhs = np.exp2(rng.integers(-60, 60, lhs_s)).astype(np.float32)
    of_rhs = np.exp2(rng.integers(-60, 60, rhs_s)).astype(np.float32)
    lhs = jp.ScaledArray(lhs.values, lhs.scale, of_lhs, jp.NVFP4)
    rhs = jp.ScaledArray(rhs.values, rhs.scale, of_rhs, jp.NVFP4)
    sizes = np.array([3, 0, 2, 3], np.int32)
    exact, _ = oracle(
      exact_lhs * of_lhs.astype(np.float64),
      exact_rhs * of_rhs.astype(np.float64),
      sizes,
    )
    contract.assert_exact(self.dot(lhs, rhs, sizes), exact, contract.F32)

  @parameterized.parameters((0, 8, 32), (5, 0, 32), (5, 8, 0))
  def test_empty(self, m, n, k):
    values = jnp.zeros((2, n, k), jnp.float8_e4m3fn)
    scale = jnp.zeros((2, n, k // 32), jnp.float8_e8m0fnu)
    rhs = jp.ScaledArray(values, scale, None, jp.MXFP8)
    actual = self.dot(jnp.zeros((m, k)), rhs, jnp.array([m, 0]))
    np.testing.assert_array_equal(actual, np.zeros((m, n), np.float32))

  @parameterized.parameters(jp.MXFP8, jp.MXFP4, jp.NVFP4)
  def test_equals_a_loop_of_dots_bitwise(self, format):
    if not self.has_loop:
      self.skipTest("its tiles depend on all sizes")
    rng = np.random.default_rng(5)
    groups, m, n, k = 4, 40, 70, 160
    w = rng.normal(size=(groups, n, k)).astype(np.float32)
    x = rng.normal(size=(m, k)).astype(np.float32)
    quantized = lambda x: contract.quantized(x, format)
    sizes = np.array([3, 1, 0, 36], np.int32)
    for is_plain in (True, False):
      lhs_of = (lambda x: x) if is_plain else quantized
      lhs = lhs_of(x)
      of_lhs = np.abs(np.float64(x) if is_plain else contract.exact(lhs))
      actual = np.float64(self.dot(lhs, quantized(w), sizes))
      starts = np.cumsum(sizes) - sizes
      for start, size, of_group in zip(starts, sizes, w, strict=True):
        if size:
          rows, rhs = slice(start, start + size), quantized(of_group)
          expected = np.float64(self.dense_dot(lhs_of(x[rows]), rhs))
          allowed = self.loop_bound * (
            of_lhs[rows] @ np.abs(contract.exact(rhs)).T
          )
          difference = np.abs(actual[rows] - expected)
          np.testing.assert_array_less(difference, allowed + 2.0**-140)


def activate(x: np.ndarray, activation: str | None) -> np.ndarray:
  """Returns an activation by its definition in f64."""
  # Below, f64 overflows to a sigmoid of 0, and says so.
  sigmoid = lambda x: 1 / (1 + np.exp(-np.maximum(x, -700)))
  if activation == "swiglu":
    gate, value = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return gate * sigmoid(gate) * value
  if activation == "swigluoai":
    gate = np.minimum(x[:, 0::2], 7.0)
    value = np.clip(x[:, 1::2], -7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (value + 1)
  return epilogue.activate(x, activation)
