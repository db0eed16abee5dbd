# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded ragged dots: right values, and what travels for them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import hlo_traffic

GROUPS, M, N, K = 8, 32, 64, 256
SIZES = np.array([5, 0, 3, 9, 0, 1, 2, 7], np.int32)  # five rows left over
KERNEL = re.compile(r'"jaxplugin_ragged_dot", operand_layout_constraints={(.*)')
F32, BF16 = contract.F32, contract.BF16
MXFP8, MXFP4, NVFP4 = jp.MXFP8, jp.MXFP4, jp.NVFP4
BY_EXPERT, BY_COLUMN, BY_K = P("b"), P(None, "b"), P(None, None, "b")


def gathered(format):
  """Collectives of rows that are gathered as bytes."""
  values, scales = M * K * format.value_bits // 8, M * K // format.block_size
  return [("all-gather", "u8", values), ("all-gather", "u8", scales)]


def summed(elements=M * N, kind="all-reduce"):
  return (kind, "f32", elements)


PERMUTED = [summed(M * N // 8, "collective-permute")] * 2
# Formats, specs of rows and weights, the wanted spec of the result, options,
# collectives, and the spec of a result without a wanted one.
COLLECTIVES = {
  "experts of an axis are each device's": (
    *((F32, MXFP4), (P(), BY_EXPERT), None, {}), [summed()]),
  "rows over one axis and experts over another": (
    *((MXFP8, MXFP4), (P("a"), BY_EXPERT), None),
    {"has_bias": True, "activation": "relu"}, [summed(M * N // 2)], P("a")),
  "rows over one axis and experts over another by xla": (
    *((MXFP8, MXFP4), (P("a"), BY_EXPERT), None),
    {"has_bias": True, "activation": "relu", "implementation": "xla"},
    [summed(M * N // 2)], P("a")),
  "rows of an axis": ((MXFP8, MXFP8), (P("a"), P()), None, {}, [], P("a")),
  "rows of two axes": (*((MXFP8, MXFP8), (P(("b", "a")), P()), None, {}, []),
    P(("b", "a"))),
  "rows over the axis of the experts are gathered as bytes": (
    *((MXFP8, MXFP4), (P("b"), BY_EXPERT), None, {}),
    [*gathered(MXFP8), summed(M * N // 4, "reduce-scatter")]),
  "gathered rows of FP4 are packed": (
    *((NVFP4, MXFP4), (P("b"), BY_EXPERT), P("b"), {}),
    [*gathered(NVFP4), summed(M * N // 4, "reduce-scatter")]),
  "a result that is wanted whole is an all-reduce": (
    *((MXFP4, MXFP4), (P("b"), BY_EXPERT), P(), {}),
    [
      *gathered(MXFP4),
      summed(M * N // 4, "reduce-scatter"),
      summed(kind="all-gather"),
    ],
  ),
  **{
    f"columns of {activation}": (
      *((BF16, NVFP4), (P(), BY_COLUMN), None),
      {"has_bias": True, "activation": activation},
      [],
      BY_COLUMN,
    )
    for activation in (None, "silu", "swigluoai")
  },
  "k is summed in f32 before the epilogue": (
    *((MXFP8, MXFP4), (BY_COLUMN, BY_K), None),
    {"has_bias": True, "activation": "relu"}, [summed()]),
  "k is scattered, and gates meet their values": (
    *((MXFP8, MXFP4), (BY_COLUMN, BY_K), BY_COLUMN),
    {"has_bias": True, "activation": "swiglu"},
    [summed(M * N // 4, "reduce-scatter"), *PERMUTED]),
  "k is scattered, and gates lie beside their values": (
    *((MXFP8, MXFP4), (BY_COLUMN, BY_K), BY_COLUMN),
    {"has_bias": True, "activation": "swigluoai"},
    [summed(M * N // 4, "reduce-scatter")]),
  "experts and k are one sum": (
    *((F32, MXFP8), (BY_COLUMN, P("a", None, "b")), None),
    {"has_bias": True, "activation": "relu"}, [summed()]),
  "k is scattered over rows": (*((MXFP8, MXFP4), (BY_COLUMN, BY_K), P("b")),
    {"has_bias": True, "activation": "swiglu"},
    [summed(M * N // 4, "reduce-scatter")]),
}  # fmt: skip


class ShardedRaggedTest(explicit.AutoTestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(0)

  def operand(self, format, shape):
    return ragged_suite.operand(self.rng, format, shape, integers=True)

  def run_sharded(
    self, lhs, rhs, sizes, lhs_spec, rhs_spec, out_spec=None, **options
  ):
    """(result, collectives, HLO) of a call of placed operands."""
    bias = options.pop("bias", None)
    mesh = options.pop("mesh", self.mesh)
    function = jax.jit(
      lambda lhs, rhs, sizes, bias: jp.ragged_dot(
        lhs, rhs, sizes, bias=bias, **options
      ),
      out_shardings=None if out_spec is None else NamedSharding(mesh, out_spec),
    )
    args = (
      explicit.put(mesh, lhs, lhs_spec),
      explicit.put(mesh, rhs, rhs_spec),
      sizes,
      bias,
    )
    text = function.lower(*args).compile().as_text()
    return function(*args), hlo_traffic.collectives(text), text

  def check(
    self, formats, specs, out_spec=None, *, n=N, has_bias=False, **options
  ):
    """Checks the result of a call with f64; returns what `run_sharded` does."""
    lhs, exact_lhs = self.operand(formats[0], (M, K))
    rhs, exact_rhs = self.operand(formats[1], (GROUPS, n, K))
    bias = None
    if has_bias:
      bias = self.rng.integers(-4, 5, (GROUPS, n)).astype(np.float32)
    sizes = options.pop("sizes", SIZES)
    found = self.run_sharded(
      *(lhs, rhs, sizes, *specs, out_spec), bias=bias, **options
    )
    activation = options.get("activation")
    expected = ragged_suite.expected_of(
      exact_lhs, exact_rhs, sizes, bias, activation
    )
    # Sums are exact. Activations have roundings of f32, and underflow.
    rtol, atol = (0, 0) if activation in (None, "relu") else (4e-6, 1e-30)
    np.testing.assert_allclose(found[0], expected, rtol=rtol, atol=atol)
    return found

  @parameterized.named_parameters(*((k, *v) for k, v in COLLECTIVES.items()))
  def test_collectives(
    self, formats, specs, out, options, expected, result_spec=None
  ):
    result, found, _ = self.check(formats, specs, out, **options)
    self.assertCountEqual(found, expected)
    if result_spec is not None:
      sharding = NamedSharding(self.mesh, result_spec)
      self.assertTrue(result.sharding.is_equivalent_to(sharding, 2))

  @parameterized.product(formats=((F32, MXFP4), (MXFP8, MXFP8), (NVFP4, NVFP4)))
  @pytest.mark.sample(1)
  def test_kernels_see_the_experts_of_a_device(self, formats):
    _, found, text = self.check(formats, (P(), BY_EXPERT))
    self.assertEqual(found, [summed()])
    (kernel,) = KERNEL.findall(text)  # two of the eight experts
    width = K * formats[1].value_bits // 8
    self.assertIn(f"u8[2,{N},{width}]", kernel)

  def test_a_short_last_block_leaves_rows_and_columns_sharded(self):
    lhs = self.rng.integers(-4, 5, (M, 192)).astype(np.float32)
    weights = self.rng.integers(-4, 5, (GROUPS, N, 192)).astype(np.float32)
    rhs = jp.quantize(weights, jp.FP8_1X128_E8M0)
    expected = ragged_suite.expected_of(lhs, weights, SIZES)
    result, found, _ = self.run_sharded(
      lhs, rhs, SIZES, P("a"), BY_COLUMN, P("a", "b")
    )
    self.assertEmpty(found)
    np.testing.assert_array_equal(result, expected)

  @parameterized.parameters(2, 3, 4, 5, 8)
  @pytest.mark.sample(4)
  def test_gates_and_values_far_apart_meet_in_two_permutations(self, parts):
    n = 16 * parts
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:parts]), "x")
    _, found, _ = self.check(
      *((MXFP8, MXFP8), (P(), P(None, "x")), P(None, "x")),
      n=n,
      has_bias=True,
      activation="swiglu",
      mesh=mesh,
    )
    self.assertEqual(found, [summed(M * n // parts // 2, PERMUTED[0][0])] * 2)

  @parameterized.product(
    specs=(
      (P("a"), P("b")),
      (P(("a", "b")), P()),
      (P("b"), P("b", "a")),
      (P("a"), P(("b", "a"))),
    ),
  )
  @pytest.mark.sample(1)
  def test_any_sizes(self, specs):
    # One program for all, with NaN wherever no group's row is.
    lhs, exact_lhs = self.operand(contract.F32, (M, K))
    rhs, exact_rhs = self.operand(jp.MXFP8, (GROUPS, N, K))
    dot = jax.jit(jp.ragged_dot)
    placed = self.put(rhs, specs[1])
    for kind in range(12):
      sizes = ragged_suite.random_sizes(self.rng, GROUPS, M, kind)
      is_own = ragged_suite.group_of_rows(sizes, M) >= 0
      poisoned = np.where(is_own[:, None], lhs, np.float32(np.nan))
      result = dot(self.put(poisoned, specs[0]), placed, sizes)
      np.testing.assert_array_equal(
        np.asarray(result),
        ragged_suite.expected_of(exact_lhs, exact_rhs, sizes),
      )

  @parameterized.parameters(([40, 0, 1, 1, 1, 1, 1, 1],), ([-3, 9] * 4,))
  @pytest.mark.sample(1)
  def test_sizes_that_do_not_fit_end_with_the_rows(self, sizes):
    sizes = np.array(sizes, np.int32)
    self.check((contract.F32, jp.MXFP8), (P("a"), P("b")), sizes=sizes)

  @parameterized.product(
    case=(
      ((1, 1), P("b")),
      ((1, 1), P(None, "b")),
      ((M, 1), P(None, None, "b")),
      ((M, 1), P("b")),
    ),
  )
  @pytest.mark.sample(3)
  def test_global_scales_of_rows_and_groups(self, case):
    lhs_scale, rhs_spec = case
    lhs, exact_lhs = self.operand(jp.NVFP4, (M, K))
    rhs, exact_rhs = self.operand(jp.NVFP4, (GROUPS, N, K))
    draw = lambda *shape: np.exp2(self.rng.integers(-9, 9, shape))
    of_lhs, of_rhs = draw(*lhs_scale), draw(GROUPS, 1, 1)
    with_scale = lambda x, s: jp.ScaledArray(
      x.values, x.scale, s.astype(np.float32), jp.NVFP4
    )
    lhs, rhs = with_scale(lhs, of_lhs), with_scale(rhs, of_rhs)
    function = jax.jit(jp.ragged_dot)
    result = function(
      jp.shard(lhs, NamedSharding(self.mesh, P("a"))),
      jp.shard(rhs, NamedSharding(self.mesh, rhs_spec)),
      SIZES,
    )
    np.testing.assert_array_equal(
      np.asarray(result),
      ragged_suite.expected_of(exact_lhs * of_lhs, exact_rhs * of_rhs, SIZES),
    )

  @parameterized.parameters("cpu", "b200", "h100")
  def test_prepared_weights_are_split_as_they_are(self, target):
    lhs, exact_lhs = self.operand(contract.BF16, (M, K))
    rhs, exact_rhs = self.operand(jp.MXFP4, (GROUPS, 128, K))
    prepared = jp.prepare_weights(rhs, jp.named_target(target))
    result, found, text = self.run_sharded(lhs, prepared, SIZES, P(), P("b"))
    np.testing.assert_array_equal(
      np.asarray(result), ragged_suite.expected_of(exact_lhs, exact_rhs, SIZES)
    )
    self.assertEqual(found, [("all-reduce", "f32", M * 128)])
    if target == "cpu":
      # The kernel reads the weights as they are.
      self.assertNotRegex(text, r"u8\[2,128,128\]\S* (fusion|copy|bitcast-c)")

  @parameterized.product(
    case=(
      (P(), P("b"), None),
      (P("a"), P("b"), "swigluoai"),
      (P("b"), P(None, "b"), "swigluoai"),
      (P(None, "b"), P(None, None, "b"), None),
    ),
  )
  @pytest.mark.full
  def test_gradients_gather_no_weights(self, case):
    lhs_spec, rhs_spec, activation = case
    rhs, exact = self.operand(jp.MXFP4, (GROUPS, N, K))
    lhs = self.rng.normal(size=(M, K)).astype(np.float32)
    bias = self.rng.normal(size=(GROUPS, N)).astype(np.float32)

    def ours(lhs, rhs, bias):
      y = jp.ragged_dot(lhs, rhs, SIZES, bias=bias, activation=activation)
      return jnp.sum(jnp.sin(y / 64))

    def theirs(lhs, bias):
      weights = jnp.asarray(exact, jnp.float32)
      y = ragged_suite.by_rows(lhs, weights, bias, SIZES, activation)
      return jnp.sum(jnp.sin(y / 64))

    function = jax.jit(jax.grad(ours, (0, 2)))
    args = self.put(lhs, lhs_spec), self.put(rhs, rhs_spec), bias
    for actual, expected in zip(
      function(*args), jax.grad(theirs, (0, 1))(lhs, bias), strict=True
    ):
      scale = float(np.abs(expected).max())
      np.testing.assert_allclose(actual, expected, atol=2e-5 * scale, rtol=1e-4)
    text = function.lower(*args).compile().as_text()
    for kind, dtype, size in hlo_traffic.collectives(text):
      self.assertNotEqual(dtype, "u8", (kind, size))
      self.assertLessEqual(size, M * K, (kind, dtype))
