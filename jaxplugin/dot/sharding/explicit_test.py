# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots of arrays whose shardings are in their types."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.arrays import interleaving
from jaxplugin.testing.meshes import explicit

M, N, K = 32, 64, 256


def _integers(seed, *shape):
  # Small ones: quantization, products and sums are all exact.
  random = np.random.default_rng(seed)
  return random.integers(-4, 5, shape).astype(np.float32)


def _fours(seed, *shape):
  """Numbers of FP4 with a largest one in each block: NVFP4 holds them too."""
  random = np.random.default_rng(seed)
  x = random.choice([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6], shape)
  x[..., ::16] = 6
  return x.astype(np.float32)


def _nvfp4(x, **options):
  return jp.quantize(x, jp.NVFP4, global_scale=1.0, **options)


def _collectives(text):
  return sorted(set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter)", text)))


X, W = _integers(0, M, K), _fours(1, N, K)
NUMBERS = (((1,), (1,)), ((), ()))


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
    w = self.put(_nvfp4(W), w_spec)
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
    (P("a"), P("b"), "a"),
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
    w = self.put(_nvfp4(W), P(None, "b"))
    bias, residual = _integers(2, N), _integers(3, M, N)

    def function(x, w, bias, residual):
      return jp.block_scaled_dot(
        x,
        w,
        bias=bias,
        activation="relu",
        residual=residual,
        out_sharding=P("a", "b"),
      )

    result = jax.jit(function)(
      x, w, self.put(bias, P("a")), self.put(residual, P(("a", "b")))
    )
    np.testing.assert_array_equal(
      result, np.maximum(X @ W.T + bias, 0) + residual
    )

  def test_operands_as_they_may_be_stored(self):
    x = self.put(X, P("a", "b"))  # plain
    fours = _fours(1, 128, K)
    w = _nvfp4(fours)
    swizzled = _nvfp4(fours, scale_layout="swizzled_128x4")
    values, scale, factor = w.unpack().values, w.scale, w.global_scale
    rows = P("b")
    calls = (
      (swizzled, None, None),
      (self.put(values, P(None, "b")), self.put(scale, rows), factor),
      (self.put(values, rows), self.put(jnp.pad(scale, ((0, 0), (0, 4))), rows),
       factor),
    )  # fmt: skip
    function = jax.jit(
      lambda x, w, scale, factor: jp.block_scaled_dot(
        x,
        w,
        None,
        scale,
        None if factor is None else factor.reshape(()),
        block_size=None if scale is None else 16,
        out_sharding=P("a", "b"),
      )
    )
    for w, scale, factor in calls:
      result = function(x, w, scale, factor)
      np.testing.assert_array_equal(result, X @ fours.T)

  @parameterized.parameters(
    (P(), P("b"), None, []),
    (P("a"), P("b"), P("a", "b"), []),
    (P("a", "b"), P(None, "b"), P("a"), ["all-reduce"]),
  )
  @pytest.mark.sample(1)
  def test_words_of_fp4_stay_where_they_are(self, x_spec, w_spec, out, moved):
    w = _nvfp4(W)
    words = interleaving.interleave(w.pack().values)
    w = jp.ScaledArray(words, w.scale, w.global_scale, w.format)
    dot = lambda x, w: jp.block_scaled_dot(
      x, w, out_sharding=out, implementation="xla"
    )
    x, w = self.put(jp.quantize(X, jp.MXFP8), x_spec), self.put(w, w_spec)
    compiled = jax.jit(dot).lower(x, w).compile()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())
    self.assertEqual(found, moved)
    np.testing.assert_array_equal(compiled(x, w), X @ W.T)

  def test_bytes_are_computed_on_nowhere_but_in_the_dot(self):
    # Each computation of a device's own costs time to compile.
    lhs = self.put(_nvfp4(X, packed=True), P("a"))
    rhs = self.put(_nvfp4(W, packed=True), P("b"))
    text = jax.jit(jp.block_scaled_dot).lower(lhs, rhs).as_text()
    self.assertEqual(text.count("sdy.manual_computation"), 1, text)

  def test_blocks_that_an_axis_would_cut_are_gathered(self):
    # Three blocks on two devices: their scales have no such sharding.
    x, w = _integers(0, M, 96), _integers(1, N, 96)
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
    x, w = _integers(0, 4, M, K), _integers(1, 4, N, K)
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
    function = jax.jit(
      lambda x, w: jp.block_scaled_dot(x, w, out_sharding=P("a"))
    )
    restored = jax.export.deserialize(
      jax.export.export(function)(x, w).serialize()
    )
    compiled = jax.jit(restored.call).lower(x, w).compile()
    gathers = re.findall(r"(\w+)\[[\d,]*\]\S* all-gather", compiled.as_text())
    self.assertNotEmpty(gathers)
    self.assertEqual(set(gathers), {"u8"})
    np.testing.assert_array_equal(compiled(x, w), X @ W.T)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
