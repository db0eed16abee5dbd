# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` exported, for several platforms and symbolic sizes."""

from __future__ import annotations

from typing import Final
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.testing import transformations

FORMATS: Final = (jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4)

array = transformations.array


class ExportTest(transformations.PrimitiveTestCase):
  @parameterized.product(lhs=FORMATS, rhs=FORMATS)
  @pytest.mark.sample(1)
  def test_export_round_trip_gives_the_same_bits(self, lhs, rhs):
    rng = np.random.default_rng(0)
    x, w = array(rng, lhs, (3, 64)), array(rng, rhs, (5, 64))
    function = jax.jit(
      lambda x, w: jp.block_scaled_dot(
        x, w, global_scale=0.5, bias=jnp.arange(5.0)
      )
    )
    exported = jax.export.export(function)(x, w)
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  @parameterized.parameters(
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP8, jp.NVFP4),
    (jp.NVFP4, jp.NVFP4),
    (None, jp.MXFP4),
    (jp.MXFP4, None),
  )
  @pytest.mark.sample(1)
  def test_symbolic_sizes_serve_every_size(self, lhs, rhs):
    scope = jax.export.SymbolicScope()

    def spec(format, rows):
      shape = lambda text: jax.export.symbolic_shape(text, scope=scope)
      if format is None:
        return jax.ShapeDtypeStruct(shape(f"b, {rows}, 32*k"), jnp.bfloat16)
      columns = f"{32 // format.block_size}*k"
      return jp.ScaledArray(
        jax.ShapeDtypeStruct(shape(f"b, {rows}, 32*k"), format.values_dtype),
        jax.ShapeDtypeStruct(
          shape(f"b, {rows}, {columns}"), format.scale_dtype
        ),
        None,
        format,
      )

    bias = jax.ShapeDtypeStruct(
      jax.export.symbolic_shape("n", scope=scope), jnp.float32
    )
    function = jax.jit(
      lambda x, w, bias: jp.block_scaled_dot(
        x, w, global_scale=0.5, bias=bias, activation="relu"
      )
    )
    exported = jax.export.export(function)(spec(lhs, "m"), spec(rhs, "n"), bias)
    self.assertEqual(str(exported.out_avals[0].shape), "(b, m, n)")
    again = jax.export.deserialize(exported.serialize())
    for b, m, n, k in ((1, 1, 1, 1), (2, 3, 5, 4), (3, 1, 7, 2)):
      rng = np.random.default_rng(b)

      def make(format, rows, b=b, k=k, rng=rng):
        if format is None:
          values = rng.integers(-8, 9, (b, rows, 32 * k))
          return jnp.asarray(values, jnp.bfloat16)
        return array(rng, format, (b, rows, 32 * k))

      args = (make(lhs, m), make(rhs, n), jnp.arange(n, dtype=jnp.float32))
      self.assert_same(again.call(*args), function(*args))

  def test_export_for_several_platforms_runs_here(self):
    rng = np.random.default_rng(0)
    x, w = array(rng, jp.NVFP4, (3, 64)), array(rng, jp.NVFP4, (5, 64))
    function = jax.jit(jp.block_scaled_dot)
    exported = jax.export.export(
      function, platforms=["cpu", "cuda", "rocm", "tpu"]
    )(x, w)
    self.assertEqual(exported.platforms, ("cpu", "cuda", "rocm", "tpu"))
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  def test_each_exported_platform_is_decided_for_itself(self):
    rng = np.random.default_rng(0)
    x, w = array(rng, jp.MXFP8, (3, 64)), array(rng, jp.MXFP8, (5, 64))
    platforms = ("cpu", "cuda", "rocm", "tpu")
    with mock.patch.object(
      backends, "choose", side_effect=backends.choose
    ) as choose:
      jax.export.export(jax.jit(jp.block_scaled_dot), platforms=platforms)(x, w)
    decided = [args[0][1].platform for args in choose.call_args_list]
    self.assertCountEqual(decided, platforms)

  def test_export_for_several_platforms_takes_symbolic_sizes(self):
    (m,) = jax.export.symbolic_shape("m")
    rng = np.random.default_rng(0)
    w = array(rng, jp.MXFP8, (5, 64))
    x = array(rng, jp.MXFP8, (7, 64))
    spec = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((m, *a.shape[1:]), a.dtype), x
    )
    function = jax.jit(jp.block_scaled_dot)
    exported = jax.export.export(function, platforms=["cpu", "cuda"])(spec, w)
    again = jax.export.deserialize(exported.serialize())
    self.assert_same(again.call(x, w), function(x, w))

  def test_vmap_of_an_exported_call_equals_a_loop(self):
    rng = np.random.default_rng(0)
    x = array(rng, jp.MXFP8, (2, 3, 32))
    w = array(rng, jp.MXFP8, (5, 32))
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype), x
    )
    function = jax.jit(jax.vmap(jp.block_scaled_dot, in_axes=(0, None)))
    exported = jax.export.export(function)(spec, w)
    rows = [jax.tree.map(lambda a, i=i: a[i], x) for i in range(2)]
    expected = np.stack([jp.block_scaled_dot(row, w) for row in rows])
    self.assert_same(exported.call(x, w), expected)


if __name__ == "__main__":
  absltest.main()
