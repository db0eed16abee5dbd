# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`vmap` and derivatives of ragged dots."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.ragged import calls, primitive
from jaxplugin.testing import contract, transformations
from jaxplugin.testing.dot_suite import ragged_suite

PRIMITIVE = "block_scaled_ragged_dot"
ENTRIES, GROUPS, M, N, K = 3, 4, 11, 16, 64
ARGUMENTS = ("lhs", "rhs", "sizes", "bias")
# Sizes that do not fit are cut of each entry for itself.
SIZES = np.array([[5, 0, 4, 1], [0, 0, 0, 0], [-2, 9, 7, 3]], np.int32)
# Shapes of the global scales of lhs and rhs, and whether weights are mapped.
SHAPES_OF_SCALES = tuple(
  itertools.product(
    ((ENTRIES, 1, 1), (ENTRIES, M, 1), (M, 1), None),
    ((ENTRIES, 1, 1, 1), (ENTRIES, GROUPS, 1, 1), (GROUPS, 1, 1)),
    (False, True),
  )
)
FITTING = np.array([[5, 0, 4, 1], [0, 0, 0, 0], [0, 9, 2, 0]], np.int32)


def ragged_dots(function, *args):
  """How many ragged dots a function has, and how many of them in loops."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  count = lambda eqns: sum(e.primitive.name == PRIMITIVE for e in eqns)
  loops = (
    eqn
    for eqn in transformations.equations(jaxpr)
    if eqn.primitive.name in ("scan", "while")
  )
  in_loops = sum(count(transformations.inner_equations(e)) for e in loops)
  return count(transformations.equations(jaxpr)), in_loops


class VmapTest(parameterized.TestCase):
  def operands(self, lhs_format, rhs_format, mapped, seed=0):
    """Arguments, mapped or not, and f(name, entry), the exact ones."""
    rng = np.random.default_rng(seed)
    make = lambda format, *shape: ragged_suite.operand(
      rng, format, shape, integers=True
    )
    lead = lambda name: (ENTRIES,) if name in mapped else ()
    lhs, exact_lhs = make(lhs_format, *lead("lhs"), M, K)
    rhs, exact_rhs = make(rhs_format, *lead("rhs"), GROUPS, N, K)
    bias = rng.integers(-4, 5, (*lead("bias"), GROUPS, N)).astype(np.float32)
    is_mapped = "sizes" in mapped
    args = (lhs, rhs, SIZES if is_mapped else SIZES[0], bias)
    exact = (exact_lhs, exact_rhs, FITTING if is_mapped else FITTING[0], bias)

    def of_entry(i):
      return [
        x[i] if name in mapped else x
        for name, x in zip(ARGUMENTS, exact, strict=True)
      ]

    return args, of_entry

  @parameterized.parameters(
    *(
      (mapped,)
      for count in range(1, 5)
      for mapped in itertools.combinations(ARGUMENTS, count)
    )
  )
  @pytest.mark.sample(2)
  def test_every_choice_of_mapped_arguments(self, mapped):
    args, of_entry = self.operands(contract.F32, jp.MXFP8, mapped)
    axes = tuple(0 if name in mapped else None for name in ARGUMENTS)
    function = jax.vmap(
      lambda lhs, rhs, sizes, bias: jp.ragged_dot(lhs, rhs, sizes, bias=bias),
      axes,
    )
    actual = jax.jit(function)(*args)
    for i in range(ENTRIES):
      np.testing.assert_array_equal(
        actual[i], ragged_suite.expected_of(*of_entry(i))
      )
    self.assertEqual(ragged_dots(function, *args), (1, 0))

  @parameterized.product(
    formats=((jp.NVFP4, jp.NVFP4), (jp.MXFP4, jp.MXFP8), (jp.MXFP8, jp.MXFP4)),
    mapped=(("lhs",), ("lhs", "sizes"), ("rhs",), ("lhs", "rhs", "sizes")),
  )
  @pytest.mark.sample(1)
  def test_quantized_rows(self, formats, mapped):
    args, of_entry = self.operands(*formats, mapped)
    axes = [0 if name in mapped else None for name in ARGUMENTS[:3]]
    function = jax.vmap(jp.ragged_dot, axes)
    actual = jax.jit(function)(*args[:3])
    for i in range(ENTRIES):
      np.testing.assert_array_equal(
        actual[i], ragged_suite.expected_of(*of_entry(i)[:3])
      )

  # Each shape of one side with two or three of the other.
  @parameterized.parameters(1, 3, 4, 9, 10, 12, 17, 19, 20)
  def test_global_scales(self, row):
    self.check_global_scales(*SHAPES_OF_SCALES[row])

  @parameterized.parameters(*SHAPES_OF_SCALES)
  @pytest.mark.full
  def test_all_pairs_of_global_scales(self, *shapes):
    self.check_global_scales(*shapes)

  def check_global_scales(self, lhs_shape, rhs_shape, has_weights):
    mapped = ("lhs", "sizes") + (("rhs",) if has_weights else ())
    rng = np.random.default_rng(1)
    (lhs, rhs, sizes, _), of_entry = self.operands(jp.NVFP4, jp.NVFP4, mapped)
    draw = lambda shape: np.exp2(rng.integers(-20, 20, shape or (1, 1))).astype(
      np.float32
    )
    of_lhs, of_rhs = draw(lhs_shape), draw(rhs_shape)

    # Arrays of which only values, or only the global scale, are mapped.
    def dot(lhs, lhs_global, rhs, rhs_global, sizes):
      lhs = jp.ScaledArray(*lhs, lhs_global, jp.NVFP4)
      rhs = jp.ScaledArray(*rhs, rhs_global, jp.NVFP4)
      return jp.ragged_dot(lhs, rhs, sizes)

    axis = lambda x, ndim: 0 if x.ndim > ndim else None
    in_axes = 0, axis(of_lhs, 2), 0 if has_weights else None, axis(of_rhs, 3), 0
    actual = jax.jit(jax.vmap(dot, in_axes))(
      (lhs.values, lhs.scale), of_lhs, (rhs.values, rhs.scale), of_rhs, sizes
    )
    for i in range(ENTRIES):
      exact_lhs, exact_rhs, fitting, _ = of_entry(i)
      own = lambda x, ndim: np.float64(x[i] if x.ndim > ndim else x)  # noqa: B023
      expected = ragged_suite.expected_of(
        exact_lhs * own(of_lhs, 2), exact_rhs * own(of_rhs, 3), fitting
      )
      np.testing.assert_array_equal(actual[i], expected)

  def test_global_scales_of_rows_repeat_for_each_entry(self):
    (lhs, rhs, _, _), of_entry = self.operands(jp.NVFP4, jp.MXFP8, ("lhs",))
    scale = np.exp2(np.arange(M)[:, None] % 5).astype(np.float32)
    dot = lambda *lhs: jp.ragged_dot(
      jp.ScaledArray(*lhs, scale, jp.NVFP4), rhs, SIZES[0]
    )
    actual = jax.jit(jax.vmap(dot))(lhs.values, lhs.scale)
    for i in range(ENTRIES):
      exact_lhs, *rest = of_entry(i)[:3]
      np.testing.assert_array_equal(
        actual[i], ragged_suite.expected_of(exact_lhs * scale, *rest)
      )

  @parameterized.parameters("silu", "swigluoai")
  @pytest.mark.full
  def test_gradients_of_a_vmap_are_those_of_a_loop(self, activation):
    mapped = ("lhs", "rhs", "sizes", "bias")
    (_, rhs, _, bias), _ = self.operands(contract.F32, jp.MXFP8, mapped)
    lhs = np.random.default_rng(2).normal(size=(ENTRIES, M, K))
    lhs = lhs.astype(np.float32) / 16

    def loss(lhs, bias, rhs, sizes):
      y = jp.ragged_dot(lhs, rhs, sizes, bias=bias, activation=activation)
      return jnp.sum(jnp.sin(y / 16))

    gradient = jax.grad(loss, (0, 1))
    actual = jax.jit(jax.vmap(gradient))(lhs, bias, rhs, FITTING)
    outside = jax.grad(
      lambda lhs, bias: jnp.sum(jax.vmap(loss)(lhs, bias, rhs, FITTING)),
      (0, 1),
    )(lhs, bias)
    for i in range(ENTRIES):
      expected = gradient(lhs[i], bias[i], rhs[i], FITTING[i])
      for results in (actual, outside):
        for have, want in zip(results, expected, strict=True):
          scale = float(np.abs(want).max()) + 1e-30
          np.testing.assert_allclose(have[i], want, atol=1e-5 * scale)

  # Three times 2^30 is below zero in i32, and three times -2^30 is above.
  @parameterized.parameters(
    ([2**30, 0, 0, 0], [M, 0, 0, 0]),
    ([3, 2**30, 2**30, 5], [3, M - 3, 0, 0]),
    ([-(2**30), 6, 0, 4], [0, 6, 0, 4]),
  )
  def test_huge_sizes_of_mapped_rows_do_not_wrap(self, sizes, fitting):
    (lhs, rhs, _, _), of_entry = self.operands(contract.F32, jp.MXFP8, ("lhs",))
    actual = jax.vmap(jp.ragged_dot, (0, None, None))(
      lhs, rhs, np.array(sizes, np.int32)
    )
    for i in range(ENTRIES):
      expected = ragged_suite.expected_of(*of_entry(i)[:2], np.array(fitting))
      np.testing.assert_array_equal(actual[i], expected)

  def test_symbolic_entries_of_rows(self):
    (lhs, rhs, sizes, _), of_entry = self.operands(
      contract.F32, jp.MXFP8, ("lhs",)
    )
    (entries,) = jax.export.symbolic_shape("entries")
    function = jax.vmap(lambda x: jp.ragged_dot(x, rhs, sizes))
    exported = jax.export.export(jax.jit(function))(
      jax.ShapeDtypeStruct((entries, M, K), jnp.float32)
    )
    actual = exported.call(lhs)
    for i in range(ENTRIES):
      np.testing.assert_array_equal(
        actual[i], ragged_suite.expected_of(*of_entry(i)[:3])
      )


_SIZES = np.array([2, 0, 3], np.int32)
_M, _N, _K = 6, 4, 8


class GradientsTest(parameterized.TestCase):
  @parameterized.parameters(((),), ((3,),), ((_M, 1),))
  @pytest.mark.sample(1)
  def test_both_have_the_global_scale(self, shape):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)
    x, w, g = draw(_M, _K), draw(3, _N, _K), draw(_M, _N)
    scale = np.exp2(np.arange(1, np.prod(shape, dtype=int) + 1)).reshape(shape)

    def dot(x, w):
      call = calls.plain(x, w, _SIZES, 2)
      call = call.replace(global_scale=jnp.float32(scale))
      return primitive.bind(call)

    of_x, of_w = jax.jit(lambda g: jax.vjp(dot, x, w)[1](g))(g)
    expected_x, expected_w = np.zeros((_M, _K)), np.zeros((3, _N, _K))
    for row, group in enumerate((0, 0, 2, 2, 2)):
      factor = scale.ravel()[{0: 0, 1: group, 2: row}[len(shape)]]
      expected_x[row] = factor * g[row] @ w[group]
      expected_w[group] += factor * np.outer(g[row], x[row])
    np.testing.assert_array_equal(of_x, expected_x)
    np.testing.assert_array_equal(of_w, expected_w)

  def test_cotangents_of_rows_of_no_group_are_not_read(self):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(_M, _K)), rng.normal(size=(3, _N, _K))

    @jax.jit
    def gradients(g):
      def dot(scale, activation):
        call = calls.plain(jnp.float32(x), jnp.float32(w), _SIZES, 2)
        call = call.replace(global_scale=scale, activation=activation)
        return primitive.bind(call)

      return [
        jax.vjp(lambda s, name=name: dot(s, name), jnp.float32(2))[1](g)
        for name in ("gelu", None)
      ]

    g = np.ones((_M, _N), np.float32)
    g[_SIZES.sum() :] = np.nan
    self.assertEqual(gradients(g), gradients(np.nan_to_num(g)))

  def test_gradient_of_a_forced_implementation_is_chosen(self):
    w = jp.quantize(np.ones((3, _N, 32), np.float32), "mxfp8")
    # The kernels for CPUs read w along its blocks; the gradient needs rows.
    dot = lambda x: jp.ragged_dot(x, w, _SIZES, implementation="cpu").sum()
    gradient = jax.jit(jax.grad(dot))(jnp.ones((_M, 32)))
    expected = np.repeat(_SIZES.sum() > np.arange(_M), 32).reshape(_M, 32) * _N
    np.testing.assert_array_equal(gradient, expected)
