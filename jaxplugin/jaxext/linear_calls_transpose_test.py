# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear_call` with a custom transpose, under JAX's transformations.

The function is a * x + b * y. Its transpose also multiplies by 10, so that the
result shows which of the two ran.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from jaxplugin.jaxext import linear_calls


@dataclasses.dataclass(frozen=True)
class Combination(linear_calls.Linear):
  def apply(self, linear, constants):
    (x, y), (a, b) = linear, constants
    return a * x + b * y

  def transpose(self, wanted, g, constants):
    return [
      10 * c * g if is_wanted else None
      for c, is_wanted in zip(constants, wanted, strict=True)
    ]


def combine(x, y, a, b):
  return linear_calls.linear_call(Combination(), [x, y], [a, b])


X, Y, A, B, G = (np.arange(3, dtype=np.float32) + i for i in range(1, 6))


class LinearCallTest(absltest.TestCase):
  def test_value_with_and_without_jit(self):
    for function in (combine, jax.jit(combine)):
      np.testing.assert_array_equal(function(X, Y, A, B), A * X + B * Y)

  def test_reverse_mode_runs_the_transpose(self):
    _, vjp = jax.vjp(lambda x, y: combine(x, y, A, B), X, Y)
    np.testing.assert_array_equal(vjp(G), [10 * A * G, 10 * B * G])
    _, vjp = jax.vjp(lambda y: combine(X, y, A, B), Y)
    np.testing.assert_array_equal(vjp(G), [10 * B * G])

  def test_forward_mode_runs_the_function(self):
    combined = lambda *args: jax.jvp(combine, args, (G, X, Y, 2 * X))[1]
    expected = A * G + B * X + X * Y + 2 * Y * X
    for function in (combined, jax.jit(combined)):
      np.testing.assert_array_equal(function(X, Y, A, B), expected)
    _, tangent = jax.jvp(lambda y: combine(X, y, A, B), (Y,), (G,))
    np.testing.assert_array_equal(tangent, B * G)

  def test_derivative_by_a_constant_is_that_of_the_function(self):
    _, vjp = jax.vjp(lambda a: combine(X, Y, a, B), A)
    np.testing.assert_array_equal(vjp(G), [X * G])

  def test_transpose_is_differentiated_like_any_function(self):
    gradient = lambda a: jax.grad(lambda x: combine(x, Y, a, B).sum())(X)
    _, tangent = jax.jvp(gradient, (A,), (G,))
    np.testing.assert_array_equal(tangent, 10 * G)

  def test_vmap_maps_both_and_sums_what_is_the_same_for_all(self):
    mapped = jax.vmap(combine, in_axes=(None, 1, 0, None))
    y, a = np.stack([Y, 2 * Y], axis=1), np.stack([A, 3 * A])
    expected = np.stack([A * X + B * Y, 3 * A * X + 2 * B * Y])
    np.testing.assert_array_equal(mapped(X, y, a, B), expected)
    g = np.stack([G, 2 * G])
    for f in (mapped, jax.jit(mapped)):
      _, vjp = jax.vjp(lambda x, y, f=f: f(x, y, a, B), X, y)
      x_grad, y_grad = vjp(g)
      np.testing.assert_array_equal(x_grad, 10 * (A * G + 3 * A * 2 * G))
      np.testing.assert_array_equal(
        y_grad, np.stack([10 * B * G, 10 * B * 2 * G], axis=1)
      )

  def test_scan_and_checkpoint_run_the_transpose(self):
    def loss(x):
      step = jax.checkpoint(lambda x, _: (combine(x, Y, A, B), None))
      return jax.lax.scan(step, x, length=2)[0].sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X), 100 * A * A)

  def test_zero_cotangent_is_zero(self):
    def loss(x):
      combine(x, Y, A, B)
      return jnp.sum(x)

    np.testing.assert_array_equal(jax.grad(loss)(X), np.ones(3))


if __name__ == "__main__":
  absltest.main()
