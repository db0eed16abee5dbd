# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `block_scaled_dot`: those of the product of dequantized sides.

Expected values are JAX's own derivatives of `lax.dot_general` and `jax.nn`, on
operands that NumPy dequantized. Integers under scales that are powers of two
make most of them exact. Under JAX's transformations and on meshes derivatives
are those of loops, of dense weights and on one device.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import arguments
from jaxplugin.testing import contract, transformations
from jaxplugin.testing.dot_suite import dot_cases
from jaxplugin.testing.meshes import explicit

# Each format beside each plain dtype, on either side.
KINDS = tuple(
  kind
  for pair in itertools.product(dot_cases.FORMATS, contract.RESULT_DTYPES)
  for kind in (pair, pair[::-1])
)
ACTIVATIONS = {
  None: lambda x: x,
  "relu": jax.nn.relu,
  "gelu": jax.nn.gelu,
  "silu": jax.nn.silu,
}
OPERANDS = ("lhs", "global_scale", "bias", "residual")
# Sums of 128 products in f32, in another order, behind f32 activations: 2^-24
# times a small multiple of the number of roundings, in units of the largest.
F32_ERROR = 2.0**-17

HAS_CPU_KERNELS = jp.detect_target("cpu").cpu_kernels is not None


def integers(rng, shape, dtype=np.float32):
  return jax.device_put(np.asarray(rng.integers(-4, 5, shape), dtype))


class SideTest(transformations.PrimitiveTestCase):
  @parameterized.parameters(
    *((i, (None, "xla")[i // 2 % 2]) for i in range(len(KINDS)))
  )
  @pytest.mark.sample(1)
  def test_derivatives_in_a_plain_side_are_exact(self, index, implementation):
    """Any dimension numbers, storage, padding and dtypes: `dot_cases`'s."""
    case = dot_cases.random_case(index, KINDS)
    rng = np.random.default_rng(index)
    sides = [
      contract.make_operand(rng, side, integers=True)
      for side in (case.lhs, case.rhs)
    ]
    position = 0 if case.lhs.format is None else 1
    plain = sides[position].operand

    def function(x, operands, scales):
      return jp.block_scaled_dot(
        *(x if i == position else operands[i] for i in (0, 1)),
        *scales,
        dimension_numbers=case.dimension_numbers,
        block_size=case.block_size,
        preferred_element_type=case.dtype,
        implementation=implementation,
      )

    def reference(x, operands, scales):
      del scales
      f32 = [jnp.asarray(x, jnp.float32) for x in operands]
      f32[position] = x.astype(jnp.float32)
      ranks = [x.ndim for x in f32]
      numbers = arguments.canonical_dimension_numbers(
        case.dimension_numbers, *ranks
      )
      return lax.dot_general(*f32, numbers, precision="highest")

    # The quantized are arguments, as weights are.
    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x, tangent, g, *quantized):
      only = lambda x: function(x, *quantized)
      value, pullback = jax.vjp(only, x)
      pushed = jax.jvp(only, (x,), (tangent,))[1]
      return value, pullback(g.astype(value.dtype))[0], pushed

    tangent = integers(rng, plain.shape, plain.dtype)
    exact = [side.exact for side in sides]
    shape = jax.eval_shape(reference, plain, exact, None).shape
    g = integers(rng, shape, case.dtype)
    operands, scales = [s.operand for s in sides], [s.scale for s in sides]
    actual = run(function, plain, tangent, g, operands, scales)
    expected = run(reference, plain, tangent, g, exact, None)
    for a, e, dtype in zip(
      actual, expected, (case.dtype, plain.dtype, case.dtype), strict=True
    ):
      contract.assert_exact(a, np.asarray(e, np.float64), dtype)
    np.testing.assert_array_equal(
      actual[0], jax.jit(function)(plain, operands, scales)
    )

  def test_gradient_has_dimensions_in_the_order_of_its_side(self):
    # rhs names both contracting dimensions in the other order.
    rng = np.random.default_rng(0)
    w = contract.operand(rng, jp.MXFP8, (5, 3, 64))
    g = integers(rng, (4, 5))
    dot = functools.partial(
      jp.block_scaled_dot, dimension_numbers=(((1, 2), (2, 1)), ((), ()))
    )
    x = integers(rng, (4, 64, 3))
    pull = jax.jit(lambda x, g: jax.vjp(lambda x: dot(x, w.operand), x)[1](g))
    expected = np.einsum("mn,nba->mab", g, w.exact)
    contract.assert_exact(pull(x, g)[0], expected, contract.F32)

  def test_global_scales_of_a_stack_multiply_their_gradients(self):
    rng = np.random.default_rng(0)
    w = contract.operand(rng, jp.NVFP4, (2, 5, 64))
    scales = np.float32([2, 8])
    array = jp.ScaledArray(w.operand.values, w.operand.scale, scales, jp.NVFP4)
    g = integers(rng, (2, 3, 5))
    _, pullback = jax.vjp(
      lambda x: jp.block_scaled_dot(x, array), integers(rng, (2, 3, 64))
    )
    expected = np.einsum("bmn,bnk,b->bmk", g, w.exact, scales)
    contract.assert_exact(pullback(g)[0], expected, contract.F32)

  @parameterized.product(shape=((), (2, 1, 1)), jit=(False, True))
  @pytest.mark.sample(2)
  def test_global_scales_whose_product_is_no_number_multiply_gradients(
    self, shape, jit
  ):
    rng = np.random.default_rng(0)
    w = contract.operand(rng, jp.NVFP4, (2, 5, 64))
    own = np.full(shape, 2.0**-70, np.float32)
    given = np.float32(2.0**-66)
    x, g = (integers(rng, size) * 2.0**30 for size in ((2, 3, 64), (2, 3, 5)))

    def pull(x, own, given, g):
      def function(x, own, given):
        array = jp.ScaledArray(w.operand.values, w.operand.scale, own, jp.NVFP4)
        return jp.block_scaled_dot(x, array, global_scale=given)

      result, pullback = jax.vjp(function, x, own, given)
      return result, pullback(g)

    result, (x_bar, own_bar, given_bar) = (jax.jit(pull) if jit else pull)(
      x, own, given, g
    )
    x, g = (np.asarray(a, np.float64) for a in (x, g))
    bare = np.einsum("bmk,bnk->bmn", x, w.exact)
    by_x = np.einsum("bmn,bnk->bmk", g, w.exact)
    sums = (bare * g).sum((1, 2) if shape else None, keepdims=bool(shape))
    for actual, expected, factor in (
      (result, bare, 2.0**-136),
      (x_bar, by_x, 2.0**-136),
      (own_bar, sums, 2.0**-66),
      (given_bar, (bare * g).sum(), 2.0**-70),
    ):
      contract.assert_exact(actual, expected * factor, contract.F32)

  def test_a_nan_scale_makes_its_block_of_the_gradient_nan(self):
    w = transformations.array(np.random.default_rng(0), jp.MXFP8, (5, 64))
    scale = np.array(w.scale)
    scale.view(np.uint8)[2, 1] = 255
    w = jp.ScaledArray(w.values, scale, None, jp.MXFP8)
    loss = lambda x: jp.block_scaled_dot(x, w)[:, :2].sum()
    actual = jax.jit(jax.grad(loss))(np.ones((3, 64), np.float32))
    np.testing.assert_array_equal(
      np.isnan(actual), np.tile(np.arange(64) >= 32, (3, 1))
    )


class Composition:
  """A call with all that has a derivative, and the same without the package."""

  def __init__(self, activation):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(rng.normal(size=shape))
    w = jp.quantize(normal(7, 128), jp.NVFP4)
    self.w = jp.ScaledArray(w.values, w.scale, None, jp.NVFP4)
    dequantized = jax.device_put(contract.dequantized(self.w))
    self.args = {
      "lhs": normal(2, 3, 128),
      "global_scale": jnp.float32(2.0**-12),
      "bias": normal(7),
      "residual": normal(2, 3, 7),
    }
    self.tangents = {k: normal(*x.shape) for k, x in self.args.items()}
    self.tangents["global_scale"] *= 2.0**-12
    self.g = normal(2, 3, 7)

    self.function = lambda lhs, **kwargs: jp.block_scaled_dot(
      lhs,
      self.w,
      dimension_numbers=(((2,), (1,)), ((), ())),
      activation=activation,
      **kwargs,
    )

    def expected(lhs, global_scale=1.0, bias=0.0, residual=0.0):
      y = jnp.einsum("abk,nk->abn", lhs, dequantized, precision="highest")
      return ACTIVATIONS[activation](y * global_scale + bias) + residual

    self.expected = expected


class EpilogueTest(parameterized.TestCase):
  def assert_close(self, actual, expected):
    for a, e in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      self.assertEqual((a.shape, a.dtype), (e.shape, e.dtype))
      a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
      np.testing.assert_allclose(a, e, rtol=0, atol=F32_ERROR * np.abs(e).max())

  @parameterized.product(
    activation=tuple(ACTIVATIONS),
    names=(*((name,) for name in OPERANDS), OPERANDS),
  )
  @pytest.mark.sample(2)
  def test_operands_have_their_derivatives(self, activation, names):
    case = Composition(activation)
    args, tangents = (
      {name: arrays[name] for name in names}
      for arrays in (case.args, case.tangents)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(f):
      only = lambda args: f(**{**case.args, **args})
      pulled = jax.vjp(only, args)[1](case.g)
      return pulled, jax.jvp(only, (args,), (tangents,))

    actual, expected = run(case.function), run(case.expected)
    self.assert_close(actual, expected)

  def test_relu_lets_no_infinite_cotangent_pass_where_it_is_zero(self):
    w = transformations.array(np.random.default_rng(0), jp.MXFP8, (5, 64))
    bias = jnp.float32([-1, 1, -1, 1, 1])
    function = lambda bias: jp.block_scaled_dot(
      np.zeros((1, 64), np.float32), w, bias=bias, activation="relu"
    )
    g = jnp.float32([[np.inf, 2, np.nan, np.inf, 3]])
    (actual,) = jax.vjp(function, bias)[1](g)
    np.testing.assert_array_equal(actual, [0, 2, 0, np.inf, 3])

  def test_two_quantized_sides_differentiate_in_the_global_scale(self):
    rng = np.random.default_rng(0)
    x = contract.operand(rng, jp.NVFP4, (2, 3, 64))
    w = contract.operand(rng, jp.NVFP4, (2, 5, 64))
    dot = np.einsum("bmk,bnk->bmn", x.exact, w.exact)
    g = integers(rng, dot.shape)

    def loss(x_global, w_global, explicit):
      arrays = [
        jp.ScaledArray(a.operand.values, a.operand.scale, s, jp.NVFP4)
        for a, s in ((x, x_global), (w, w_global))
      ]
      return (g * jp.block_scaled_dot(*arrays, global_scale=explicit)).sum()

    scales = (jnp.float32([2.0, 4.0]), jnp.float32(0.5), jnp.float32([[[2.0]]]))
    actual = jax.jit(jax.grad(loss, (0, 1, 2)))(*scales)
    by_batch = (dot * np.asarray(g, np.float64)).sum((1, 2))
    total = (by_batch * [2.0, 4.0]).sum()
    expected = by_batch, np.float64(2 * total), np.full((1, 1, 1), total / 2)
    for a, e in zip(actual, expected, strict=True):
      contract.assert_exact(a, e, contract.F32)


class CostTest(transformations.PrimitiveTestCase):
  @parameterized.parameters((None, 0), ("relu", 5), ("gelu", 4), ("silu", 4))
  @pytest.mark.sample(2)
  def test_kept_for_the_backward_pass_is_only_what_is_quantized(
    self, activation, bytes_per_result
  ):
    case = Composition(activation)
    args = {k: case.args[k] for k in ("lhs", "bias", "residual")}
    pullback = jax.eval_shape(
      lambda args: jax.vjp(lambda args: case.function(**args), args)[1], args
    )
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))
    quantized = case.w.values.nbytes + case.w.scale.nbytes
    self.assertLessEqual(kept, quantized + bytes_per_result * case.g.size)
    self.assertGreater(kept, 0)

  @parameterized.parameters(None, "silu")
  def test_one_dot_gives_the_value_for_the_gradient(self, activation):
    if not HAS_CPU_KERNELS:
      self.skipTest("no CPU kernels here")
    case = Composition(activation)
    function, x = case.function, case.args["lhs"]
    experts = jp.quantize(np.ones((2, 32, 64), np.float32), "mxfp8")
    sizes = jnp.array([3, 2])
    ragged = lambda x: jp.ragged_dot(x, experts, sizes, activation=activation)
    through = lambda x: jp.quantize(x, "mxfp8", derivative="straight_through")
    gradient = lambda f: jax.value_and_grad(lambda x: f(x).sum())
    rows = np.ones((5, 64), np.float32)
    for f, args, count in (
      (function, (x,), 1),
      (gradient(function), (x,), 1),
      (lambda x, t: jax.jvp(function, (x,), (t,)), (x, x), 2),
      (gradient(ragged), (rows,), 1),
      (gradient(lambda x: ragged(through(x))), (rows,), 1),
      (gradient(lambda x: function(through(x))), (x,), 1),
    ):
      text = jax.jit(f).lower(*args).compile().as_text()
      calls = text.count('custom_call_target="jaxplugin_block_scaled_dot"')
      calls += text.count('custom_call_target="jaxplugin_ragged_dot"')
      self.assertEqual(calls, count)


class RefusalTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.x = transformations.array(rng, jp.MXFP8, (3, 32))
    self.w = transformations.array(rng, jp.MXFP4, (5, 32))
    self.plain = integers(rng, (3, 32))

  @parameterized.parameters("grad", "jvp", "linearize", "vjp", "transpose")
  def test_quantized_values_have_no_derivative(self, transform):
    def function(values):
      x = jp.ScaledArray(values, self.x.scale, None, jp.MXFP8)
      return jp.block_scaled_dot(x, self.w).sum()

    run = {
      "grad": jax.grad(function),
      "jvp": lambda x: jax.jvp(function, (x,), (x,)),
      "linearize": lambda x: jax.linearize(function, x),
      "vjp": jax.jit(lambda x: jax.vjp(function, x)[0]),
      "transpose": lambda x: jax.linear_transpose(function, x)(jnp.float32(1)),
    }[transform]
    with self.assertRaisesRegex(
      NotImplementedError,
      r"block_scaled_dot: quantized values and block scales have no derivative,"
      r" got lhs \(mxfp8\)\..*jaxplugin\.quantize_dots.*dot_general",
    ):
      run(self.x.values)

  def test_every_operand_without_a_derivative_is_named(self):
    words = r"rhs \(mxfp4\) and rhs_scale \(mxfp4\)\."
    with self.assertRaisesRegex(NotImplementedError, words):
      jax.grad(lambda w: jp.block_scaled_dot(self.plain, w).sum())(self.w)

  def test_linear_transpose_of_what_is_not_linear_is_refused(self):
    activated = lambda x: jp.block_scaled_dot(x, self.w, activation="silu")
    both = lambda x, s: jp.block_scaled_dot(x, self.w, global_scale=s)
    for function, args, words in (
      (activated, (), "not linear in lhs through silu; use jax.vjp"),
      (both, (jnp.float32(1),), "not linear in lhs and global_scale at once"),
    ):
      with self.assertRaisesRegex(NotImplementedError, words):
        jax.linear_transpose(function, self.plain, *args)(
          np.ones((3, 5), np.float32)
        )


class TransformTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.w = transformations.array(rng, jp.MXFP8, (5, 64))
    self.stack = transformations.array(rng, jp.MXFP8, (4, 5, 64))
    self.x = integers(rng, (3, 64))
    self.xs = integers(rng, (4, 3, 64))
    self.g = integers(rng, (3, 5))
    self.rng = rng

  def pull(self, x, w, g, **kwargs):
    return jax.vjp(lambda x: jp.block_scaled_dot(x, w, **kwargs), x)[1](g)[0]

  @parameterized.parameters(
    ((0, None, None),), ((None, 0, None),), ((None, None, 0),), ((0, 0, 0),)
  )
  @pytest.mark.sample(1)
  def test_vmap_of_a_gradient_is_a_loop(self, in_axes):
    stacked = self.xs, self.stack, integers(self.rng, (4, 3, 5))
    args = [
      many if axis == 0 else one
      for many, one, axis in zip(
        stacked, (self.x, self.w, self.g), in_axes, strict=True
      )
    ]
    pull = jax.jit(functools.partial(self.pull, activation="relu"))
    actual = jax.jit(jax.vmap(pull, in_axes=in_axes))(*args)
    entry = lambda i: [
      jax.tree.map(lambda t: t[i], a) if axis == 0 else a
      for a, axis in zip(args, in_axes, strict=True)
    ]
    self.assert_same(actual, np.stack([pull(*entry(i)) for i in range(4)]))

  def test_linear_transpose_is_the_pullback(self):
    function = lambda x: jp.block_scaled_dot(x, self.w)
    (actual,) = jax.linear_transpose(function, self.x)(self.g)
    self.assert_same(actual, self.pull(self.x, self.w, self.g))
    args = (self.x, np.zeros(5, np.float32), np.zeros((3, 5), np.float32))
    function = lambda x, b, r: jp.block_scaled_dot(
      x, self.w, bias=b, residual=r
    )
    results = jax.linear_transpose(function, *args)(self.g)
    expected = actual, self.g.sum(0), self.g
    jax.tree.map(self.assert_same, results, expected)

  def test_jacobians_by_either_mode_are_the_dequantized_weight(self):
    function = lambda x: jp.block_scaled_dot(x[None], self.w)[0]
    expected = np.asarray(jp.dequantize(self.w))
    for mode in (jax.jacfwd, jax.jacrev):
      self.assert_same(jax.jit(mode(function))(self.x[0]), expected)

  def test_argument_weights_without_a_derivative_are_constants(self):
    packed = transformations.array(
      self.rng, jp.NVFP4, (5, 64), storage="packed_scaled_array"
    )
    for w in (self.w, packed):
      function = lambda x, w: jp.block_scaled_dot(x, w).sum()
      expected = np.asarray(jp.dequantize(w)).sum(0)
      expected = np.tile(expected, (3, 1))
      self.assert_same(jax.grad(function)(self.x, w), expected)
      self.assert_same(jax.jit(jax.grad(function))(self.x, w), expected)

  def test_gradient_of_a_symbolic_size_is_exported(self):
    (m,) = jax.export.symbolic_shape("m")
    x, g = (jax.ShapeDtypeStruct((m, n), jnp.float32) for n in (64, 5))
    exported = jax.export.export(jax.jit(self.pull))(x, self.w, g)
    args = self.x, self.w, self.g
    self.assert_same(exported.call(*args), self.pull(*args))


class ShardingTest(transformations.PrimitiveTestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self)
    rng = np.random.default_rng(0)
    self.w = transformations.array(rng, jp.MXFP8, (8, 64))
    x, bias, residual = (integers(rng, s) for s in ((4, 64), (8,), (4, 8)))
    self.args = (x, jnp.float32(2), bias, residual)
    self.g = integers(rng, (4, 8))
    self.expected = jax.jit(self.gradients)(*self.args, self.w, self.g)

  def dot(self, x, scale, bias, residual, w):
    options = {"global_scale": scale, "bias": bias, "residual": residual}
    return jp.block_scaled_dot(x, w, activation="relu", **options)

  def gradients(self, *args):
    *args, w, g = args
    return jax.vjp(lambda *args: self.dot(*args, w), *args)[1](g)

  def sharded(self, kind):
    mesh = jax.make_mesh((2, 4), ("m", "n"), axis_types=(kind,) * 2)
    put = lambda a, *spec: jax.device_put(
      np.asarray(a), NamedSharding(mesh, P(*spec))
    )
    x, scale, bias, residual = self.args
    return mesh, (
      put(x, "m", None),
      put(scale),
      put(bias, "n"),
      put(residual, "m", "n"),
      jax.tree.map(lambda a: put(a, "n", None), self.w),
      put(self.g, "m", "n"),
    )

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_gradients_are_those_of_one_device(self, kind):
    mesh, args = self.sharded(kind)
    with jax.set_mesh(mesh):
      actual = jax.jit(self.gradients)(*args)
      unplaced = jax.jit(self.gradients)(*self.args, self.w, self.g)
      if kind == AxisType.Explicit:
        for a, arg in zip(actual, args, strict=False):
          self.assertEqual(jax.typeof(a).sharding, jax.typeof(arg).sharding)
    for gradients in (actual, unplaced):
      jax.tree.map(self.assert_same, gradients, self.expected)

  def test_tangents_have_the_explicit_sharding_of_the_result(self):
    mesh, args = self.sharded(AxisType.Explicit)
    x, _, bias, *_, w, _ = args
    with jax.set_mesh(mesh):
      function = lambda bias: jp.block_scaled_dot(x, w, bias=bias)
      value, tangent = jax.jvp(function, (bias,), (bias,))
      self.assertEqual(jax.typeof(tangent), jax.typeof(value))
    self.assert_same(tangent, np.tile(np.asarray(self.args[2]), (4, 1)))

  @parameterized.parameters(True, False)
  @pytest.mark.sample(1)
  def test_gradients_in_shard_map_are_summed_over_the_devices(self, check_vma):
    mesh, args = self.sharded(AxisType.Auto)
    *args, w, g = args

    def local(*args):
      *args, g = args
      return lax.psum((self.dot(*args) * g).sum(), ("m", "n"))

    loss = lambda *args: jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P("m"), P(), P("n"), P("m", "n"), P("n"), P("m", "n")),
      out_specs=P(),
      check_vma=check_vma,
    )(*args, w, g)
    actual = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args)
    jax.tree.map(self.assert_same, actual, self.expected)
