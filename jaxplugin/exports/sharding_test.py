# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exported sharded calls have the same collectives as under jit."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.exported import reading

NUM_DEVICES = 8
M, N, K = 16, 64, 256


class ExportCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, here are fewer")
    devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 4)
    self.mesh = jax.sharding.Mesh(devices, ("a", "b"))
    self.rng = np.random.default_rng(0)

  def floats(self, *shape):
    return jnp.asarray(self.rng.normal(size=shape), jnp.float32)

  def put(self, tree, *spec):
    def put(leaf):
      sharding = NamedSharding(self.mesh, P(*spec) if leaf.size > 1 else P())
      return jax.device_put(leaf, sharding)

    return jax.tree.map(put, tree)

  def quantized(self, shape, *spec, format=jp.MXFP8):
    return self.put(jp.quantize(self.floats(*shape), format), *spec)

  def assert_as_under_jit(self, function, *args):
    """Checks the collectives against jit's, and returns them."""
    exported = jp.export(function)(*args)
    loaded = jax.export.deserialize(exported.serialize())
    ours = jax.jit(loaded.call).lower(*args).compile()
    jitted = jax.jit(function).lower(*args).compile()
    moved = reading.collectives(ours)
    self.assertEqual(moved, reading.collectives(jitted))
    result, expected = ours(*args), jitted(*args)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    return moved


class ShardedExportTest(ExportCase):
  def test_fsdp_gathers_bytes(self):
    x = self.quantized((M, K), ("a", "b"), format=jp.NVFP4)
    w = self.quantized((N, K), ("a", "b"), format=jp.NVFP4)
    moved = self.assert_as_under_jit(jp.block_scaled_dot, x, w)
    self.assertIn(("all-gather", "u8[16,128]"), moved)
    self.assertEqual({type_[:2] for _, type_ in moved}, {"u8"})

  def test_each_of_two_calls_of_one_shape_is_split_by_itself(self):
    shared = jax.jit(jp.block_scaled_dot)

    def function(x, z, w_n, w_k):
      y = jp.block_scaled_dot(x, w_n), jp.block_scaled_dot(x, w_k)
      return *y, shared(z, w_n), shared(z, w_k)

    moved = self.assert_as_under_jit(
      function,
      self.quantized((M, K)),
      self.quantized((M, K)),
      self.quantized((N, K), "b"),
      self.quantized((N, K), None, "b"),
    )
    self.assertNotEmpty(moved)
    self.assertNotIn("all-gather", {kind for kind, _ in moved})

  def test_inside_of_a_shard_map_over_some_axes(self):
    devices = self.mesh.devices.reshape(2, 2, 2)
    self.mesh = jax.sharding.Mesh(devices, ("a", "s", "b"))

    def function(x, w):
      return jax.shard_map(
        jp.block_scaled_dot,
        in_specs=P("s"),
        out_specs=P("s"),
        axis_names={"s"},
      )(x, w)

    with jax.set_mesh(self.mesh):
      moved = self.assert_as_under_jit(
        function,
        self.quantized((2, M, K), "s", "a", "b"),
        self.quantized((2, N, K), "s", None, "b"),
      )
    self.assertEqual([kind for kind, _ in moved], ["all-reduce"])

  def test_part_of_a_mesh_axis(self):
    # 16 rows over 8 devices become (2, 8) rows over a 2 x 4 mesh.
    def function(values, scale, w):
      values, scale = (x.reshape(2, M // 2, -1) for x in (values, scale))
      x = jp.ScaledArray(values, scale, None, jp.MXFP8)
      return jp.block_scaled_dot(x, w).reshape(M, N)

    self.mesh = jax.sharding.Mesh(self.mesh.devices.reshape(-1), ("a",))
    x = self.quantized((M, K), "a")
    moved = self.assert_as_under_jit(
      function, x.values, x.scale, self.quantized((N, K))
    )
    self.assertEqual(moved, [])

  @pytest.mark.full
  def test_gpus_are_exported_for_by_as_many_cpus(self):
    def function(x, w):
      y = jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w)
      return y + jp.dequantize(jp.quantize(y, jp.MXFP4))

    args = self.put(self.floats(M, K), "a"), self.quantized((N, K), "b")
    target = jp.named_target("b200", cudnn="9.13")
    exported = jp.export(function, ["cpu", "cuda"], target=target)(*args)
    calls = reading.calls_in(exported)
    self.assertEqual(calls.pop("__op$block_scaled_dot"), 1)
    if jp.detect_target("cpu").cpu_kernels is not None:
      self.assertContainsSubset({"jaxplugin_quantize": 2}, calls)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
      jax.jit(loaded.call)(*args), jax.jit(function)(*args)
    )
    self.assertIn("sdy.manual_computation", exported.mlir_module())

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_mesh_without_devices_is_refused(self, axis_type):
    mesh = jax.sharding.AbstractMesh((8,), ("d",), (axis_type,))
    spec = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P("d"))
      ),
      self.quantized((M, K)),
    )
    with self.assertRaisesRegex(
      NotImplementedError, "must have devices, got Abs"
    ):
      jp.export(jp.block_scaled_dot)(spec, self.quantized((N, K)))

  @parameterized.parameters(None, "auto", "explicit", "shard_map")
  def test_symbolic_sizes_on_several_devices_are_refused(self, kind):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.sharding.Mesh(self.mesh.devices, ("a", "b"), (axis_type,) * 2)
    (m,) = jax.export.symbolic_shape("8*m")
    sharding = None if kind is None else NamedSharding(mesh, P(("a", "b")))
    x = jax.ShapeDtypeStruct((m, K), jnp.float32, sharding=sharding)
    w = self.quantized((N, K), *(("a",) if kind is None else ()))
    function = jp.linear
    if kind == "shard_map":
      spec = P(("a", "b"))
      function = jax.shard_map(
        jp.linear, mesh=mesh, in_specs=(spec, P()), out_specs=spec
      )
    elif kind == "explicit":
      w = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), w)
    message = r"must be static on several devices, got symbolic .*m, 256"
    with self.assertRaisesRegex(NotImplementedError, message):
      jp.export(function)(x, w)
    (found,) = jp.explain(function, x, w, for_export=True)
    self.assertRegex(found.error, message)

  def test_symbolic_quantize_on_several_devices_is_refused(self):
    (m,) = jax.export.symbolic_shape("8*m")
    sharding = NamedSharding(self.mesh, P(("a", "b")))
    x = jax.ShapeDtypeStruct((m, K), jnp.float32, sharding=sharding)
    function = lambda x: jp.quantize(x, "mxfp8")
    with self.assertRaisesRegex(NotImplementedError, "quantize: sizes must be"):
      jp.export(function)(x)
    (found,) = jp.explain(function, x, for_export=True).quantizations
    self.assertEqual(found.implementation, "none")
    self.assertIn("sizes must be static on several devices", found.reason)

  def test_symbolic_sizes_in_a_mesh_of_one_device(self):
    mesh = jax.sharding.Mesh(self.mesh.devices[:1, :1], ("a", "b"))
    (m,) = jax.export.symbolic_shape("m")
    w = jp.quantize(self.floats(N, K), "mxfp8")
    function = jax.shard_map(
      lambda x: jp.linear(x, w), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    x = jax.ShapeDtypeStruct((m, K), jnp.float32)
    (found,) = jp.explain(function, x, for_export=True)
    self.assertEqual(found.error, "")
    exported = jp.export(function)(x)
    loaded = jax.export.deserialize(exported.serialize())
    x = self.floats(3, K)
    np.testing.assert_array_equal(loaded.call(x), jax.jit(function)(x))

  def test_devices_call_a_module_of_symbolic_size(self):
    (m,) = jax.export.symbolic_shape("m")
    w = self.quantized((N, K))
    function = lambda x: jp.linear(x, w)
    exported = jp.export(function)(jax.ShapeDtypeStruct((m, K), jnp.float32))
    loaded = jax.export.deserialize(exported.serialize())
    results = []
    for of_device in (loaded.call, function):
      spec = P(("a", "b"))
      sharded = jax.shard_map(
        of_device, mesh=self.mesh, in_specs=spec, out_specs=spec
      )
      for rows in (8, 24):
        x = np.random.default_rng(rows).normal(size=(rows, K))
        results.append(jax.jit(sharded)(jnp.asarray(x, jnp.float32)))
    half = len(results) // 2
    jax.tree.map(np.testing.assert_array_equal, results[:half], results[half:])


@pytest.mark.full
class LongShardedExportTest(ExportCase):
  def test_loop_over_layers_that_quantizes_and_one_that_nothing_uses(self):
    def layer(x, w):
      return jp.block_scaled_dot(jp.quantize(x, jp.MXFP8), w), None

    def function(x, w):
      unused = lambda _, y: y + jp.block_scaled_dot(x_q, w_q)
      y, _ = jax.lax.scan(layer, x, w)
      return jax.lax.fori_loop(0, 0, unused, y)

    x_q, w_q = self.quantized((M, K), "a"), self.quantized((K, K), "a")
    x = self.put(self.floats(M, K), ("a", "b"))
    w = self.quantized((2, K, K), None, ("a", "b"))
    moved = self.assert_as_under_jit(function, x, w)
    self.assertIn(("all-gather", "u8[256,256]"), moved)

  def test_gradients_of_a_product_that_quantizes(self):
    dot = jp.dot_general(jp.MXFP8, jp.MXFP8)

    def loss(w, x):
      return jnp.tanh(dot(x, w, (((1,), (0,)), ((), ())))).sum()

    w = self.put(self.floats(K, N), ("a", "b"))
    self.assert_as_under_jit(
      jax.grad(loss), w, self.put(self.floats(M, K), ("a", "b"))
    )

  def test_experts_stay_where_they_are(self):
    sizes = self.put(jnp.full((8,), M // 8, jnp.int32))
    experts = self.quantized((8, 64, K), ("a", "b"))
    moved = self.assert_as_under_jit(
      jp.ragged_dot, self.quantized((M, K)), experts, sizes
    )
    self.assertNotIn("all-gather", {kind for kind, _ in moved})
