# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refused derivatives, and the tangent with respect to some leaves."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from jaxplugin.jaxext import jax_private, tangents

X = np.arange(4, dtype=np.float32)


def refusing(x):
  return tangents.without_derivative(x, "it has none")


class WithoutDerivativeTest(absltest.TestCase):
  def test_it_is_the_identity_and_no_operation(self):
    tree = {"a": jnp.asarray(X), "b": [jnp.int8(3)], "c": None}
    self.assertIs(refusing(tree)["a"], tree["a"])
    for wrap in (jax.jit, jax.vmap):
      np.testing.assert_array_equal(wrap(refusing)(X), X)
    programs = [
      jax_private.optimized_hlo(jax.jit(f).lower(X).compile())
      for f in (lambda x: refusing(x) + 1, lambda x: x + 1)
    ]
    self.assertEqual(*(p.split("\n", 1)[1] for p in programs))

  def test_a_derivative_by_it_is_an_error_and_others_pass(self):
    function = lambda x, y: (refusing(x) * y).sum()
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
      with self.assertRaisesRegex(NotImplementedError, "it has none"):
        jax.grad(wrap(function))(X, X)
      gradient = jax.grad(wrap(function), 1)(X, 2 * X)
      np.testing.assert_array_equal(gradient, X)
    frozen = lambda x: function(jax.lax.stop_gradient(x), x)
    np.testing.assert_array_equal(jax.grad(frozen)(X), X)

  def test_integers_have_no_derivative_to_refuse(self):
    function = lambda x: refusing(x.astype(np.int8)).sum() * x.sum()
    np.testing.assert_array_equal(jax.grad(function)(X), np.full(4, 6.0))
    codes = np.int8([1, 2])
    gradient = jax.grad(lambda c: refusing(c).sum() * 1.0, allow_int=True)
    self.assertEqual(gradient(codes).dtype, jax.dtypes.float0)


class TangentOfTest(absltest.TestCase):
  def test_only_leaves_that_vary_count(self):
    @jax.custom_jvp
    def function(x, y, n):
      return x * y * n

    seen = []

    @lambda f: function.defjvp(f, symbolic_zeros=True)
    def _(primals, given):
      seen.append([tangents.is_constant(t) for t in given])
      bare = lambda a: a[0] * a[1] * a[2]
      return function(*primals), tangents.tangent_of(bare, primals, given)

    y = jnp.float32(3)
    self.assertEqual(jax.grad(function)(jnp.float32(2), y, 5), 15)
    self.assertEqual(seen, [[False, True, True]])

  def test_none_where_all_are_constant(self):
    zero = jax.custom_derivatives.SymbolicZero(jax.typeof(jnp.ones(())))
    self.assertIsNone(tangents.tangent_of(lambda x: x, jnp.ones(()), zero))
