# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over devices: `reduce_dtype`, global scales, and where sums go."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.testing import contract
from jaxplugin.testing import exact_numbers
from jaxplugin.testing.meshes import explicit

M, N, K = 16, 32, 256
BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)
integers = exact_numbers.integers


def normal_pair():
  """NVFP4 of random numbers, [M, K] and [N, K]."""
  rng = np.random.default_rng(0)
  x, w = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (N, K)))
  return jp.quantize(x, jp.NVFP4), jp.quantize(w, jp.NVFP4)


def with_global_scale(x, global_scale):
  """Small integers as MXFP8, exactly, with a global scale of ours."""
  x = jp.quantize(x, jp.MXFP8)
  return jp.ScaledArray(x.values, x.scale, global_scale, x.format)


class ReduceDtypeTest(explicit.AutoTestCase):
  def run_sharded(self, function, lhs, rhs, out=P()):
    """Runs a function of operands whose k is sharded over "a", in two parts."""
    return jax.jit(function, out_shardings=NamedSharding(self.mesh, out))(
      self.put(lhs, P(None, "a")), self.put(rhs, P(None, "a"))
    )

  @parameterized.parameters(BF16, F16)
  @pytest.mark.full
  def test_scaled_parts_are_rounded_and_summed_in_it(self, dtype):
    lhs, rhs = integers(0, M, K), integers(1, N, K)
    scale = np.float32(1 / 3)
    bias = np.linspace(-2, 2, N, dtype=np.float32)
    result = self.run_sharded(
      functools.partial(
        jp.block_scaled_dot, bias=bias, activation="relu", reduce_dtype=dtype
      ),
      with_global_scale(jnp.asarray(lhs), jnp.full((1, 1), scale)),
      jp.quantize(rhs, jp.MXFP8),
    )
    parts = [
      (l @ r.T * scale).astype(dtype)
      for l, r in zip(
        np.split(lhs, 2, axis=1), np.split(rhs, 2, axis=1), strict=True
      )
    ]
    wide = [part.astype(np.float32) for part in parts]
    total = (wide[0] + wide[1]).astype(dtype).astype(np.float32)
    expected = np.maximum(total + bias, 0)
    np.testing.assert_array_equal(result, expected)
    # They are rounded, or this would say nothing.
    exact = np.maximum(lhs @ rhs.T * scale + bias, 0)
    self.assertGreater(np.abs(expected - exact).max(), 0)

  def test_unscaled_sums_beyond_its_range_are_in_range(self):
    lhs, rhs = normal_pair()
    exact, magnitude = contract.dot(
      *(np.asarray(jp.dequantize(x), np.float64) for x in (lhs, rhs))
    )
    scales = float(lhs.global_scale.item() * rhs.global_scale.item())
    self.assertGreater(np.abs(exact).max() / scales, 1e6)
    dot = functools.partial(jp.block_scaled_dot, preferred_element_type=F16)
    # Two parts, and their sum, are rounded.
    bound = 2 * reference.rounding_error(F16) + reference.ERROR_BOUND
    for dtype in (F16, None):
      result = self.run_sharded(
        functools.partial(dot, reduce_dtype=dtype), lhs, rhs
      )
      error = np.abs(np.asarray(result, np.float64) - exact)
      np.testing.assert_array_less(error, bound * magnitude)

  @parameterized.parameters(None, BF16, np.float32)
  @pytest.mark.sample(1)
  def test_scales_of_rows_and_scattered_sums(self, dtype):
    # Sums of up to 256 and powers of two are exact in bf16.
    lhs, rhs = integers(0, M, K, most=1), integers(1, N, K, most=1)
    rows = 2.0 ** np.arange(-8, 8, dtype=np.float32)[:, None]
    columns = 2.0 ** np.arange(-16, 16, dtype=np.float32)[:, None]
    for out in (P("a"), P(None, "a"), P("b", "a")):
      result = self.run_sharded(
        functools.partial(jp.block_scaled_dot, reduce_dtype=dtype),
        with_global_scale(jnp.asarray(lhs), jnp.asarray(rows)),
        with_global_scale(jnp.asarray(rhs), jnp.asarray(columns)),
        out,
      )
      self.assertTrue(
        result.sharding.is_equivalent_to(NamedSharding(self.mesh, out), 2)
      )
      expected = lhs @ rhs.T * rows * columns.T
      np.testing.assert_array_equal(result, expected)

  def test_changes_no_bit_where_no_sum_crosses_devices(self):
    lhs, rhs = normal_pair()
    expected = jax.jit(jp.block_scaled_dot)(lhs, rhs)
    function = jax.jit(functools.partial(jp.block_scaled_dot, reduce_dtype=F16))
    result = function(self.put(lhs, P("a")), self.put(rhs, P("b")))
    np.testing.assert_array_equal(result, expected)

  @pytest.mark.full
  def test_sum_over_two_axes_is_dealt_out_along_two_dimensions(self):
    x = integers(0, 8, 128, 16)
    g = integers(1, 8, 128, 32)
    numbers = (((0, 1), (0, 1)), ((), ()))
    function = jax.jit(
      functools.partial(jp.block_scaled_dot, dimension_numbers=numbers),
      out_shardings=NamedSharding(self.mesh, P("b", "a")),
    )
    x_q, g_q = (jp.quantize(v, jp.MXFP8, axis=1) for v in (x, g))
    rows = [self.put(v, P("a", "b")) for v in (g_q, x_q)]
    result = function(*rows)
    np.testing.assert_array_equal(result, np.einsum("bsn,bsk->nk", g, x))


class ArgumentTest(parameterized.TestCase):
  @parameterized.parameters("int8", "float64", "no dtype")
  def test_other_dtypes_are_refused_by_name(self, dtype):
    x = jp.quantize(np.ones((32, 32), np.float32), jp.MXFP8)
    for function, args in (
      (jp.block_scaled_dot, (x, x)),
      (jp.linear, (x, x)),
      (jp.dot_general, (jp.MXFP8, jp.MXFP8)),
    ):
      who = function.__name__
      with self.assertRaisesRegex(
        TypeError, f"^{who}: reduce_dtype must be float32.*got '?{dtype}"
      ):
        function(*args, reduce_dtype=dtype)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
