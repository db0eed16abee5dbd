# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded calls: right values, and no more communication than they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import exact_numbers
from jaxplugin.testing.exported import reading
from jaxplugin.testing.meshes import explicit

BATCH, M, N, K = 8, 64, 96, 512
SUM = ("all-reduce", f"f32[{M},{N}]")


def operands(format=jp.MXFP8, rhs_format=None, *, batch=(), k=K):
  """Both sides, of small integers: their product is exact in f32."""
  return (
    jp.quantize(exact_numbers.integers(0, *batch, M, k), format),
    jp.quantize(exact_numbers.integers(1, *batch, N, k), rhs_format or format),
  )


def product(k=K):
  return exact_numbers.integers(0, M, k) @ exact_numbers.integers(1, N, k).T


class ShardedDotTest(explicit.AutoTestCase):
  def run_sharded(self, lhs, rhs, lhs_spec, rhs_spec, out_spec, **kwargs):
    """Result and collectives of a sharded call, checked against one device."""
    expected = jp.block_scaled_dot(lhs, rhs, **kwargs)
    lhs = self.put(lhs, lhs_spec)
    rhs = self.put(rhs, rhs_spec)
    out = None if out_spec is None else NamedSharding(self.mesh, out_spec)
    function = jax.jit(
      lambda l, r: jp.block_scaled_dot(l, r, **kwargs), out_shardings=out
    )
    compiled = function.lower(lhs, rhs).compile()
    # Calling the compiled object itself fails for sharded FP4 arguments on
    # jax 0.10.2, whose layout check does not know sub-byte types.
    result = function(lhs, rhs)
    np.testing.assert_array_equal(result, expected)
    return result, reading.collectives(compiled)

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
    lhs, rhs = operands(format, batch=(BATCH,))
    result, collectives = self.run_sharded(lhs, rhs, specs[0], specs[1], None)
    self.assertEmpty(collectives)
    self.assertTrue(
      result.sharding.is_equivalent_to(
        NamedSharding(self.mesh, specs[2]), result.ndim
      ),
      result.sharding,
    )

  @parameterized.named_parameters(
    ("mxfp8", (jp.MXFP8,), P(None, "b"), None, SUM),
    ("nvfp4", (jp.NVFP4,), P(None, "b"), None, SUM),
    ("mixed", (jp.MXFP8, jp.NVFP4), P(None, "b"), None, SUM),
    (
      "rows",
      (),
      P(None, "b"),
      P("b"),
      ("reduce-scatter", f"f32[{M // 4},{N}]"),
    ),
    (
      *("columns", (), P(None, "b"), P(None, "b")),
      ("reduce-scatter", f"f32[{M},{N // 4}]"),
    ),
    # The whole k of rhs is sliced; lhs is not gathered.
    ("only_lhs", (), P(), None, SUM),
  )
  def test_k_sharding_gives_one_sum_of_f32_over_devices(
    self, formats, rhs_spec, out, expected
  ):
    _, collectives = self.run_sharded(
      *(*operands(*formats), P(None, "b"), rhs_spec, out),
      preferred_element_type=jnp.bfloat16,
      bias=jnp.arange(N, dtype=jnp.float32),
      activation="relu",
      residual=jnp.ones((M, N), jnp.bfloat16),
    )
    self.assertEqual(collectives, [expected])

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP4, jp.NVFP4),
    specs=(
      (P("b"), P("b")),  # m and n want the same axis
      (P(None, "b"), P("b")),  # k of one side and n of the other
    ),
  )
  @pytest.mark.sample(1)
  def test_what_is_gathered_is_gathered_as_bytes(self, format, specs):
    lhs, rhs = operands(format)
    _, collectives = self.run_sharded(lhs, rhs, specs[0], specs[1], None)
    self.assertNotEmpty(collectives)
    # The smaller operand's values, at their width, and its scales.
    values, scales = lhs.pack().values, lhs.scale
    shapes = {f"u8[{x.shape[0]},{x.shape[1]}]" for x in (values, scales)}
    self.assertContainsSubset(collectives, {("all-gather", x) for x in shapes})

  def test_k_sharding_that_splits_blocks_is_gathered(self):
    # k = 64 is two blocks of 32: they cannot be dealt to four devices.
    lhs, rhs = (
      jp.ScaledArray(self.put(x.values, P(None, "b")), x.scale, None, jp.MXFP8)
      for x in operands(k=64)
    )
    result = jax.jit(jp.block_scaled_dot)(lhs, rhs)
    np.testing.assert_array_equal(result, product(64))

  def test_a_short_last_block_leaves_m_and_n_sharded(self):
    # Each row of the weight has four blocks of 128 and one of 64.
    _, rhs = operands(jp.FP8_1X128_E8M0, k=576)
    lhs = exact_numbers.integers(0, M, 576)
    result, collectives = self.run_sharded(lhs, rhs, P("a"), P("b"), None)
    self.assertEmpty(collectives)
    self.assertEqual(result.sharding.spec, P("a", "b"))
    _, collectives = self.run_sharded(lhs, rhs, P("a", "b"), P("b"), None)
    self.assertEqual(collectives, [("all-gather", f"f32[{M // 2},576]")])

  def test_one_sided_operand_and_general_dimensions(self):
    lhs = exact_numbers.integers(0, 4, K, M)  # plain, [b, k, m]
    rhs = jp.quantize(
      exact_numbers.integers(1, N, K, 4), jp.MXFP4, axis=1
    )  # [n, k, b]
    numbers = (((1,), (1,)), ((0,), (2,)))
    function = jax.jit(
      lambda l, r: jp.block_scaled_dot(l, r, dimension_numbers=numbers)
    )
    expected = function(lhs, rhs)
    sharded_lhs = self.put(jnp.asarray(lhs), P("a", None, "b"))
    sharded_rhs = self.put(rhs, P(None, None, "a"))
    result = function(sharded_lhs, sharded_rhs)
    np.testing.assert_array_equal(result, expected)
    self.assertEmpty(
      reading.collectives(function.lower(sharded_lhs, sharded_rhs).compile())
    )

  def test_swizzled_and_padded_scales_are_sharded_calls_too(self):
    lhs, rhs = operands()
    swizzled = jp.ScaledArray(
      *(lhs.values, jp.swizzle_scale(lhs.scale), None, jp.MXFP8),
      scale_layout="swizzled_128x4",
    )
    self.run_sharded(swizzled, rhs, P("a"), P("b"), None)

  def test_vmap_of_a_sharded_weight_stays_local(self):
    lhs = jp.quantize(exact_numbers.integers(0, BATCH, M, K), jp.MXFP8)
    rhs = jp.quantize(exact_numbers.integers(1, N, K), jp.MXFP8)
    function = jax.jit(jax.vmap(jp.block_scaled_dot, in_axes=(0, None)))
    expected = function(lhs, rhs)
    lhs, rhs = self.put(lhs, P("a")), self.put(rhs, P("b"))
    result = function(lhs, rhs)
    np.testing.assert_array_equal(result, expected)
    self.assertEmpty(reading.collectives(function.lower(lhs, rhs).compile()))

  def test_shard_map_multiplies_each_shard(self):
    lhs, rhs = operands()

    def local(l, r):
      return jax.lax.psum(jp.block_scaled_dot(l, r), "b")

    for check_vma in (True, False):
      function = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(P("a", "b"), P(None, "b")),
        out_specs=P("a"),
        check_vma=check_vma,
      )
      np.testing.assert_array_equal(jax.jit(function)(lhs, rhs), product())

  def test_export_of_a_sharded_call_runs(self):
    lhs, rhs = operands()
    lhs, rhs = self.put(lhs, P("a")), self.put(rhs, P("b"))
    exported = jax.export.export(jax.jit(jp.block_scaled_dot))(lhs, rhs)
    restored = jax.export.deserialize(exported.serialize())
    result = jax.jit(restored.call)(lhs, rhs)
    np.testing.assert_array_equal(result, product())

  @pytest.mark.full
  def test_sharded_training_step_equals_the_unsharded_one(self):
    x, w = exact_numbers.integers(0, M, K), exact_numbers.integers(1, K, N)
    dot_general = jp.dot_general(jp.MXFP8, jp.MXFP8)
    numbers = (((1,), (0,)), ((), ()))

    def loss(x, w):
      return (dot_general(x, w, numbers) ** 2).sum() * 2.0**-20

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected = step(x, w)
    actual = step(
      self.put(jnp.asarray(x), P("a")),
      self.put(jnp.asarray(w), P(None, "b")),
    )
    for want, have in zip(expected, actual, strict=True):
      # Sums over devices in another order: a few f32 roundings.
      bound = 16 * 2.0**-24 * float(np.abs(want).max()) * np.sqrt(K)
      np.testing.assert_allclose(have, want, rtol=0, atol=bound)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
