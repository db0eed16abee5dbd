# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays with zero points or minima on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes import explicit

M, N, K = 8, 16, 1024
SIZES = jnp.array([3, 0, 4, 1])
KINDS = (AxisType.Auto, AxisType.Explicit)
FORMATS = ("uint4_128", "uint4_32_min")


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class OffsetsTest(parameterized.TestCase):
  def put(self, mesh, x, spec):
    return jp.shard(x, NamedSharding(mesh, spec))

  @parameterized.product(
    kind=KINDS,
    format=FORMATS,
    specs=(
      (P("a"), P("b"), P("a", "b")),
      (P(None, "b"), P(None, "b"), P()),
      (P("a"), P("b", "a"), P("a", "b")),
    ),
  )
  def test_dots_and_gradients(self, kind, format, specs):
    mesh = explicit.mesh(self, kind=kind)
    x, w = normal(0, M, K), jp.quantize(normal(1, N, K), format)
    x_spec, w_spec, spec = specs
    out = None if kind == AxisType.Auto else spec

    def loss(x, w):
      y = jp.block_scaled_dot(x, w, activation="relu", out_sharding=out)
      return jnp.sum(y**2), y

    with jax.set_mesh(mesh):
      function = jax.jit(jax.grad(loss, has_aux=True))
      args = self.put(mesh, x, x_spec), self.put(mesh, w, w_spec)
      x_bar, y = function(*args)
    e = np.asarray(w.dequantize())
    exact = np.maximum(x @ e.T, 0)
    np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(x_bar, 2 * exact @ e, rtol=1e-3, atol=1e-2)

  @parameterized.product(kind=KINDS, format=FORMATS)
  def test_quantize_has_the_bits_of_one_device(self, kind, format):
    mesh = explicit.mesh(self, kind=kind)
    w = normal(0, N, K)
    expected = jp.quantize(w, format)
    with jax.set_mesh(mesh):
      placed = self.put(mesh, jnp.asarray(w), P("a", "b"))
      found = jax.jit(lambda w: jp.quantize(w, format))(placed)
      back = jax.jit(jp.dequantize)(found)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(back, expected.dequantize())

  @parameterized.product(
    kind=KINDS, specs=((P("a"), P("b")), (P(None, "b"), P(None, None, "b")))
  )
  def test_groups(self, kind, specs):
    mesh = explicit.mesh(self, kind=kind)
    x, w = normal(0, M, K), jp.quantize(normal(1, 4, N, K), "uint4_128")
    with jax.set_mesh(mesh):
      args = self.put(mesh, x, specs[0]), self.put(mesh, w, specs[1])
      found = jax.jit(lambda x, w: jp.ragged_dot(x, w, SIZES))(*args)
    e = np.asarray(w.dequantize())
    exact = np.concatenate([x[:3] @ e[0].T, x[3:7] @ e[2].T, x[7:] @ e[3].T])
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3)

  @parameterized.parameters(*KINDS)
  def test_layers(self, kind):
    mesh = explicit.mesh(self, kind=kind)
    x, w = normal(0, M, K), jp.quantize(normal(1, 4, N, K), "uint4_128")
    with jax.set_mesh(mesh):
      args = self.put(mesh, x, P("a")), self.put(mesh, w, P(None, "b"))
      found = jax.jit(lambda x, w: jp.linear(x, w, layer=2))(*args)
    exact = x @ np.asarray(w[2].dequantize()).T
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3)

  def test_shard_map_over_rows_of_weights(self):
    mesh = explicit.mesh(self, kind=AxisType.Auto)
    x, w = normal(0, M, K), jp.quantize(normal(1, 4, N, K), "uint4_128")
    spec = P(None, "b")

    @jax.jit
    def run(x, w):
      local = lambda x, w: (
        jp.ragged_dot(x, w, SIZES),
        jp.block_scaled_dot(x, w[1]),
      )
      return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), spec),
        out_specs=(spec, spec),
      )(x, w)

    groups, one = run(x, self.put(mesh, w, spec))
    e = np.asarray(w.dequantize())
    exact = np.concatenate([x[:3] @ e[0].T, x[3:7] @ e[2].T, x[7:] @ e[3].T])
    np.testing.assert_allclose(groups, exact, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(one, x @ e[1].T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
