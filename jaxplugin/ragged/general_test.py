# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot_general` and `align_groups` under JAX, and their errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.testing.dot_suite import contraction_suite, ragged_suite

_M, _N, _K = 24, 6, 10
_SIZES = np.array([9, 0, 11], np.int32)
_NUMBERS = contraction_suite.NUMBERS
_Numbers = jax.lax.RaggedDotDimensionNumbers


def _arrays(seed=0):
  rng = np.random.default_rng(seed)
  lhs = rng.normal(size=(_M, _N)).astype(np.float32)
  rhs = rng.normal(size=(_M, _K)).astype(np.float32)
  return lhs, rhs


def _contract(lhs, rhs, sizes=_SIZES, **options):
  return jp.ragged_dot_general(lhs, rhs, sizes, _NUMBERS, **options)


class DimensionsTest(parameterized.TestCase):
  @parameterized.parameters(*itertools.product((0, 1), (0, 1)))
  @pytest.mark.sample(1)
  def test_contraction_of_any_order_is_that_of_numpy(self, lhs_m, rhs_m):
    lhs, rhs = _arrays()
    expected, _ = contraction_suite.oracle(lhs, rhs, _SIZES)
    lhs = lhs.T if lhs_m else lhs
    rhs = rhs.T if rhs_m else rhs
    numbers = _Numbers((((lhs_m,), (rhs_m,)), ((), ())), (lhs_m,), ())
    actual = jp.ragged_dot_general(lhs, rhs, _SIZES, numbers)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(
    *itertools.product((0, 1), itertools.permutations(range(3)))
  )
  @pytest.mark.sample(2)
  def test_ragged_rows_of_any_order_are_those_of_numpy(self, m_dim, order):
    rng = np.random.default_rng(1)
    groups, n, k = 3, 8, 32
    x = rng.integers(-4, 5, (_M, k)).astype(np.float32)
    w_q, exact = ragged_suite.operand(
      rng, jp.MXFP8, (groups, n, k), integers=True
    )
    expected, _ = ragged_suite.oracle(x, exact, _SIZES)
    x, w_q = x.T if m_dim else x, w_q.transpose(order)
    group, k_dim = order.index(0), order.index(2)
    numbers = _Numbers((((1 - m_dim,), (k_dim,)), ((), ())), (m_dim,), (group,))
    actual = jp.ragged_dot_general(x, w_q, _SIZES, numbers)
    np.testing.assert_array_equal(actual, expected)


class TransformationsTest(parameterized.TestCase):
  def test_derivatives_of_both_orders_and_modes(self):
    args, tangents = _arrays(), _arrays(1)
    g = np.random.default_rng(2).normal(size=(3, _N, _K)).astype(np.float32)

    @jax.jit
    def run(args, tangents, g):
      slope = lambda *args: jax.jvp(_contract, args, tangents)[1]
      back = lambda *args: jax.vjp(_contract, *args)[1](g)
      return (
        (back(*args), slope(*args), jax.jvp(slope, args, tangents)[1]),
        # Forward over reverse, reverse over forward, reverse over reverse.
        jax.jvp(back, args, tangents)[1],
        jax.vjp(slope, *args)[1](g),
        jax.vjp(back, *args)[1](tangents),
      )

    exact = lambda lhs, rhs: contraction_suite.oracle(
      lhs.astype(np.float64), rhs.astype(np.float64), _SIZES
    )[0]
    of_row = ragged_suite.group_of_rows(_SIZES, _M)
    of_row_g = np.where(of_row[:, None, None] < 0, 0, g[of_row])
    pulled = lambda lhs, rhs: (
      np.einsum("mk,mnk->mn", rhs, of_row_g),
      np.einsum("mn,mnk->mk", lhs, of_row_g),
    )
    (lhs, rhs), (lhs_dot, rhs_dot) = args, tangents
    first, *mixed = run(args, tangents, g)
    slope = exact(lhs_dot, rhs) + exact(lhs, rhs_dot)
    expected = pulled(lhs, rhs), slope, 2 * exact(lhs_dot, rhs_dot)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(near, first, expected)
    for found in mixed:
      jax.tree.map(near, found, pulled(lhs_dot, rhs_dot))

  @parameterized.parameters("lhs", "rhs")
  @pytest.mark.sample(1)
  def test_gradient_beside_a_quantized_side_is_exact_on_integers(self, side):
    rng = np.random.default_rng(2)
    m, n, k = 64, 8, 12
    sizes = np.array([20, 0, 33], np.int32)
    shapes = {"lhs": (m, n), "rhs": (m, k)}
    other = "rhs" if side == "lhs" else "lhs"
    quantized, exact = ragged_suite.operand(
      rng, jp.NVFP4, shapes[other], axis=0, integers=True
    )
    scale = np.full((1, 1), 0.25, np.float32)
    quantized = jp.ScaledArray(
      quantized.values, quantized.scale, scale, jp.NVFP4
    )
    exact = exact * 0.25
    x = rng.integers(-4, 5, shapes[side]).astype(np.float32)
    g = rng.integers(-4, 5, (3, n, k)).astype(np.float32)

    def f(x):
      pair = (x, quantized) if side == "lhs" else (quantized, x)
      return _contract(*pair, sizes)

    of_row = ragged_suite.group_of_rows(sizes, m)
    each = g.astype(np.float64)[of_row]
    equation = "mk,mnk->mn" if side == "lhs" else "mn,mnk->mk"
    expected = np.einsum(equation, exact, each)
    expected[of_row < 0] = 0
    pull = jax.jit(lambda x, g: jax.vjp(f, x)[1](g)[0])
    np.testing.assert_array_equal(pull(x, g), expected)

  def test_global_scale_has_its_derivative(self):
    lhs, rhs = _arrays()
    lhs = np.concatenate([lhs, lhs])[:32]
    rhs = np.concatenate([rhs, rhs])[:32]
    lhs_q = jp.quantize(lhs, jp.NVFP4, axis=0)
    rhs_q = jp.quantize(rhs, jp.NVFP4, axis=0)

    def f(a, b):
      scaled = lambda x, s: jp.ScaledArray(
        x.values, x.scale, x.global_scale * s, jp.NVFP4
      )
      return jnp.sum(_contract(scaled(lhs_q, a), scaled(rhs_q, b)) ** 2)

    b = np.ones((1, _K), np.float32)
    value, (of_a, of_b) = jax.jit(jax.value_and_grad(f, (0, 1)))(1.0, b)
    # Homogeneous of degree two in each.
    np.testing.assert_allclose(of_a, 2 * value, rtol=1e-5)
    np.testing.assert_allclose(np.sum(of_b), 2 * value, rtol=1e-5)

  @parameterized.parameters("lhs", "rhs", "sizes", "both", "all")
  @pytest.mark.sample(2)
  def test_vmap(self, mapped):
    lhs, rhs = zip(*(_arrays(seed) for seed in range(2)), strict=True)
    many = (
      np.stack(lhs),
      np.stack(rhs),
      np.array([[9, 0, 11], [1, 20, 3]], np.int32),
    )
    is_mapped = [
      mapped in (name, "all") or (mapped == "both" and name != "sizes")
      for name in ("lhs", "rhs", "sizes")
    ]
    args = [x if m else x[0] for x, m in zip(many, is_mapped, strict=True)]
    axes = tuple(0 if m else None for m in is_mapped)
    actual = jax.jit(jax.vmap(_contract, axes))(*args)
    for i in range(2):
      own = [x[i] if m else x for x, m in zip(args, is_mapped, strict=True)]
      expected, _ = contraction_suite.oracle(*map(np.float64, own[:2]), own[2])
      np.testing.assert_allclose(actual[i], expected, atol=1e-4)

  @parameterized.product(
    mapped=("lhs", "rhs", "sizes", "both"), has_gradient=(False, True)
  )
  def test_vmap_of_no_entries_is_empty(self, mapped, has_gradient):
    lhs, rhs = _arrays()
    is_mapped = [
      name == mapped or (mapped == "both" and name != "sizes")
      for name in ("lhs", "rhs", "sizes")
    ]
    args = [
      np.zeros((0, *x.shape), x.dtype) if m else x
      for x, m in zip((lhs, rhs, _SIZES), is_mapped, strict=True)
    ]
    axes = tuple(0 if m else None for m in is_mapped)
    if has_gradient:
      function = jax.grad(lambda *args: jnp.sum(_contract(*args)), (0, 1))
      expected = [(0, *lhs.shape), (0, *rhs.shape)]
    else:
      function = lambda *args: [_contract(*args)]
      expected = [(0, len(_SIZES), _N, _K)]
    actual = jax.jit(jax.vmap(function, axes))(*args)
    self.assertEqual([x.shape for x in actual], expected)

  @parameterized.parameters("lhs", "rhs")
  @pytest.mark.sample(1)
  def test_vmap_of_a_quantized_side_keeps_the_other(self, side):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 64, _N)).astype(np.float32)
    x_q = jp.quantize(x, jp.NVFP4, axis=1)
    x_q = jp.ScaledArray(
      x_q.values, x_q.scale, x_q.global_scale.reshape(1, 1), jp.NVFP4
    )
    y = rng.normal(size=(64, _K)).astype(np.float32)
    swap = lambda a, b: (a, b) if side == "lhs" else (b, a)
    f = lambda values, scale: _contract(
      *swap(jp.ScaledArray(values, scale, x_q.global_scale, jp.NVFP4), y)
    )

    @jax.jit
    def run(values, scale):
      each = [f(values[i], scale[i]) for i in range(2)]
      return jax.vmap(f)(values, scale), each

    actual, expected = run(x_q.values, x_q.scale)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    jaxpr = str(jax.make_jaxpr(jax.vmap(f))(x_q.values, x_q.scale))
    self.assertNotIn("scan", jaxpr)

  def test_export_with_a_symbolic_number_of_rows(self):
    (m,) = jax.export.symbolic_shape("m")
    exported = jax.export.export(jax.jit(_contract))(
      jax.ShapeDtypeStruct((m, _N), jnp.float32),
      jax.ShapeDtypeStruct((m, _K), jnp.float32),
      jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    loaded = jax.export.deserialize(exported.serialize())
    lhs, rhs = _arrays()
    for rows, sizes in ((7, [2, 0, 5]), (24, [9, 9, 3])):
      expected, _ = contraction_suite.oracle(
        lhs[:rows].astype(np.float64), rhs[:rows].astype(np.float64), sizes
      )
      actual = loaded.call(lhs[:rows], rhs[:rows], np.array(sizes, np.int32))
      np.testing.assert_allclose(actual, expected, atol=1e-4)

  def test_linear_transpose_of_both_at_once_is_refused(self):
    lhs, rhs = _arrays()
    with self.assertRaisesRegex(NotImplementedError, "lhs and rhs at once"):
      jax.linear_transpose(_contract, lhs, rhs)(
        np.ones((3, _N, _K), np.float32)
      )

  def test_values_and_scales_have_no_derivative(self):
    lhs = jp.quantize(np.ones((32, _N), np.float32), jp.MXFP8, axis=0)
    f = lambda s: _contract(
      jp.ScaledArray(lhs.values, s, None, jp.MXFP8), np.ones((32, _K))
    )
    with self.assertRaisesRegex(NotImplementedError, r"lhs_scale \(mxfp8\)"):
      jax.jvp(f, (lhs.scale,), (lhs.scale,))


class AlignGroupsTest(parameterized.TestCase):
  @parameterized.parameters(
    (20, [7, 0, 5], 4),
    (20, [20, 0, 0], 8),
    (3, [1, 1, 1], 16),
    (20, [0, 0, 0], 4),
    (5, [9, 1, 1], 4),
    (5, [2, -1, 2], 4),
    (2, [0, 1, 0, 1], 32),
    (12, [5, 7], 1),
    (0, [0, 0], 4),
  )
  def test_each_group_begins_at_a_multiple(self, m, sizes, multiple):
    rng = np.random.default_rng(m)
    x = rng.normal(size=(m, 3)).astype(np.float32)
    of_row = ragged_suite.group_of_rows(np.array(sizes), m)
    x[of_row < 0] = np.nan
    align = jax.jit(jp.align_groups, static_argnums=2)
    rows, new = align(x, np.array(sizes, np.int32), multiple)
    own = [x[of_row == g] for g in range(len(sizes))]
    padded = [
      np.pad(part, ((0, -len(part) % multiple), (0, 0))) for part in own
    ]
    self.assertEqual(list(new), [len(part) for part in padded])
    expected = np.concatenate(padded)
    self.assertLessEqual(len(expected), len(rows))
    most = m + min(len(sizes), m) * (multiple - 1)
    self.assertEqual(len(rows), most // multiple * multiple)
    if multiple > 1:
      expected = np.pad(expected, ((0, len(rows) - len(expected)), (0, 0)))
      np.testing.assert_array_equal(rows, expected)
    else:
      np.testing.assert_array_equal(rows[: len(expected)], expected)

  def test_contraction_of_aligned_groups_is_the_same(self):
    lhs, rhs = _arrays()
    lhs[20:], rhs[22:] = np.nan, np.nan

    @jax.jit
    def aligned(lhs, rhs):
      lhs, sizes = jp.align_groups(lhs, _SIZES, 32)
      rhs, _ = jp.align_groups(rhs, _SIZES, 32)
      return _contract(lhs, rhs, sizes)

    expected, _ = contraction_suite.oracle(
      np.nan_to_num(lhs).astype(float), np.nan_to_num(rhs).astype(float), _SIZES
    )
    np.testing.assert_allclose(aligned(lhs, rhs), expected, atol=1e-5)

  def test_its_derivative_brings_rows_back(self):
    lhs, _ = _arrays()
    f = lambda x: jp.align_groups(x, _SIZES, 4)[0]
    rows = jax.jit(f)(lhs)
    (back,) = jax.jit(lambda x, rows: jax.vjp(f, x)[1](rows))(lhs, rows)
    np.testing.assert_array_equal(back[:20], lhs[:20])
    np.testing.assert_array_equal(back[20:], 0)

  def test_errors_name_the_rule(self):
    lhs, _ = _arrays()
    check = lambda error, pattern, *args: self.assertRaisesRegex(
      error, pattern, jp.align_groups, *args
    )
    check(TypeError, "multiple must be an integer, got 4.0", lhs, _SIZES, 4.0)
    check(ValueError, "multiple must be at least 1, got 0", lhs, _SIZES, 0)
    check(TypeError, "group_sizes must be integers", lhs, _SIZES * 1.0, 4)
    check(TypeError, "x must have rank 1 or more", np.float32(1), _SIZES, 4)


class ExplainTest(absltest.TestCase):
  def test_cost_is_told(self):
    def aligned(lhs, rhs):
      rows, sizes = jp.align_groups(lhs, _SIZES, 32)
      rhs_rows, _ = jp.align_groups(rhs, _SIZES, 32)
      return jp.quantize(rows, jp.MXFP8, axis=0), rhs_rows, sizes

    args = jax.eval_shape(aligned, *_arrays())
    told = jp.explain(_contract, *args, target=jp.named_target("h200"))
    (dot,) = told.dots
    self.assertEqual(dot.decision.implementation, "xla")
    self.assertIn("groups=3 m=96 n=6 k=10, contracting m", told.details())
    self.assertIn("in tiles of 32 rows", told.details())
    self.assertIn("the host decides each step", told.details())
    self.assertIn("whole f32 or bf16 copies", told.details())
    read = 96 * 6 + 3 * 6 + 96 * 10 * 4 + 3 * 4
    self.assertEqual(dot.estimate.num_bytes, read + 3 * 6 * 10 * 4)


class DebugChecksTest(parameterized.TestCase):
  def test_explained_nans_and_overflow_pass(self):
    lhs, rhs = _arrays()
    lhs[1, 3] = np.nan

    @jax.jit
    def run(lhs, large, rhs):
      y = _contract(lhs, rhs)
      return y, _contract(large, rhs, preferred_element_type=jnp.float16)

    with jp.debug_checks():
      y, z = jax.device_get(run(lhs, lhs * 1e5, rhs))
    self.assertTrue(np.isnan(y[0, 3]).all())
    self.assertTrue(np.isfinite(np.delete(y[0], 3, 0)).all())
    self.assertTrue(np.isinf(z).any())


class ErrorsTest(parameterized.TestCase):
  def test_names_rule_and_remedy(self):
    lhs, rhs = _arrays()
    args = (lhs, rhs, _SIZES)
    stacked = np.ones((2, _M, _N), np.float32)
    experts = np.ones((3, _N, _K), np.float32)
    ones = np.ones((32, 32), np.float32)
    quantized = jp.quantize(ones, jp.MXFP8)
    through = jp.quantize(ones, jp.MXFP8, axis=0, derivative="straight_through")
    plain = ((0,), (0,)), ((), ())
    dims = lambda *dot, ragged=(0,), group=(): {
      "ragged_dot_dimension_numbers": _Numbers(dot, ragged, group)
    }
    t, v, n = TypeError, ValueError, NotImplementedError
    for error, pattern, given, options in (
      (t, "contracting sizes must agree", (lhs, rhs[:7], _SIZES), {}),
      (t, "group_sizes must be integers", (lhs, rhs, _SIZES * 1.0), {}),
      (t, "lhs without a scale must be", (lhs.astype(int), rhs, _SIZES), {}),
      (t, "float32, bfloat16 or", args, {"preferred_element_type": int}),
      (v, "implementation must be", args, {"implementation": "q"}),
      (v, "precision must be", args, {"precision": "fast"}),
      (*(t, "RaggedDotDimensionNumbers, got None", args),
        {"ragged_dot_dimension_numbers": None}),
      (t, "rhs must be blocked along m", (ones, quantized, _SIZES), {}),
      (*(t, r"one dimension of lhs must be ragged, got \(\)", args),
        dims(*plain, ragged=())),
      (*(t, r"lhs_ragged_dimensions \(2,\) must be", args),
        dims(*plain, ragged=(2,))),
      (t, "must have one group dimension", args, dims(*plain, group=(1,))),
      (*(n, "batch dimensions.* use jax.vmap", (stacked, stacked, _SIZES)),
        dims(((1,), (1,)), ((0,), (0,)), ragged=(1,))),
      (*(n, "merge other dimensions", (stacked, rhs, _SIZES)),
        dims(((1,), (0,)), ((), ()), ragged=(1,))),
      (n, "lhs was quantized with .*_through", (through, ones, _SIZES), {}),
      (*(t, "rhs must be a ScaledArray", (lhs, experts, _SIZES)),
        dims(((1,), (1,)), ((), ()), group=(0,))),
    ):  # fmt: skip
      options = {"ragged_dot_dimension_numbers": _NUMBERS} | options
      with (
        self.subTest(pattern),
        self.assertRaisesRegex(error, f"ragged_dot_general: .*{pattern}"),
      ):
        jp.ragged_dot_general(*given, **options)

  def test_negative_nvfp4_scale_is_refused(self):
    rows = jp.quantize(np.ones((16, 4), np.float32), jp.NVFP4, axis=0)
    scale = jnp.asarray(-np.asarray(rows.scale).astype(np.float32))
    bad = jp.ScaledArray(
      rows.values, scale.astype(rows.scale.dtype), rows.global_scale, jp.NVFP4
    )
    with self.assertRaisesRegex(ValueError, "ragged_dot_general: .*lhs_scale"):
      _contract(bad, np.ones((16, 2)))
