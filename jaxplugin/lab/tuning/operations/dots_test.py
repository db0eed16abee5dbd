# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact operands of dots, and the check that finds wrong results."""

import dataclasses
import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.dot import primitive
from jaxplugin.lab.tuning.operations import dots, operands
from jaxplugin.testing import contract, dot_problems

side = dot_problems.operand


def problem(lhs, rhs, **changes):
  return dot_problems.problem(lhs, rhs, **{"m": 5, "n": 33, "k": 96, **changes})


# XLA's own operations take long to compile.
TWICE: Final = ("mixed", "one_sided")
PACKED_MXFP4: Final = side(jp.MXFP4, dtype=formats.PACKED)
PACKED_NVFP4: Final = side(jp.NVFP4, dtype=formats.PACKED)
SWIZZLED: Final = side(jp.MXFP8, scale_layout="swizzled_128x4")
PROBLEMS: Final = {
  "mxfp8": problem(jp.MXFP8, jp.MXFP8),
  "mixed": problem(jp.MXFP8_E5M2, jp.MXFP4, out_dtype=formats.BF16),
  "fp6": problem(jp.MXFP6_E2M3, jp.MXFP6_E3M2),
  "packed": problem(PACKED_MXFP4, PACKED_NVFP4, global_scale="scalar"),
  "int4": problem(None, side(jp.INT4_32, dtype=formats.PACKED)),
  "rows": problem(
    jp.INT8_ROW.along(96), side(jp.MXINT8, contracting_is_minor=False)
  ),
  "short_block": problem(jp.FP8_1X128, jp.FP8_128X128.of_rows(), k=200),
  "two_factors": problem(
    jp.NVFP4, jp.NVFP4, global_scale="scalar", has_global_power=True
  ),
  "one_sided": problem(None, PACKED_NVFP4),
  "fastest": problem(None, PACKED_NVFP4, fastest_precision=True),
  "swizzled": problem(SWIZZLED, SWIZZLED),
  "across": problem(
    side(jp.MXFP8, contracting_is_minor=False),
    dataclasses.replace(PACKED_MXFP4, contracting_is_minor=False),
  ),
  "batched": problem(jp.MXFP8, jp.MXFP8, batch=3),
  "interleaved": problem(
    None, dataclasses.replace(PACKED_MXFP4, is_interleaved=True)
  ),
  "relu": problem(
    jp.MXFP8,
    jp.MXFP8,
    has_bias=True,
    activation="relu",
    has_residual=True,
    out_dtype=np.dtype(np.float16),
  ),
  "gelu": problem(jp.MXFP8, jp.NVFP4, has_bias=True, activation="gelu"),
  "silu": problem(jp.MXFP8, jp.MXFP8, activation="silu"),
}


def decided(given, arrays):
  function = functools.partial(dots.compute, given)
  (eqn,) = primitive.equations(jax.make_jaxpr(function)(arrays).jaxpr)
  return primitive.decide(eqn, None).problem


def computed(given, arrays, implementation=None):
  return jax.jit(lambda x: dots.compute(given, x, implementation))(arrays)


class ExactTest(parameterized.TestCase):
  @parameterized.parameters(*PROBLEMS)
  @pytest.mark.lab
  def test_every_implementation_here_gives_the_bits(self, name):
    given = PROBLEMS[name]
    arrays, expected = dots.DOT.make(given, 0)
    self.assertEqual(decided(given, arrays), given)
    for implementation in ("xla", None) if name in TWICE else (None,):
      result = computed(given, arrays, implementation)
      operands.check(result, expected, given)

  @parameterized.parameters("mxfp8", "one_sided", "fastest", "rows")
  @pytest.mark.lab
  def test_tails_and_poison_are_of_the_kind_and_give_the_bits(self, name):
    tail = dots.DOT.tail(PROBLEMS[name])
    self.assertLessEqual(tail.m, PROBLEMS[name].m)
    poisoned = dots.DOT.poisoned(tail)
    for given in filter(None, (tail, poisoned)):
      arrays, expected = dots.DOT.make(given, 1)
      self.assertEqual(decided(given, arrays), given)
      result = computed(given, arrays)
      operands.check(result, expected, given)
    if name == "rows":  # A ScaledArray has no padded scale.
      self.assertIsNone(poisoned)
      return
    _, scale = arrays["rhs"]
    self.assertTrue(np.isnan(np.asarray(scale, np.float32)).any())

  def test_expected_is_what_the_codes_mean(self):
    # Written a second time: by ml_dtypes, in f64.
    given = PROBLEMS["mixed"]
    arrays, expected = dots.DOT.make(given, 7)
    lhs, rhs = (contract.exact(arrays[name]) for name in ("lhs", "rhs"))
    exact = (lhs @ rhs.T).astype(np.float32).astype(formats.BF16)
    np.testing.assert_array_equal(expected, exact)
    self.assertGreater(len(np.unique(exact)), 50)

  @pytest.mark.lab
  def test_sums_stay_exact_for_any_k(self):
    given = problem(jp.NVFP4, jp.MXFP8, m=1, n=2, k=1 << 18)
    lhs = dots.DOT.make(given, 0)[0]["lhs"]
    largest = np.abs(np.asarray(lhs.values, np.float32)).max() * 2
    self.assertLess(4 * given.k * largest * 2, 2**24)
    self.assertEqual(np.asarray(lhs.scale, np.float32).max(), 2)

  @parameterized.parameters(
    (dict(m=None), "symbolic"),
    (dict(n=0), "a size is 0"),
    (dict(num_contracting=2), "several dimensions"),
    (dict(global_scale="array"), "an array"),
    (dict(lhs=side(jp.MXFP8, dtype=formats.PACKED)), "stored as bytes"),
  )
  def test_what_cannot_be_made_says_why(self, changes, said):
    given = dataclasses.replace(PROBLEMS["mxfp8"], **changes)
    with self.assertRaisesRegex(operands.OperandsError, said):
      dots.DOT.make(given, 0)


class WrongTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.given = PROBLEMS["mxfp8"]
    _, self.expected = dots.DOT.make(self.given, 0)

  def assert_wrong(self, result, message=""):
    with self.assertRaisesRegex(operands.InexactResultError, message):
      operands.check(jnp.asarray(result), self.expected, self.given)

  def test_one_wrong_element_is_found(self):
    for by in (np.nan, np.inf, 0.25):
      result = self.expected.copy()
      result[4, 32] += np.float32(by)
      self.assert_wrong(result, r"at \(4, 32\) got .* 1 of 165")

  def test_an_ulp_another_shape_and_another_dtype_are_wrong(self):
    self.assert_wrong(np.nextafter(self.expected, np.float32(np.inf)))
    self.assert_wrong(self.expected[:4])
    self.assert_wrong(self.expected.astype(np.float16))

  def test_another_activation_is_wrong(self):
    self.given = dataclasses.replace(self.given, activation="silu")
    gelu = dataclasses.replace(self.given, activation="gelu")
    arrays, self.expected = dots.DOT.make(self.given, 0)
    self.assert_wrong(computed(gelu, arrays))
