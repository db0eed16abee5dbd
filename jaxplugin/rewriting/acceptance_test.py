# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized`: a model's own code multiplies by quantized weights."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.rewriting import acceleration_test as constructs
from jaxplugin.testing.models import (
  EPSILON,
  AcceptedTest,
  accepted,
  compiled,
  count_calls,
  exact,
  normal,
  quantized,
)

FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4")
F32 = lax.DotAlgorithmPreset.F32_F32_F32


class FormsTest(AcceptedTest):
  """Products as people write them."""

  @parameterized.product(
    format=FORMATS,
    case=(
      ("bk,kn->bn", (5, 64), (64, 96), 0),
      ("bk,nk->bn", (5, 64), (96, 64), 1),
      ("nk,bk->nb", (96, 64), (5, 64), None),
      ("btd,dhs->bths", (2, 3, 64), (64, 4, 24), 0),
      ("bths,hsd->btd", (2, 3, 4, 16), (4, 16, 96), (0, 1)),
      ("bsth,dhs->bdt", (2, 16, 3, 4), (96, 4, 16), (1, 2)),
      ("ebk,ekn->ebn", (3, 5, 64), (3, 64, 96), 1),
      ("ebk,enk->bne", (3, 5, 64), (3, 96, 64), 2),
      ("bk,lkn->lbn", (5, 64), (3, 64, 96), 1),
      ("k,kn->n", (64,), (64, 96), 0),
    ),
  )
  @pytest.mark.sample(5)
  def test_einsum_is_one_product_with_the_bytes(self, format, case):
    equation, shape, other, axis = case
    einsum = functools.partial(jnp.einsum, equation)
    if axis is None:
      args = (quantized(normal(*shape), format, 1), normal(*other))
    else:
      args = (normal(*shape), quantized(normal(*other), format, axis))
    function = accepted(einsum)
    self.assert_within(
      function(*args), functools.partial(np.einsum, equation), *args
    )
    if format != "mxfp6_e2m3":  # which is XLA's
      hlo = compiled(function, *args)
      self.assertEqual(count_calls(hlo), 1)
      self.assertNotIn("jaxplugin_dequantize", hlo)

  def test_layouts_and_conversions_are_seen_through(self):
    w = quantized(normal(64, 96), "nvfp4", 0)

    def function(x, w):
      w = w.astype(jnp.bfloat16).T.reshape(4, 24, 64).transpose(2, 0, 1)
      w = lax.stop_gradient(w.reshape(8, 8, 96))
      y = lax.dot_general(
        x.reshape(5, 8, 8), w.astype(jnp.float32), (((1, 2), (0, 1)), ((), ()))
      )
      return y @ jnp.ones((96, 1))

    x = normal(5, 64)
    call = accepted(function)
    hlo = compiled(call, x, w)
    self.assertEqual(count_calls(hlo), 1)
    # Of 96 sums, each rounded as one.
    expected = (exact(x) @ exact(w)).sum(1, keepdims=True)
    bound = np.abs(exact(x)) @ np.abs(exact(w)).sum(1, keepdims=True)
    self.assertLess(
      (np.abs(np.asarray(call(x, w)) - expected) / bound).max(), 2 * EPSILON
    )

  def test_scaled_array_is_blocked_along_any_dimension(self):
    x = normal(5, 64)
    w = jp.quantize(normal(64, 96), "mxfp8", axis=0)
    stack = jp.quantize(normal(3, 64, 96), "nvfp4", axis=1)
    products = lambda x, w: jnp.einsum("bk,lkn->lbn", x, w)
    function = accepted(lambda x, w, stack: (x @ w, products(x, stack), w))
    self.assertNotIn("jaxplugin_dequantize", compiled(function, x, w, stack))
    y, z, same = function(x, w, stack)
    np.testing.assert_array_equal(y, jp.linear(x, w.transpose()))
    for i in range(3):
      np.testing.assert_array_equal(z[i], jp.linear(x, stack[i].transpose()))
    self.assertEqual((same.shape, same.axis), (w.shape, 0))

  @parameterized.parameters(jnp.bfloat16, jnp.float16)
  @pytest.mark.sample(1)
  def test_result_has_the_type_that_code_gives_it(self, dtype):
    w = quantized(normal(64, 96, dtype=dtype), "mxfp8", 0)
    x = normal(5, 64, dtype=dtype)
    types = []

    def function(x, w):
      types.append((w.shape, w.dtype))
      return x @ w

    y = accepted(function)(x, w)
    self.assertEqual(types, [((64, 96), dtype)])
    self.assertEqual(y.dtype, dtype)
    np.testing.assert_array_equal(
      y, jp.linear(x, w.array, preferred_element_type=dtype)
    )

  def test_dtype_of_a_scaled_array_is_that_beside_it(self):
    w = jp.quantize(normal(96, 64), "mxfp8")
    half, single = jnp.bfloat16, np.dtype("float32")
    seen = lambda tree, x: jnp.zeros((), tree["w"].dtype)
    for beside, dtype, expected in (
      ([normal(3, dtype=half)], None, half),
      ([normal(3, dtype=half), normal(3)], None, single),
      ([], None, single),
      ([normal(3)], half, half),
    ):
      call = jax.jit(jp.accept_quantized(seen, dtype=dtype))
      tree = {"w": w, "beside": beside}
      self.assertEqual(call(tree, normal(3, dtype=np.float16)).dtype, expected)


class BothSidesTest(AcceptedTest):
  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.sample(1)
  def test_activations_are_quantized_on_the_fly(self, format):
    x, w = normal(5, 64), quantized(normal(64, 96), format, 0)
    call = accepted(jnp.matmul, activations=format)
    y = call(x, w)
    x_q = jp.quantize(x, format)
    np.testing.assert_array_equal(y, jax.jit(jp.linear)(x_q, w.array))
    self.assert_within(y, np.matmul, x_q, w)
    names = compiled(call, x, w)
    self.assertIn("jaxplugin_quantize", names)
    self.assertNotIn("jaxplugin_dequantize", names)

  def test_derivative_is_that_of_the_product_at_the_quantized_numbers(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    call = jp.accept_quantized(jnp.matmul, activations="mxfp8")
    actual = jax.jit(jax.grad(lambda x: (call(x, w) ** 2).sum()))(x)
    y = exact(jp.quantize(x, "mxfp8")) @ exact(w)
    np.testing.assert_allclose(actual, 2 * y @ exact(w).T, rtol=1e-4, atol=1e-2)

  def test_sizes_that_are_no_blocks_are_left_with_a_warning(self):
    x, w = normal(5, 48), quantized(normal(48, 96), "nvfp4", 0)
    call = jax.jit(jp.accept_quantized(jnp.matmul, activations="mxfp8"))
    with self.assertWarnsRegex(
      UserWarning, "48 .* not a multiple of the block size of mxfp8"
    ):
      y = call(x, w)
    np.testing.assert_allclose(y, exact(x) @ exact(w), rtol=1e-4, atol=1e-4)


class TransformationsTest(AcceptedTest):
  def test_scan_reads_layers_where_they_lie(self):
    stack = quantized(normal(3, 64, 64), "nvfp4", 1)
    x, bias = normal(5, 64), normal(3, 64)

    def function(x, stack, bias):
      def step(x, layer):
        w, b = layer
        return jnp.tanh(x @ w + b), None

      return lax.scan(step, x, (stack, bias), reverse=True)[0]

    expected = np.asarray(x, np.float64)
    for w, b in zip(exact(stack)[::-1], exact(bias)[::-1], strict=True):
      expected = np.tanh(expected @ w + b)
    for name, weights in (
      ("as it is", stack),
      ("prepared", jp.prepare_weights(stack, jp.named_target("cpu"))),
    ):
      with self.subTest(name):
        call = accepted(function)
        np.testing.assert_allclose(
          call(x, weights, bias), expected, rtol=1e-4, atol=1e-4
        )
        hlo = compiled(call, x, weights, bias)
        self.assertEqual(count_calls(hlo), 1)
        self.assertIn("jaxplugin_ragged_dot", hlo)
        self.assertNotIn("f32[64,64]", hlo)

  @pytest.mark.full
  def test_calls_take_the_bytes_with_them(self):
    w = quantized(normal(64, 64), "mxfp8", 0)
    x = normal(5, 64)

    def layers(x, w):
      return jnp.tanh(jnp.tanh(x @ w) @ w)

    def in_jits_of_a_transposed_weight(x, w):
      return jax.jit(lambda w, x: jnp.tanh(x @ w.T))(
        w.T, jax.jit(lambda x: jnp.tanh(x @ w))(x)
      )

    def in_inlined_jits_with_a_number(x, w):
      f = jax.jit(lambda x, w: (0, jnp.tanh(x @ w)), inline=True)
      return f(f(x, w)[1], w)[1]

    def in_vmap(x, w):
      f = jax.vmap(lambda x, w: jnp.tanh(w.T @ x), in_axes=(0, None))
      return f(f(x, w), w)

    functions = {
      name: (construct(layers), factor)
      for name, (construct, factor, _) in constructs.OF_ANY_ARRAYS.items()
      if name in ("while_body", "cond", "scan", "checkpoint", "custom_jvp")
    } | {
      "jits_of_a_transposed_weight": (in_jits_of_a_transposed_weight, 1),
      "inlined_jits_with_a_number": (in_inlined_jits_with_a_number, 1),
      "vmap": (in_vmap, 1),
    }
    expected = exact(x)
    for _ in range(2):
      expected = np.tanh(expected @ exact(w))
    for name, (function, factor) in functions.items():
      with self.subTest(name):
        call = accepted(function)
        np.testing.assert_allclose(
          call(x, w), factor * expected, rtol=1e-3, atol=factor * 1e-4
        )
        hlo = compiled(call, x, w)
        self.assertIn("jaxplugin_block_scaled_dot", hlo)
        self.assertNotIn("jaxplugin_dequantize", hlo)
        self.assertNotIn("f32[64,64]", hlo)

  def test_weight_in_a_carry_that_no_trip_changes_is_followed(self):
    w, x = quantized(normal(64, 64), "mxfp8", 0), normal(5, 64)

    def function(x, w):
      trip = lambda carry, _: ((carry[0], jnp.tanh(carry[1] @ carry[0])), None)
      return lax.scan(trip, (w, x), length=2)[0][1]

    call = accepted(function)
    expected = np.tanh(np.tanh(exact(x) @ exact(w)) @ exact(w))
    np.testing.assert_allclose(call(x, w), expected, rtol=1e-3, atol=1e-4)
    self.assertNotIn(" dot(", compiled(call, x, w))

  def test_checkpoint_that_the_function_differentiates_is_followed(self):
    w, x = quantized(normal(64, 64), "mxfp8", 0), normal(5, 64)
    step = lambda x, w: jnp.sin(x @ w).sum()
    call = jp.accept_quantized(jax.grad(jax.checkpoint(step)))
    with self.assertWarnsRegex(UserWarning, "differentiate outside"):
      jaxpr = str(jax.make_jaxpr(call)(x, w))
    # Forward and recomputed; the backward matmul contracts the other dimension.
    self.assertEqual(jaxpr.count("block_scaled_dot["), 2)
    self.assertEqual(jaxpr.count(" dot_general["), 1)
    expected = jax.grad(step)(x, jnp.asarray(exact(w), jnp.float32))
    np.testing.assert_allclose(
      jax.jit(call)(x, w), expected, rtol=1e-3, atol=1e-3
    )

  def test_mapped_weights_are_products_of_each(self):
    stack = quantized(normal(3, 64, 96), "nvfp4", 1)
    x = normal(3, 5, 64)
    call = jax.jit(jax.vmap(jp.accept_quantized(jnp.matmul)))
    self.assert_within(call(x, stack), np.matmul, x, stack)
    hlo = compiled(call, x, stack)
    self.assertEqual(count_calls(hlo), 1)

  def test_experts_are_ragged_dots(self):
    weights = quantized(normal(3, 64, 96), "mxfp8", 1)
    x, sizes = normal(7, 64), jnp.array([2, 0, 5], jnp.int32)
    call = accepted(lax.ragged_dot)
    y = call(x, weights, sizes)
    w = exact(weights)
    expected = np.concatenate([exact(x[:2]) @ w[0], exact(x[2:]) @ w[2]])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    self.assertIn("jaxplugin_ragged_dot", compiled(call, x, weights, sizes))


class DerivativesTest(AcceptedTest):
  """Derivatives by adapters next to frozen weights."""

  def adapted(self, format):
    stack = quantized(normal(2, 64, 64), format, 1)
    adapters = {"a": normal(2, 64, 4) / 8, "b": normal(2, 4, 64) / 2}

    def loss(adapters, x, stack):
      def layer(x, weights):
        w, adapter = weights
        y = x @ w / 8 + (x @ adapter["a"]) @ adapter["b"] / 8
        return jnp.tanh(y), None

      return (lax.scan(layer, x, (stack, adapters))[0] ** 2).sum()

    return loss, adapters, normal(5, 64), stack

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_they_are_those_of_dequantized_weights(self, format):
    loss, *args = self.adapted(format)
    actual = jax.jit(jax.grad(jp.accept_quantized(loss), argnums=(0, 1)))(*args)
    plain = args[2].dequantize()
    expected = jax.grad(loss, argnums=(0, 1))(*args[:2], plain)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
      self.assertGreater(np.abs(b).max(), 0.01)
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

  def test_nothing_dequantized_is_kept_for_them(self):
    loss, adapters, x, stack = self.adapted("mxfp8")

    def forward(adapters, x, stack):
      call = lambda adapters: jp.accept_quantized(loss)(adapters, x, stack)
      _, backward = jax.vjp(call, adapters)
      return jax.tree.leaves(backward)

    kept = jax.eval_shape(forward, adapters, x, stack)
    self.assertNotEmpty(kept)
    shapes = {(x.shape, x.dtype.name) for x in kept}
    for shape in ((2, 64, 64), (64, 64)):
      for dtype in ("float32", "bfloat16"):
        self.assertNotIn((shape, dtype), shapes)
    self.assertIn(((2, 64, 64), "float8_e4m3fn"), shapes)

  def test_recipe_trains_adapters_inside_and_outside(self):
    stack = quantized(normal(2, 64, 64), "mxfp8", 1)
    adapters = {"a": normal(2, 64, 32), "b": normal(2, 32, 64)}

    def loss(adapters, x, stack):
      def layer(x, weights):
        w, adapter = weights
        return x @ w / 64 + (x @ adapter["a"]) @ adapter["b"] / 64, None

      return (lax.scan(layer, x, (stack, adapters))[0] ** 2).sum()

    args = adapters, normal(32, 64), stack
    recipe = jp.training.MXFP8_RECIPE
    inside = jp.accept_quantized(jp.quantize_dots(loss, recipe))
    outside = jp.quantize_dots(jp.accept_quantized(loss), recipe)
    expected, actual = (jax.jit(jax.grad(f))(*args) for f in (inside, outside))
    for name in adapters:
      np.testing.assert_array_equal(actual[name], expected[name])
    sites = jp.explain(outside, *args).sites
    self.assertEqual([site.is_taken for site in sites], [True, True])

  @parameterized.product(
    rule=("fwd", "bwd", "jvp"),
    traced=(
      jax.jit,
      jax.checkpoint,
      lambda f: (
        lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, length=2)[0]
      ),
    ),
  )
  @pytest.mark.sample(4)
  def test_custom_rules_run_after_the_function_is_traced(self, rule, traced):
    f = lambda x, w: jnp.tanh(x @ w / 8)
    if rule == "jvp":
      custom = jax.custom_jvp(f)
      custom.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    else:
      custom = jax.custom_vjp(f)
      if rule == "fwd":
        custom.defvjp(lambda *x: jax.vjp(f, *x), lambda vjp, g: vjp(g))
      else:
        forward = lambda *x: (f(*x), x)
        custom.defvjp(forward, lambda x, g: jax.vjp(f, *x)[1](g))
    x, w = normal(5, 64), quantized(normal(64, 64), "mxfp8", 0)
    accepted_f = jp.accept_quantized(traced(custom))
    expected = jax.grad(lambda x: traced(f)(x, w.dequantize()).sum())(x)
    for g in (accepted_f, jax.jit(accepted_f)):
      gradient = jax.jit(jax.grad(lambda x, w, g=g: g(x, w).sum()))
      with self.assertWarnsRegex(UserWarning, "runs the rule of a custom"):
        actual = gradient(x, w)
      np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)

  def test_one_of_a_quantized_weight_is_an_error(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    call = jp.accept_quantized(lambda w, x: (x @ w).sum())
    with self.assertRaisesRegex(
      NotImplementedError, "accept_quantized: quantized weights have no deriv"
    ):
      jax.jit(jax.grad(call, allow_int=True))(w, x)


def doubled_in_a_carry(w, x):
  return lax.scan(lambda w, _: (2 * w, x @ w), w, length=2)[1]


class TrapsTest(AcceptedTest):
  """Warnings for slow uses, and errors for unsupported ones."""

  @parameterized.named_parameters(
    ("gather", lambda w, x: w[jnp.array([1, 2])], "gather|dynamic_slice"),
    ("mask", lambda w, x: x @ (w * (w > 0)), "greater"),
    ("integers", lambda w, x: x.astype(jnp.int8) @ w.astype(jnp.int8), "conv"),
    ("norm", lambda w, x: (x @ w) / jnp.abs(w).sum(), "abs.*"),
    (
      "tied",
      lambda w, x: (x @ w) @ w.T,
      "dot_general.*than the blocked one.*Find .* quantize_params.call=",
    ),
    (
      "algorithm",
      lambda w, x: jnp.dot(x, w, precision=F32),
      "dot_general.*F32",
    ),
    (
      "tile",
      lambda w, x: x @ jnp.tile(w, (1, 2)),
      "dot_general.*its elements are repeated",
    ),
    ("carry", doubled_in_a_carry, "scan.*changes in each iteration"),
    (
      "joined with ones",
      lambda w, x: x @ jnp.hstack([w, jnp.ones((64, 2))]),
      "concatenate.*it is joined with an unquantized array",
    ),
    (
      "joined with its transpose",
      lambda w, x: x @ jnp.hstack([w, w.T]),
      "concatenate.*weights of other orders are joined",
    ),
  )
  @pytest.mark.sample(4)
  def test_a_weight_that_is_dequantized_is_named(self, function, message):
    x, w = normal(5, 64), quantized(normal(64, 64), "mxfp8", 0)
    call = jax.jit(jp.accept_quantized(function))
    with self.assertWarnsRegex(
      UserWarning, f"(?s)the whole of argument 0 is dequantized for {message}"
    ):
      y = call(w, x)
    expected = jax.jit(function)(w.dequantize(), x)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)

  def test_called_outside_of_jit_is_said(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    with self.assertWarnsRegex(UserWarning, "called outside of jit"):
      y = jp.accept_quantized(jnp.matmul)(x, w)
    self.assert_within(y, np.matmul, x, w)

  def test_weights_that_are_not_seen_are_said(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    with (
      self.assertWarnsRegex(UserWarning, "contain no quantized weight"),
      self.assertRaisesRegex(TypeError, "jaxplugin.accept_quantized"),
    ):
      jax.jit(jp.accept_quantized(lambda x: x @ w))(x)

  def test_a_second_transformation_changes_and_says_nothing(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    twice = jp.accept_quantized(jp.accept_quantized(jnp.matmul))
    jitted = jp.accept_quantized(jax.jit(jp.accept_quantized(jnp.matmul)))
    expected = accepted(jnp.matmul)(x, w)
    for f in (twice, jitted):
      with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(jax.jit(f)(x, w), expected)

  def test_weights_do_not_pass_barriers(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    expected = accepted(jnp.matmul)(x, w)
    both = lambda x, w: jnp.matmul(*lax.optimization_barrier((x, w)))
    one = lambda x, w: x @ lax.optimization_barrier(w)
    for f in (both, one):
      with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(accepted(f)(x, w), expected)

  def test_bound_arguments_are_seen(self):
    x, w = normal(5, 64), quantized(normal(64, 96), "mxfp8", 0)
    partial = functools.partial(lambda w, x: x @ w, w)
    expected = jp.linear(x, w.array)
    np.testing.assert_array_equal(accepted(partial)(x), expected)
    named = functools.partial(lambda x, *, w: x @ w, w=w)
    np.testing.assert_array_equal(accepted(named)(x), expected)

  def test_weights_that_are_returned_stay_quantized(self):
    tree = {"w": quantized(normal(64, 96), "nvfp4", 0), "b": normal(96)}
    step = lambda tree, x: (dict(tree, b=tree["b"] + 1), x @ tree["w"])
    after, _ = accepted(step)(tree, normal(5, 64))
    self.assertEqual(jax.tree.structure(after), jax.tree.structure(tree))
    for a, b in zip(*map(jax.tree.leaves, (after, tree)), strict=True):
      np.testing.assert_array_equal(a, b if a.shape != (96,) else b + 1)

  def test_arguments_are_checked(self):
    for options, error, message in (
      ({"activations": "fp3"}, ValueError, "accept_quantized.*fp3"),
      ({"dtype": np.float64}, TypeError, "dtype must be float32.*float64"),
      ({"implementation": "gpu"}, ValueError, "accept_quantized.*gpu"),
    ):
      with self.assertRaisesRegex(error, message):
        jp.accept_quantized(jnp.matmul, **options)
    with self.assertRaisesRegex(TypeError, "fn must be a function"):
      jp.accept_quantized(normal(3))

  def test_errors_from_inside_name_the_function_that_was_called(self):
    sizes = jnp.array([5], jnp.int32)
    w = quantized(normal(64, 96), "mxfp8", 0)
    experts = quantized(normal(1, 64, 96), "mxfp8", 1)
    for function, weight in (
      (jnp.matmul, w),
      (lambda x, w: jax.lax.ragged_dot(x, w, sizes), experts),
    ):
      call = jp.accept_quantized(function, implementation="triton")
      with (
        jp.use_target(jp.named_target("cpu")),
        self.assertRaisesRegex(
          NotImplementedError, "^accept_quantized: implementation='triton'"
        ),
      ):
        jax.jit(call).lower(normal(5, 64), weight)

  def test_functions_of_scaled_arrays_say_what_to_give(self):
    w = quantized(normal(64, 96), "mxfp8", 0)
    with self.assertRaisesRegex(TypeError, r"linear: w_q .* pass its array"):
      jp.linear(normal(5, 64), w)

  def test_slices_of_other_dimensions_are_refused(self):
    w = quantized(normal(64, 96), "mxfp8", 0)
    half = jax.tree.map(lambda x: x[:48], w)
    with self.assertRaisesRegex(TypeError, r"must be \(96, 64\).*leading"):
      jax.jit(jp.accept_quantized(jnp.matmul))(normal(5, 64), half)
