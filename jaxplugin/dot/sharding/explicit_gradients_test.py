# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of dots of arrays whose shardings are in their types."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.arrays import interleaving
from jaxplugin.testing.meshes import explicit

M, N, K = 32, 128, 256
MOVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


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


X, W, G = _integers(0, M, K), _fours(1, N, K), _integers(2, M, N)


def _moved(compiled):
  """(what, dtype) of what devices send each other."""
  found = re.findall(
    rf" = \(?(\w+)\[[\d,]*\]\S* ({MOVES})(?:-start)?\(", compiled.as_text()
  )
  return {(what, dtype) for dtype, what in found}


class ExplicitGradientsTest(explicit.InsideTestCase):
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
    w_q = _nvfp4(W) if format == "nvfp4" else jp.quantize(W, jp.MXFP8)
    w = self.put(w_q, w_spec)
    x = self.put(X, x_spec)
    lowered = jax.jit(self.gradient(out)).lower(x, w, G)
    self.assertNotIn("jaxplugin_partitioned", lowered.as_text())
    compiled = lowered.compile()
    self.assertEqual(_moved(compiled), moved)
    result = compiled(x, w, G)
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, G @ W)

  def test_quantized_lhs(self):
    x_q = self.put(jp.quantize(X, jp.MXFP8), P("b"))
    w = self.put(W, P("b"))

    def function(w):
      return jp.block_scaled_dot(x_q, w, out_sharding=P("b"))

    _, pull = jax.vjp(function, w)
    (result,) = pull(self.put(G, P("b")))
    self.assertEqual(jax.typeof(result), jax.typeof(w))
    np.testing.assert_array_equal(result, G.T @ X)

  @parameterized.parameters("swizzled", "words")
  def test_weights_as_they_may_be_stored(self, how):
    w = _nvfp4(W, scale_layout="swizzled_128x4" if how[0] == "s" else "linear")
    if how == "words":
      words = interleaving.interleave(w.pack().values)
      w = jp.ScaledArray(words, w.scale, w.global_scale, w.format)
      w = self.put(w, P(None, "b"))
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
    x, w = self.put(X, P("a")), self.put(_nvfp4(W), P("b"))
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
    w = self.put(_nvfp4(W), P(None, "b"))
    g = np.stack([G, 3 * G])
    function = jax.vmap(self.gradient(P("b")), (0, None, 0))
    result = jax.jit(function)(x, w, self.put(g, P("a")))
    self.assertEqual(jax.typeof(result), jax.typeof(x))
    np.testing.assert_array_equal(result, g @ W)

  @pytest.mark.full
  def test_second_derivative(self):
    w_q = _nvfp4(W)

    def twice(x, v, w, out):
      def loss(x):
        y = jp.block_scaled_dot(x, w, out_sharding=out)
        return jnp.sum(y * y * y) / 2**20

      gradient = jax.grad(loss)
      _, forward = jax.jvp(gradient, (x,), (v,))
      return forward, jax.grad(lambda x: jnp.sum(gradient(x) * v))(x)

    expected, _ = twice(X, X, w_q, None)
    x = self.put(X, P("a", "b"))
    args = x, x, self.put(w_q, P(None, "b"))
    for actual in jax.jit(lambda *args: twice(*args, P("a")))(*args):
      self.assertEqual(jax.typeof(actual), jax.typeof(x))
      scale = float(np.abs(expected).max())
      np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * scale)

  def test_exported_gradient_gathers_bytes_and_runs(self):
    x = self.put(X, P("b"))
    w = self.put(jp.quantize(W, jp.MXFP8), P(None, "b"))
    g = self.put(G, P("b"))
    function = jax.jit(self.gradient(P("b")))
    restored = jax.export.deserialize(
      jax.export.export(function)(x, w, g).serialize()
    )
    compiled = jax.jit(restored.call).lower(x, w, g).compile()
    self.assertEqual(_moved(compiled), {("all-gather", "u8")})
    np.testing.assert_array_equal(compiled(x, w, g), G @ W)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
