# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded ragged dots: right values, and what travels for them."""

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
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite

NUM_DEVICES = 8
GROUPS, M, N, K = 8, 32, 64, 256
SIZES = np.array([5, 0, 3, 9, 0, 1, 2, 7], np.int32)  # five rows left over
COLLECTIVE = re.compile(
  r"= \(?(\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all"
  r"|collective-permute)(?:-start)?\("
)
KERNEL = re.compile(r'"jaxplugin_ragged_dot", operand_layout_constraints={(.*)')


def collectives(text):
  """(kind, element type, elements) of each collective in optimized HLO."""
  found = []
  for dtype, dims, kind in COLLECTIVE.findall(text):
    size = int(np.prod([int(d) for d in dims.split(",") if d]))
    found.append((kind, dtype, size))
  return found


def expected_of(lhs, rhs, sizes, activation=None, bias=None):
  """In NumPy and f64."""
  result, _ = ragged_suite.oracle(lhs, rhs, sizes)
  of_row = ragged_suite.group_of_rows(sizes, len(lhs))
  if bias is not None:
    result = result + bias[of_row]
  result = ragged_suite.activate(result, activation)
  return np.where((of_row >= 0)[:, None], result, 0)


class ShardedRaggedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")
    self.mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:NUM_DEVICES]).reshape(2, 4), ("a", "b")
    )
    self.rng = np.random.default_rng(0)

  def operand(self, format, shape):
    return ragged_suite.operand(self.rng, format, shape, integers=True)

  def put(self, tree, spec, mesh=None):
    """Placed, with what has one number on all devices."""
    return jax.tree.map(
      lambda leaf: jax.device_put(
        leaf, NamedSharding(mesh or self.mesh, spec if leaf.size > 1 else P())
      ),
      tree,
    )

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
    lhs, rhs = self.put(lhs, lhs_spec, mesh), self.put(rhs, rhs_spec, mesh)
    text = function.lower(lhs, rhs, sizes, bias).compile().as_text()
    return function(lhs, rhs, sizes, bias), collectives(text), text

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
    expected = expected_of(exact_lhs, exact_rhs, sizes, activation, bias)
    # Sums are exact. Activations have roundings of f32, and underflow.
    rtol, atol = (0, 0) if activation in (None, "relu") else (4e-6, 1e-30)
    np.testing.assert_allclose(found[0], expected, rtol=rtol, atol=atol)
    return found

  def assert_spec(self, x, spec):
    self.assertTrue(
      x.sharding.is_equivalent_to(NamedSharding(self.mesh, spec), x.ndim),
      x.sharding,
    )

  @parameterized.product(
    formats=(
      (contract.F32, jp.MXFP4),
      (jp.MXFP8, jp.MXFP8),
      (jp.NVFP4, jp.NVFP4),
    ),
  )
  @pytest.mark.sample(1)
  def test_experts_over_an_axis_are_each_device_s_own(self, formats):
    _, found, text = self.check(formats, (P(), P("b")))
    self.assertEqual(found, [("all-reduce", "f32", M * N)])
    # The kernel is used, and sees two of the eight experts.
    (kernel,) = KERNEL.findall(text)
    width = K * formats[1].value_bits // 8
    self.assertIn(f"u8[2,{N},{width}]", kernel)

  @parameterized.product(implementation=("xla", None))
  @pytest.mark.sample(2)
  def test_rows_over_one_axis_and_experts_over_another(self, implementation):
    result, found, _ = self.check(
      (jp.MXFP8, jp.MXFP4),
      (P("a"), P("b")),
      has_bias=True,
      activation="relu",
      implementation=implementation,
    )
    self.assertEqual(found, [("all-reduce", "f32", M * N // 2)])
    self.assert_spec(result, P("a"))

  @parameterized.product(lhs_spec=(P("a"), P(("b", "a"))))
  @pytest.mark.sample(1)
  def test_rows_alone_need_no_collective(self, lhs_spec):
    result, found, _ = self.check((jp.MXFP8, jp.MXFP8), (lhs_spec, P()))
    self.assertEmpty(found)
    self.assert_spec(result, lhs_spec)

  def test_a_short_last_block_leaves_rows_and_columns_sharded(self):
    lhs = self.rng.integers(-4, 5, (M, 192)).astype(np.float32)
    weights = self.rng.integers(-4, 5, (GROUPS, N, 192)).astype(np.float32)
    rhs = jp.quantize(weights, jp.FP8_1X128_E8M0)
    expected = expected_of(lhs, weights, SIZES)
    result, found, _ = self.run_sharded(
      lhs, rhs, SIZES, P("a"), P(None, "b"), P("a", "b")
    )
    self.assertEmpty(found)
    np.testing.assert_array_equal(result, expected)

  @parameterized.product(
    case=((jp.MXFP8, None), (jp.NVFP4, P("b")), (jp.MXFP4, P())),
  )
  @pytest.mark.sample(1)
  def test_rows_over_the_axis_of_the_experts_are_gathered_as_bytes(self, case):
    format, out_spec = case
    _, found, _ = self.check((format, jp.MXFP4), (P("b"), P("b")), out_spec)
    values, scales = M * K * format.value_bits // 8, M * K // format.block_size
    summed = [("reduce-scatter", "f32", M * N // 4)]
    if out_spec == P():  # an all-reduce is both
      summed.append(("all-gather", "f32", M * N))
    self.assertCountEqual(
      found,
      [("all-gather", "u8", values), ("all-gather", "u8", scales), *summed],
    )

  @parameterized.product(
    activation=(None, "silu", "swigluoai"),
  )
  @pytest.mark.sample(1)
  def test_columns_need_no_collective(self, activation):
    result, found, _ = self.check(
      (contract.BF16, jp.NVFP4),
      (P(), P(None, "b")),
      has_bias=True,
      activation=activation,
    )
    self.assertEmpty(found)
    self.assert_spec(result, P(None, "b"))

  @parameterized.parameters(2, 3, 4, 5, 8)
  @pytest.mark.sample(4)
  def test_gates_and_values_far_apart_meet_in_two_permutations(self, parts):
    n = 16 * parts
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:parts]), "x")
    _, found, _ = self.check(
      (jp.MXFP8, jp.MXFP8),
      (P(), P(None, "x")),
      P(None, "x"),
      n=n,
      has_bias=True,
      activation="swiglu",
      mesh=mesh,
    )
    permutation = ("collective-permute", "f32", M * n // parts // 2)
    self.assertEqual(found, [permutation] * 2)

  @parameterized.product(
    case=(
      ("relu", None, "all-reduce", 1),
      ("swiglu", P(None, "b"), "reduce-scatter", 4),
      ("swigluoai", P(None, "b"), "reduce-scatter", 4),
      ("swiglu", P("b"), "reduce-scatter", 4),
    ),
  )
  @pytest.mark.sample(2)
  def test_contracting_sums_in_f32_before_what_follows(self, case):
    activation, out_spec, kind, parts = case
    _, found, _ = self.check(
      (jp.MXFP8, jp.MXFP4),
      (P(None, "b"), P(None, None, "b")),
      out_spec,
      has_bias=True,
      activation=activation,
    )
    permuted = []
    if activation == "swiglu" and out_spec == P(None, "b"):
      permuted = [("collective-permute", "f32", M * N // 8)] * 2
    self.assertEqual(found, [(kind, "f32", M * N // parts), *permuted])

  @pytest.mark.full
  def test_experts_and_contracting_are_one_sum(self):
    _, found, _ = self.check(
      (contract.F32, jp.MXFP8),
      (P(None, "b"), P("a", None, "b")),
      has_bias=True,
      activation="relu",
    )
    self.assertEqual(found, [("all-reduce", "f32", M * N)])

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
        np.asarray(result), expected_of(exact_lhs, exact_rhs, sizes)
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
      expected_of(exact_lhs * of_lhs, exact_rhs * of_rhs, SIZES),
    )

  @parameterized.parameters("cpu", "b200", "h100")
  def test_prepared_weights_are_split_as_they_are(self, target):
    lhs, exact_lhs = self.operand(contract.BF16, (M, K))
    rhs, exact_rhs = self.operand(jp.MXFP4, (GROUPS, 128, K))
    prepared = jp.prepare_weights(rhs, jp.named_target(target))
    result, found, text = self.run_sharded(lhs, prepared, SIZES, P(), P("b"))
    np.testing.assert_array_equal(
      np.asarray(result), expected_of(exact_lhs, exact_rhs, SIZES)
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
    of_row = ragged_suite.group_of_rows(SIZES, M)

    def ours(lhs, rhs, bias):
      y = jp.ragged_dot(lhs, rhs, SIZES, bias=bias, activation=activation)
      return jnp.sum(jnp.sin(y / 64))

    def theirs(lhs, bias):
      weights = jnp.asarray(exact, jnp.float32)[of_row]
      z = jnp.einsum("mk,mnk->mn", lhs, weights, precision="highest")
      z = z + bias[of_row]
      if activation is not None:
        gate, value = jnp.minimum(z[:, ::2], 7), jnp.clip(z[:, 1::2], -7, 7)
        z = gate * jax.nn.sigmoid(1.702 * gate) * (value + 1)
      z = jnp.where((of_row >= 0)[:, None], z, 0)
      return jnp.sum(jnp.sin(z / 64))

    function = jax.jit(jax.grad(ours, (0, 2)))
    args = self.put(lhs, lhs_spec), self.put(rhs, rhs_spec), bias
    for actual, expected in zip(
      function(*args), jax.grad(theirs, (0, 1))(lhs, bias), strict=True
    ):
      scale = float(np.abs(expected).max())
      np.testing.assert_allclose(actual, expected, atol=2e-5 * scale, rtol=1e-4)
    text = function.lower(*args).compile().as_text()
    for kind, dtype, size in collectives(text):
      self.assertNotEqual(dtype, "u8", (kind, size))
      self.assertLessEqual(size, M * K, (kind, dtype))


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
  absltest.main()
