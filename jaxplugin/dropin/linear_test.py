# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""(..., k) x (n, k): `linear`, and `block_scaled_dot` without numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit

NUM_DEVICES = 4
K, N = 64, 12

make = contract.operand


class LeadingDimensionsTest(parameterized.TestCase):
  @parameterized.product(
    kind=(
      (jp.MXFP8, jp.MXFP8, "raw"),
      (jp.MXFP4, jp.MXFP8, "swizzled"),
      (jp.NVFP4, jp.NVFP4, "packed_scaled_array"),
      (contract.BF16, jp.MXFP4, "packed_raw"),
      (jp.MXFP8_E5M2, contract.F32, "raw"),
    ),
    lead=((5,), (2, 3), (2, 1, 3)),
  )
  @pytest.mark.sample(1)
  def test_leading_dimensions_of_lhs_are_rows_if_rhs_has_rank_2(
    self, kind, lead
  ):
    rng = np.random.default_rng(0)
    lhs = make(rng, kind[0], (*lead, K), storage=kind[2])
    rhs = make(rng, kind[1], (N, K), storage=kind[2])
    bias = rng.integers(-9, 9, N).astype(np.float32)
    residual = rng.integers(-9, 9, (*lead, N)).astype(np.float32)
    actual = jp.block_scaled_dot(
      lhs.operand,
      rhs.operand,
      lhs.scale,
      rhs.scale,
      global_scale=2.0,
      bias=bias,
      activation="relu",
      residual=residual,
    )
    exact = 2 * np.einsum("...k,nk->...n", lhs.exact, rhs.exact) + bias
    contract.assert_exact(actual, np.maximum(exact, 0) + residual, contract.F32)

  @parameterized.parameters(
    ((3,), (N, K), "ranks 1 and 2"),
    ((2, 3, K), (2, 3, N, K), "ranks 3 and 4"),
    ((5, 2, 3, K), (3, N, K), "ranks 4 and 3"),
    ((2, 3, K), (K,), "ranks 3 and 1"),
  )
  def test_other_ranks_need_dimension_numbers(self, lhs, rhs, message):
    rng = np.random.default_rng(0)
    with self.assertRaisesRegex(TypeError, f"{message}; pass dimension"):
      jp.block_scaled_dot(jnp.zeros(lhs), make(rng, jp.MXFP8, rhs).operand)

  def test_explain_counts_the_rows(self):
    rng = np.random.default_rng(3)
    w = make(rng, jp.MXFP8, (N, K)).operand
    explained = jp.explain(jp.linear, jnp.zeros((2, 3, K)), w).details()
    self.assertRegex(explained, rf"batch=1 m=6 n={N} k={K}")


class LinearTest(parameterized.TestCase):
  @parameterized.product(
    format=formats.FORMATS, lead=((), (3,), (2, 3)), activation=(None, "relu")
  )
  @pytest.mark.sample(1)
  def test_result_is_exact_and_has_the_dtype_of_x(
    self, format, lead, activation
  ):
    rng = np.random.default_rng(5)
    x, w = make(rng, contract.BF16, (*lead, K)), make(rng, format, (N, K))
    bias = rng.integers(-9, 9, N).astype(np.float32)
    actual = jp.linear(x.operand, w.operand, bias, activation)
    exact = x.exact @ w.exact.T + bias
    if activation:
      exact = np.maximum(exact, 0)
    contract.assert_exact(actual, exact, contract.BF16)

  def test_dtype_is_f32_of_a_quantized_x_and_otherwise_as_asked_for(self):
    rng = np.random.default_rng(6)
    w = make(rng, jp.MXFP8, (N, K)).operand
    x = jnp.zeros((2, K), jnp.float16)
    self.assertEqual(jp.linear(x, w).dtype, jnp.float16)
    self.assertEqual(jp.linear(w, w).dtype, jnp.float32)
    self.assertEqual(jp.linear(w, x).dtype, jnp.float32)
    result = jp.linear(x, w, preferred_element_type=jnp.bfloat16)
    self.assertEqual(result.dtype, jnp.bfloat16)

  @parameterized.parameters(
    ((), (N, K), 1, r"linear: x must be \(\.\.\., k\).*x \(\)"),
    ((2, K), (3, N, K), 2, r"w_q \(n, k\), got .* w_q \(3, 12, 64\)"),
    ((2, 32), (N, K), 1, r"the same k, got x \(2, 32\) and w_q \(12, 64\)$"),
    ((2, 64), (64, 96), 1, r"weights are \(n, k\): quantize kernel\.T"),
    (
      *((2, 64), (64, 96), 0),
      r"w_q must be blocked along k.*dimension 0; pass w_q\.transpose\(1, 0\)",
    ),
    (
      *((2, 40), (N, 64), 1),
      r"if w_q was padded .*pad x too: jnp\.pad\(x, \[\(0, 0\), \(0, 24\)\]\)",
    ),
    (
      *((2, K), None, None),
      r"x or w_q must be quantized, got x float32\[2, 64\].*jaxplugin.quantize",
    ),
  )
  def test_wrong_shapes_are_refused(self, x, w, axis, message):
    w = jnp.ones((N, K)) if w is None else jp.quantize(
      jnp.ones(w), jp.MXFP8, axis=axis
    )  # fmt: skip
    with self.assertRaisesRegex(TypeError, message):
      jp.linear(jnp.ones(x), w)

  @parameterized.product(is_stack=(False, True), is_traced=(False, True))
  @pytest.mark.sample(2)
  def test_out_sharding_places_the_sum_over_k(self, is_stack, is_traced):
    explicit.need_devices(self, NUM_DEVICES)
    rng = np.random.default_rng(7)
    lead = (3,) if is_stack else ()
    x, w = make(rng, contract.F32, (4, K)), make(rng, jp.MXFP8, (*lead, N, K))
    mesh = jax.make_mesh((2,), ("a",))
    with jax.set_mesh(mesh):
      args = (
        jax.device_put(x.operand, jax.P(None, "a")),
        jax.device_put(w.operand, jax.P(*(None,) * len(lead), None, "a")),
      )
      layer = {"layer": jnp.int32(1)} if is_stack else {}
      function = lambda x, w: jp.linear(x, w, out_sharding=jax.P("a"), **layer)
      actual = (jax.jit(function) if is_traced else function)(*args)
      with self.assertRaisesRegex(Exception, "out_sharding|ambiguous"):
        jp.linear(*args, **layer)
    self.assertEqual(actual.sharding.spec, jax.P("a", None))
    exact = x.exact @ (w.exact[1] if is_stack else w.exact).T
    contract.assert_exact(actual, exact, contract.F32)

  def test_layers_divided_over_explicit_axes_are_refused(self):
    explicit.need_devices(self, NUM_DEVICES)
    rng = np.random.default_rng(8)
    x, stack = make(rng, contract.F32, (4, K)), make(rng, jp.MXFP8, (4, N, K))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    dot = jax.jit(lambda w: jp.linear(x.operand, w, layer=3))
    remedy = lambda w: jp.shard(w, jax.P(None, None, None))
    with jax.set_mesh(mesh):
      divided = jp.shard(stack.operand, jax.P("a"))
      message = r"linear: w_q .*\('a',\); pass jp\.shard\(w_q, P"
      with self.assertRaisesRegex(NotImplementedError, message):
        dot(divided)
      actual = dot(remedy(divided))
    contract.assert_exact(actual, x.exact @ stack.exact[3].T, contract.F32)

  @pytest.mark.full
  def test_f64_is_rounded_to_f32_and_multiplied(self):
    rng = np.random.default_rng(3)
    # Odd numbers of 20 bits over 2^30, plus what f32 has no bits for.
    rows = rng.integers(1, 2**10, (8, K)) / 2.0**10
    w_q = jp.quantize(jnp.ones((2, N, K), jnp.float32), jp.MXFP8)
    with jax.enable_x64(True):
      x = jnp.asarray(rows + 2.0**-40)
      bias = jnp.ones((N,))
      self.assertEqual((x.dtype, bias.dtype), (np.float64, np.float64))
      sizes = jnp.array([8, 0], jnp.int32)
      one = w_q[0]
      results = {
        "linear": jp.linear(x, one) + 1,
        "bias": jp.linear(x, one, bias),
        "layer": jp.linear(x, w_q, layer=0) + 1,
        "block_scaled_dot": jp.block_scaled_dot(x, one) + 1,
        "matmul": x @ one.T + 1,
        "ragged_dot": jp.ragged_dot(x, w_q, sizes) + 1,
        "residual": jp.block_scaled_dot(x, one, residual=jnp.ones((8, N))),
        "jit": jax.jit(jp.linear)(x, one) + 1,
      }
      gradient = jax.grad(lambda x: jp.linear(x, one).sum())(x)
      q = jp.quantize(x, jp.MXFP8)
    exact = np.repeat(rows.sum(axis=1)[:, None], N, 1) + 1
    for name, result in results.items():
      with self.subTest(name):
        self.assertEqual(result.dtype, np.float32)
        np.testing.assert_array_equal(np.asarray(result), exact)
    self.assertEqual(gradient.dtype, np.float64)
    np.testing.assert_array_equal(np.asarray(gradient), np.full((8, K), N))
    expected = jp.quantize(jnp.asarray(rows, jnp.float32), jp.MXFP8)
    np.testing.assert_array_equal(np.asarray(q.values), expected.values)

  def test_other_dtypes_are_refused_in_words_of_its_arguments(self):
    w = jp.quantize(jnp.ones((N, K)), jp.MXFP8)
    message = r"linear: x must be .* or a ScaledArray, got int32\[2, 64\]; cast"
    with self.assertRaisesRegex(TypeError, message):
      jp.linear(jnp.ones((2, 64), jnp.int32), w)

  def test_implementation_is_passed_on(self):
    w = jp.quantize(jnp.ones((N, K)), jp.MXFP8)
    with self.assertRaisesRegex(ValueError, "linear: implementation.*'mlx'"):
      jp.linear(jnp.ones((2, K)), w, implementation="mlx")
    with self.assertRaisesRegex(TypeError, "linear: implementation .*'cpu'"):
      jp.linear(jnp.ones((2, K)), w, implementation=["cpu"])
