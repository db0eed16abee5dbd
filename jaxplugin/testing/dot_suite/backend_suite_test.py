# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite for backends of other packages passes a right one, and no other."""

import dataclasses
import unittest

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import testing
from jaxplugin.testing import acme_backend

SIZES = ((2, 3, 5, 64),)


def sums_of(call, dtype=jnp.float32):
  rows = call.as_rows()
  return jnp.einsum(
    "bmk,bnk->bmn",
    rows.lhs.dequantized().astype(dtype),
    rows.rhs.dequantized().astype(dtype),
    precision="highest",
    preferred_element_type=dtype,
  )


def right(call):
  return call.as_rows().finish(sums_of(call))


def without_global_scale(call):
  """Its own epilogue, without what multiplies the sums."""
  rows, result = call.as_rows(), sums_of(call)
  if rows.bias is not None:
    result = result + rows.bias
  result = jax.nn.relu(result) if rows.activation else result
  if rows.residual is not None:
    result = result + rows.residual
  return result.astype(call.dtype)


def one_global_scale_for_all(call):
  """Takes the first number of a global scale that varies."""
  rows = call.as_rows()
  scales = [jnp.ravel(x)[0] for x in rows.global_scales]
  sums = sums_of(call)
  for ours, own in zip(scales, rows.global_scales, strict=True):
    sums = sums * (ours / own)
  return rows.finish(sums)


def with_padding(call):
  """Multiplies whole tiles of swizzled scales, which it says that it reads."""
  sums = right(call)
  for side in (call.lhs, call.rhs):
    if side.scale is not None and side.scale_layout == "swizzled_128x4":
      # Values of the padding are zero, and scales there whatever they are.
      sums = sums + 0 * jnp.sum(side.scale.astype(sums.dtype))
  return sums


def rounded_twice(call):
  rows = call.as_rows()
  sums = sums_of(call).astype(jnp.bfloat16)
  return rows.finish(sums.astype(jnp.float32))


def finite_where_nan(call):
  return call.as_rows().finish(jnp.nan_to_num(sums_of(call), nan=0.0))


def last_block_forgotten(call):
  rows = call.as_rows()
  lhs, rhs = rows.lhs.dequantized(), rows.rhs.dequantized()
  lhs, rhs = lhs[..., :-32], rhs[..., :-32]
  sums = jnp.einsum("bmk,bnk->bmn", lhs, rhs, precision="highest")
  return rows.finish(sums)


def lacking_some(problem, target):
  del target
  return None if problem.m > 3 else "is not for so few rows"


def wordless(problem, target):
  del target
  return None if problem.m < 4096 else False


class Fickle:
  """Another answer each time."""

  def __init__(self):
    self.count = 0

  def __call__(self, problem, target):
    self.count += 1
    return None if problem.m < 100 else f"asked {self.count} times"


def backend(emit=right, **changes):
  flags = {"is_portable": True, "takes_symbolic_sizes": True}
  return acme_backend.create(emit, **{"name": "planted", **flags, **changes})


def failed(planted, *prefixes, **attributes):
  """Names of the tests of a suite that fail, of those that start so."""

  class Planted(testing.BackendSuite):
    implementation = "planted"
    backend = planted
    kinds = ((jp.MXFP8, jp.MXFP8),)
    sizes = SIZES

  for name, value in attributes.items():
    setattr(Planted, name, value)
  names = unittest.defaultTestLoader.getTestCaseNames(Planted)
  chosen = [name for name in names if name.startswith(prefixes)]
  assert chosen, prefixes
  result = unittest.TestResult()
  unittest.TestSuite(map(Planted, chosen)).run(result)
  tests = [test for test, _ in (*result.failures, *result.errors)]
  # A subtest counts as its test.
  return sorted({getattr(t, "test_case", t)._testMethodName for t in tests})


CLAIMED = (
  "test_claimed",
  "test_global_scale_and",
  "test_storage_and",
  "test_nan_s",
)
EXACT = "test_claimed_sizes_are_exact_on_integers"
BOUNDED = "test_claimed_sizes_are_within_the_bound_on_all_codes"
EPILOGUE = "test_global_scale_and_epilogue_count_in_claimed_sizes"
STORAGE = "test_storage_and_poison_change_nothing_in_claimed_sizes"
NAN = "test_nan_scale_is_nan_in_its_row_alone_in_claimed_sizes"
SERVED = "test_every_kind_is_served_in_every_size_that_is_claimed"
ANSWERS = "test_supports_answers_about_anything_and_always_the_same"


class PlantedTest(parameterized.TestCase):
  @pytest.mark.full
  def test_right_one_passes(self):
    self.assertEqual(failed(backend(), *CLAIMED), [])

  def test_right_one_passes_under_transformations(self):
    tests = ("test_every_kind", "test_supports", "test_vmap", "test_gradients")
    tests += ("test_portable", "test_a_sharded")
    self.assertEqual(failed(backend(), *tests), [])

  @parameterized.parameters(
    (without_global_scale, {EPILOGUE}),
    (one_global_scale_for_all, {EPILOGUE}),
    (rounded_twice, {EXACT, BOUNDED, EPILOGUE, NAN}),
    (last_block_forgotten, {EXACT, BOUNDED, EPILOGUE, NAN}),
    (finite_where_nan, {NAN}),
  )
  @pytest.mark.sample(1)
  def test_wrong_numbers_fail(self, emit, expected):
    self.assertEqual(failed(backend(emit), *CLAIMED), sorted(expected))

  def test_one_that_reads_poison_fails(self):
    planted = backend(with_padding, reads=("swizzled_128x4",))
    self.assertEqual(failed(planted, *CLAIMED), [STORAGE])

  def test_claim_that_is_refused_fails(self):
    planted = backend(supports=lacking_some)
    self.assertEqual(failed(planted, "test_every_kind"), [SERVED])
    # Where a size is not claimed, it is the author's business.
    sizes = ((1, 4, 5, 64),)
    self.assertEqual(failed(planted, "test_every_kind", sizes=sizes), [])

  @parameterized.parameters(wordless, Fickle())
  def test_supports_that_does_not_answer_fails(self, supports):
    planted = backend(supports=supports)
    self.assertEqual(failed(planted, "test_supports"), [ANSWERS])

  def test_suite_without_claims_fails(self):
    for name in ("implementation", "kinds", "sizes"):
      attributes = {name: None}
      self.assertEqual(
        failed(backend(), "test_every_kind", **attributes), [SERVED]
      )

  def test_backend_that_is_not_there_fails_and_the_others_are_told(self):
    other = dataclasses.replace(backend(), name="other")
    self.assertEqual(failed(other, "test_supports"), [ANSWERS])

  def test_what_is_refused_is_skipped_and_never_passes(self):
    class Refusing(testing.BackendSuite):
      implementation = "planted"
      backend = backend(supports=lambda problem, target: "never")
      kinds = ((jp.MXFP8, jp.MXFP8),)
      sizes = SIZES
      cases_per_test = 2

    names = ["test_epilogue_of_nan_is_nan", EXACT]
    names.append(
      "test_fuzzed_shapes_are_exact_on_integers_and_bounded_otherwise0"
    )
    result = unittest.TestResult()
    unittest.TestSuite(map(Refusing, names)).run(result)
    self.assertEqual(
      [(t._testMethodName, why) for t, why in result.skipped],
      [(names[0], "planted: never"), (names[2], "planted: never")],
    )
    self.assertLen(result.errors, 1)
