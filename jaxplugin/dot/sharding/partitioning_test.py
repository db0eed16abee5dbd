# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded calls: right values, and no more communication than they need."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp

NUM_DEVICES = 8
BATCH, M, N, K = 8, 64, 96, 512
COLLECTIVE = re.compile(
  r"= \(?(\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)


def _mesh():
  devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 4)
  return jax.sharding.Mesh(devices, ("a", "b"))


def _integers(seed, *shape):
  """Small integers: every product and sum of them is exact in f32."""
  return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def _collectives(compiled):
  """(kind, element type, elements) of each collective in optimized HLO."""
  found = []
  for dtype, dims, kind in COLLECTIVE.findall(compiled.as_text()):
    size = int(np.prod([int(d) for d in dims.split(",") if d]))
    found.append((kind, dtype, size))
  return found


def _put(array, mesh, spec):
  def put(leaf):
    return jax.device_put(
      leaf, NamedSharding(mesh, spec if leaf.size > 1 else P())
    )

  return jax.tree.map(put, array)


class ShardedDotTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")
    self.mesh = _mesh()

  def run_sharded(self, lhs, rhs, lhs_spec, rhs_spec, out_spec, **kwargs):
    """Result and collectives of a sharded call, checked against one device."""
    expected = jp.block_scaled_dot(lhs, rhs, **kwargs)
    lhs = _put(lhs, self.mesh, lhs_spec)
    rhs = _put(rhs, self.mesh, rhs_spec)
    out = None if out_spec is None else NamedSharding(self.mesh, out_spec)
    function = jax.jit(
      lambda l, r: jp.block_scaled_dot(l, r, **kwargs), out_shardings=out
    )
    compiled = function.lower(lhs, rhs).compile()
    # Calling the compiled object itself fails for sharded FP4 arguments on
    # jax 0.10.2, whose layout check does not know sub-byte types.
    result = function(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))
    return result, _collectives(compiled)

  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4),
    specs=(
      (P("a"), P("a"), P("a")),
      (P(None, "a"), P(), P(None, "a")),
      (P(None, "a"), P(None, "b"), P(None, "a", "b")),
      (P("a", "b"), P("a"), P("a", "b")),
    ),
  )
  @pytest.mark.sample(2)
  def test_batch_m_and_n_shardings_stay_local(self, format, specs):
    lhs = jp.quantize(_integers(0, BATCH, M, K), format)
    rhs = jp.quantize(_integers(1, BATCH, N, K), format)
    result, collectives = self.run_sharded(lhs, rhs, specs[0], specs[1], None)
    self.assertEmpty(collectives)
    self.assertTrue(
      result.sharding.is_equivalent_to(
        NamedSharding(self.mesh, specs[2]), result.ndim
      ),
      result.sharding,
    )

  @parameterized.product(
    formats=((jp.MXFP8, jp.MXFP8), (jp.NVFP4, jp.NVFP4), (jp.MXFP8, jp.NVFP4)),
  )
  @pytest.mark.sample(3)
  def test_k_sharding_gives_one_all_reduce_of_f32(self, formats):
    lhs = jp.quantize(_integers(0, M, K), formats[0])
    rhs = jp.quantize(_integers(1, N, K), formats[1])
    _, collectives = self.run_sharded(
      lhs,
      rhs,
      P(None, "b"),
      P(None, "b"),
      None,
      preferred_element_type=jnp.bfloat16,
      bias=jnp.arange(N, dtype=jnp.float32),
      activation="relu",
      residual=jnp.ones((M, N), jnp.bfloat16),
    )
    self.assertEqual(collectives, [("all-reduce", "f32", M * N)])

  @parameterized.product(scattered=(0, 1))
  @pytest.mark.sample(2)
  def test_k_sharding_with_sharded_result_gives_one_reduce_scatter(
    self, scattered
  ):
    lhs = jp.quantize(_integers(0, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)
    out = P("b", None) if scattered == 0 else P(None, "b")
    _, collectives = self.run_sharded(
      lhs,
      rhs,
      P(None, "b"),
      P(None, "b"),
      out,
      bias=jnp.arange(N, dtype=jnp.float32),
    )
    self.assertEqual(collectives, [("reduce-scatter", "f32", M * N // 4)])

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP4, jp.NVFP4),
    specs=(
      (P("b"), P("b")),  # m and n want the same axis
      (P(None, "b"), P("b")),  # k of one side and n of the other
    ),
  )
  @pytest.mark.sample(1)
  def test_what_is_gathered_is_gathered_as_bytes(self, format, specs):
    lhs = jp.quantize(_integers(0, M, K), format)
    rhs = jp.quantize(_integers(1, N, K), format)
    _, collectives = self.run_sharded(lhs, rhs, specs[0], specs[1], None)
    self.assertNotEmpty(collectives)
    for kind, dtype, size in collectives:
      self.assertEqual((kind, dtype), ("all-gather", "u8"))
      # The smaller operand's values, at their width, or its scales.
      values = M * K * format.value_bits // 8
      self.assertIn(size, (values, M * K // format.block_size))

  def test_unsharded_k_is_sliced_rather_than_the_other_gathered(self):
    lhs = jp.quantize(_integers(0, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)
    _, collectives = self.run_sharded(lhs, rhs, P(None, "b"), P(), None)
    self.assertEqual(collectives, [("all-reduce", "f32", M * N)])

  def test_k_sharding_that_splits_blocks_is_gathered(self):
    # k = 64 is two blocks of 32: they cannot be dealt to four devices.
    lhs = jp.quantize(_integers(0, M, 64), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, 64), jp.MXFP8)
    values = lambda q, spec: _put(q.values, self.mesh, spec)
    lhs = jp.ScaledArray(values(lhs, P(None, "b")), lhs.scale, None, jp.MXFP8)
    rhs = jp.ScaledArray(values(rhs, P(None, "b")), rhs.scale, None, jp.MXFP8)
    result = jax.jit(jp.block_scaled_dot)(lhs, rhs)
    np.testing.assert_array_equal(
      np.asarray(result), _integers(0, M, 64) @ _integers(1, N, 64).T
    )

  def test_one_sided_operand_and_general_dimensions(self):
    lhs = _integers(0, 4, K, M)  # plain, [b, k, m]
    rhs = jp.quantize(_integers(1, N, K, 4), jp.MXFP4, axis=1)  # [n, k, b]
    numbers = (((1,), (1,)), ((0,), (2,)))
    function = jax.jit(
      lambda l, r: jp.block_scaled_dot(l, r, dimension_numbers=numbers)
    )
    expected = function(lhs, rhs)
    sharded_lhs = _put(jnp.asarray(lhs), self.mesh, P("a", None, "b"))
    sharded_rhs = _put(rhs, self.mesh, P(None, None, "a"))
    result = function(sharded_lhs, sharded_rhs)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))
    self.assertEmpty(
      _collectives(function.lower(sharded_lhs, sharded_rhs).compile())
    )

  def test_swizzled_and_padded_scales_are_sharded_calls_too(self):
    lhs = jp.quantize(_integers(0, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)
    swizzled = jp.ScaledArray(
      lhs.values,
      jp.swizzle_scale(lhs.scale),
      None,
      jp.MXFP8,
      scale_layout="swizzled_128x4",
    )
    self.run_sharded(swizzled, rhs, P("a"), P("b"), None)

  def test_vmap_of_a_sharded_weight_stays_local(self):
    lhs = jp.quantize(_integers(0, BATCH, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)
    function = jax.jit(jax.vmap(jp.block_scaled_dot, in_axes=(0, None)))
    expected = function(lhs, rhs)
    lhs, rhs = _put(lhs, self.mesh, P("a")), _put(rhs, self.mesh, P("b"))
    result = function(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))
    self.assertEmpty(_collectives(function.lower(lhs, rhs).compile()))

  def test_shard_map_multiplies_each_shard(self):
    lhs = jp.quantize(_integers(0, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)

    def local(l, r):
      return jax.lax.psum(jp.block_scaled_dot(l, r), "b")

    function = jax.jit(
      jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(P("a", "b"), P(None, "b")),
        out_specs=P("a"),
      )
    )
    np.testing.assert_array_equal(
      np.asarray(function(lhs, rhs)), _integers(0, M, K) @ _integers(1, N, K).T
    )

  def test_export_of_a_sharded_call_runs(self):
    lhs = jp.quantize(_integers(0, M, K), jp.MXFP8)
    rhs = jp.quantize(_integers(1, N, K), jp.MXFP8)
    lhs, rhs = _put(lhs, self.mesh, P("a")), _put(rhs, self.mesh, P("b"))
    exported = jax.export.export(jax.jit(jp.block_scaled_dot))(lhs, rhs)
    restored = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(
      np.asarray(jax.jit(restored.call)(lhs, rhs)),
      _integers(0, M, K) @ _integers(1, N, K).T,
    )

  @pytest.mark.full
  def test_sharded_training_step_equals_the_unsharded_one(self):
    x, w = _integers(0, M, K), _integers(1, K, N)
    dot_general = jp.dot_general(jp.MXFP8, jp.MXFP8)
    numbers = (((1,), (0,)), ((), ()))

    def loss(x, w):
      return (dot_general(x, w, numbers) ** 2).sum() * 2.0**-20

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected = step(x, w)
    actual = step(
      _put(jnp.asarray(x), self.mesh, P("a")),
      _put(jnp.asarray(w), self.mesh, P(None, "b")),
    )
    for want, have in zip(expected, actual, strict=True):
      # Sums over devices in another order: a few f32 roundings.
      np.testing.assert_allclose(
        np.asarray(have),
        np.asarray(want),
        rtol=0,
        atol=16 * 2.0**-24 * float(np.abs(want).max()) * np.sqrt(K),
      )


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
  absltest.main()
