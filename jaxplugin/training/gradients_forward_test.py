# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general` in forward mode: one matrix with the backward pass."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing.oracles import gradients_oracle as testing

MATMUL = (((1,), (0,)), ((), ()))


def expected_tangent(x, x_names, y, y_names, out, y_format):
  """f64 product of a tangent of x, as it is, and y as x's gradient has it.

  Returns:
    The product, and sum|a * b|.
  """
  backward = [c for c in y_names if c not in x_names]  # what g and y contract
  y = testing.fake_quantize(y, y_names, backward, y_format)
  x = np.asarray(x, np.float64)
  expression = f"{x_names},{y_names}->{out}"
  return (
    np.einsum(expression, x, y),
    np.einsum(expression, np.abs(x), np.abs(y)),
  )


class ForwardTest(parameterized.TestCase):
  def assert_within(self, actual, *expected, rounding=0.0):
    """A sum of products is within the contract's bound of each of them."""
    value, magnitude = (sum(terms) for terms in zip(*expected, strict=True))
    error = np.abs(np.asarray(actual, np.float64) - value)
    np.testing.assert_array_less(
      error, testing.BOUND * magnitude + rounding * np.abs(value) + 1e-300
    )

  @parameterized.parameters(
    ("mk", "kn", (jp.MXFP8, jp.MXFP8), {}),
    ("bmMk", "kNbn", (jp.NVFP4, jp.MXFP8), {}),
    ("kbKm", "nKbk", (None, jp.MXFP4), {"grad_format": jp.MXFP8_E5M2}),
    ("mkK", "KkNn", (jp.MXFP4, jp.NVFP4), {"quantize_dgrad": False}),
    ("mk", "k", (jp.MXFP8, jp.MXFP8), {"quantize_wgrad": False}),
  )
  @pytest.mark.full
  def test_tangent_is_a_product_with_what_the_backward_pass_has(
    self, lhs_names, rhs_names, formats, options
  ):
    out = testing.result_of(lhs_names, rhs_names)
    lhs, lhs_tangent = (testing.normal(i, lhs_names) for i in (0, 2))
    rhs, rhs_tangent = (testing.normal(i, rhs_names) for i in (1, 3))
    numbers = testing.numbers(lhs_names, rhs_names)
    function = jp.dot_general(*formats, **options)
    dot = lambda lhs, rhs: function(lhs, rhs, numbers)
    lhs_format = formats[0] if options.get("quantize_wgrad", True) else None
    rhs_format = formats[1] if options.get("quantize_dgrad", True) else None
    of_lhs = expected_tangent(
      lhs_tangent, lhs_names, rhs, rhs_names, out, rhs_format
    )
    of_rhs = expected_tangent(
      rhs_tangent, rhs_names, lhs, lhs_names, out, lhs_format
    )
    result, both = jax.jit(
      lambda primals, tangents: jax.jvp(dot, primals, tangents)
    )((lhs, rhs), (lhs_tangent, rhs_tangent))
    self.assert_within(both, of_lhs, of_rhs)
    np.testing.assert_array_equal(result, jax.jit(dot)(lhs, rhs))
    # A constant operand has no tangent.
    _, one = jax.jvp(lambda lhs: dot(lhs, rhs), (lhs,), (lhs_tangent,))
    self.assert_within(one, of_lhs)
    _, linear = jax.linearize(lambda rhs: dot(lhs, rhs), rhs)
    self.assert_within(linear(rhs_tangent), of_rhs)

  @pytest.mark.full
  def test_both_modes_have_one_jacobian(self):
    # Reverse mode quantizes a g of one 1, exactly; all other terms are zero.
    function = jp.dot_general(jp.NVFP4, jp.MXFP8)
    lhs, rhs = testing.normal(0, "mk"), testing.normal(1, "kn")
    dot = lambda lhs, rhs: function(lhs, rhs, MATMUL)
    forward, reverse = (
      jax.jit(jac(dot, argnums=(0, 1)))(lhs, rhs)
      for jac in (jax.jacfwd, jax.jacrev)
    )
    for f, r in zip(forward, reverse, strict=True):
      self.assertGreater(np.abs(f).max(), 0)
      np.testing.assert_array_equal(f, r)

  def test_tangents_of_bf16_are_of_bf16(self):
    bf16 = ml_dtypes.bfloat16
    lhs, rhs = testing.normal(0, "mk", bf16), testing.normal(1, "kn", bf16)
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    tangent = testing.normal(2, "mk", bf16)
    _, actual = jax.jvp(
      lambda x: function(x, rhs, MATMUL), (jnp.asarray(lhs),), (tangent,)
    )
    self.assertEqual(actual.dtype, jnp.bfloat16)
    self.assert_within(
      actual,
      expected_tangent(tangent, "mk", rhs, "kn", "mn", jp.MXFP8),
      rounding=testing.BF16_ROUNDING,
    )

  @pytest.mark.full
  def test_vmap_and_scan_are_the_loop(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    lhs, rhs = testing.normal(0, "bmk"), testing.normal(1, "kn")
    tangent = testing.normal(2, "kn")

    def along(x):
      dot = lambda rhs: jnp.sin(function(x, rhs, MATMUL))
      return jax.jvp(dot, (rhs,), (tangent,))[1]

    expected = np.stack([along(x) for x in lhs])
    scanned = jax.lax.scan(lambda c, x: (c, along(x)), 0, lhs)[1]
    for actual in (jax.vmap(along)(lhs), jnp.asarray(scanned)):
      # Another program may round sums, and so the sine's slope, otherwise.
      np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)

  @pytest.mark.full
  def test_gradient_of_a_mapped_weight_is_the_sum(self):
    # The tangents are mapped, and then transposed.
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    lhs, rhs = testing.normal(0, "bmk"), testing.normal(1, "kn")
    g = testing.normal(2, "bmn")
    dot = lambda x, rhs: function(x, rhs, MATMUL)
    _, vjp = jax.vjp(jax.vmap(dot, in_axes=(0, None)), lhs, rhs)
    lhs_grad, rhs_grad = vjp(jnp.asarray(g))
    for i, row in enumerate(g):
      expected = testing.expected_product(
        row, "mn", rhs, "kn", "mk", jp.MXFP8, jp.MXFP8
      )
      self.assert_within(lhs_grad[i], expected)
    terms = [
      testing.expected_product(x, "mk", y, "mn", "kn", jp.MXFP8, jp.MXFP8)
      for x, y in zip(lhs, g, strict=True)
    ]
    self.assert_within(rhs_grad, *terms)

  @pytest.mark.full
  def test_forward_over_reverse_in_high_precision(self):
    function = jp.dot_general(
      jp.MXFP8, jp.MXFP8, quantize_dgrad=False, quantize_wgrad=False
    )
    w = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    x = np.eye(2, 4, dtype=np.float32)
    loss = lambda x: (function(x, w, MATMUL) ** 2).sum() / 2
    # The gradient by x is y w', whose own, by x, is w w' for each row.
    expected = np.einsum("ab,ij->aibj", np.eye(2), w.astype(np.float64) @ w.T)
    for hessian in (
      jax.hessian(loss),
      jax.jacfwd(jax.jacfwd(loss)),
      jax.jacrev(jax.jacfwd(loss)),
    ):
      np.testing.assert_allclose(hessian(x), expected, rtol=0, atol=1e-6)

  def test_second_derivative_of_quantized_products_is_refused(self):
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    x, w = testing.normal(0, "mk"), testing.normal(1, "kn")
    loss = lambda x: (function(x, w, MATMUL) ** 2).sum()
    for second in (
      jax.jacfwd(jax.grad(loss)),
      jax.jacfwd(jax.jacfwd(loss)),
      jax.jacrev(jax.jacfwd(loss)),
    ):
      with self.assertRaisesRegex(NotImplementedError, "quantize_dgrad=False"):
        second(x)

  def test_tangent_has_the_results_explicit_sharding(self):
    if jax.device_count() < 4:
      self.skipTest(f"needs 4 devices, has {jax.device_count()}")
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((4,), ("a",), axis_types=(explicit,))
    spec = jax.sharding.PartitionSpec
    function = jp.dot_general(jp.MXFP8, jp.MXFP8)
    # Integers whose quantization, products and sums are all exact.
    x = np.random.default_rng(0).integers(-4, 5, (8, 128)).astype(np.float32)
    w = np.random.default_rng(1).integers(-4, 5, (128, 32)).astype(np.float32)
    with jax.set_mesh(mesh):
      put = lambda a, *s: jax.device_put(
        a, jax.sharding.NamedSharding(mesh, spec(*s))
      )
      x_put, w_put = put(x, None, "a"), put(w, "a")

      @jax.jit
      def along(x, w):
        dot = lambda x: function(x, w, MATMUL, out_sharding=spec("a"))
        return jax.jvp(dot, (x,), (2 * x,))[1]

      tangent = along(x_put, w_put)
    self.assertEqual(jax.typeof(tangent).sharding.spec, spec("a", None))
    np.testing.assert_array_equal(tangent, 2 * x @ w)


if __name__ == "__main__":
  absltest.main()
