# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts under recipes: its three products, and JAX around it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import quantization_lowerings
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import gradients_oracle, recipes_oracle

training = jp.training
_M, _N, _K, _GROUPS = 70, 64, 96, 4
_SIZES = np.array([37, 0, 5, 20], np.int32)
_ROWS = 62  # of groups; the others are of none
_KEY = jax.random.key(7)
_fixed_point = gradients_oracle.fixed_point
_step = gradients_oracle.with_gradients
_Numbers = jax.lax.RaggedDotDimensionNumbers
_NEAREST = dataclasses.replace(training.NVFP4_RECIPE, stochastic_rounding=False)


def _arrays(m=_M, groups=_GROUPS):
  """x, w and g."""
  return (
    _fixed_point(0, m, _K),
    _fixed_point(1, groups, _N, _K),
    _fixed_point(2, m, _N),
  )


def _dot(recipe, key=_KEY, sizes=_SIZES, **options):
  return lambda x, w: training.ragged_dot_general(
    x, w, sizes, recipe=recipe, key=key, **options
  )


@functools.cache
def _products_of_arrays():
  """Returns the result and both gradients with `_NEAREST`."""
  return jax.device_get(_step(_dot(_NEAREST, None))(*_arrays()))


@functools.partial(jax.jit, static_argnums=0)
def _vjp(dot, *args):
  """`jax.vjp`, what it keeps being leaves of the second."""
  return jax.vjp(dot, *args)


class ProductsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    *recipes_oracle.CASES,
    ("nvfp4_e4m3_gradients", training.NVFP4_RECIPE,
      {"grad_format": jp.MXFP8_E5M2, "weight_2d": False}),
    ("mxfp4_plain_weights", training.MXFP4_RECIPE, {"weight_format": None}),
    ("nvfp4_plain_activations", training.NVFP4_RECIPE,
      {"activation_format": None, "wgrad_hadamard": 64}),
    ("mxfp8_plain_gradients", training.MXFP8_RECIPE,
      {"grad_format": None, "wgrad_hadamard": 16}),
  )  # fmt: skip
  @pytest.mark.sample(1)
  def test_are_those_of_the_formulas_by_groups(self, recipe, fields):
    recipe = dataclasses.replace(recipe, **fields)
    x, w, g = _arrays()
    zeros = [a * (np.arange(_M) < _ROWS)[:, None] for a in (x, g)]
    expected = recipes_oracle.ragged_products(
      recipe, zeros[0], w, zeros[1], _SIZES, _KEY
    )
    # What no group has must be in no code: neither as NaN nor in a scale.
    x[_ROWS:], g[_ROWS:] = np.nan, 1e30
    forward, dgrad, wgrad = map(np.asarray, _step(_dot(recipe))(x, w, g))
    starts = np.cumsum(_SIZES) - _SIZES
    own = lambda a, i: a[starts[i] : starts[i] + _SIZES[i]]
    for i in range(_GROUPS):
      actual = own(forward, i), own(dgrad, i), wgrad[i]
      for name, a, e in zip(
        ("forward", "dgrad", "wgrad"), actual, expected, strict=True
      ):
        with self.subTest(name, group=i):
          # A product of quantized numbers that are off would be off by 2^-4.
          error = np.abs(a.astype(np.float64) - e[i].value)
          bound = gradients_oracle.BOUND * e[i].magnitude + 1e-300
          np.testing.assert_array_less(error, bound)
    for rest in (forward, dgrad):
      np.testing.assert_array_equal(rest[_ROWS:], 0)
    np.testing.assert_array_equal(wgrad[1], 0)  # of the empty group

  def test_rows_of_no_group_change_no_global_scale(self):
    x, w, g = _arrays()
    is_own = np.arange(_M)[:, None] < _ROWS
    expected, _, _ = recipes_oracle.ragged_products(
      _NEAREST, np.where(is_own, x, 0), w, np.where(is_own, g, 0), _SIZES
    )
    forward = jax.jit(_dot(_NEAREST, None))
    for number in (1e30, np.nan):
      result = forward(np.where(is_own, x, np.float32(number)), w)
      own = np.split(np.asarray(result, np.float64), np.cumsum(_SIZES))
      for actual, e in zip(own, expected, strict=False):
        bound = gradients_oracle.BOUND * e.magnitude + 1e-300
        np.testing.assert_array_less(np.abs(actual - e.value), bound)

  @parameterized.parameters("fp8_row", "int8_row")
  def test_rows_of_no_group_change_no_scale_of_all_rows(self, format):
    x, w, g = _arrays()
    is_own = np.arange(_M)[:, None] < _ROWS

    @jax.jit
    def wgrad(number):  # Only its scales are of columns.
      rows, given = (jnp.where(is_own, a, number) for a in (x, g))
      return jax.vjp(lambda w: _dot(format, None)(rows, w), w)[1](given)[0]

    zeros = wgrad(np.float32(0))
    for number in (1e6, np.nan):
      np.testing.assert_array_equal(wgrad(np.float32(number)), zeros)

  @parameterized.parameters((0, (0, 2, 1)), (1, (1, 2, 0)), (0, (2, 1, 0)))
  def test_other_orders_of_dimensions_are_the_same(self, m_dim, order):
    x, w, g = _arrays()
    numbers = _Numbers(
      (((1 - m_dim,), (order.index(2),)), ((), ())),
      (m_dim,),
      (order.index(0),),
    )
    expected = _products_of_arrays()
    dot = _dot(_NEAREST, None, ragged_dot_dimension_numbers=numbers)
    result, dx, dw = _step(dot)(x.T if m_dim else x, w.transpose(order), g)
    np.testing.assert_array_equal(result, expected[0])
    np.testing.assert_array_equal(dx.T if m_dim else dx, expected[1])
    np.testing.assert_array_equal(dw, expected[2].transpose(order))

  def test_quantized_weights_in_any_order_have_the_same_result(self):
    x, w, _ = _arrays()
    recipe = training.MXFP8_RECIPE
    quantized = jp.quantize_operand(
      w.swapaxes(1, 2), recipe, contracting=1, batch=0
    )
    numbers = _Numbers((((1,), (1,)), ((), ())), (0,), (0,))
    turned = _dot(recipe, ragged_dot_dimension_numbers=numbers)
    expected, of_rows = jax.jit(
      lambda x, w, w_q: (
        _dot(recipe)(x, w),
        [turned(x, w_q), _dot(recipe)(x, w_q.transposed((0, 2, 1)))],
      )
    )(x, w, quantized)
    for result in of_rows:
      np.testing.assert_array_equal(result, expected)

  def test_weights_of_jax_are_quantized_in_their_order(self):
    if jp.detect_target("cpu").cpu_kernels is None:
      return
    x, w, _ = _arrays()
    numbers = _Numbers((((1,), (1,)), ((), ())), (0,), (0,))
    dot = _dot(training.MXFP8_RECIPE, ragged_dot_dimension_numbers=numbers)
    step = jax.jit(jax.grad(lambda x, w: dot(x, w).sum(), (0, 1)))
    text = step.lower(x, w.swapaxes(1, 2)).compile().as_text()
    weights = re.findall(r"^.*\((?:.*, )?%w[.\d]*[,)].*$", text, re.MULTILINE)
    self.assertNotEmpty(weights)
    for line in weights:
      self.assertRegex(line, "jaxplugin_quantize|bitcast|ENTRY")

  @pytest.mark.full
  def test_dtypes_are_those_of_the_operands(self):
    x, w, g = _arrays()
    x, w, g = (a.astype(jnp.bfloat16) for a in (x, w, g))
    results = _step(_dot(_NEAREST, None))(x, w, g)
    self.assertEqual({a.dtype for a in results}, {np.dtype(jnp.bfloat16)})
    f32 = [a.astype(np.float32) for a in (x, w, g)]
    for a, e in zip(results, _step(_dot(_NEAREST, None))(*f32), strict=True):
      np.testing.assert_array_equal(a, e.astype(jnp.bfloat16))
    dot = _dot(_NEAREST, None, preferred_element_type=jnp.float32)
    self.assertEqual(jax.eval_shape(dot, x, w).dtype, jnp.float32)


class TransformationsTest(parameterized.TestCase):
  @pytest.mark.full
  def test_forward_mode_is_the_transpose_of_reverse(self):
    x, w, g = _arrays()
    recipe = dataclasses.replace(_NEAREST, grad_format=None)
    dot = _dot(recipe, None)
    tangents = _fixed_point(4, *x.shape), _fixed_point(5, *w.shape)
    tangent = jax.jit(lambda *t: jax.jvp(dot, (x, w), t)[1])(*tangents)
    cotangents = _step(dot)(x, w, g)[1:]
    ours = sum(np.vdot(t, c) for t, c in zip(tangents, cotangents, strict=True))
    theirs = np.vdot(tangent, g)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)

  def test_what_is_kept_is_bytes_with_names(self):
    x, w, _ = _arrays()
    _, pull = _vjp(_dot(training.MXFP8_RECIPE), x, w)
    kept = [a for a in jax.tree.leaves(pull) if a.size > 100]
    # Weights have no copy, because they stay in memory.
    (weights,) = [a for a in kept if a.dtype == np.float32]
    np.testing.assert_array_equal(weights, w)
    kept = [a for a in kept if a is not weights]
    self.assertEqual({str(a.dtype) for a in kept}, {"uint8"})
    # A byte a value, and scales; of lhs in whole blocks for each group.
    values = (_M + _GROUPS * 31) // 32 * 32 * _K
    self.assertEqual(sum(a.size for a in kept), values + values // 32)
    policy = jp.checkpoint_policies.quantized_saveable
    remat = jax.checkpoint(_dot(training.MXFP8_RECIPE), policy=policy)
    jaxpr = str(jax.make_jaxpr(lambda x, w: jax.vjp(remat, x, w)[1])(x, w))
    self.assertIn("jaxplugin_quantized_lhs", jaxpr)
    self.assertNotIn("jaxplugin_quantized_rhs", jaxpr)

  @pytest.mark.full
  def test_second_derivatives_where_gradients_are_not_quantized(self):
    x, w, _ = _arrays()
    recipe = dataclasses.replace(
      training.MXFP8_RECIPE, quantize_dgrad=False, quantize_wgrad=False
    )
    f = lambda x: jnp.sum(_dot(recipe)(x, w) ** 2)
    t = _fixed_point(4, *x.shape)
    tangent = jax.jit(lambda t: jax.jvp(jax.grad(f), (x,), (t,))[1])(t)
    # Straight through: the derivative of a product with w as it is.
    w = w[np.repeat(np.arange(_GROUPS), _SIZES)].astype(np.float64)
    inner = np.einsum("mk,mnk->mn", t[:_ROWS], w)
    expected = 2 * np.einsum("mn,mnk->mk", inner, w)
    np.testing.assert_allclose(tangent[:_ROWS], expected, atol=1e-2, rtol=1e-4)
    np.testing.assert_array_equal(tangent[_ROWS:], 0)
    weights = _arrays()[1]
    f = lambda x: jnp.sum(_dot(training.MXFP8_RECIPE)(x, weights) ** 2)
    with self.assertRaisesRegex(
      NotImplementedError, "ragged_dot_general: .*has no derivative"
    ):
      jax.jvp(jax.grad(f), (x,), (t,))

  @parameterized.parameters(
    (P("a"), P("b"), None, P("a", None)),
    (P(), P(None, "b"), None, P(None, "b")),
    (P(None, "b"), P(None, None, "b"), P("b"), P("b", None)),
    (P("b"), P("b"), P("b", "a"), P("b", "a")),
  )
  @pytest.mark.sample(1)
  def test_explicit_axes_type_results_and_gradients(
    self, x_spec, w_spec, out, spec
  ):
    mesh = explicit.mesh(self)
    x, w, g = _arrays(m=80)
    expected = _step(_dot(_NEAREST))(x, w, g)
    with jax.set_mesh(mesh):
      x, w, g = (
        explicit.put(mesh, array, own)
        for array, own in ((x, x_spec), (w, w_spec), (g, spec))
      )
      actual = _step(_dot(_NEAREST, out_sharding=out))(x, w, g)
    self.assertEqual(jax.typeof(actual[0]), jax.typeof(g))
    self.assertEqual(jax.typeof(actual[1]), jax.typeof(x))
    self.assertEqual(jax.typeof(actual[2]), jax.typeof(w))
    for have, want in zip(actual, expected, strict=True):
      # The same codes, and sums of the parts of devices.
      scale = float(np.abs(want).max())
      np.testing.assert_allclose(have, want, rtol=0, atol=2e-6 * scale)

  @quantization_lowerings.needs_library
  def test_explain_tells_each_product_and_its_cost(self):
    x, w, _ = _arrays()
    f = lambda x, w: jnp.sum(_dot(training.NVFP4_RECIPE)(x, w))
    told = jp.explain(jax.value_and_grad(f, (0, 1)), x, w)
    self.assertEqual(
      [d.phase for d in told.dots], ["forward", "dgrad", "wgrad"]
    )
    self.assertIn("contracting m by groups", told.details())
    self.assertEqual(
      [d.decision.implementation for d in told.dots], ["cpu", "cpu", "xla"]
    )


class ErrorsTest(parameterized.TestCase):
  def _check(self, error, pattern, x, w, sizes=_SIZES, **options):
    options.setdefault("recipe", training.MXFP8_RECIPE)
    with self.assertRaisesRegex(error, f"ragged_dot_general: {pattern}"):
      training.ragged_dot_general(x, w, sizes, **options)

  def test_names_rule_and_remedy(self):
    x, w, _ = _arrays()
    t, n = TypeError, NotImplementedError
    self._check(t, "recipe must be a .*, got 8", x, w, recipe=8)
    self._check(t, "lhs must be float32", x.astype(int), w)
    self._check(t, "lhs must be a plain array", jp.quantize(x, jp.MXFP8), w)
    self._check(t, "contracting sizes must agree", x[:, :32], w)
    self._check(
      t, "group_sizes must have one size for each of the 4", x, w, _SIZES[:2]
    )
    self._check(t, "preferred_element_type", x, w, preferred_element_type=int)
    self._check(t, "key must be", x, w, key=1.5)
    numbers = _Numbers((((0,), (0,)), ((), ())), (0,), ())
    self._check(
      *(n, "the ragged dimension must not be", x, x),
      ragged_dot_dimension_numbers=numbers,
    )
