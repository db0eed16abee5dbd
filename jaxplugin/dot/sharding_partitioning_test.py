# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sharded calls: right values, and no more communication than they need."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.testing import contract, exact_numbers
from jaxplugin.testing.exported import reading
from jaxplugin.testing.meshes import explicit

BATCH, M, N, K = 8, 64, 96, 512
SUM = ("all-reduce", f"f32[{M},{N}]")
integers = exact_numbers.integers
exact = exact_numbers.fours


def operands(format=jp.MXFP8, rhs_format=None, *, batch=(), k=K):
  """Both sides, of small integers: their product is exact in f32."""
  return (
    jp.quantize(integers(0, *batch, M, k), format),
    jp.quantize(integers(1, *batch, N, k), rhs_format or format),
  )


def product(k=K):
  return integers(0, M, k) @ integers(1, N, k).T


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
    ("rows", (), P(None, "b"), P("b"),
      ("reduce-scatter", f"f32[{M // 4},{N}]")),
    (*("columns", (), P(None, "b"), P(None, "b")),
      ("reduce-scatter", f"f32[{M},{N // 4}]")),
    # The whole k of rhs is sliced; lhs is not gathered.
    ("only_lhs", (), P(), None, SUM),
  )  # fmt: skip
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
    lhs = integers(0, M, 576)
    result, collectives = self.run_sharded(lhs, rhs, P("a"), P("b"), None)
    self.assertEmpty(collectives)
    self.assertEqual(result.sharding.spec, P("a", "b"))
    _, collectives = self.run_sharded(lhs, rhs, P("a", "b"), P("b"), None)
    self.assertEqual(collectives, [("all-gather", f"f32[{M // 2},576]")])

  def test_one_sided_operand_and_general_dimensions(self):
    lhs = integers(0, 4, K, M)  # plain, [b, k, m]
    rhs = jp.quantize(integers(1, N, K, 4), jp.MXFP4, axis=1)  # [n, k, b]
    numbers = (((1,), (1,)), ((0,), (2,)))
    function = jax.jit(
      lambda l, r: jp.block_scaled_dot(l, r, dimension_numbers=numbers)
    )
    expected = function(lhs, rhs)
    sharded_lhs = self.put(jax.device_put(lhs), P("a", None, "b"))
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

  @parameterized.product(
    check_vma=(True, False),
    specs=(
      (P("a"), P(), P("a")),
      (P(), P("b"), P(None, None, "b")),
      (P(None, "a"), P("b"), P(None, "a", "b")),
      (P(), P(), P()),
    ),
  )
  @pytest.mark.sample(1)
  def test_shard_map_says_over_which_axes_results_vary(self, check_vma, specs):
    *in_specs, out = specs
    varying = set(out) - {None} if check_vma else set()

    def local(l, r):
      dot = lambda l: jp.block_scaled_dot(l, r, bias=jnp.ones(r.shape[:1]))
      for y in (dot(l), jax.vmap(dot)(l)):
        self.assertEqual(set(jax.typeof(y).manual_axis_type.varying), varying)
      return y

    function = jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=tuple(in_specs),
      out_specs=out,
      check_vma=check_vma,
    )
    lhs = jp.quantize(integers(0, 2, M, K), jp.MXFP8)
    result = jax.jit(function)(lhs, operands()[1])
    expected = integers(0, 2, M, K) @ integers(1, N, K).T + 1
    np.testing.assert_array_equal(result, expected)

  def test_vmap_of_a_sharded_weight_stays_local(self):
    lhs = jp.quantize(integers(0, BATCH, M, K), jp.MXFP8)
    rhs = jp.quantize(integers(1, N, K), jp.MXFP8)
    function = jax.jit(jax.vmap(jp.block_scaled_dot, in_axes=(0, None)))
    expected = function(lhs, rhs)
    lhs, rhs = self.put(lhs, P("a")), self.put(rhs, P("b"))
    result = function(lhs, rhs)
    np.testing.assert_array_equal(result, expected)
    self.assertEmpty(reading.collectives(function.lower(lhs, rhs).compile()))


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
    )
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
    )
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


# Sums of as many integers of magnitude 1 are exact in bf16.
ROWS, COLUMNS, SUMMED = 16, 32, 256
BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def normal_pair():
  """NVFP4 of random numbers, [ROWS, SUMMED] and [COLUMNS, SUMMED]."""
  rng = np.random.default_rng(0)
  return [
    jp.quantize(rng.normal(size=(rows, SUMMED)).astype(np.float32), jp.NVFP4)
    for rows in (ROWS, COLUMNS)
  ]


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
    lhs, rhs = integers(0, ROWS, SUMMED), integers(1, COLUMNS, SUMMED)
    scale = np.float32(1 / 3)
    bias = np.linspace(-2, 2, COLUMNS, dtype=np.float32)
    result = self.run_sharded(
      functools.partial(
        jp.block_scaled_dot, bias=bias, activation="relu", reduce_dtype=dtype
      ),
      with_global_scale(jax.device_put(lhs), jnp.full((1, 1), scale)),
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
    lhs, rhs = (
      integers(0, ROWS, SUMMED, most=1),
      integers(1, COLUMNS, SUMMED, most=1),
    )
    rows = 2.0 ** np.arange(-8, 8, dtype=np.float32)[:, None]
    columns = 2.0 ** np.arange(-16, 16, dtype=np.float32)[:, None]
    for out in (P("a"), P(None, "a"), P("b", "a")):
      result = self.run_sharded(
        functools.partial(jp.block_scaled_dot, reduce_dtype=dtype),
        with_global_scale(jax.device_put(lhs), jax.device_put(rows)),
        with_global_scale(jax.device_put(rhs), jax.device_put(columns)),
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
