# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded ragged contractions: right values, and what travels for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import contraction_suite, ragged_suite
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import hlo_traffic

GROUPS, M, N, K = 8, 256, 48, 64
SIZES = np.array([50, 0, 33, 9, 0, 31, 2, 77], np.int32)
NUMBERS = contraction_suite.NUMBERS


def expected_of(*args):
  return contraction_suite.oracle(*args)[0]


class ShardedContractionTest(explicit.AutoTestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(0)

  def operand(self, format, columns):
    """Blocked along its rows."""
    operand, exact = ragged_suite.operand(
      self.rng, format, (columns, M), integers=True
    )
    if isinstance(operand, jp.ScaledArray):
      # The same values, blocked along the first dimension.
      values = np.asarray(exact.T, np.float32)
      operand = jp.quantize(values, format, axis=0)
      return operand, np.asarray(jp.dequantize(operand), np.float64)
    return np.ascontiguousarray(operand.T), exact.T

  def run_sharded(self, lhs, rhs, sizes, lhs_spec, rhs_spec, out_spec):
    """(result, collectives) of a call of placed operands."""
    sharding = lambda spec: NamedSharding(self.mesh, spec)
    function = jax.jit(
      lambda *args: jp.ragged_dot_general(*args, NUMBERS),
      out_shardings=sharding(out_spec),
    )
    args = (
      jp.shard(lhs, sharding(lhs_spec)),
      jp.shard(rhs, sharding(rhs_spec)),
      sizes,
    )
    text = function.lower(*args).compile().as_text()
    return function(*args), hlo_traffic.collectives(text)

  @parameterized.product(
    case=(
      (P("a"), P("a"), P(), [("all-reduce", "f32", GROUPS * N * K)]),
      (
        *(P("b"), P("b"), P(None, "b")),
        [("reduce-scatter", "f32", GROUPS * N * K // 4)],
      ),
      (P(), P(), P("b"), []),
      (P("a"), P("a"), P("b"), [("all-reduce", "f32", GROUPS * N * K // 4)]),
      (P(None, "a"), P(None, "b"), P(None, "a", "b"), []),
    ),
    formats=((contract.F32, contract.F32), (jp.MXFP8, jp.MXFP4)),
  )
  @pytest.mark.sample(1)
  def test_each_split_has_one_collective_at_most(self, case, formats):
    *specs, collectives = case
    lhs, exact_lhs = self.operand(formats[0], N)
    rhs, exact_rhs = self.operand(formats[1], K)
    result, found = self.run_sharded(lhs, rhs, SIZES, *specs)
    expected = expected_of(exact_lhs, exact_rhs, SIZES)
    np.testing.assert_array_equal(np.asarray(result), expected)
    self.assertEqual(found, collectives)

  def test_rows_over_the_axis_of_the_groups_are_gathered_as_bytes(self):
    lhs, exact_lhs = self.operand(jp.MXFP8, N)
    rhs, exact_rhs = self.operand(jp.MXFP4, K)
    result, found = self.run_sharded(lhs, rhs, SIZES, P("b"), P("b"), P("b"))
    expected = expected_of(exact_lhs, exact_rhs, SIZES)
    np.testing.assert_array_equal(np.asarray(result), expected)
    sizes = (M * N, M * N // 32, M * K // 2, M * K // 32)
    self.assertCountEqual(found, [("all-gather", "u8", s) for s in sizes])

  @parameterized.parameters(
    (P("a"), P("a"), P("b")),
    (P("b"), P("b"), P("b")),
    (P(), P(), P(("a", "b"))),
  )
  @pytest.mark.sample(1)
  def test_any_sizes(self, lhs_spec, rhs_spec, out_spec):
    lhs, exact_lhs = self.operand(contract.F32, N)
    rhs, exact_rhs = self.operand(jp.MXFP4, K)
    sharding = lambda spec: NamedSharding(self.mesh, spec)
    function = jax.jit(
      lambda *args: jp.ragged_dot_general(*args, NUMBERS),
      out_shardings=sharding(out_spec),
    )
    rhs = jp.shard(rhs, sharding(rhs_spec))
    for kind in range(8):
      sizes = ragged_suite.random_sizes(self.rng, GROUPS, M, kind)
      # NaN where no group's row is.
      is_own = ragged_suite.group_of_rows(sizes, M) >= 0
      poisoned = np.where(is_own[:, None], lhs, np.float32(np.nan))
      result = function(jp.shard(poisoned, sharding(lhs_spec)), rhs, sizes)
      np.testing.assert_array_equal(
        np.asarray(result), expected_of(exact_lhs, exact_rhs, sizes)
      )

  def test_parts_are_summed_in_f32(self):
    # The sums of both halves are not exact in bf16. Their sum is.
    lhs = np.repeat(np.array([[257.0], [-1.0]], np.float32), M // 2, 0)
    rhs = np.zeros((M, 4), np.float32)
    rhs[0] = rhs[M // 2] = 1
    sizes = np.array([M, 0], np.int32)
    sharding = NamedSharding(self.mesh, P("a"))
    result = jax.jit(
      lambda *args: jp.ragged_dot_general(
        *args, NUMBERS, preferred_element_type=jnp.bfloat16
      )
    )(jp.shard(lhs, sharding), jp.shard(rhs, sharding), sizes)
    np.testing.assert_array_equal(
      np.asarray(result, np.float64)[0], [[256] * 4]
    )

  @parameterized.parameters(
    (P("a"), P("a"), (None, None, None)),
    (P("a", "b"), P("a"), (None, "b", None)),
    (P(), P(None, "b"), (None, None, "b")),
    # The wanted result: rows are summed over, and the sum is scattered.
    (P("a"), P("a"), ("b", None, "a"), P("b", None, "a")),
  )
  @pytest.mark.sample(2)
  def test_explicit_axes_type_the_result_and_gradients(
    self, lhs_spec, rhs_spec, spec, out=None
  ):
    lhs, exact_lhs = self.operand(contract.F32, N)
    rhs, exact_rhs = self.operand(contract.F32, K)
    mesh = explicit.mesh(self)
    function = functools.partial(
      jp.ragged_dot_general,
      ragged_dot_dimension_numbers=NUMBERS,
      out_sharding=out,
    )

    def loss(*args):
      y = function(*args)
      return jnp.sum(y**2) / 64, y

    with jax.set_mesh(mesh):
      args = (
        explicit.put(mesh, lhs, lhs_spec),
        explicit.put(mesh, rhs, rhs_spec),
        SIZES,
      )
      g, result = jax.jit(jax.grad(loss, has_aux=True))(*args)
    self.assertEqual(tuple(jax.typeof(result).sharding.spec), spec)
    self.assertEqual(jax.typeof(g), jax.typeof(args[0]))
    expected = expected_of(exact_lhs, exact_rhs, SIZES)
    np.testing.assert_array_equal(np.asarray(result), expected)
    of_row = ragged_suite.group_of_rows(SIZES, M)
    expected = np.einsum("mnk,mk->mn", expected[of_row], exact_rhs) / 32
    expected[of_row < 0] = 0
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-2)
