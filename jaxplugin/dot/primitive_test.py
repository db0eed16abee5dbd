# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` under JAX's transformations: the same as the plain call.

Control flow and a mesh of one device; derivatives, `vmap` and export have tests
of their own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.dot import calls
from jaxplugin.testing import transformations

array = transformations.array
dots_of = transformations.dots_of


class ControlFlowTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = array(rng, jp.MXFP8, (3, 64))
    self.w = array(rng, jp.NVFP4, (5, 64))
    self.residual = jnp.asarray(rng.integers(-9, 9, (3, 5)), jnp.float32)
    self.plain = jp.block_scaled_dot(self.x, self.w, residual=self.residual)

  def test_scan_over_stacked_weights_equals_a_loop(self):
    rng = np.random.default_rng(1)
    layers = [array(rng, jp.MXFP4, (5, 64)) for _ in range(4)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)

    def step(carry, w):
      y = jp.block_scaled_dot(self.x, w, residual=carry)
      return y, y.sum()

    carry, sums = lax.scan(step, self.residual, stacked)
    expected, expected_sums = self.residual, []
    for w in layers:
      expected = jp.block_scaled_dot(self.x, w, residual=expected)
      expected_sums.append(expected.sum())
    self.assert_same(carry, expected)
    self.assert_same(sums, np.stack(expected_sums))

  @parameterized.parameters(True, False)
  def test_cond_takes_the_right_branch(self, flag):
    function = jax.jit(
      lambda flag, x, w: lax.cond(
        flag,
        lambda: jp.block_scaled_dot(x, w, residual=self.residual),
        lambda: jp.block_scaled_dot(x, w, activation="relu"),
      )
    )
    expected = self.plain
    if not flag:
      expected = jp.block_scaled_dot(self.x, self.w, activation="relu")
    self.assert_same(function(flag, self.x, self.w), expected)

  def test_mapped_cond_selects_by_entry(self):
    def function(flag):
      return lax.cond(
        flag,
        lambda: jp.block_scaled_dot(self.x, self.w, residual=self.residual),
        lambda: self.residual,
      )

    actual = jax.vmap(function)(jnp.array([True, False]))
    self.assert_same(actual, np.stack([self.plain, self.residual]))

  def test_while_loop_accumulates(self):
    def body(state):
      i, y = state
      return i + 1, jp.block_scaled_dot(self.x, self.w, residual=y)

    _, actual = jax.jit(
      lambda y: lax.while_loop(lambda s: s[0] < 3, body, (0, y))
    )(self.residual)
    expected = self.residual
    for _ in range(3):
      expected = jp.block_scaled_dot(self.x, self.w, residual=expected)
    self.assert_same(actual, expected)

  @parameterized.parameters(
    None, "everything_saveable", "nothing_saveable", "dots_saveable"
  )
  @pytest.mark.sample(1)
  def test_remat_gives_the_same_value_and_gradient(self, policy):
    if policy is not None:
      policy = getattr(jax.checkpoint_policies, policy)

    def loss(s, remat):
      def inner(s, x, w):
        y = jp.block_scaled_dot(x, w, residual=self.residual)
        return s * s * y

      if remat:
        inner = jax.checkpoint(inner, policy=policy)
      return inner(s, self.x, self.w).sum()

    s = jnp.float32(2)
    expected = jax.value_and_grad(loss)(s, False)
    self.assertEqual(float(expected[1]), 4 * float(self.plain.sum()))
    for function in (
      jax.value_and_grad(loss),
      jax.jit(jax.value_and_grad(loss), static_argnums=1),
    ):
      actual = function(s, True)
      self.assert_same(actual[0], expected[0])
      self.assert_same(actual[1], expected[1])

  def test_rematted_dot_is_computed_again_in_the_backward_pass(self):
    def loss(s):
      inner = jax.checkpoint(
        lambda s, x: jnp.sin(s * jp.block_scaled_dot(x, self.w)).sum(),
        policy=jax.checkpoint_policies.nothing_saveable,
      )
      return inner(s, self.x)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.float32(1)).jaxpr
    self.assertGreaterEqual(len(dots_of(jaxpr)), 1)

  def test_donated_residual_is_reused(self):
    def function(residual, x, w):
      return jp.block_scaled_dot(x, w, residual=residual)

    residual = jnp.array(self.residual)
    actual = jax.jit(function, donate_argnums=0)(residual, self.x, self.w)
    self.assert_same(actual, self.plain)
    self.assertTrue(residual.is_deleted())
    lowered = jax.jit(function, donate_argnums=0).lower(
      self.residual, self.x, self.w
    )
    self.assertIn("tf.aliasing_output = 0", lowered.as_text())

  def test_compiling_ahead_of_time_gives_the_same_bits(self):
    function = jax.jit(lambda x, w, r: jp.block_scaled_dot(x, w, residual=r))
    specs = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
      (self.x, self.w, self.residual),
    )
    compiled = function.lower(*specs).compile()
    self.assert_same(compiled(self.x, self.w, self.residual), self.plain)

  @parameterized.parameters("float32", "bfloat16", "float16")
  def test_eval_shape_and_jaxpr_tell_shape_and_dtype(self, dtype):
    function = functools.partial(
      jp.block_scaled_dot, preferred_element_type=dtype
    )
    spec = jax.eval_shape(function, self.x, self.w)
    self.assertEqual((spec.shape, spec.dtype), ((3, 5), jnp.dtype(dtype)))
    self.assertFalse(spec.weak_type)
    jaxpr = jax.make_jaxpr(function)(self.x, self.w)
    (eqn,) = dots_of(jaxpr.jaxpr)
    self.assertEqual(
      [v.aval.dtype for v in eqn.invars],
      [self.x.dtype, self.w.dtype, self.x.scale.dtype, self.w.scale.dtype],
    )
    self.assertEqual(eqn.params["call"].lhs.format, jp.MXFP8)
    self.assertIsInstance(eqn.params["call"], calls.Call)


class DerivativeTest(transformations.PrimitiveTestCase):
  def test_stop_gradient_makes_it_a_constant(self):
    w = array(np.random.default_rng(0), jp.MXFP8, (5, 32))

    def loss(x):
      y = jp.block_scaled_dot(lax.stop_gradient(x), w, bias=jnp.ones(5))
      return y.sum() * x.sum()

    x = jnp.ones((3, 32))
    expected = 3 * float(np.asarray(jp.dequantize(w)).sum() + 5)
    np.testing.assert_array_equal(jax.grad(loss)(x), np.full((3, 32), expected))


def varying_axes(x: jax.Array) -> set[str]:
  """The mesh axes over which `x` differs, by its type, inside `shard_map`."""
  return set(jax.typeof(x).manual_axis_type.varying)


class OneDeviceMeshTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = array(rng, jp.MXFP8, (2, 3, 64))
    self.w = array(rng, jp.MXFP4, (2, 5, 64))
    self.bias = jnp.arange(5, dtype=jnp.float32)
    self.plain = jp.block_scaled_dot(self.x, self.w, bias=self.bias)

  @parameterized.product(
    check_vma=(True, False),
    specs=(("x", None), (None, "x"), ("x", "x"), (None, None)),
  )
  @pytest.mark.sample(1)
  def test_shard_map_equals_the_plain_call(self, check_vma, specs):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = lambda s: jax.sharding.PartitionSpec(s)
    varying = {"x"} if check_vma and "x" in specs else set()

    def local(x, w, b):
      y = jp.block_scaled_dot(x, w, bias=b)
      self.assertEqual(varying_axes(y), varying)
      return y

    function = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(*map(spec, specs), spec(None)),
      out_specs=spec("x" if "x" in specs else None),
      check_vma=check_vma,
    )
    for run in (function, jax.jit(function)):
      self.assert_same(run(self.x, self.w, self.bias), self.plain)

  @parameterized.parameters(True, False)
  def test_contraction_over_shards_is_a_psum_in_shard_map(self, check_vma):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    function = jax.shard_map(
      lambda x, w: lax.psum(jp.block_scaled_dot(x, w), "x"),
      mesh=mesh,
      in_specs=(spec, spec),
      out_specs=jax.sharding.PartitionSpec(),
      check_vma=check_vma,
    )
    expected = jp.block_scaled_dot(self.x, self.w)
    self.assert_same(jax.jit(function)(self.x, self.w), expected)

  def test_vmap_in_shard_map_equals_the_plain_call(self):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
      jax.vmap(jp.block_scaled_dot, in_axes=(0, None)),
      mesh=mesh,
      in_specs=(
        jax.sharding.PartitionSpec("x"),
        jax.sharding.PartitionSpec(),
      ),
      out_specs=jax.sharding.PartitionSpec("x"),
    )
    w = jax.tree.map(lambda a: a[0], self.w)
    expected = jax.vmap(jp.block_scaled_dot, in_axes=(0, None))(self.x, w)
    self.assert_same(jax.jit(function)(self.x, w), expected)

  @parameterized.parameters("b", "m", "n")
  @pytest.mark.sample(1)
  def test_explicit_sharding_is_in_the_results_type(self, where):
    mesh = jax.make_mesh(
      (1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    P = jax.sharding.PartitionSpec
    lhs_spec = {"b": P("x", None, None), "m": P(None, "x", None)}
    rhs_spec = {"b": P("x", None, None), "n": P(None, "x", None)}
    with jax.set_mesh(mesh):
      put = lambda a, spec: jax.device_put(
        a, jax.sharding.NamedSharding(mesh, spec)
      )
      x = put(self.x, lhs_spec.get(where, P(None, None, None)))
      w = put(self.w, rhs_spec.get(where, P(None, None, None)))
      bias = put(self.bias, P(None))
      function = lambda x, w, b: jp.block_scaled_dot(x, w, bias=b)
      expected = P(*("x" if where == d else None for d in "bmn"))
      for run in (function, jax.jit(function)):
        actual = run(x, w, bias)
        self.assertEqual(jax.typeof(actual).sharding.spec, expected)
        self.assert_same(actual, self.plain)


if __name__ == "__main__":
  absltest.main()
