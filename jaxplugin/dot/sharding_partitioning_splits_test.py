# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings by parts of a mesh axis, which no `PartitionSpec` can say."""

import jax
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import exact_numbers
from jaxplugin.testing.meshes import explicit

exact = exact_numbers.fours


def bits(x):
  """Bytes of an array: signs of zeros and codes of NaN count."""
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


class SplitAxisTest(parameterized.TestCase):
  """Shardings by parts of a mesh axis: a caller's reshape makes them, as does
  quantizing a k that is sharded."""

  def setUp(self):
    super().setUp()
    explicit.need_devices(self)

  def run_sharded(self, sizes, function, arrays, specs):
    """The function's result or results, of arguments that it gets sharded."""
    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes),
      tuple("xyz"[: len(sizes)]),
    )

    def sharded(*arrays):
      # Unlike arguments, they may be sharded unevenly.
      return function(
        *(
          jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))
          for a, spec in zip(arrays, specs, strict=True)
        )
      )

    # No `PartitionSpec` describes such a sharding.
    replicated = NamedSharding(mesh, P())
    result = jax.jit(sharded, out_shardings=replicated)(*arrays)
    return jax.tree.map(np.asarray, result)

  @parameterized.product(
    case=(
      (jp.MXFP8, 128, (8,), "xla"),
      (jp.MXFP8, 192, (4,), None),
      (jp.NVFP4, 96, (4,), None),
      (jp.NVFP4, 480, (8,), None),
      (jp.MXFP4, 2880, (2, 4), None),
      (jp.MXFP8, 96, (6,), "xla"),
    ),
  )
  @pytest.mark.sample(1)
  def test_blocks_of_a_sharded_k(self, case):
    format, k, sizes, implementation = case
    axes = P(None, tuple("xyz"[: len(sizes)]))
    arrays = exact(0, 24, k), exact(1, 16, k)
    global_scale = 1.0 if format.has_global_scale else None

    def function(lhs, rhs):
      return jp.block_scaled_dot(
        jp.quantize(lhs, format, global_scale=global_scale),
        jp.quantize(rhs, format, global_scale=global_scale),
        implementation=implementation,
      )

    result = self.run_sharded(sizes, function, arrays, (axes, axes))
    np.testing.assert_array_equal(result, arrays[0] @ arrays[1].T)

  @parameterized.product(size=(4, 8))
  @pytest.mark.sample(2)
  def test_rows_that_a_reshape_splits_or_merges(self, size):
    numbers = (((2,), (1,)), ((), ()))
    lhs, rhs = exact(0, 24, 128), exact(1, 16, 128)
    expected = lhs @ rhs.T

    def split(lhs, rhs):
      return jp.dot_general(jp.MXFP8, jp.MXFP8)(
        lhs.reshape(6, 4, 128), rhs, numbers
      )

    def split_quantized(values, scale, rhs):
      lhs = jp.ScaledArray(
        values.reshape(6, 4, 128), scale.reshape(6, 4, 4), None, jp.MXFP8
      )
      rhs = jp.quantize(rhs, jp.MXFP8)
      return jp.block_scaled_dot(lhs, rhs, dimension_numbers=numbers)

    def merge(lhs, rhs):
      lhs = jp.quantize(lhs.reshape(24, 128), jp.MXFP8)
      return jp.block_scaled_dot(lhs, jp.quantize(rhs, jp.MXFP8))

    rows, quantized = P("x"), jp.quantize(lhs, jp.MXFP8)
    for function, arrays, specs in (
      (split, (lhs, rhs), (rows, P())),
      (
        *(split_quantized, (quantized.values, quantized.scale, rhs)),
        (rows, rows, P()),
      ),
      (merge, (lhs.reshape(6, 4, 128), rhs), (P(None, "x"), rows)),
    ):
      with self.subTest(function.__name__):
        result = self.run_sharded((size,), function, arrays, specs)
        np.testing.assert_array_equal(result.reshape(24, 16), expected)

  @parameterized.product(size=(4, 8))
  @pytest.mark.full
  def test_a_batch_that_does_not_divide_or_was_merged(self, size):
    lhs, rhs = exact(0, 6, 8, 64), exact(1, 6, 4, 64)

    def function(lhs, rhs):
      rhs = rhs.reshape(6, 4, 64)
      return jp.block_scaled_dot(
        jp.quantize(lhs, jp.MXFP4), jp.quantize(rhs, jp.MXFP8)
      )

    arrays = lhs, rhs.reshape(24, 64)
    result = self.run_sharded((size,), function, arrays, (P("x"), P("x")))
    np.testing.assert_array_equal(result, np.einsum("bmk,bnk->bmn", lhs, rhs))

  def test_zero_blocks_of_rows_fewer_than_devices_stay_zero(self):
    lhs, rhs = exact(0, 3, 64), exact(1, 5, 64)
    lhs[1] = rhs[2] = 0

    def function(lhs, rhs):
      return jp.block_scaled_dot(
        jp.quantize(lhs, jp.MXFP8), jp.quantize(rhs, jp.MXFP8)
      )

    result = self.run_sharded((8,), function, (lhs, rhs), (P("x"), P("x")))
    np.testing.assert_array_equal(result, lhs @ rhs.T)

  def test_shard_map_over_some_axes_leaves_the_others_to_the_partitioner(self):
    lhs, rhs = exact(0, 16, 128), exact(1, 8, 128)
    mesh = explicit.mesh(self, kind=jax.sharding.AxisType.Auto)

    def call(implementation):
      def local(lhs, rhs):
        return jp.block_scaled_dot(
          jp.quantize(lhs, jp.MXFP8),
          jp.quantize(rhs, jp.MXFP8),
          implementation=implementation,
        )

      mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P("a"),
        axis_names={"a"},
      )
      sharded = jax.device_put(rhs, NamedSharding(mesh, P("b")))
      return jax.jit(mapped)(lhs, sharded)

    np.testing.assert_array_equal(np.asarray(call(None)), lhs @ rhs.T)

  @parameterized.product(
    case=(
      # 30 and 4 blocks over 8 devices; rows over parts of an axis.
      (jp.NVFP4, (24, 480), P(None, "x"), None),
      (jp.MXFP8, (24, 128), P(None, "x"), None),
      (jp.MXFP4, (24, 64), P("x"), (3, 8, 64)),
    ),
  )
  @pytest.mark.sample(4)
  def test_quantize_gives_the_bits_of_one_device(self, case):
    format, shape, spec, reshaped = case
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def function(x):
      return jax.tree.leaves(jp.quantize(x.reshape(reshaped or shape), format))

    expected = function(x)
    result = self.run_sharded((8,), function, (x,), (spec,))
    for have, want in zip(result, expected, strict=True):
      np.testing.assert_array_equal(bits(have), bits(want))


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
