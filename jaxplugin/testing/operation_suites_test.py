# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suites pass right backends of other operations, and no wrong ones."""

import dataclasses
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin import testing
from jaxplugin.quantization import operations, problems
from jaxplugin.testing import acme_backend

SHAPES = ((2, 5, 96),)
FORMATS = (jp.MXFP8, jp.NVFP4)


def quantize(call):
  problem = call.problem
  whole = problems.QuantizationProblem.along(
    problem.axis,
    shape=problem.shape,
    dtype=problem.dtype,
    format=problem.format,
    scale_rounding=problem.scale_rounding,
  )
  results = operations.quantize(call.x, call.global_scale, None, whole)
  return results if problem.computes_global_scale else results[:2]


def quantize_without_given_scale(call):
  if call.global_scale is None:
    return quantize(call)
  return quantize(dataclasses.replace(call, global_scale=jnp.float32(1)))


def quantize_infinite_blocks_to_zero(call):
  is_finite = jnp.isfinite(call.x)
  return quantize(dataclasses.replace(call, x=jnp.where(is_finite, call.x, 0)))


def dequantize(call):
  problem = call.problem
  scale = call.scale.astype(jnp.float32)
  scale = jnp.repeat(scale, problem.format.block_size, problem.axis)
  result = call.values.astype(jnp.float32) * scale
  if call.global_scale is not None:
    result = result * call.global_scale
  return result.astype(problem.dtype)


def dequantize_by_last_scale(call):
  last = jax.lax.index_in_dim(call.scale, -1, call.problem.axis)
  scale = jnp.broadcast_to(last, call.scale.shape)
  return dequantize(dataclasses.replace(call, scale=scale))


def ragged_sums(call, clip=True):
  if not call.problem.contracts_blocks:
    raise NotImplementedError("computes no gradient of lhs")
  ends = jnp.cumsum(call.group_sizes)
  group = jnp.searchsorted(ends, jnp.arange(call.shape[0]), side="right")
  weights = call.rhs.dequantized()[group % len(ends)]
  rows = call.lhs.dequantized().astype(jnp.float32)
  return jnp.einsum("mk,mnk->mn", rows, weights, precision="highest")


def ragged_dot(call):
  return call.finish(ragged_sums(call))


def ragged_dot_without_bias(call):
  sums = ragged_sums(call)
  if call.bias is None:
    return call.finish(sums)
  return jnp.maximum(sums, 0).astype(call.dtype)


def ragged_dot_of_every_row(call):
  """Computes rows of no group."""
  if call.bias is not None or call.global_scales:
    return ragged_dot(call)
  return ragged_sums(call).astype(call.dtype)


@pytest.mark.sample(1)
class QuantizeTest(testing.QuantizeBackendSuite):
  backend = acme_backend.create(quantize, operation="quantize")
  formats = FORMATS
  shapes = SHAPES
  axes = (-1, -2)


@pytest.mark.sample(1)
class DequantizeTest(testing.DequantizeBackendSuite):
  backend = acme_backend.create(dequantize, operation="dequantize")
  formats = FORMATS
  shapes = SHAPES
  axes = (-1, -2)


class RaggedTest(testing.RaggedBackendSuite):
  backend = acme_backend.create(ragged_dot, operation="ragged_dot")
  kinds = ((jp.MXFP8, jp.MXFP8), (jnp.bfloat16, jp.MXFP4))
  sizes = ((3, 7, 5, 64),)


def failures(suite, *names, **attributes):
  """Returns which tests of `names` fail. The rows of a test have numbers."""
  case = type("Wrong", (suite,), {**attributes, "__module__": __name__})
  result = unittest.TestResult()
  unittest.TestSuite(map(case, names)).run(result)
  return {
    getattr(test, "test_case", test)._testMethodName
    for test, _ in (*result.failures, *result.errors)
  }


class WrongBackendTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      quantize_without_given_scale,
      "test_given_global_scale_has_the_bits_of_quantize",
    ),
    (
      quantize_infinite_blocks_to_zero,
      "test_special_numbers_have_the_bits_of_quantize",
    ),
  )
  def test_quantize(self, emit, name):
    found = failures(
      testing.QuantizeBackendSuite,
      name,
      backend=acme_backend.create(emit, operation="quantize"),
      formats=(jp.NVFP4,),
      shapes=((2, 64),),
    )
    self.assertEqual(found, {name})

  def test_dequantize(self):
    found = failures(
      testing.DequantizeBackendSuite,
      "test_all_codes_have_the_bits_of_dequantize0",
      backend=acme_backend.create(
        dequantize_by_last_scale, operation="dequantize"
      ),
      formats=(jp.MXFP8,),
      shapes=((2, 64),),
    )
    self.assertLen(found, 1)

  @parameterized.parameters(
    (ragged_dot_without_bias, {"test_bias_and_activation_follow_the_sums"}),
    (
      ragged_dot_of_every_row,
      {
        "test_sums_of_integers_are_exact",
        "test_sums_of_all_codes_are_within_the_bound",
      },
    ),
  )
  def test_ragged_dot(self, emit, expected):
    found = failures(
      testing.RaggedBackendSuite,
      *expected,
      backend=acme_backend.create(emit, operation="ragged_dot"),
      kinds=((jp.MXFP8, jp.MXFP8),),
      sizes=((2, 4, 3, 32),),
    )
    self.assertEqual(found, expected)

  def test_backend_that_refuses_fails(self):
    found = failures(
      testing.QuantizeBackendSuite,
      "test_special_numbers_have_the_bits_of_quantize",
      backend=acme_backend.create(
        quantize,
        operation="quantize",
        supports=lambda p, t: "supports no array",
      ),
      formats=(jp.MXFP8,),
      shapes=((2, 64),),
    )
    self.assertLen(found, 1)


class InterfaceTest(parameterized.TestCase):
  """Answers and results of backends of other operations are checked."""

  def register(self, emit, operation, **changes):
    acme_backend.register(
      self, emit, first=True, operation=operation, **changes
    )

  @parameterized.parameters(
    (lambda call: None, "got None"),
    (lambda call: (call.x, call.x), r"must return \(float8_e4m3fn\[2, 64\], "),
    (lambda call: quantize(call)[:1], r"float8_e8m0fnu\[2, 2\]\), got \("),
  )
  def test_wrong_codes_are_an_error(self, emit, text):
    self.register(emit, "quantize")
    with self.assertRaisesRegex(TypeError, "emit of backend 'acme'.*" + text):
      jp.quantize(jnp.ones((2, 64)), jp.MXFP8)

  def test_wrong_floats_are_an_error(self):
    x = jp.quantize(jnp.ones((2, 64)), jp.MXFP8)
    self.register(lambda call: call.values, "dequantize")
    with self.assertRaisesRegex(
      TypeError, r"must return float32\[2, 64\], got"
    ):
      jp.dequantize(x)

  def test_wrong_rows_are_an_error(self):
    self.register(lambda call: jnp.zeros((1, 1)), "ragged_dot")
    w = jp.quantize(jnp.ones((2, 3, 32)), jp.MXFP8)
    with self.assertRaisesRegex(TypeError, r"must return float32\[4, 3\], got"):
      jp.ragged_dot(jnp.ones((4, 32)), w, jnp.array([1, 3]))

  def test_reason_of_emit_names_the_way_to_another_backend(self):
    error = NotImplementedError("no compiler")
    self.register(mock.Mock(side_effect=error), "quantize")
    text = "acme: no compiler; or call jp.backends.unregister_backend$"
    with self.assertRaisesRegex(NotImplementedError, text):
      jp.quantize(jnp.ones((2, 64)), jp.MXFP8)

  def test_options_of_training_are_never_asked_about(self):
    self.register(quantize, "quantize")
    function = lambda x, key: jp.quantize(x, jp.MXFP8, key=key)
    x, key = jnp.ones((2, 64)), jax.random.key(0)
    (found,) = jp.explain(function, x, key).quantizations
    self.assertNotEqual(found.implementation, "acme")
    refusals = {r.implementation: r.reason for r in found.decisions[0].refusals}
    self.assertIn("quantize whole arrays, without options", refusals["acme"])

  @parameterized.parameters(
    ({"packed": True},), ({"scale_layout": "swizzled_128x4"},)
  )
  def test_results_are_packed_and_swizzled_after_it(self, options):
    x = jax.device_put(np.random.default_rng(0).normal(size=(5, 64)))
    pack = lambda x: jp.quantize(x, jp.MXFP4, **options)
    expected = pack(x)
    self.register(quantize, "quantize")
    actual = pack(x)
    np.testing.assert_array_equal(
      actual.values.astype(np.float32), expected.values.astype(np.float32)
    )
    np.testing.assert_array_equal(
      actual.scale.view(np.uint8), expected.scale.view(np.uint8)
    )

  def test_one_name_may_have_several_operations(self):
    self.register(quantize, "quantize")
    jp.register_backend(
      acme_backend.create(dequantize, operation="dequantize"), first=True
    )
    with self.assertRaisesRegex(ValueError, "'acme' is taken"):
      jp.register_backend(acme_backend.create(quantize, operation="quantize"))
    self.assertEqual(
      [str(status) for status in jp.backends.statuses()],
      [
        f"acme, registered in code, for {name}, tried first"
        for name in ("quantize", "dequantize")
      ],
    )
