# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot` under JAX's transformations, its errors, and `explain`."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.jaxext import program
from jaxplugin.ragged import backends, primitive
from jaxplugin.tables import resolution
from jaxplugin.testing.dot_suite import ragged_suite

_GROUPS, _M, _N, _K = 3, 12, 16, 64
_SIZES = np.array([5, 0, 4], np.int32)
_ACTIVATIONS = (None, "relu", "gelu", "silu", "swiglu", "swigluoai")


def _operands(format=jp.NVFP4, seed=0):
  """x, quantized weights, and the weights dequantized in f64."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(_M, _K)).astype(np.float32)
  w = rng.normal(size=(_GROUPS, _N, _K)).astype(np.float32)
  w_q = jp.quantize(w, format)
  return x, w_q, np.asarray(jp.dequantize(w_q), np.float64)


class TransformationsTest(parameterized.TestCase):
  @parameterized.product(activation=_ACTIVATIONS, implementation=("xla", "cpu"))
  @pytest.mark.sample(1)
  def test_gradients_are_those_of_the_formula(self, activation, implementation):
    x, w_q, w = _operands()
    bias = np.random.default_rng(1).normal(size=(_GROUPS, _N))
    bias = bias.astype(np.float32)
    g_scale = np.float32(0.75)

    def ours(x, bias, scale):
      weights = jp.ScaledArray(
        w_q.values, w_q.scale, w_q.global_scale * scale, jp.NVFP4
      )
      y = jp.ragged_dot(
        x,
        weights,
        _SIZES,
        bias=bias,
        activation=activation,
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(y))

    def theirs(x, bias, scale):
      weights = jnp.asarray(w, jnp.float32) * scale
      return jnp.sum(
        jnp.sin(ragged_suite.by_rows(x, weights, bias, _SIZES, activation))
      )

    actual, expected = (
      jax.jit(jax.grad(total, (0, 1, 2)))(x, bias, g_scale)
      for total in (ours, theirs)
    )
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, e, rtol=3e-4, atol=3e-4)
    self.assertFalse(np.asarray(actual[1][1]).any())  # of the empty group
    self.assertFalse(np.asarray(actual[0][9:]).any())  # of no group's rows

  def test_gradients_of_a_linear_call_are_exact_on_integers(self):
    rng = np.random.default_rng(2)
    rhs, exact = ragged_suite.operand(
      rng, jp.MXFP8, (_GROUPS, _N, _K), integers=True
    )
    x = rng.integers(-4, 5, (_M, _K)).astype(np.float32)
    g = rng.integers(-4, 5, (_M, _N)).astype(np.float32)
    _, pull = jax.vjp(lambda x: jp.ragged_dot(x, rhs, _SIZES), x)
    of_row = ragged_suite.group_of_rows(_SIZES, _M)
    expected = np.einsum("mn,mnk->mk", g.astype(np.float64), exact[of_row])
    expected[of_row < 0] = 0
    np.testing.assert_array_equal(pull(g)[0], expected)

  @parameterized.parameters(*_ACTIVATIONS)
  @pytest.mark.sample(1)
  def test_forward_mode_agrees_with_reverse(self, activation):
    x, w_q, _ = _operands()
    rng = np.random.default_rng(3)
    f = lambda x: jp.ragged_dot(x, w_q, _SIZES, activation=activation)
    t = rng.normal(size=x.shape).astype(np.float32)
    y = jax.eval_shape(f, x)
    g = rng.normal(size=y.shape).astype(np.float32)
    tangent, x_bar = jax.jit(
      lambda x, t, g: (jax.jvp(f, (x,), (t,))[1], jax.vjp(f, x)[1](g)[0])
    )(x, t, g)
    self.assertAlmostEqual(
      float(np.vdot(tangent, g)), float(np.vdot(t, x_bar)), delta=2e-2
    )

  @parameterized.parameters(None, "silu")
  def test_tangent_by_bias_is_zero_in_rows_of_no_group(self, activation):
    x, w_q, _ = _operands()
    bias = np.ones((_GROUPS, _N), np.float32)
    f = lambda b: jp.ragged_dot(x, w_q, _SIZES, bias=b, activation=activation)
    tangent = jax.jit(lambda b: jax.jvp(f, (b,), (b,))[1])(bias)
    self.assertTrue(np.asarray(tangent[:9]).all())
    np.testing.assert_array_equal(tangent[9:], 0)

  def test_second_derivatives(self):
    x, w_q, w = _operands()
    w = jnp.asarray(w, jnp.float32)
    f = lambda x: jnp.sum(jp.ragged_dot(x, w_q, _SIZES, activation="silu") ** 2)
    h = lambda x: jnp.sum(ragged_suite.by_rows(x, w, None, _SIZES, "silu") ** 2)
    t = jnp.ones_like(x)
    along = lambda f: jax.jvp(jax.grad(f), (x,), (t,))[1]
    found, expected = jax.jit(lambda: (along(f), along(h)))()
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-2)

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP6_E2M3, jp.MXFP4, jp.NVFP4),
    implementation=("cpu", "xla"),
  )
  @pytest.mark.sample(1)
  def test_prepared_weights_have_the_same_bits(self, format, implementation):
    x, w_q, _ = _operands(format)
    prepared = jp.prepare_weights(w_q)
    self.assertTrue(prepared.is_bytes)
    f = jax.jit(functools.partial(jp.ragged_dot, implementation=implementation))
    np.testing.assert_array_equal(f(x, prepared, _SIZES), f(x, w_q, _SIZES))
    # No array of all groups is made: each would cost more than a decode step.
    text = f.lower(x, prepared, _SIZES).as_text()
    self.assertNotRegex(text, r"bitcast_convert .*\(tensor<3x16x")

  @parameterized.product(
    rows=("mxfp8", "nvfp4"), weights=("mxfp8", "uint4_128", "uint4_32_min")
  )
  @pytest.mark.sample(3)
  def test_rows_in_bytes_are_read_as_floats(self, rows, weights):
    """`to_bytes` stores values and scales as bytes, as stacks have them."""
    x, w_q, w = _operands(weights)

    def total(w, x_q):
      w_q = jp.quantize(w, "mxfp8", derivative="straight_through")
      return jnp.sum(jp.ragged_dot(x_q, w_q, _SIZES))

    @jax.jit
    def run(x_q, w_q, w):
      y = jp.ragged_dot(x_q, w_q, _SIZES, implementation="xla")
      return y, jax.grad(total)(w, x_q)

    x_q = jp.quantize(x, rows)
    result, gradient = run(x_q.to_bytes(), w_q, np.asarray(w, np.float32))
    floats = np.asarray(x_q.dequantize(), np.float64)
    expected = ragged_suite.by_rows(floats, w, None, _SIZES, None)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    groups = np.split(floats, np.cumsum(_SIZES))[: len(_SIZES)]
    of_group = np.stack([group.sum(0) for group in groups])
    expected = np.broadcast_to(of_group[:, None], w.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)

  def test_is_never_expanded_by_groups(self):
    # The optimized module multiplies at most one surplus tile for each group.
    x, w_q, _ = _operands()
    f = functools.partial(jp.ragged_dot, implementation="xla")
    text = jax.jit(f).lower(x, w_q, _SIZES).as_text()
    dots = re.findall(r"stablehlo.dot_general.*", text)
    self.assertLen(dots, 1)
    self.assertRegex(dots[0], r"tensor<8x64xf32>, tensor<16x64xf32>")


class DebugChecksTest(parameterized.TestCase):
  # The last are so many that their sum wraps around to 0.
  @parameterized.parameters(
    ([9, 9, 9],), ([-1, 2, 3],), ([2**31 - 1, 2**31 - 1, 2],)
  )
  @pytest.mark.sample(1)
  def test_wrong_sizes_are_an_error(self, sizes):
    x, w_q, _ = _operands()
    with (
      self.assertRaisesRegex(ValueError, "group_sizes must not be negative"),
      jp.debug_checks(),
    ):
      jax.jit(jp.ragged_dot)(x, w_q, np.array(sizes, np.int32))

  def test_error_names_the_implementation_of_the_tables(self):
    x, w_q, _ = _operands()
    with (
      self.assertRaisesRegex(ValueError, "implementation: xla, as decided"),
      jp.debug_checks(),
      resolution.pinned("xla", ()),
    ):
      jp.ragged_dot(x, w_q, np.array([9, 9, 9], np.int32))

  def test_nan_without_a_cause_is_an_error(self):
    x, w_q, _ = _operands()
    emit = backends.emit

    def broken(decision, *args):
      result = emit(decision, *args)
      return result * np.nan if decision.implementation == "cpu" else result

    with (
      mock.patch.object(backends, "emit", broken),
      self.assertRaisesRegex(jp.NonFiniteError, "^ragged_dot: 192 of the"),
      jp.debug_checks(),
    ):
      jax.jit(lambda x: jp.ragged_dot(x, w_q, _SIZES))(x)

  @parameterized.parameters(None, "swigluoai")
  def test_right_sizes_and_explained_nans_pass(self, activation):
    x, w_q, _ = _operands()
    x[1, 3] = np.nan
    with jp.debug_checks():
      y = jp.ragged_dot(x, w_q, _SIZES, activation=activation)
    self.assertTrue(np.isnan(np.asarray(y)[1]).all())

  def test_overflow_of_the_result_is_explained(self):
    x, w_q, _ = _operands()
    with jp.debug_checks():
      y = jp.ragged_dot(
        x * 1e5, w_q, _SIZES, preferred_element_type=jnp.float16
      )
    self.assertTrue(np.isinf(np.asarray(y)).any())

  @parameterized.parameters(jp.MXFP6_E2M3, jp.MXFP4)
  def test_overflow_of_a_sum_is_explained(self, format):
    # Positive products sum to 2.5e38, and so do negative ones.
    w_q = jp.quantize(np.tile(np.float32([4, -4]), (3, _N, _K // 2)), format)
    x = np.full((_M, _K), 5e38 / _K / 4, np.float32)
    emit = backends.emit

    def overflowing(decision, *args):
      result = emit(decision, *args)
      is_planted = decision.implementation == "cpu"
      return result.at[0, 0].set(np.inf) if is_planted else result

    with (
      mock.patch.object(backends, "emit", overflowing),
      jp.debug_checks(),
    ):
      y = jax.jit(
        lambda x: jp.ragged_dot(x, w_q, _SIZES, implementation="cpu")
      )(x)
    self.assertTrue(np.isinf(np.asarray(y)).any())


class ErrorsTest(parameterized.TestCase):
  def _check(self, error, pattern, *args, **options):
    call = functools.partial(jp.ragged_dot, *args, **options)
    for run in (call, functools.partial(jax.eval_shape, call)):
      with self.assertRaisesRegex(error, pattern):
        run()

  def test_names_rule_and_remedy(self):
    x, w_q, w = _operands()
    t, v = TypeError, ValueError
    self._check(t, "must be a ScaledArray .* jax.lax.ragged_dot", x, w, _SIZES)
    weight = jp.QuantizedWeight(w_q, (_K, _N), (0,))
    self._check(t, "pass the .array of a QuantizedWeight", x, weight, _SIZES)
    self._check(t, r"lhs must have rank 2, \(m, k\)", x[0], w_q, _SIZES)
    self._check(t, r"rhs must have rank 3", x, w_q[0], _SIZES)
    self._check(t, "the same k, got", x[:, :32], w_q, _SIZES)
    swapped = jp.quantize(np.ones((3, _K, 32), np.float32), jp.MXFP8)
    self._check(t, "quantize jnp.swapaxes.weights, 1, 2", x, swapped, _SIZES)
    padded = jp.quantize(np.ones((3, 32, 40), np.float32), jp.MXFP8, pad=True)
    self._check(t, "pad lhs too: jnp.pad", x[:, :40], padded, _SIZES)
    self._check(
      t,
      r"group_sizes must be integers, got float\d+\[3\]; .*astype",
      x,
      w_q,
      _SIZES * 1.0,
    )
    self._check(t, r"one size for each of the 3 groups", x, w_q, _SIZES[:2])
    along_n = jp.quantize(w.astype(np.float32), jp.NVFP4, axis=1)
    self._check(
      t, r"blocked along .* rhs\.transpose\(0, 2, 1\)", x, along_n, _SIZES
    )
    self._check(t, "float32, bfloat16 or", x.astype(int), w_q, _SIZES)
    bias = np.zeros((3, _N + 1), np.float32)
    self._check(
      t, r"bias must have shape \(groups, n\)", x, w_q, _SIZES, bias=bias
    )
    self._check(v, "activation must be", x, w_q, _SIZES, activation="tanh")
    odd = w_q[:, :15]
    self._check(v, "needs an even n", x, odd, _SIZES, activation="swiglu")
    self._check(v, "implementation must be", x, w_q, _SIZES, implementation="q")
    self._check(
      v, "^ragged_dot: precision must be", x, w_q, _SIZES, precision="fast"
    )
    self._check(
      t, "preferred_element_type", x, w_q, _SIZES, preferred_element_type=int
    )
    varying = jp.ScaledArray(
      w_q.values, w_q.scale, np.ones((3, _N, 1), np.float32), jp.NVFP4
    )
    self._check(t, "one number, or one per group", x, varying, _SIZES)

  @parameterized.parameters("lhs", "rhs", "prepared")
  def test_negative_nvfp4_scale_is_refused(self, where):
    x, w_q, _ = _operands()
    x_q = jp.quantize(x, jp.NVFP4)
    given = x_q if where == "lhs" else w_q
    codes = np.asarray(given.scale).view(np.uint8).copy()
    codes.reshape(-1)[0] = 0xB8  # -1
    scale = jnp.asarray(codes.view(given.scale.dtype))
    bad = jp.ScaledArray(given.values, scale, given.global_scale, jp.NVFP4)
    if where == "prepared":
      bad = bad.to_bytes()
    args = (bad, w_q) if where == "lhs" else (x_q, bad)
    self._check(
      ValueError,
      rf"{'lhs' if where == 'lhs' else 'rhs'}_scale .* got -1.* at \(0, 0",
      *args,
      _SIZES,
      implementation="xla",
    )

  def test_quantized_operands_have_no_derivative(self):
    x, w_q, _ = _operands(jp.MXFP8)
    scale = lambda s: jp.ragged_dot(
      x, jp.ScaledArray(w_q.values, s, None, jp.MXFP8), _SIZES
    )
    ones = jnp.ones_like(w_q.scale)
    with self.assertRaisesRegex(NotImplementedError, r"rhs_scale \(mxfp8\)"):
      jax.jvp(scale, (w_q.scale,), (ones,))

  def test_implementation_that_cannot_serve_says_why(self):
    x, w_q, _ = _operands()
    with jp.use_target(jp.named_target("h100")):
      self._check(
        *(NotImplementedError, "needs a CPU", x, w_q, _SIZES),
        implementation="cpu",
      )
    # Where a program is lowered for another platform than it was traced for.
    f = jax.jit(functools.partial(jp.ragged_dot, implementation="cpu"))
    export = jax.export.export(f, platforms=("cuda",))
    with self.assertRaisesRegex(
      NotImplementedError, "(?s)^ragged_dot: .*needs a C"
    ):
      export(x, w_q, _SIZES)


def _moe(x, implementation=None):
  w = jp.quantize(jnp.ones((32, 256, 128)), jp.MXFP4)
  sizes = jnp.full((32,), 1)
  return jp.ragged_dot(
    x, w, sizes, activation="swigluoai", implementation=implementation
  ).sum()


class ExplainTest(parameterized.TestCase):
  def test_says_what_serves_and_why_others_do_not(self):
    (dot,) = jp.explain(_moe, jnp.ones((8, 128)))
    self.assertEqual(dot.decision.implementation, "cpu")
    self.assertIn("groups=32 m=8 n=256 k=128", str(dot.problem))
    self.assertIn("xla", [r.implementation for r in dot.decision.refusals])

  def test_cost_of_the_loop_is_told(self):
    h200 = jp.named_target("h200")
    by_xla = functools.partial(_moe, implementation="xla")
    told = jp.explain(by_xla, jnp.ones((8, 128)), target=h200)
    self.assertIn("dequantizes each of them once", told.details())
    self.assertIn("the host decides each step", told.details())
    # Eight rows read at most eight of 32 groups.
    values, scales = 32 * 256 * 64, 32 * 256 * 4
    others = 8 * 128 * 4 + 8 * 128 * 4 + 32 * 4
    self.assertEqual(told[0].estimate.num_bytes, (values + scales) / 4 + others)

  def test_estimate_knows_what_multiplies(self):
    # So many rows are bound by multiplication, of FP8 or of bf16.
    m, size = 1 << 16, 8192
    dot = functools.partial(jp.ragged_dot, preferred_element_type=jnp.bfloat16)
    quantized = lambda *shape: jax.eval_shape(
      lambda x: jp.quantize(x, jp.MXFP8),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    for name, peak in (("h200", 989e12), ("b200", 4500e12)):
      target = jp.named_target(name)
      args = quantized(m, size), quantized(2, size, size), sizes
      (told,) = jp.explain(dot, *args, target=target)
      self.assertAlmostEqual(
        told.estimate.seconds * peak / (2 * m * size**2), 1, places=6
      )

  def test_gradient_contracts_across_blocks(self):
    told = jp.explain(jax.grad(_moe), jnp.ones((8, 128)))
    implementations = [dot.decision.implementation for dot in told]
    self.assertEqual(implementations, ["cpu", "xla"])
    self.assertEqual(told[1].phase, "backward")

  @parameterized.parameters((128, "cpu"), (0, "xla"))
  def test_kernels_serve_devices_that_have_a_share(self, k, served):
    def dot(x, values, scale):
      w = jp.ScaledArray(values, scale, None, jp.MXFP8)
      return jp.ragged_dot(x, w, jnp.full((32,), 1))

    jaxpr = jax.make_jaxpr(dot)(
      jnp.ones((8, k)),
      jnp.ones((32, 256, k), jnp.float8_e4m3fn),
      jnp.ones((32, 256, k // 32), jnp.float8_e8m0fnu),
    )
    (eqn,) = (
      operation.eqn
      for operation in program.operations(jaxpr.jaxpr)
      if operation.eqn.primitive.name == "block_scaled_ragged_dot"
    )
    decided = primitive.decide(eqn, None, num_devices=8)
    self.assertEqual(decided.decision.implementation, served)
    reasons = [r.reason for r in decided.decision.refusals]
    is_split = served == "cpu"
    self.assertEqual(
      any("XLA partitions the module" in r for r in reasons), not is_split
    )
