# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that GSPMD would partition are refused. Nothing here is compiled."""

import jax
import jax.numpy as jnp
from absl.testing import absltest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes import explicit

NUM_DEVICES = 4
CONTRACTION = jax.lax.RaggedDotDimensionNumbers(
  (((0,), (0,)), ((), ())), (0,), ()
)


def quantized(values):
  """An MXFP8 array with scales of one."""
  scale = jnp.ones(
    (*values.shape[:-1], values.shape[-1] // 32), jnp.float8_e8m0fnu
  )
  values = values.astype(jnp.float8_e4m3fn)
  return jp.ScaledArray(values, scale, None, jp.MXFP8)


def sizes(x):
  return jnp.full((2,), x.shape[0] // 2, jnp.int32)


# By the function that the error names: functions of f32[rows, 64].
CALLS = {
  "quantize": lambda x: jp.quantize(x, jp.MXFP8),
  "dequantize": lambda x: jp.dequantize(quantized(x)),
  "block_scaled_dot": lambda x: jp.block_scaled_dot(
    x, quantized(jnp.ones((16, 64)))
  ),
  "ragged_dot": lambda x: jp.ragged_dot(
    x, quantized(jnp.ones((2, 16, 64))), sizes(x)
  ),
  "ragged_dot_general": lambda x: jp.ragged_dot_general(
    x, x, sizes(x), CONTRACTION
  ),
}


class GspmdTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self, NUM_DEVICES)
    shardy = jax.config.jax_use_shardy_partitioner
    self.addCleanup(jax.config.update, "jax_use_shardy_partitioner", shardy)
    jax.config.update("jax_use_shardy_partitioner", False)

  def mesh(self, kind=AxisType.Auto, sizes=(2, 2)):
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(
      sizes, ("a", "b"), axis_types=(kind,) * 2, devices=devices
    )

  def rows(self, mesh=None):
    """The type of f32[32, 64], with rows over "a" if there is a mesh."""
    sharding = None if mesh is None else NamedSharding(mesh, P("a"))
    return jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=sharding)

  def mapped(self, function, axes):
    """The same function inside a `shard_map` over some axes."""
    return jax.shard_map(
      lambda x: jax.tree.map(lambda y: y[None], function(x)),
      mesh=self.mesh(),
      in_specs=P("a"),
      out_specs=P("a"),
      axis_names=axes,
      check_vma=False,
    )

  def test_calls_on_several_devices_are_refused(self):
    for name, function in CALLS.items():
      message = (
        f"^{name}: jax_use_shardy_partitioner must be True if arrays are"
        " sharded over several devices, got False. Call"
        r" jax.config.update\('jax_use_shardy_partitioner', True\)."
      )
      for claim, called, mesh in (
        ("automatic", function, self.mesh()),
        ("partly_manual", self.mapped(function, {"a"}), self.mesh()),
        ("explicit", function, self.mesh(AxisType.Explicit)),
      ):
        with (
          self.subTest(f"{name}_{claim}"),
          jax.set_mesh(mesh),
          self.assertRaisesRegex(NotImplementedError, message),
        ):
          jax.jit(called).lower(self.rows(mesh))

  def test_calls_of_one_device_and_exported_ones_are_lowered(self):
    for name, function in CALLS.items():
      for claim, lower in (
        ("no_mesh", lambda f: jax.jit(f).lower(self.rows())),
        (
          "mesh_of_one_device",
          lambda f: jax.jit(f).lower(self.rows(self.mesh(sizes=(1, 1)))),
        ),
        (
          "shard_map_over_all_axes",
          lambda f: jax.jit(self.mapped(f, {"a", "b"})).lower(
            self.rows(self.mesh())
          ),
        ),
        (
          "jax_export",
          lambda f: jax.export.export(jax.jit(f))(self.rows(self.mesh())),
        ),
      ):
        with self.subTest(f"{name}_{claim}"):
          lower(lambda x, f=function: jax.tree.leaves(f(x)))
