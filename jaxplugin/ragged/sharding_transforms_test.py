# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded ragged dots under `shard_map`, explicit axes and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.dot_suite import contraction_suite, ragged_suite
from jaxplugin.testing.meshes import explicit

LAYERS, GROUPS, M, K = 3, 8, 32, 128
SIZES = np.array([5, 0, 3, 9, 0, 1, 2, 7], np.int32)


def own_experts(rows, weights, sizes, *, implementation=None):
  """A device's part, in the words of a user of `shard_map` over "b"."""
  groups = weights.shape[0]
  first = jax.lax.axis_index("b") * groups
  ends = jnp.cumsum(sizes)
  start = jnp.where(first, ends[first - 1], 0)
  own = jax.lax.dynamic_slice_in_dim(sizes, first, groups)
  result = jp.ragged_dot(
    jnp.roll(rows, -start, 0), weights, own, implementation=implementation
  )
  return jax.lax.psum(jnp.roll(result, start, 0), "b")


class TransformsTest(explicit.AutoTestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.rhs, self.exact = ragged_suite.operand(
      rng, jp.MXFP4, (LAYERS, GROUPS, K, K), integers=True
    )
    self.lhs = rng.integers(-4, 5, (M, K)).astype(np.float32)
    self.expected, _ = ragged_suite.oracle(self.lhs, self.exact[0], SIZES)

  @parameterized.product(implementation=(None, "xla"), check_vma=(True, False))
  @pytest.mark.sample(1)
  def test_shard_map_of_a_device_s_own_experts(self, implementation, check_vma):
    mapped = jax.shard_map(
      functools.partial(own_experts, implementation=implementation),
      mesh=self.mesh,
      in_specs=(P("a"), P("b"), P()),
      out_specs=P("a"),
      check_vma=check_vma,
    )
    # Each half of the rows is sorted for itself, and of the same sizes.
    sizes = SIZES // 2
    result = np.asarray(jax.jit(mapped)(self.lhs, self.rhs[0], sizes))
    for half in np.split(np.arange(M), 2):
      expected, _ = ragged_suite.oracle(self.lhs[half], self.exact[0], sizes)
      np.testing.assert_array_equal(result[half], expected)

  def test_shard_map_of_a_contraction(self):
    # Gradients of weights: of each half of the rows, summed.
    def local(lhs, rhs, sizes):
      part = jp.ragged_dot_general(lhs, rhs, sizes, contraction_suite.NUMBERS)
      return jax.lax.psum(part, "a")

    mapped = jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=(P("a"), P("a"), P()),
      out_specs=P(),
    )
    sizes = SIZES // 2
    result = jax.jit(mapped)(self.lhs, self.lhs[:, :16], sizes)
    expected = sum(
      contraction_suite.oracle(half, half[:, :16], sizes)[0]
      for half in np.split(self.lhs.astype(np.float64), 2)
    )
    np.testing.assert_array_equal(np.asarray(result), expected)

  @parameterized.parameters(None, "cpu")
  @pytest.mark.sample(1)
  def test_shard_map_over_some_axes_leaves_the_others(self, implementation):
    mapped = jax.shard_map(
      functools.partial(own_experts, implementation=implementation),
      mesh=self.mesh,
      in_specs=(P(), P("b"), P()),
      out_specs=P(),
      axis_names={"b"},
    )
    rows = self.put(self.lhs, P("a"))
    result = jax.jit(mapped)(rows, self.rhs[0], SIZES)
    np.testing.assert_array_equal(np.asarray(result), self.expected)

  @parameterized.parameters(False, True)
  @pytest.mark.full
  def test_scan_and_remat_of_stacked_experts(self, is_explicit):
    """Gradients too; weights of a layer are never gathered."""

    @jax.checkpoint
    def layer(x, w):
      return jp.ragged_dot(x, w, SIZES, activation="relu") / 512, None

    def loss(x, stack):
      return jnp.sum(jax.lax.scan(layer, x, stack)[0])

    step = jax.jit(jax.value_and_grad(loss))

    def exact(x):
      for w in self.exact.astype(np.float32):
        x = ragged_suite.by_rows(x, w, None, SIZES, "relu") / 512
      return jnp.sum(x)

    expected = jax.value_and_grad(exact)(self.lhs)
    mesh = self.mesh
    if is_explicit:
      mesh = explicit.mesh(self)
    with jax.set_mesh(mesh):
      args = (
        explicit.put(mesh, self.lhs, P("a")),
        explicit.put(mesh, self.rhs, P(None, "b")),
      )
      value, gradient = step(*args)
      text = step.lower(*args).compile().as_text()
    for have, want in zip((value, gradient), expected, strict=True):
      scale = float(np.abs(want).max())
      np.testing.assert_allclose(have, want, atol=1e-5 * scale)
    self.assertNotIn("all-gather", text)

  @pytest.mark.full
  def test_vmap_of_sharded_weights_gathers_none(self):
    lhs = np.stack([self.lhs, 2 * self.lhs])
    function = jax.jit(jax.vmap(jp.ragged_dot, (0, 0, None)))
    args = lhs, self.put(self.rhs[:2], P("a", "b")), SIZES
    result = function(*args)
    for i in range(2):
      expected, _ = ragged_suite.oracle(lhs[i], self.exact[i], SIZES)
      np.testing.assert_array_equal(np.asarray(result[i]), expected)
    self.assertNotIn("all-gather", function.lower(*args).compile().as_text())

  def test_export_of_a_sharded_call_runs(self):
    args = (
      self.put(self.lhs, P("a")),
      self.put(self.rhs[0], P("b")),
      self.put(SIZES, P()),
    )
    exported = jax.export.export(jax.jit(jp.ragged_dot))(*args)
    restored = jax.export.deserialize(exported.serialize())
    result = jax.jit(restored.call)(*args)
    np.testing.assert_array_equal(np.asarray(result), self.expected)


class ExplicitTest(explicit.ExplicitTestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(0)

  def assert_type(self, x, *spec):
    self.assertEqual(tuple(jax.typeof(x).sharding.spec), spec)

  @parameterized.parameters(
    # The type follows from the operands: rows keep their axes, and columns too.
    (P(), P("b"), None, P()),
    (P("a"), P("b"), None, P("a")),
    (P("b"), P("b"), None, P("b")),
    (P("a"), P(None, "b"), None, P("a", "b")),
    (P(None, "b"), P(None, None, "b"), None, P()),
    # Rows of four devices' groups come to where they are wanted.
    (P("a"), P("b"), P(("a", "b"))),
    # Parts of k: a sum, scattered or everywhere.
    (P(None, "b"), P(None, None, "b"), P(None, "b")),
    (P("a", "b"), P(None, None, "b"), P("a")),
    # Nothing is sharded, and everything is.
    (P(), P(), P("b", "a")),
    # What would stay is gathered.
    (P("a"), P(None, "b"), P()),
    # Half as many columns.
    (P("a"), P(None, "b"), P("b"), None, "swiglu"),
  )
  @pytest.mark.sample(4)
  def test_type_of_the_result(
    self, lhs_spec, rhs_spec, out, default=None, activation=None
  ):
    lhs, exact_lhs = ragged_suite.operand(
      self.rng, jp.MXFP8, (M, K), integers=True
    )
    rhs, exact_rhs = ragged_suite.operand(
      self.rng, jp.NVFP4, (GROUPS, 64, K), integers=True
    )
    function = functools.partial(jp.ragged_dot, activation=activation)
    one_device = np.asarray(function(lhs, rhs, SIZES))
    with jax.set_mesh(self.mesh):
      args = self.put(lhs, lhs_spec), self.put(rhs, rhs_spec), SIZES
      named = None if out is None else NamedSharding(self.mesh, out)
      result, same = jax.jit(
        lambda *args: [function(*args, out_sharding=s) for s in (out, named)]
      )(*args)
    spec = default if out is None else out
    self.assert_type(result, *spec, *[None] * (2 - len(spec)))
    self.assertEqual(jax.typeof(same), jax.typeof(result))
    np.testing.assert_array_equal(np.asarray(same), np.asarray(result))
    if activation is not None:  # by XLA's exp, and by the kernel's
      scale = float(np.abs(one_device).max())
      np.testing.assert_allclose(result, one_device, atol=1e-6 * scale)
      return
    # Integers: sums over devices are exact too.
    np.testing.assert_array_equal(np.asarray(result), one_device)
    expected, _ = ragged_suite.oracle(exact_lhs, exact_rhs, SIZES)
    np.testing.assert_array_equal(np.asarray(result), expected)

  @parameterized.parameters(
    (P("a", "b", None), ValueError, r"at most 2 dimensions.*\(32, 64\)"),
    (P(None, ("a", "b")), ValueError, r"axis 1 .* 8 times.*size 60"),
    (P("c"), ValueError, "axis: c"),
    ("a", TypeError, "ragged_dot: out_sharding .* got a str"),
    (P(unreduced={"b"}), NotImplementedError, "ragged_dot: .*no unreduced"),
  )
  def test_out_sharding_that_does_not_fit(self, out, error, message):
    columns = 60 if "60" in message else 64
    rhs = jp.quantize(np.ones((GROUPS, columns, K), np.float32), jp.MXFP8)
    lhs = self.put(np.ones((M, K), np.float32), P("a"))
    with (
      jax.set_mesh(self.mesh),
      self.assertRaisesRegex(error, message),
    ):
      jp.ragged_dot(lhs, rhs, SIZES, out_sharding=out)

  def test_out_sharding_needs_explicit_axes(self):
    rhs = jp.quantize(np.ones((GROUPS, 64, K), np.float32), jp.MXFP8)
    lhs = np.ones((M, K), np.float32)
    with self.assertRaisesRegex(ValueError, "not under a mesh context"):
      jp.ragged_dot(lhs, rhs, SIZES, out_sharding=P("a"))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with (
      jax.set_mesh(mesh),
      self.assertRaisesRegex(ValueError, "of type Auto|AxisType.Auto"),
    ):
      jp.ragged_dot(lhs, rhs, SIZES, out_sharding=P("a"))

  @parameterized.parameters(
    ("swigluoai", P("a"), P("b"), P("b")),
    ("swiglu", P("a"), P(None, "b"), P(None, "b")),
    ("silu", P(None, "b"), P(None, None, "b"), P()),
  )
  @pytest.mark.full
  def test_types_of_gradients(self, activation, lhs_spec, rhs_spec, bias_spec):
    rhs, _ = ragged_suite.operand(
      self.rng, jp.MXFP8, (GROUPS, 64, K), integers=True
    )
    lhs = self.rng.normal(size=(M, K)).astype(np.float32) / 64
    bias = self.rng.normal(size=(GROUPS, 64)).astype(np.float32)

    def loss(lhs, bias, rhs):
      y = jp.ragged_dot(lhs, rhs, SIZES, bias=bias, activation=activation)
      return jnp.sum(jnp.sin(y))

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    expected = gradient(lhs, bias, rhs)
    with jax.set_mesh(self.mesh):
      args = (
        self.put(lhs, lhs_spec),
        self.put(bias, bias_spec),
        self.put(rhs, rhs_spec),
      )
      actual = gradient(*args)
      for have, arg in zip(actual, args, strict=False):
        self.assertEqual(jax.typeof(have), jax.typeof(arg))
    for have, want in zip(actual, expected, strict=True):
      scale = float(np.abs(want).max())
      np.testing.assert_allclose(have, want, atol=1e-5 * scale)

  @parameterized.parameters(
    (P("a"), P("b")), (P("b"), P("b")), (P(), P(None, "b"))
  )
  @pytest.mark.full
  def test_types_of_straight_through_gradients(self, lhs_spec, rhs_spec):
    lhs = self.rng.normal(size=(M, K)).astype(np.float32)
    rhs = self.rng.normal(size=(GROUPS, 64, K)).astype(np.float32)
    quantize = functools.partial(
      jp.quantize, format=jp.MXFP8, derivative="straight_through"
    )

    def loss(lhs, rhs, **options):
      y = jp.ragged_dot(quantize(lhs), quantize(rhs), SIZES, **options)
      return jnp.sum(jnp.sin(y / 8))

    expected = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    asked = functools.partial(loss, out_sharding=P("b", "a"))
    with jax.set_mesh(self.mesh):
      args = self.put(lhs, lhs_spec), self.put(rhs, rhs_spec)
      actual = jax.jit(jax.grad(asked, (0, 1)))(*args)
    for have, want, arg in zip(actual, expected, args, strict=True):
      self.assertEqual(jax.typeof(have), jax.typeof(arg))
      np.testing.assert_allclose(have, want, atol=1e-5)

  @pytest.mark.full
  def test_checks_vmap_jvp_and_explain_take_types(self):
    rhs, exact = ragged_suite.operand(
      self.rng, jp.MXFP8, (GROUPS, K, K), integers=True
    )
    lhs = self.rng.integers(-4, 5, (M, K)).astype(np.float32)
    expected, _ = ragged_suite.oracle(lhs, exact, SIZES)
    with jax.set_mesh(self.mesh):
      weights, rows = self.put(rhs, P("b")), self.put(lhs, P("a"))
      with jp.debug_checks():
        result = jax.jit(jp.ragged_dot)(rows, weights, SIZES)
      self.assert_type(result, "a", None)
      np.testing.assert_array_equal(np.asarray(result), expected)
      pair = self.put(np.stack([lhs, 2 * lhs]), P("a"))
      both = jax.vmap(jp.ragged_dot, (0, None, None))(pair, weights, SIZES)
      self.assert_type(both, "a", None, None)
      np.testing.assert_array_equal(np.asarray(both)[1], 2 * expected)
      _, tangent = jax.jvp(
        lambda x: jp.ragged_dot(x, weights, SIZES), (rows,), (rows,)
      )
      self.assert_type(tangent, "a", None)
      np.testing.assert_array_equal(np.asarray(tangent), expected)
      (told,) = jp.explain(jp.ragged_dot, rows, weights, SIZES)
      self.assertEqual(told.decision.implementation, "cpu")
