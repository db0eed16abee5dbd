# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized` on meshes: the bytes of quantized weights move."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes.explicit import need_devices
from jaxplugin.testing.models import (
  EPSILON,
  AcceptedTest,
  accepted,
  compiled,
  count_calls,
  normal,
  quantized,
)
from jaxplugin.testing.oracles import hlo_traffic

NUM_DEVICES = 4


# Code that places a weight. Each row: a function of `put`, the weight and x,
# and the weight's shape and contracted dimension.
PLACES = {
  "columns": (lambda put, w, x: x @ put(w, P(None, "b")), (64, 96), 0),
  "transposed": (
    lambda put, w, x: x @ put(w.astype(jnp.bfloat16).T, P("b")).T,
    (64, 96),
    0,
  ),
  "everything": (lambda put, w, x: x @ put(w, P()), (64, 96), 0),
  "contracted rows": (
    lambda put, w, x: jnp.dot(
      put(x, P(None, "b")),
      put(w, P("b")),
      out_sharding=P() if put is jax.sharding.reshard else None,
    ),
    (64, 96),
    0,
  ),
  "layer": (lambda put, w, x: x @ put(w[1], P(None, "b")), (2, 64, 96), 1),
  "scanned layers": (
    lambda put, w, x: lax.scan(lambda x, w: (x @ put(w, P()), None), x, w)[0],
    (2, 64, 64),
    1,
  ),
  "scanned experts": (
    lambda put, w, x: lax.scan(
      lambda x, w: (jnp.einsum("ebk,ekn->ebn", x, put(w, P("a"))), None),
      put(jnp.stack([x, x]), P("a")),
      w,
    )[0],
    (2, 2, 64, 64),
    2,
  ),
  "heads": (
    lambda put, w, x: jnp.einsum("bk,khd->bhd", x, put(w, P(None, "a"))),
    (64, 4, 16),
    0,
  ),
}


def gathered(w, axis):
  return lax.all_gather(w, "b", axis=axis, tiled=True)


# Functions of devices' parts. Each row: a function of x and a weight, specs of
# both and of the result, and the weight's shape and contracted dimension.
SHARDS = {
  "columns": (jnp.matmul, P(), P(None, "b"), P(None, "b"), (64, 96), 0),
  "contracted rows": (
    lambda x, w: lax.psum(x @ w, "b"),
    *(P(None, "b"), P("b"), P(), (64, 96), 0),
  ),
  "a whole weight": (jnp.matmul, P("a"), P(), P("a"), (64, 96), 0),
  "heads": (
    lambda x, w: jnp.einsum("bk,khd->bhd", x, w),
    *(P(), P(None, "b"), P(None, "b"), (64, 4, 16), 0),
  ),
  "layers": (
    lambda x, w: x @ w[1],
    *(P(), P(None, None, "b"), P(None, "b"), (2, 64, 96), 1),
  ),
  "experts": (
    lambda x, w: jnp.einsum("bk,ekn->ebn", x, w),
    *(P(), P("b"), P("b"), (2, 64, 48), 1),
  ),
  "gathered columns": (
    lambda x, w: x @ gathered(w, 1),
    *(P("a"), P(None, "b"), P("a"), (64, 96), 0),
  ),
  "gathered blocks": (
    lambda x, w: x @ gathered(w, 0),
    *(P("a"), P("b"), P("a"), (64, 96), 0),
  ),
  "gathered experts": (
    lambda x, w: jnp.einsum("bk,ekn->ebn", x, gathered(w, 0)),
    *(P("a"), P("b"), P(None, "a"), (4, 64, 48), 1),
  ),
}


class PlacesTest(AcceptedTest):
  """Code places a weight on a mesh, and its bytes move."""

  @parameterized.parameters(
    *zip(
      (*SHARDS, *SHARDS),
      itertools.cycle(("mxfp8", "nvfp4", "int4_32", "uint4_32_min")),
      itertools.cycle((None, "mxfp8", None)),
      strict=False,
    )
  )
  @pytest.mark.sample(9)
  def test_devices_multiply_by_their_parts(self, name, format, activations):
    need_devices(self, NUM_DEVICES)
    function, of_x, of_w, of_y, shape, axis = SHARDS[name]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    w, x = quantized(normal(*shape), format, axis), normal(8, 64)
    plain = (
      x if activations is None else jp.quantize(x, activations).dequantize(),
      w.dequantize(jnp.float32),
    )
    # JAX compiles a program to split an array of one device.
    w, x, plain = jax.device_get((w, x, plain))
    mapped = jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(of_x, of_w),
      out_specs=of_y,
      # JAX takes what is gathered for different on each device.
      check_vma="gathered" not in name,
    )
    call = accepted(mapped, activations=activations)
    run = jax.jit(mapped)
    actual, expected, magnitude = jax.device_get(
      (call(x, w), run(*plain), run(*map(np.abs, plain)))
    )
    # Both sums are in f32, so each has this error.
    error = np.abs(actual - expected)
    np.testing.assert_array_less(error, 2 * EPSILON * magnitude)
    hlo = compiled(call, x, w)
    self.assertEqual(count_calls(hlo), 1 if activations is None else 2)
    self.assertNotIn("jaxplugin_dequantize", hlo)
    found = hlo_traffic.collectives(hlo)
    moved = {dtype: n for kind, dtype, n in found if kind == "all-gather"}
    # Some scales are f16, and global scales are f32.
    self.assertContainsSubset(moved, {"u8", "f16", "f32"})
    self.assertLessEqual(moved.get("f32", 0), 4)
    self.assertEqual("u8" in moved, "gathered" in name)

  def test_scales_of_devices_are_not_taken_for_equal(self):
    need_devices(self, NUM_DEVICES)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))

    def function(x, w):
      # Each device computes a global scale for its part.
      w_q = jp.quantize(w.T, "nvfp4").T
      product = lambda x, w: x @ gathered(w, 1)
      return jp.accept_quantized(product)(x, w_q), product(x, w_q.dequantize())

    mapped = jax.shard_map(
      function,
      mesh=mesh,
      in_specs=(P(), P(None, "b")),
      out_specs=P(),
      check_vma=False,
    )
    w = normal(64, 96) * np.linspace(1, 100, 96)
    with self.assertWarnsRegex(UserWarning, "all_gather.*its own global scale"):
      actual, expected = jax.jit(mapped)(normal(5, 64), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)

  @parameterized.product(
    name=tuple(PLACES),
    kind=(AxisType.Auto, AxisType.Explicit),
    activations=(None, "nvfp4"),
  )
  @pytest.mark.sample(6)
  def test_its_bytes_move_and_are_multiplied(self, name, kind, activations):
    need_devices(self, NUM_DEVICES)
    function, shape, axis = PLACES[name]
    w, x = quantized(normal(*shape), "mxfp8", axis), normal(8, 64)
    mesh = jax.make_mesh(
      (2, 2),
      ("a", "b"),
      axis_types=(kind,) * 2,
      devices=jax.devices()[:NUM_DEVICES],
    )
    is_auto = kind == AxisType.Auto
    put = lax.with_sharding_constraint if is_auto else jax.sharding.reshard
    alone = accepted(
      functools.partial(function, lambda w, _: w), activations=activations
    )
    call = accepted(functools.partial(function, put), activations=activations)
    blocked = [None] * axis + ["a", "b"]
    with jax.set_mesh(mesh):
      w, x = jax.device_get((w, x))
      args = jp.shard(w, P(*blocked)), jax.device_put(x, P())
      actual, hlo = call(*args), compiled(call, *args)
    expected = alone(w, x)
    np.testing.assert_allclose(
      actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max()
    )
    self.assertEqual(hlo.count('"jaxplugin_block_scaled_dot'), 1)
    moved = re.findall(r"= (\w+)\[\S* (?:all-gather|all-to-all)\(", hlo)
    self.assertEqual(set(moved), {"u8"})

  def test_scales_of_devices_around_a_shard_map_differ(self):
    need_devices(self, NUM_DEVICES)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    gather = functools.partial(lax.all_gather, axis=1, tiled=True)

    def inside(x, w):
      return jax.shard_map(
        lambda x, w: x @ gather(gather(w, "b"), "a"),
        in_specs=(P(), P(None, "b")),
        out_specs=P(),
        axis_names={"b"},
        check_vma=False,
      )(x, w)

    def function(x, w):
      # Each device along "a" computes a global scale for its part.
      w_q = jp.quantize(w.T, "nvfp4").T
      return jp.accept_quantized(inside)(x, w_q), inside(x, w_q.dequantize())

    mapped = jax.shard_map(
      function,
      in_specs=(P(), P(None, "a")),
      out_specs=P(),
      axis_names={"a"},
      check_vma=False,
    )
    w = normal(64, 128) * np.linspace(1, 100, 128)
    with (
      jax.set_mesh(mesh),
      self.assertWarnsRegex(UserWarning, "all_gather.*its own global scale"),
    ):
      actual, expected = jax.jit(mapped)(normal(5, 64), w)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-2)

  def test_a_place_that_cuts_blocks_dequantizes(self):
    need_devices(self, NUM_DEVICES)
    w, x = quantized(normal(96, 64), "mxfp8", 0), normal(5, 96)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    function = lambda w, x: x @ lax.with_sharding_constraint(w, P("a"))
    call = jax.jit(jp.accept_quantized(function))
    with (
      jax.set_mesh(mesh),
      self.assertWarnsRegex(
        UserWarning, "sharding_constraint.*whole blocks of 32.*jaxplugin.shard"
      ),
    ):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w, w, x)
