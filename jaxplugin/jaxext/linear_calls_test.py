# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear_call` with a transpose and derivatives that differ from JAX's."""

import dataclasses
import gc
import weakref
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from jaxplugin.jaxext import linear_calls

RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4)).astype(np.float32)
A = RNG.normal(size=(5, 4)).astype(np.float32)
ROW = np.arange(4, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Scaled(linear_calls.Linear):
  """A value, factor * x, that counts its traces."""

  factor: float
  traced: ClassVar[list[float]] = []

  def apply(self, linear, constants):
    self.traced.append(self.factor)
    return self.factor * linear[0]

  def transpose(self, wanted, g, constants):
    return [7 * g]


class InContext(Scaled):
  """Reads the contexts in which JAX traces it."""

  def apply(self, linear, constants):
    self.traced.append(jax.config.jax_default_matmul_precision)
    return linear[0] * jax.lax.axis_size("i")


class TracedTest(absltest.TestCase):
  def test_reverse_mode_never_traces_a_value(self):
    Scaled.traced.clear()

    @jax.custom_jvp
    def same(x):
      return x

    @same.defjvp
    def same_jvp(primals, tangents):
      x, t = *primals, *tangents
      return x, linear_calls.linear_call(Scaled(5.0), [t], [], like=x)

    f = jax.jit(jax.grad(lambda x: same(x).sum()))
    np.testing.assert_array_equal(f(X), np.full_like(X, 7))
    self.assertEqual(Scaled.traced, [])
    _, t = jax.jit(lambda x: jax.jvp(same, (x,), (x,)))(X)
    np.testing.assert_array_equal(t, 5 * X)
    self.assertEqual(Scaled.traced, [5.0])

  def test_later_traces_are_in_the_contexts_of_the_call(self):
    Scaled.traced.clear()
    call = lambda x: linear_calls.linear_call(InContext(0), [x], [], like=x)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.default_matmul_precision("highest"):
      traced = jax.jit(mapped).trace(ROW)
    self.assertEqual(Scaled.traced, [])
    np.testing.assert_array_equal(traced.lower().compile()(ROW), 2 * ROW)
    self.assertEqual(Scaled.traced, ["highest"])

  def test_equal_values_are_traced_once(self):
    Scaled.traced.clear()

    def f(x):
      for factor in (2.0, 2.0, 3.0, 2.0):
        x = linear_calls.linear_call(Scaled(factor), [x], [], like=x)
      return x

    np.testing.assert_array_equal(jax.jit(f)(X), 24 * X)
    self.assertEqual(Scaled.traced, [2.0, 3.0])
    np.testing.assert_allclose(jax.vmap(f)(X), 24 * X)

  def test_nobody_keeps_what_a_closure_holds(self):
    held = jnp.asarray(A)
    kept = weakref.ref(held)

    def called(x, held):
      # Each call makes a new function, like straight-through dots.
      function = linear_calls.Linear()
      function.is_value = False
      function.apply = lambda linear, constants: held @ linear[0]
      return linear_calls.linear_call(function, [x], [], like=ROW[:1].repeat(5))

    called(jnp.asarray(X[0]), held)  # traced, and run
    del held
    gc.collect()
    self.assertIsNone(kept())


# The function is a * x + b * y. Its transpose also multiplies by 10, and its
# derivative by constants by 100, so that the result shows which of them ran.
@dataclasses.dataclass(frozen=True)
class Combination(linear_calls.Linear):
  def apply(self, linear, constants):
    (x, y), (a, b) = linear, constants
    return a * x + b * y

  def by_constants(self, linear, constants):
    return 100 * self.apply(linear, constants)

  def transpose(self, wanted, g, constants):
    return [
      10 * c * g if is_wanted else None
      for c, is_wanted in zip(constants, wanted, strict=True)
    ]


def combine(x, y, a, b):
  return linear_calls.linear_call(Combination(), [x, y], [a, b], like=x)


P, Q, C, D, H = (np.arange(3, dtype=np.float32) + i for i in range(1, 6))


class LinearCallTest(absltest.TestCase):
  def test_value_with_and_without_jit(self):
    for function in (combine, jax.jit(combine)):
      np.testing.assert_array_equal(function(P, Q, C, D), C * P + D * Q)

  def test_reverse_mode_runs_the_transpose(self):
    _, vjp = jax.vjp(lambda x, y: combine(x, y, C, D), P, Q)
    np.testing.assert_array_equal(vjp(H), [10 * C * H, 10 * D * H])
    _, vjp = jax.vjp(lambda y: combine(P, y, C, D), Q)
    np.testing.assert_array_equal(vjp(H), [10 * D * H])

  def test_forward_mode_runs_the_function(self):
    combined = lambda *args: jax.jvp(combine, args, (H, P, Q, 2 * P))[1]
    expected = C * H + D * P + 100 * (P * Q + 2 * Q * P)
    for function in (combined, jax.jit(combined)):
      np.testing.assert_array_equal(function(P, Q, C, D), expected)
    _, tangent = jax.jvp(lambda y: combine(P, y, C, D), (Q,), (H,))
    np.testing.assert_array_equal(tangent, D * H)

  def test_derivative_by_a_constant_is_that_of_its_function(self):
    _, vjp = jax.vjp(lambda a: combine(P, Q, a, D), C)
    np.testing.assert_array_equal(vjp(H), [100 * P * H])

  def test_transpose_is_differentiated_like_any_function(self):
    gradient = lambda a: jax.grad(lambda x: combine(x, Q, a, D).sum())(P)
    _, tangent = jax.jvp(gradient, (C,), (H,))
    np.testing.assert_array_equal(tangent, 10 * H)

  def test_vmap_maps_both_and_sums_what_is_the_same_for_all(self):
    mapped = jax.vmap(combine, in_axes=(None, 1, 0, None))
    y, a = np.stack([Q, 2 * Q], axis=1), np.stack([C, 3 * C])
    expected = np.stack([C * P + D * Q, 3 * C * P + 2 * D * Q])
    np.testing.assert_array_equal(mapped(P, y, a, D), expected)
    g = np.stack([H, 2 * H])
    for f in (mapped, jax.jit(mapped)):
      _, vjp = jax.vjp(lambda x, y, f=f: f(x, y, a, D), P, y)
      x_grad, y_grad = vjp(g)
      np.testing.assert_array_equal(x_grad, 10 * (C * H + 3 * C * 2 * H))
      np.testing.assert_array_equal(
        y_grad, np.stack([10 * D * H, 10 * D * 2 * H], axis=1)
      )
    _, tangent = jax.jvp(lambda a: mapped(P, y, a, D), (a,), (a,))
    np.testing.assert_array_equal(tangent, 100 * a * P)

  def test_scan_and_checkpoint_run_the_transpose(self):
    def loss(x):
      step = jax.checkpoint(lambda x, _: (combine(x, Q, C, D), None))
      return jax.lax.scan(step, x, length=2)[0].sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(P), 100 * C * C)

  def test_zero_cotangent_is_zero(self):
    def loss(x):
      combine(x, Q, C, D)
      return jnp.sum(x)

    np.testing.assert_array_equal(jax.grad(loss)(P), np.ones(3))

  def test_operations_inside_are_seen_in_a_program(self):
    (eqn,) = jax.make_jaxpr(combine)(P, Q, C, D).jaxpr.eqns
    names = [e.primitive.name for e in eqn.params["operations"].jaxpr.eqns]
    self.assertIn("mul", names)
