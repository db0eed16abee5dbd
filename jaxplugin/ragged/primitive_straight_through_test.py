# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `ragged_dot` by what was quantized straight-through.

Those expected are of the formula by rows, by JAX, with dequantized operands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing.dot_suite import ragged_suite

_GROUPS, _M, _N, _K = 3, 12, 16, 64
_SIZES = np.array([5, 0, 4], np.int32)
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(_M, _K)).astype(np.float32)
W = _RNG.normal(size=(_GROUPS, _N, _K)).astype(np.float32)
BIAS = _RNG.normal(size=(_GROUPS, _N)).astype(np.float32)

_through = functools.partial(jp.quantize, derivative="straight_through")


def _rounded(x, format):
  """x as quantized, with the derivative of the identity."""
  constant = jax.lax.stop_gradient(x)
  exact = jp.dequantize(jp.quantize(constant, format))
  return exact + (x - constant)


class StraightThroughTest(parameterized.TestCase):
  @parameterized.product(
    lhs=(None, jp.MXFP8, jp.NVFP4),
    rhs=(jp.MXFP8, jp.NVFP4),
    activation=(None, "swiglu"),
  )
  @pytest.mark.sample(2)
  def test_gradients_are_those_of_the_formula(self, lhs, rhs, activation):
    def ours(x, w, bias):
      x = x if lhs is None else _through(x, lhs)
      y = jp.ragged_dot(
        x, _through(w, rhs), _SIZES, bias=bias, activation=activation
      )
      return jnp.sum(jnp.sin(y)), y

    def theirs(x, w, bias):
      x = x if lhs is None else _rounded(x, lhs)
      y = ragged_suite.by_rows(x, _rounded(w, rhs), bias, _SIZES, activation)
      return jnp.sum(jnp.sin(y)), y

    (actual, y), (expected, z) = (
      jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(X, W, BIAS)
      for f in (ours, theirs)
    )
    np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-4)
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(actual[1][1], 0)  # of the empty group
    np.testing.assert_array_equal(actual[0][9:], 0)  # of no group's rows

  def test_value_is_that_without_surrogates(self):
    x, w = _through(X, jp.NVFP4), _through(W, jp.MXFP8)
    plain = jp.quantize(X, jp.NVFP4), jp.quantize(W, jp.MXFP8)
    for options in ({}, {"implementation": "xla"}, {"activation": "gelu"}):
      np.testing.assert_array_equal(
        jp.ragged_dot(x, w, _SIZES, **options),
        jp.ragged_dot(*plain, _SIZES, **options),
      )

  @pytest.mark.full
  def test_one_side_may_have_none(self):
    # Then it is a constant, as it is quantized.
    w_q = jp.quantize(W, jp.MXFP8)
    f = lambda x: jnp.sum(
      jnp.sin(jp.ragged_dot(_through(x, jp.MXFP8), w_q, _SIZES))
    )
    weights = jnp.asarray(jp.dequantize(w_q))
    g = lambda x: jnp.sum(
      jnp.sin(
        ragged_suite.by_rows(_rounded(x, jp.MXFP8), weights, None, _SIZES)
      )
    )
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(g)(X), atol=1e-4)

  @parameterized.parameters(
    (None, "forward"),
    (jp.MXFP8, "forward"),
    (None, "reverse"),
    (jp.MXFP8, "reverse"),
  )
  @pytest.mark.sample(2)
  def test_mixed_second_derivatives_go_to_the_other_surrogate(self, lhs, mode):
    def f(rounded, dot):
      def value(x, w):
        x = x if lhs is None else rounded(x, lhs)
        return jnp.sum(jnp.sin(dot(x, rounded(w, jp.MXFP8))))

      tx = jnp.full(X.shape, 0.5)
      if mode == "forward":
        along = lambda x, w: jax.jvp(lambda x: value(x, w), (x,), (tx,))[1]
        return jax.jvp(lambda w: along(X, w), (W,), (W,))[1]
      of_x = lambda w: jnp.vdot(jax.grad(value)(X, w), tx)
      return jax.grad(of_x)(W)

    actual = jax.jit(
      lambda: f(_through, lambda x, w: jp.ragged_dot(x, w, _SIZES))
    )()
    expected = jax.jit(
      lambda: f(_rounded, lambda x, w: ragged_suite.by_rows(x, w, None, _SIZES))
    )()
    self.assertGreater(np.abs(expected).max(), 0.1)
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)

  def test_gradient_of_weights_may_have_another_backend(self):
    def value(w):  # the kernels for CPUs read no unquantized weights
      x_q, w_q = _through(X, jp.MXFP8), _through(w, jp.MXFP8)
      return jp.ragged_dot(x_q, w_q, _SIZES, implementation="cpu").sum()

    self.assertEqual(jax.eval_shape(jax.grad(value), W).shape, W.shape)

  def test_mixed_second_derivatives_by_a_global_scale(self):
    x_q = jp.quantize(X, jp.NVFP4)
    numbers = x_q.dequantize() / x_q.global_scale

    def along(dot, rounded):
      value = lambda s, w: jnp.sum(jnp.sin(dot(s, rounded(w, jp.MXFP8))))
      return jax.grad(lambda w: jax.grad(value)(x_q.global_scale, w).sum())(W)

    def ours(scale, w):
      x = jp.ScaledArray(x_q.values, x_q.scale, scale, jp.NVFP4)
      return jp.ragged_dot(x, w, _SIZES, bias=BIAS)

    theirs = lambda scale, w: ragged_suite.by_rows(
      numbers * scale, w, BIAS, _SIZES
    )
    actual = jax.jit(lambda: along(ours, _through))()
    expected = jax.jit(lambda: along(theirs, _rounded))()
    size = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3 * size)
