# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate` and derivatives: rules are kept, with their dots replaced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.rewriting import acceleration_test as constructs
from jaxplugin.testing import contract
from jaxplugin.testing import nn_cases

NT_3D = nn_cases.NT_3D
dot, matmul = constructs.dot, constructs.matmul

MODES = ("mxfp8", "nvfp4")  # what JAX 0.10 has


def configs_of(mode):
  """For lhs, rhs and the gradient."""
  return [jax.nn.get_scaled_dot_general_config(mode) for _ in range(3)]


def general(mode):
  return functools.partial(
    jax.nn.scaled_dot_general, dimension_numbers=NT_3D, configs=configs_of(mode)
  )


def integers(*seed, shape):
  """Small integers, which quantize exactly (E4M3 holds all up to 16)."""
  x = nn_cases.rng_of(*seed).integers(-8, 9, shape)
  x[..., ::32] = 8  # so that the scale of every block of E4M3 is 2^-5
  return x.astype(np.float32)


def value_and_gradients(f, weights):
  """The result of f(lhs, rhs), and the gradients of its weighted sum."""

  def loss(lhs, rhs):
    y = f(lhs, rhs)
    return (y * weights).sum(), y

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


# Where `accelerate` and jit go about a gradient.
PLACES = (
  ("inside", lambda f, grad: grad(jp.accelerate(f))),
  ("inside_of_jit", lambda f, grad: jax.jit(grad(jp.accelerate(f)))),
  ("around_jit", lambda f, grad: grad(jp.accelerate(jax.jit(f)))),
  ("outside", lambda f, grad: jp.accelerate(grad(f))),
  ("outside_of_jit", lambda f, grad: jp.accelerate(jax.jit(grad(f)))),
  ("around_all", lambda f, grad: jax.jit(jp.accelerate(grad(jax.jit(f))))),
  ("checkpointed", lambda f, grad: grad(jax.checkpoint(jp.accelerate(f)))),
  ("around_checkpoint", lambda f, grad: grad(jp.accelerate(jax.checkpoint(f)))),
)


def around(derivative, f, outside):
  """Accelerates a derivative, or takes that of an accelerated function."""
  if outside:
    return jp.accelerate(derivative(f))
  return derivative(jp.accelerate(f))


class GradientsTest(parameterized.TestCase):
  def test_all_three_dots_are_replaced_and_exact(self):
    # Quantizing these operands changes nothing, so the gradients of a plain
    # product are right.
    lhs, rhs = integers(1, shape=(2, 64, 32)), integers(2, shape=(2, 32, 32))
    weights = integers(3, shape=(2, 64, 32))
    grad = functools.partial(value_and_gradients, weights=weights)
    rows = {
      (name, wrap): place(wrap(general("mxfp8")), grad)
      for name, place in PLACES
      for wrap in (lambda f: f, constructs.in_scanned_operands)
    }
    for name, function in rows.items():
      with self.subTest(name):
        found = constructs.assert_replaced(function, lhs, rhs)
        self.assertGreaterEqual(found, 3)
    exact = lambda equation, a, b: np.einsum(
      equation, a.astype(np.float64), b.astype(np.float64)
    )
    expected = (
      exact("bmk,bnk->bmn", lhs, rhs),
      exact("bmn,bnk->bmk", weights, rhs),
      exact("bmn,bmk->bnk", weights, lhs),
    )
    program = jax.jit(lambda *args: [f(*args) for f in rows.values()])
    for name, ((_, y), gradients) in zip(rows, program(lhs, rhs), strict=True):
      with self.subTest(name):
        for actual, e in zip((y, *gradients), expected, strict=True):
          contract.assert_exact(actual, e, contract.F32)

  @parameterized.named_parameters(
    (f"{name}_{mode}", place, mode) for name, place in PLACES for mode in MODES
  )
  @pytest.mark.full
  def test_gradients_are_jaxs(self, place, mode):
    if not nn_cases.JAX_NN_RUNS_ON_CPU:
      self.skipTest(nn_cases.NEEDS_JAX_NN)
    rng = nn_cases.rng_of(4)
    lhs = rng.normal(size=(2, 64, 96)).astype(np.float32)
    rhs = rng.normal(size=(2, 32, 96)).astype(np.float32)
    weights = rng.normal(size=(2, 64, 32)).astype(np.float32)
    grad = functools.partial(value_and_gradients, weights=weights)
    expected = jax.jit(grad(general(mode)))(lhs, rhs)
    actual = place(general(mode), grad)(lhs, rhs)
    # Both sum the same quantized numbers; 96 terms of size about 1.
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
      np.testing.assert_allclose(a, e, rtol=1e-5, atol=96 * 2**-20)

  @parameterized.parameters(False, True)
  @pytest.mark.sample(1)
  def test_custom_vjp_keeps_its_rule_with_replaced_dots(self, outside):
    args, exact = constructs.exact_operands(5)

    @jax.custom_vjp
    def f(x):
      return x * matmul(*args)

    # The rule differs from the derivative: factors 2 forward, 3 backward.
    f.defvjp(
      lambda x: (2 * x * matmul(*args), x),
      lambda x, g: (3 * g * jax.jit(dot)(*args),),
    )
    x = jnp.full(exact.shape, 2, jnp.float32)
    value_and_grad = lambda f: lambda x: jax.vjp(f, x)[0:1] + jax.vjp(f, x)[1](
      jnp.ones_like(x)
    )
    function = around(value_and_grad, f, outside)
    for run in (function, jax.jit(function)):
      y, gradient = run(x)
      contract.assert_exact(y, 4 * exact, contract.F32)
      contract.assert_exact(gradient, 3 * exact, contract.F32)
    self.assertEqual(constructs.assert_replaced(function, x), 3)
    contract.assert_exact(jp.accelerate(f)(x), 2 * exact, contract.F32)

  @parameterized.parameters(False, True)
  @pytest.mark.full
  def test_custom_jvp_keeps_its_rule_with_replaced_dots(self, outside):
    args, exact = constructs.exact_operands(6)

    @jax.custom_jvp
    def f(x):
      return x * matmul(*args)

    @f.defjvp
    def _(primals, tangents):
      (x,), (t,) = primals, tangents
      return 2 * x * dot(*args), 3 * t * lax.map(
        lambda x: matmul(*(a[None] for a in x))[0], args
      )

    x = jnp.full(exact.shape, 2, jnp.float32)
    jvp = lambda f: lambda x: jax.jvp(f, (x,), (x,))
    grad = lambda f: lambda x: jax.vjp(f, x)[1](x)
    for derivative in (jvp, grad):
      function = around(derivative, f, outside)
      constructs.assert_replaced(function, x)
      for run in (function, jax.jit(function)):
        results = run(x)
        contract.assert_exact(results[-1], 6 * exact, contract.F32)
        if len(results) == 2:
          contract.assert_exact(results[0], 4 * exact, contract.F32)

  def test_quantized_operands_have_no_derivative(self):
    args, _, _ = constructs.operands(7)
    values = args[0].astype(jnp.float32)
    loss = lambda x: jp.accelerate(dot)(x, *args[1:]).sum()
    with self.assertRaisesRegex(NotImplementedError, "no derivative"):
      jax.grad(loss)(values)


if __name__ == "__main__":
  absltest.main()
