# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of what was quantized straight-through, and where there are none.

Those expected are of the formula in f64, by JAX or NumPy, with dequantized
operands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import jaxplugin as jp
from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import guards
from jaxplugin.jaxext import jax_private
from jaxplugin.testing import contract

RNG = np.random.default_rng(77)
M, N, K = 6, 10, 64
X = RNG.normal(size=(M, K)).astype(np.float32)
W = RNG.normal(size=(N, K)).astype(np.float32)
G = RNG.normal(size=(M, N)).astype(np.float32)
BIAS = RNG.normal(size=(N,)).astype(np.float32)
RESIDUAL = RNG.normal(size=(M, N)).astype(np.float32)
FACTOR = np.float32(0.75)

# A sum of K or fewer products in f32 (16 * 2^-24 * sum|a * b|), of numbers
# below 4 in magnitude; a global scale and an activation add some roundings.
TOLERANCE = 4 * 4 * K * 16 * 2.0**-24

quantize = functools.partial(
  quantization.quantize, derivative="straight_through"
)


def dequantized(x, format, **kwargs):
  """NumPy f64, of codes."""
  return contract.exact(quantization.quantize(x, format, **kwargs))


def in_f64(function, *args):
  with jax.enable_x64(True):
    args = (jnp.asarray(a, jnp.float64) for a in args)
    return jax.tree.map(np.asarray, jax.jit(function)(*args))


def assert_near(actual, expected, tolerance=TOLERANCE):
  """Compares the leaves of two trees."""
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


def squares(x, w, scale):
  return (jax.nn.silu(x @ w.T * scale) ** 2).sum()


EXACT_HESSIAN = jax.hessian(squares, (0, 1, 2))  # which compiles once


def gradients(product, g):
  """Returns the gradient of sum(product(x, w) * g)."""
  return jax.grad(lambda x, w: (product(x, w) * g).sum(), (0, 1))


def product(lhs_format, rhs_format, **options):
  """Returns the dot of two sides that it quantizes."""
  return lambda x, w: jp.block_scaled_dot(
    quantize(x, lhs_format), quantize(w, rhs_format), **options
  )


def expected_gradients(format, x=X, w=W, g=G):
  g = g.astype(float)
  return g @ dequantized(w, format), g.T @ dequantized(x, format)


class GradientTest(parameterized.TestCase):
  @parameterized.parameters(*formats.FORMATS, jp.INT4_128)
  @pytest.mark.sample(3)
  def test_both_sides_have_the_gradient_at_the_dequantized(self, format):
    @jax.jit
    def run(x, w):
      found = gradients(product(format, format), G)(x, w)
      return found, [quantization.quantize(side, format) for side in (x, w)]

    found, (x, w) = run(X, W)
    g = G.astype(float)
    assert_near(found, (g @ contract.exact(w), g.T @ contract.exact(x)))

  @parameterized.parameters(
    (None, jnp.float32, "both"),
    (None, jnp.bfloat16, "both"),
    (None, jnp.float32, "lhs"),
    ("relu", jnp.bfloat16, "rhs"),
    ("gelu", jnp.float32, "both"),
    ("silu", jnp.float32, "lhs"),
  )
  @pytest.mark.sample(2)
  def test_epilogue(self, activation, dtype, sides):
    format = jp.NVFP4
    is_lhs, is_rhs = sides != "rhs", sides != "lhs"

    def function(x, w, factor, bias, residual):
      return jp.block_scaled_dot(
        quantize(x, format) if is_lhs else x,
        quantize(w, format) if is_rhs else w,
        global_scale=factor,
        bias=bias,
        activation=activation,
        residual=residual,
        preferred_element_type=dtype,
      )

    def formula(x, w, factor, bias, residual):
      activate = getattr(jax.nn, activation) if activation else lambda y: y
      return activate(x @ w.T * factor + bias) + residual

    args = (X, W, FACTOR, BIAS, RESIDUAL)
    at = (
      dequantized(X, format) if is_lhs else X,
      dequantized(W, format) if is_rhs else W,
      *args[2:],
    )
    directions = (X[::-1], W[::-1], FACTOR, BIAS[::-1], RESIDUAL[::-1])

    @jax.jit
    def run(args, g, directions):
      result, pullback = jax.vjp(function, *args)
      return result, pullback(g), jax.jvp(function, args, directions)[1]

    result, pulled, tangent = run(args, G.astype(dtype), directions)
    self.assertEqual(result.dtype, dtype)
    pull = lambda *a: jax.vjp(formula, *a)[1](a[0][:, :1] * 0 + G)
    wanted = in_f64(pull, *at)
    # bf16: the result, and so its cotangent, rounded.
    relative = 2.0**-8 if dtype == jnp.bfloat16 else 0
    for actual, expected in zip(pulled, wanted, strict=True):
      scale = np.abs(expected).max()
      assert_near(actual, expected, TOLERANCE + 2 * relative * scale)
    push = lambda *a: jax.jvp(formula, a[:5], a[5:])[1]
    wanted = in_f64(push, *at, *directions)
    error = 2 * TOLERANCE + relative * np.abs(wanted).max()
    assert_near(np.asarray(tangent, float), wanted, error)

  def test_bf16_cotangent_meets_numbers_that_are_not_rounded(self):
    dot = product(jp.NVFP4, jp.NVFP4, preferred_element_type=jnp.bfloat16)
    g = np.eye(M, N)
    gradient = jax.jit(lambda x, g: jax.vjp(lambda x: dot(x, W), x)[1](g)[0])
    np.testing.assert_allclose(
      gradient(X, g.astype(jnp.bfloat16)),
      g @ dequantized(W, jp.NVFP4),
      rtol=2 * 2.0**-23,  # two scales are multiplied in f32
      atol=0,
    )

  @parameterized.parameters(
    ("both", ("hessian", "reverse", "forward")),
    ("lhs", ("reverse",)),
    ("rhs", ("forward",)),
  )
  def test_second_derivatives_in_all_modes(self, quantized, modes):
    x, w = X[:2, :32], W[:3, :32]

    def loss(*args):
      sides = [
        quantize(side, jp.NVFP4) if quantized in ("both", name) else side
        for name, side in zip(("lhs", "rhs"), args[:2], strict=True)
      ]
      result = jp.block_scaled_dot(
        *sides, activation="silu", global_scale=args[2]
      )
      return (result**2).sum()

    sides = [
      dequantized(side, jp.NVFP4) if quantized in ("both", name) else side
      for name, side in (("lhs", x), ("rhs", w))
    ]
    by = 0, 1, 2
    expected = in_f64(EXACT_HESSIAN, *sides, FACTOR)
    functions = {
      "hessian": jax.hessian(loss, by),
      "reverse": jax.jacrev(jax.grad(loss, by), by),
      "forward": jax.jacfwd(jax.jacfwd(loss, by), by),
    }
    run = jax.jit(lambda *args: [functions[mode](*args) for mode in modes])
    for found in run(x, w, FACTOR):
      for actual, row in zip(found, expected, strict=True):
        for a, e in zip(actual, row, strict=True):
          # The global scale multiplies sums of all results.
          size = max(1, np.abs(e).max() / 16)
          assert_near(a, e, 4 * TOLERANCE * size)

  @parameterized.parameters(
    ((), jax.hessian),
    ((2, 1), lambda f, by: jax.jacrev(jax.grad(f, by), by)),
  )
  def test_second_derivatives_by_the_global_scale_of_a_side(self, shape, mode):
    x_q, w = quantization.quantize(X[:2, :32], jp.NVFP4), W[:3, :32]
    scale = np.full(shape, x_q.global_scale[0, 0])

    def loss(scale, w):
      x = jp.ScaledArray(x_q.values, x_q.scale, scale, jp.NVFP4)
      dot = jp.block_scaled_dot(x, quantize(w, jp.NVFP4), activation="silu")
      return (dot**2).sum()

    x = contract.exact(x_q) / np.float64(x_q.global_scale)
    formula = lambda scale, w: (jax.nn.silu(x * scale @ w.T) ** 2).sum()
    by = 0, 1
    args = scale, dequantized(w, jp.NVFP4)
    expected = in_f64(jax.hessian(formula, by), *args)
    actual = jax.jit(mode(loss, by))(scale, w)
    leaves = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    for a, e in leaves:
      # The derivatives by the scale are larger than those by numbers near 1.
      assert_near(a, e, 4 * TOLERANCE * max(1, np.abs(e).max() / 16))

  def test_derivatives_keep_no_tracers_alive(self):
    def loss(x, scale, w):
      w_q = quantize(w, jp.NVFP4)
      return jp.block_scaled_dot(x, w_q, global_scale=scale).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    with jax.checking_leaks():
      jax.jit(lambda *x: jax.jvp(gradient, x, x)).trace(X, FACTOR, W)

  def test_first_gradients_have_the_bits_without_a_surrogate(self):
    @functools.partial(jax.jit, static_argnums=0)
    def by_x(dtype, w):
      dot = lambda x: jp.block_scaled_dot(
        x, w, preferred_element_type=dtype, global_scale=FACTOR
      )
      return jax.vjp(dot, X.astype(dtype))[1](G.astype(dtype))

    w = quantize(W, jp.NVFP4)
    for dtype in (np.float32, jnp.bfloat16):
      found, expected = by_x(dtype, w), by_x(dtype, w.without_surrogate())
      np.testing.assert_array_equal(found, expected)

  def test_any_dimension_numbers_and_several_batches(self):
    x = RNG.normal(size=(K, 3, M)).astype(np.float32)
    w = RNG.normal(size=(3, N, K)).astype(np.float32)
    g = RNG.normal(size=(3, M, N)).astype(np.float32)

    def dot(x, w):
      lhs, rhs = quantize(x, jp.MXFP4, axis=0), quantize(w, jp.MXFP8)
      numbers = (((0,), (2,)), ((1,), (0,)))
      return jp.block_scaled_dot(lhs, rhs, dimension_numbers=numbers)

    expected = (
      np.einsum("bmn,bnk->kbm", g, dequantized(w, jp.MXFP8)),
      np.einsum("bmn,kbm->bnk", g, dequantized(x, jp.MXFP4, axis=0)),
    )
    assert_near(jax.jit(gradients(dot, g))(x, w), expected)

  def test_clipped_values_have_the_gradient_of_the_others(self):
    x = np.full((1, 32), 1.0, np.float32)
    x[0, 0] = 500  # saturates at 448 when the scale is rounded down

    function = lambda x: jp.dequantize(
      quantize(x, jp.MXFP8, scale_rounding="floor")
    )
    self.assertEqual(function(x)[0, 0], 448)
    gradient = jax.grad(lambda x: function(x).sum())(x)
    np.testing.assert_array_equal(gradient, np.ones_like(x))

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  @pytest.mark.full
  def test_dequantize_is_the_identity(self, dtype):
    def function(x):
      lhs, rhs = quantization.quantize_both(
        x, jp.MXFP8, derivative="straight_through"
      )
      key = jax.random.key(3)
      stochastic = quantize(x, jp.MXFP4, key=key)
      return sum(
        jp.dequantize(q, dtype) * f
        for q, f in ((lhs, 1), (rhs, 2), (stochastic, 4))
      )

    x = X[:, :32].repeat(6, 0)[:32]
    _, tangent = jax.jvp(function, (x,), (np.ones_like(x),))
    self.assertEqual(tangent.dtype, dtype)
    np.testing.assert_array_equal(tangent, np.full_like(x, 7))
    square = lambda x: (jp.dequantize(quantize(x, jp.NVFP4)) ** 2).sum()
    second, twice = jax.grad(square), 2 * dequantized(X, jp.NVFP4)
    np.testing.assert_allclose(second(X), twice, rtol=2.0**-20)
    along = jax.grad(lambda x: (second(x) * X).sum())(X)
    np.testing.assert_allclose(along, 2 * X, rtol=2.0**-20)

  def test_under_scan_vmap_remat_and_debug_checks(self):
    layers = RNG.normal(size=(3, K, K)).astype(np.float32) / 8
    dot = product(jp.MXFP8, jp.MXFP4)

    def loss(x, layers):
      layer = jax.checkpoint(lambda x, w: (dot(x, w), None))
      return jax.lax.scan(layer, x, layers)[0].sum()

    def unrolled(x, layers):
      for w in layers:
        x = dot(x, w)
      return x.sum()

    expected = jax.jit(jax.grad(unrolled, (0, 1)))(X, layers)
    per_row = lambda x, w: jax.vmap(lambda x: loss(x[None], w))(x).sum()
    for function in (loss, per_row):
      with guards.debug_checks(function is loss):
        assert_near(jax.jit(jax.grad(function, (0, 1)))(X, layers), expected)

  @parameterized.product(
    kind=("shard_map", "explicit"), lhs_is_quantized=(True, False)
  )
  def test_on_a_mesh(self, kind, lhs_is_quantized):
    if len(jax.devices()) < 4:
      self.skipTest("needs 4 devices")
    is_explicit = kind == "explicit"
    types = jax.sharding.AxisType
    axis_types = (types.Explicit if is_explicit else types.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    x, g = np.tile(X, (2, 1))[:8], np.tile(G, (2, 1))[:8]
    rows, everywhere = PartitionSpec("d"), PartitionSpec()
    lhs = functools.partial(quantize, format=jp.MXFP8)
    if not lhs_is_quantized:
      lhs = lambda x: x
    dot = lambda x, w: jp.block_scaled_dot(lhs(x), quantize(w, jp.MXFP8))
    loss = lambda x, w, g: (dot(x, w) * g).sum()
    function = loss
    if not is_explicit:
      function = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "d"),
        mesh=mesh,
        in_specs=(rows, everywhere, rows),
        out_specs=everywhere,
      )
    with jax.set_mesh(mesh):
      args = [
        jax.device_put(np.asarray(a), jax.sharding.NamedSharding(mesh, spec))
        for a, spec in ((x, rows), (W, everywhere), (g, rows))
      ]
      actual = jax.jit(jax.grad(function, (0, 1)))(*args)
    by_x, by_w = expected_gradients(jp.MXFP8, x=x, g=g)
    if not lhs_is_quantized:
      by_w = g.T.astype(float) @ x
    assert_near(actual, (by_x, by_w))


class CostTest(absltest.TestCase):
  def test_without_differentiation_the_program_is_the_same(self):
    def program(derivative):
      q = functools.partial(jp.quantize, format=jp.MXFP8, derivative=derivative)

      def function(x, w):
        return jp.block_scaled_dot(q(x), q(w)), jp.dequantize(q(x))

      return jax_private.optimized_hlo(jax.jit(function).lower(X, W).compile())

    self.assertEqual(program("straight_through"), program(None))

  def test_what_is_kept_of_a_quantized_side_is_quantized(self):
    dot = product(jp.MXFP8, jp.MXFP8)
    _, pullback = jax.vjp(dot, jnp.asarray(X), jnp.asarray(W))
    kept = [(x.dtype, x.shape) for x in jax.tree.leaves(pullback)]
    self.assertIn((formats.E4M3, X.shape), kept)
    # Besides, for derivatives of it, the surrogates, which are arguments.
    self.assertLessEqual(kept.count((np.float32, X.shape)), 1)
    self.assertLessEqual(kept.count((np.float32, W.shape)), 1)


def round_trip(x, **options):
  return jp.dequantize(jp.quantize(x, jp.NVFP4, **options))


# By name: a function of x in whose derivative `jp.quantize` is.
NO_DERIVATIVE = {
  "both sides": lambda x: jp.block_scaled_dot(
    jp.quantize(W, jp.NVFP4), jp.quantize(x, jp.NVFP4)
  ),
  "one side": lambda x: jp.block_scaled_dot(W, jp.quantize(x, jp.NVFP4)),
  "round trip": round_trip,
  "another axis": lambda x: round_trip(x, axis=0),
  "key": lambda x: round_trip(x, key=jax.random.key(0)),
  "no elements": lambda x: round_trip(x[:0]),
  "both axes": lambda x: jp.dequantize(
    quantization.quantize_both(x, jp.NVFP4)[1]
  ),
  "by the global scale": lambda x: round_trip(W, global_scale=x[0, 0] ** 2),
}


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(*NO_DERIVATIVE)
  @pytest.mark.sample(1)
  def test_a_derivative_of_quantize_is_an_error(self, case):
    x = np.tile(X, (6, 1))[:32]
    who = "quantize_both" if case == "both axes" else "quantize"
    loss = lambda x: NO_DERIVATIVE[case](x).sum()
    repeated = lambda c, x: (c + loss(x), None)
    message = rf"{who}: .*dot_general.*{who}\(.*straight_through.*stop_gradient"
    for function in (
      jax.grad(loss),
      jax.jit(jax.grad(loss)),
      jax.grad(jax.jit(loss)),
      jax.grad(jax.checkpoint(loss)),
      lambda x: jax.jvp(loss, (x,), (x,)),
      jax.vmap(jax.grad(lambda x: loss(x[None].repeat(32, 0)))),
      jax.grad(lambda x: jax.lax.scan(repeated, 0.0, jnp.stack([x, x]))[0]),
    ):
      refused = self.assertRaisesRegex(NotImplementedError, message)
      with guards.debug_checks(), refused:
        function(x)
    loss(x)  # without a derivative it is not an error
    jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) * x[0, 0])(x)

  def test_what_is_frozen_beside_what_is_trained(self):
    def loss(trained, frozen):
      y = jp.block_scaled_dot(trained, jp.quantize(frozen, jp.MXFP8))
      return (y * G).sum()

    _, actual = jax.value_and_grad(loss)(X, W)
    assert_near(actual, expected_gradients(jp.MXFP8)[0])

  @parameterized.parameters("values", "scale")
  def test_dequantize_by_values_or_scales_is_an_error(self, leaf):
    q = jp.quantize(X, jp.MXFP8)

    def loss(x):
      leaves = {"values": q.values, "scale": q.scale, leaf: x}
      array = jp.ScaledArray(**leaves, global_scale=None, format=jp.MXFP8)
      return jp.dequantize(array).sum()

    with self.assertRaisesRegex(NotImplementedError, "dequantize: quantized"):
      jax.grad(loss)(getattr(q, leaf))
    with self.assertRaisesRegex(NotImplementedError, "block_scaled_dot: quant"):
      array = quantize(X, jp.MXFP8)
      jax.grad(lambda a: jp.block_scaled_dot(a, W).sum())(array)

  def test_second_derivative_of_quantized_products_is_an_error(self):
    numbers = (((1,), (1,)), ((), ()))
    dot = jp.dot_general(jp.MXFP8, jp.MXFP8)
    config = jp.nn.get_scaled_dot_general_config("mxfp8")
    for who, function, of_jacfwd in (
      ("dot_general", lambda x: dot(x, W, numbers), NotImplementedError),
      (
        "scaled_dot_general",
        lambda x: jp.nn.scaled_dot_general(x, W, numbers, configs=[config] * 3),
        TypeError,  # JAX's own, of forward mode over custom gradients
      ),
    ):
      gradient = jax.grad(lambda x, f=function: (f(x) ** 2).sum())
      message = f"{who}: a gradient computed from"
      with self.assertRaisesRegex(NotImplementedError, message):
        jax.jit(jax.jacrev(gradient)).trace(X)
      with self.assertRaises(of_jacfwd):
        jax.jit(jax.jacfwd(gradient)).trace(X)

  def test_unknown_derivative(self):
    for function in (jp.quantize, quantization.quantize_both):
      with self.assertRaisesRegex(
        ValueError, "derivative must be .*, got 'ste'"
      ):
        function(W[:, :32].repeat(4, 0)[:32], jp.MXFP8, derivative="ste")


class LeafTest(absltest.TestCase):
  def test_it_is_a_leaf_only_where_it_is(self):
    plain, array = jp.quantize(X, jp.NVFP4), quantize(X, jp.NVFP4)
    self.assertLen(jax.tree.leaves(plain), 3)
    leaves, tree = jax.tree.flatten(array)
    self.assertLen(leaves, 4)
    np.testing.assert_array_equal(leaves[3], X)
    paths = [p[0].name for p, _ in jax.tree.leaves_with_path(array)]
    self.assertEqual(paths, ["values", "scale", "global_scale", "surrogate"])
    self.assertEqual(array.nbytes, plain.nbytes + X.nbytes)
    self.assertIn("surrogate=float32[6, 64]", repr(array))
    self.assertNotIn("surrogate", repr(plain))
    again = jax.tree.unflatten(tree, leaves)
    self.assertIs(again.surrogate, leaves[3])
    self.assertLen(jax.tree.leaves(array.without_surrogate()), 3)

  def test_every_form_of_the_array_carries_it(self):
    array = quantize(X, jp.NVFP4)
    gpus = [jp.named_target(name, cudnn="9.13") for name in ("h100", "b200")]
    for other in (
      array.unpack(),
      array.unpack().pack(),
      *(jp.prepare_weights(array, gpu) for gpu in gpus),
      *(jp.unprepare_weights(jp.prepare_weights(array, gpu)) for gpu in gpus),
    ):
      np.testing.assert_array_equal(other.surrogate, X)
      (*leaves, _), tree = jax.tree.flatten(other)
      leaves_to_array = functools.partial(jax.tree.unflatten, tree)
      loss = lambda x, leaves=leaves, made=leaves_to_array: (
        jp.block_scaled_dot(made([*leaves, x]), W).sum()
      )
      expected = np.broadcast_to(W.astype(float).sum(0), X.shape)
      assert_near(jax.jit(jax.grad(loss))(X), expected)

  def test_wrong_surrogates(self):
    q = jp.quantize(X, jp.MXFP8)
    for wrong in (X[:1], X.astype(np.int32)):
      with self.assertRaisesRegex(TypeError, r"surrogate must be .*\(6, 64\)"):
        scaled_array.ScaledArray(
          q.values, q.scale, None, jp.MXFP8, surrogate=wrong
        )
