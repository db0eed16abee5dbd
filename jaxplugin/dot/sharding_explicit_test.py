# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots of arrays whose shardings are in their types, and their gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.arrays import interleaving
from jaxplugin.testing import exact_numbers
from jaxplugin.testing.exported import reading
from jaxplugin.testing.meshes import explicit

M, N, K = 32, 128, 256
nvfp4 = exact_numbers.nvfp4


def _collectives(text):
  return sorted(set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter)", text)))


X, W = exact_numbers.integers(0, M, K), exact_numbers.fours(1, N, K)
G = exact_numbers.integers(2, M, N)
NUMBERS = (((1,), (1,)), ((), ()))


def interleaved(w):
  """The weight with its values as words of interleaved FP4."""
  words = interleaving.interleave(w.pack().values)
  return jp.ScaledArray(words, w.scale, w.global_scale, w.format)


class OutsideTest(explicit.ExplicitTestCase):
  def test_mesh_that_only_out_sharding_has_is_refused(self):
    x = jp.quantize(X, jp.MXFP8)
    with self.assertRaisesRegex(ValueError, "set_mesh"):
      jp.block_scaled_dot(x, x, out_sharding=NamedSharding(self.mesh, P("a")))

  def test_other_axes_of_the_mesh_may_be_auto(self):
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    w = jp.shard(nvfp4(W), NamedSharding(mesh, P("b")))
    result = jax.jit(jp.linear)(x, w)  # the types have no devices
    self.assertEqual(jax.typeof(result).sharding.spec, P(None, "b"))
    np.testing.assert_array_equal(result, X @ W.T)


class ExplicitTest(explicit.InsideTestCase):
  @parameterized.parameters(
    (P("a"), P("b"), None, []),
    (P(("a", "b")), P(), None, []),
    # k is sharded on one side: the other is sliced, and the sum is everywhere.
    (P(None, "b"), P(), None, ["all_reduce"]),
    # On both, and the result says how.
    (P("a", "b"), P(None, "b"), P("a"), ["all_reduce"]),
    (P("a", "b"), P(None, "b"), P("a", "b"), ["reduce_scatter"]),
    # Both sides have an axis, and the result says who keeps it.
    (P("a"), P("a"), P("a"), []),
    (P("a"), P("a"), P(None, "a"), []),
    (P("a"), P("b"), P(), []),
  )
  @pytest.mark.sample(1)
  def test_types_are_those_of_lax_and_values_those_of_one_device(
    self, x_spec, w_spec, out, collectives
  ):
    x = self.put(jp.quantize(X, jp.MXFP8), x_spec)
    w = self.put(nvfp4(W), w_spec)
    function = jax.jit(lambda x, w: jp.block_scaled_dot(x, w, out_sharding=out))
    lowered = function.lower(x, w)
    # All else is the compiler's, of types: it calls nothing back.
    self.assertEqual(_collectives(lowered.as_text()), collectives)
    self.assertNotIn("jaxplugin_partitioned", lowered.as_text())
    result = function(x, w)
    expected = jax.eval_shape(
      lambda x, w: jax.lax.dot_general(x, w, NUMBERS, out_sharding=out),
      self.put(X, x_spec),
      self.put(W, w_spec),
    )
    self.assertEqual(jax.typeof(result).sharding, expected.sharding)
    np.testing.assert_array_equal(result, X @ W.T)

  @parameterized.parameters(
    (P(None, "b"), P(None, "b"), None),  # where should the sum be?
    (P("a"), P("a"), None),
    (P("a"), P("b"), P("c")),
  )
  def test_errors_are_those_of_lax_dot_general(self, x_spec, w_spec, out):
    with self.assertRaises(Exception) as expected:
      jax.lax.dot_general(
        self.put(X, x_spec), self.put(W, w_spec), NUMBERS, out_sharding=out
      )
    message = str(expected.exception).splitlines()[0]
    x = self.put(jp.quantize(X, jp.MXFP8), x_spec)
    w = self.put(jp.quantize(W, jp.MXFP8), w_spec)
    with self.assertRaisesRegex(type(expected.exception), re.escape(message)):
      jp.block_scaled_dot(x, w, out_sharding=out)

  def test_unreduced_result_is_refused(self):
    x = self.put(jp.quantize(X, jp.MXFP8), P(None, "b"))
    with self.assertRaisesRegex(
      NotImplementedError, r"block_scaled_dot: out_sharding.*unreduced=\{'b'\}"
    ):
      jp.block_scaled_dot(x, x, out_sharding=P(unreduced={"b"}))

  def test_axes_that_are_not_explicit_cannot_be_named(self):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), self.assertRaisesRegex(ValueError, "type Auto"):
      x = jp.quantize(X, jp.MXFP8)
      jp.block_scaled_dot(x, x, out_sharding=P("a"))

  def test_epilogue_follows_the_sum(self):
    x = self.put(jp.quantize(X, jp.MXFP8), P("a", "b"))
    w = self.put(nvfp4(W), P(None, "b"))
    bias, residual = (
      exact_numbers.integers(2, N),
      exact_numbers.integers(3, M, N),
    )

    def function(x, w, bias, residual):
      options = {"activation": "relu", "out_sharding": P("a", "b")}
      return jp.block_scaled_dot(x, w, bias=bias, residual=residual, **options)

    placed = self.put(bias, P("a")), self.put(residual, P(("a", "b")))
    result = jax.jit(function)(x, w, *placed)
    expected = np.maximum(X @ W.T + bias, 0) + residual
    np.testing.assert_array_equal(result, expected)

  def test_operands_as_they_may_be_stored(self):
    x = self.put(X, P("a", "b"))  # plain
    w = nvfp4(W)
    swizzled = nvfp4(W, scale_layout="swizzled_128x4")
    values, scale, factor = w.unpack().values, w.scale, w.global_scale
    rows = P("b")
    calls = (
      (swizzled, None, None),
      (self.put(values, P(None, "b")), self.put(scale, rows), factor),
      (self.put(values, rows), self.put(jnp.pad(scale, ((0, 0), (0, 4))), rows),
       factor),
    )  # fmt: skip
    out = P("a", "b")
    for w, scale, factor in calls:
      factor = None if factor is None else factor.reshape(())
      options = {} if scale is None else {"block_size": 16}
      dot = functools.partial(jp.block_scaled_dot, out_sharding=out, **options)
      result = jax.jit(dot)(x, w, None, scale, factor)
      np.testing.assert_array_equal(result, X @ W.T)

  def test_axis_that_cuts_a_byte_is_dropped(self):
    x, w = X[:, :20], np.clip(W[:, :20], -8, 7)
    scale = np.ones((N, 1), jp.INT4_32.scale_dtype)
    dot = lambda x, values: jp.block_scaled_dot(
      x, jp.ScaledArray(values, scale, None, jp.INT4_32)
    )
    values = self.put(w.astype(jnp.int4), P("a", "b"))  # five of 20 each
    result = jax.jit(dot)(self.put(x, P()), values)
    np.testing.assert_array_equal(result, x @ w.T)

  @parameterized.parameters(
    (P(), P("b"), None, []),
    (P("a"), P("b"), P("a", "b"), []),
    (P("a", "b"), P(None, "b"), P("a"), ["all-reduce"]),
  )
  @pytest.mark.sample(1)
  def test_words_of_fp4_stay_where_they_are(self, x_spec, w_spec, out, moved):
    w = interleaved(nvfp4(W))
    dot = lambda x, w: jp.block_scaled_dot(
      x, w, out_sharding=out, implementation="xla"
    )
    x, w = self.put(jp.quantize(X, jp.MXFP8), x_spec), self.put(w, w_spec)
    compiled = jax.jit(dot).lower(x, w).compile()
    self.assertEqual([kind for kind, _ in reading.collectives(compiled)], moved)
    np.testing.assert_array_equal(compiled(x, w), X @ W.T)

  def test_bytes_are_computed_on_nowhere_but_in_the_dot(self):
    # Each computation of a device's own costs time to compile.
    lhs = self.put(nvfp4(X, packed=True), P("a"))
    rhs = self.put(nvfp4(W, packed=True), P("b"))
    text = jax.jit(jp.block_scaled_dot).lower(lhs, rhs).as_text()
    self.assertEqual(text.count("sdy.manual_computation"), 1, text)

  def test_blocks_that_an_axis_would_cut_are_gathered(self):
    # Three blocks on two devices: their scales have no such sharding.
    x, w = exact_numbers.integers(0, M, 96), exact_numbers.integers(1, N, 96)
    x_q, w_q = jp.quantize(x, jp.MXFP8), jp.quantize(w, jp.MXFP8)
    function = jax.jit(
      lambda x, w, x_scale, w_scale: jp.block_scaled_dot(
        x, w, x_scale, w_scale, out_sharding=P("b", "a")
      )
    )
    result = function(
      self.put(x_q.values, P("b", "a")),
      self.put(w_q.values, P(None, "a")),
      self.put(x_q.scale, P("a")),
      self.put(w_q.scale, P()),
    )
    np.testing.assert_array_equal(result, x @ w.T)

  def test_batches_and_vmap(self):
    x, w = (
      exact_numbers.integers(0, 4, M, K),
      exact_numbers.integers(1, 4, N, K),
    )
    xs = self.put(jp.quantize(x, jp.MXFP8), P("b", "a"))
    ws = self.put(jp.quantize(w, jp.MXFP8), P("b"))
    expected = np.einsum("bmk,bnk->bmn", x, w)
    result = jax.jit(jp.block_scaled_dot)(xs, ws)
    self.assertEqual(jax.typeof(result).sharding.spec, P("b", "a", None))
    np.testing.assert_array_equal(result, expected)
    dot = lambda x, w: jp.block_scaled_dot(x, w, out_sharding=P(None, "a"))
    result = jax.jit(jax.vmap(dot))(xs, ws)
    self.assertEqual(jax.typeof(result).sharding.spec, P("b", None, "a"))
    np.testing.assert_array_equal(result, expected)
    one = self.put(jp.quantize(w[0], jp.MXFP8), P())
    result = jax.jit(jax.vmap(dot, (0, None)))(xs, one)
    self.assertEqual(jax.typeof(result).sharding.spec, P("b", None, "a"))
    np.testing.assert_array_equal(result, np.einsum("bmk,nk->bmn", x, w[0]))

  def test_exported_module_gathers_bytes_and_runs(self):
    x = self.put(jp.quantize(X, jp.MXFP8), P("a"))
    w = self.put(jp.quantize(W, jp.MXFP8), P("a"))
    dot = functools.partial(jp.block_scaled_dot, out_sharding=P("a"))
    exported = jax.export.export(jax.jit(dot))(x, w)
    restored = jax.export.deserialize(exported.serialize())
    compiled = jax.jit(restored.call).lower(x, w).compile()
    self.assertEqual(reading.kinds_moved(compiled), {("all-gather", "u8")})
    np.testing.assert_array_equal(compiled(x, w), X @ W.T)


class GradientTest(explicit.InsideTestCase):
  def gradient(self, out, **options):
    """(x, w, g) -> the gradient of x."""

    def function(x, w, g):
      dot = lambda x: jp.block_scaled_dot(x, w, out_sharding=out, **options)
      y, pull = jax.vjp(dot, x)
      return pull(jax.sharding.reshard(g, jax.typeof(y).sharding))[0]

    return function

  @parameterized.product(
    layout=(
      # Weights split over the axis of the rows: they come together as bytes.
      (P("b"), P(None, "b"), P("b"), {("all-gather", "u8")}),
      (P("b"), P("b"), P("b"), {("all-gather", "u8")}),
      # Columns of the result are contracted: a sum.
      (P("a"), P("b"), P("a", "b"), {("all-reduce", "f32")}),
      (P(None, "b"), P("b"), P(None, "b"), {("reduce-scatter", "f32")}),
      # k is not: each device has its own.
      (P("a", "b"), P(None, "b"), P("a"), set()),
    ),
    format=("mxfp8", "nvfp4"),
  )
  @pytest.mark.sample(1)
  def test_values_are_one_devices_and_bytes_are_gathered(self, layout, format):
    x_spec, w_spec, out, moved = layout
    w_q = nvfp4(W) if format == "nvfp4" else jp.quantize(W, jp.MXFP8)
    w = self.put(w_q, w_spec)
    x = self.put(X, x_spec)
    lowered = jax.jit(self.gradient(out)).lower(x, w, G)
    self.assertNotIn("jaxplugin_partitioned", lowered.as_text())
    compiled = lowered.compile()
    self.assertEqual(reading.kinds_moved(compiled), moved)
    result = compiled(x, w, G)
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, G @ W)

  def test_quantized_lhs(self):
    x_q = self.put(jp.quantize(X, jp.MXFP8), P("b"))
    w = self.put(W, P("b"))

    def function(w):
      return jp.block_scaled_dot(x_q, w, out_sharding=P("b"))

    @jax.jit
    def gradient(w, g):
      return jax.vjp(function, w)[1](g)[0]

    result = gradient(w, self.put(G, P("b")))
    self.assertEqual(jax.typeof(result), jax.typeof(w))
    np.testing.assert_array_equal(result, G.T @ X)

  @parameterized.parameters("swizzled", "words")
  def test_weights_as_they_may_be_stored(self, how):
    w = nvfp4(W, scale_layout="swizzled_128x4" if how[0] == "s" else "linear")
    if how == "words":
      w = self.put(interleaved(w), P(None, "b"))
    x = self.put(X, P("a", "b"))
    result = jax.jit(self.gradient(P("a"), implementation="xla"))(x, w, G)
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, G @ W)

  def test_blocks_of_the_weight_stay_whole(self):
    # Four blocks of k over eight devices: x has halves of them.
    w = W[:, :128]
    x = self.put(X[:, :128], P(None, ("a", "b")))
    w_q = self.put(jp.quantize(w, jp.MXFP8), P())
    result = jax.jit(self.gradient(P()))(x, w_q, G)
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, G @ w)

  def test_global_scales_of_rows_may_lie_otherwise(self):
    x, w = self.put(X, P("a")), self.put(nvfp4(W), P("b"))
    scale = self.put(
      2.0 ** np.arange(M, dtype=np.float32)[:, None] / 256, P("b")
    )

    def function(x, scale):
      return jp.block_scaled_dot(
        x, w, global_scale=scale, out_sharding=P("a", "b")
      )

    def run(x, scale):
      y, pull = jax.vjp(function, x, scale)
      return pull(jax.sharding.reshard(G, jax.typeof(y).sharding))

    by_x, by_scale = jax.jit(run)(x, scale)
    self.assertEqual(jax.typeof(by_x), jax.typeof(x))
    self.assertEqual(jax.typeof(by_scale), jax.typeof(scale))
    np.testing.assert_array_equal(by_x, (np.asarray(scale) * G) @ W)
    expected = ((X @ W.T) * G).sum(1, keepdims=True)
    np.testing.assert_array_equal(by_scale, expected)

  def test_vmap_of_a_gradient(self):
    x = self.put(np.stack([X, 2 * X]), P("a", "b"))
    w = self.put(nvfp4(W), P(None, "b"))
    g = np.stack([G, 3 * G])
    function = jax.vmap(self.gradient(P("b")), (0, None, 0))
    result = jax.jit(function)(x, w, self.put(g, P("a")))
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, g @ W)
