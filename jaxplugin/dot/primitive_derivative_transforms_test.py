# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `block_scaled_dot` under JAX's transformations and on meshes.

The same as of loops, of dense weights and on one device: integers under scales
that are powers of two make them exact.
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
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import transformations


def integers(rng, shape, dtype=np.float32):
  return jnp.asarray(rng.integers(-4, 5, shape), dtype)


class TransformTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.w = transformations.array(rng, jp.MXFP8, (5, 64))
    self.stack = transformations.array(rng, jp.MXFP8, (4, 5, 64))
    self.x = integers(rng, (3, 64))
    self.xs = integers(rng, (4, 3, 64))
    self.g = integers(rng, (3, 5))
    self.rng = rng

  def pull(self, x, w, g, **kwargs):
    return jax.vjp(lambda x: jp.block_scaled_dot(x, w, **kwargs), x)[1](g)[0]

  @parameterized.parameters(
    ((0, None, None),), ((None, 0, None),), ((None, None, 0),), ((0, 0, 0),)
  )
  @pytest.mark.sample(1)
  def test_vmap_of_a_gradient_is_a_loop(self, in_axes):
    gs = integers(self.rng, (4, 3, 5))
    is_mapped = [a is not None for a in in_axes]
    stacked = (self.xs, self.stack, gs)
    single = (self.x, self.w, self.g)
    args = [
      m if i else s for m, s, i in zip(stacked, single, is_mapped, strict=True)
    ]
    pull = functools.partial(self.pull, activation="relu")
    actual = jax.jit(jax.vmap(pull, in_axes=in_axes))(*args)
    expected = []
    for i in range(4):
      entry = lambda a, i=i: jax.tree.map(lambda t: t[i], a)
      expected.append(
        pull(
          *(entry(a) if m else a for a, m in zip(args, is_mapped, strict=True))
        )
      )
    self.assert_same(actual, np.stack(expected))

  @pytest.mark.full
  def test_gradient_of_a_scan_over_stacked_weights_is_that_of_a_loop(self):
    eye = jnp.eye(5, 64) / 64

    def layer(x, w):
      return jp.block_scaled_dot(x, w, activation="relu") @ eye

    def by_scan(x, remat):
      step = lambda x, w: (layer(x, w), None)
      step = jax.checkpoint(step) if remat else step
      return lax.scan(step, x, self.stack)[0].sum()

    def by_loop(x):
      for i in range(4):
        x = layer(x, jax.tree.map(lambda t, i=i: t[i], self.stack))
      return x.sum()

    expected = jax.grad(by_loop)(self.x)
    self.assertTrue(np.any(expected))
    for remat in (False, True):
      actual = jax.jit(jax.grad(by_scan), static_argnums=1)(self.x, remat)
      np.testing.assert_allclose(actual, expected, rtol=1e-5)

  def test_linear_transpose_is_the_pullback(self):
    function = lambda x: jp.block_scaled_dot(x, self.w)
    (actual,) = jax.linear_transpose(function, self.x)(self.g)
    self.assert_same(actual, self.pull(self.x, self.w, self.g))
    args = (self.x, jnp.zeros(5), jnp.zeros((3, 5)))
    function = lambda x, b, r: jp.block_scaled_dot(
      x, self.w, bias=b, residual=r
    )
    x, bias, residual = jax.linear_transpose(function, *args)(self.g)
    self.assert_same(x, actual)
    self.assert_same(bias, self.g.sum(0))
    self.assert_same(residual, self.g)

  def test_jacobians_by_either_mode_are_the_dequantized_weight(self):
    function = lambda x: jp.block_scaled_dot(x[None], self.w)[0]
    expected = np.asarray(jp.dequantize(self.w))
    self.assert_same(jax.jacfwd(function)(self.x[0]), expected)
    self.assert_same(jax.jacrev(function)(self.x[0]), expected)

  def test_argument_weights_without_a_derivative_are_constants(self):
    packed = transformations.array(
      self.rng, jp.NVFP4, (5, 64), storage="packed_scaled_array"
    )
    for w in (self.w, packed):
      function = lambda x, w: jp.block_scaled_dot(x, w).sum()
      expected = np.asarray(jp.dequantize(w)).sum(0)
      expected = np.tile(expected, (3, 1))
      self.assert_same(jax.grad(function)(self.x, w), expected)
      self.assert_same(jax.jit(jax.grad(function))(self.x, w), expected)

  def test_lora_trains_beside_a_quantized_weight(self):
    a, b = integers(self.rng, (64, 2)), integers(self.rng, (2, 5))

    def loss(lora, x, w):
      return (jp.block_scaled_dot(x, w) + x @ lora[0] @ lora[1]).sum()

    dense = np.asarray(jp.dequantize(self.w)).T
    expected = jax.grad(
      lambda lora, x: (x @ dense + x @ lora[0] @ lora[1]).sum(), (0, 1)
    )((a, b), self.x)
    actual = jax.grad(loss, (0, 1))((a, b), self.x, self.w)
    jax.tree.map(self.assert_same, actual, expected)

  def test_debug_checks_let_derivatives_pass(self):
    expected = self.pull(self.x, self.w, self.g, activation="relu")
    with jp.debug_checks():
      actual = self.pull(self.x, self.w, self.g, activation="relu")
    self.assert_same(actual, expected)

  def test_gradient_of_a_symbolic_size_is_exported(self):
    (m,) = jax.export.symbolic_shape("m")
    exported = jax.export.export(jax.jit(self.pull))(
      jax.ShapeDtypeStruct((m, 64), jnp.float32),
      self.w,
      jax.ShapeDtypeStruct((m, 5), jnp.float32),
    )
    self.assert_same(
      exported.call(self.x, self.w, self.g), self.pull(self.x, self.w, self.g)
    )


class ShardingTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < 8:
      self.skipTest(f"needs 8 devices, has {jax.device_count()}")
    rng = np.random.default_rng(0)
    self.w = transformations.array(rng, jp.MXFP8, (8, 64))
    self.args = (
      integers(rng, (4, 64)),
      jnp.float32(2),
      integers(rng, (8,)),
      integers(rng, (4, 8)),
    )
    self.g = integers(rng, (4, 8))
    self.expected = self.gradients(*self.args, self.w, self.g)

  def gradients(self, x, scale, bias, residual, w, g):
    def function(x, scale, bias, residual):
      return jp.block_scaled_dot(
        x,
        w,
        global_scale=scale,
        bias=bias,
        residual=residual,
        activation="relu",
      )

    return jax.vjp(function, x, scale, bias, residual)[1](g)

  def sharded(self, kind):
    mesh = jax.make_mesh((2, 4), ("m", "n"), axis_types=(kind,) * 2)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    x, scale, bias, residual = self.args
    return mesh, (
      put(x, "m", None),
      put(scale),
      put(bias, "n"),
      put(residual, "m", "n"),
      jax.tree.map(lambda a: put(a, "n", None), self.w),
      put(self.g, "m", "n"),
    )

  def test_partitioned_gradients_equal_those_on_one_device(self):
    _, args = self.sharded(AxisType.Auto)
    actual = jax.jit(self.gradients)(*args)
    jax.tree.map(self.assert_same, actual, self.expected)

  @parameterized.parameters(True, False)
  @pytest.mark.full
  def test_gradients_have_the_explicit_sharding_of_their_operands(self, is_jit):
    mesh, args = self.sharded(AxisType.Explicit)
    with jax.set_mesh(mesh):
      run = jax.jit(self.gradients) if is_jit else self.gradients
      actual = run(*args)
      for a, arg in zip(actual, args, strict=False):
        self.assertEqual(
          jax.typeof(a).sharding.spec, jax.typeof(arg).sharding.spec
        )
    jax.tree.map(self.assert_same, actual, self.expected)

  def test_operands_on_no_mesh_have_gradients_inside_an_explicit_one(self):
    mesh, _ = self.sharded(AxisType.Explicit)
    with jax.set_mesh(mesh):
      actual = self.gradients(*self.args, self.w, self.g)
    jax.tree.map(self.assert_same, actual, self.expected)

  def test_tangents_have_the_explicit_sharding_of_the_result(self):
    mesh, args = self.sharded(AxisType.Explicit)
    x, _, bias, *_, w, _ = args
    with jax.set_mesh(mesh):
      function = lambda bias: jp.block_scaled_dot(x, w, bias=bias)
      value, tangent = jax.jvp(function, (bias,), (bias,))
      self.assertEqual(jax.typeof(tangent), jax.typeof(value))
    self.assert_same(tangent, np.tile(np.asarray(self.args[2]), (4, 1)))

  @parameterized.parameters(True, False)
  @pytest.mark.sample(1)
  def test_gradients_in_shard_map_are_summed_over_the_devices(self, check_vma):
    mesh, args = self.sharded(AxisType.Auto)
    *args, w, g = args

    def loss(x, scale, bias, residual):
      def local(x, scale, bias, residual, w, g):
        y = jp.block_scaled_dot(
          x,
          w,
          global_scale=scale,
          bias=bias,
          residual=residual,
          activation="relu",
        )
        return lax.psum((y * g).sum(), ("m", "n"))

      return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("m"), P(), P("n"), P("m", "n"), P("n"), P("m", "n")),
        out_specs=P(),
        check_vma=check_vma,
      )(x, scale, bias, residual, w, g)

    actual = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args)
    jax.tree.map(self.assert_same, actual, self.expected)


if __name__ == "__main__":
  absltest.main()
