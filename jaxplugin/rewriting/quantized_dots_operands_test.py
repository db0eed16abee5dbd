# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots` of functions whose weights are quantized already.

Also in loops, branches and checkpoints.
"""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.testing import transformations

MXFP8 = jp.training.MXFP8_RECIPE
NVFP4 = dataclasses.replace(jp.training.NVFP4_RECIPE, stochastic_rounding=False)
RNG = np.random.default_rng(0)
PARAMS = {
  "first": jax.device_put(RNG.normal(size=(64, 96))),
  "bias": jax.device_put(RNG.normal(size=(96,))),
  "second": jax.device_put(RNG.normal(size=(96, 32))),
}
X = jax.device_put(RNG.normal(size=(16, 64)))
ROWS = jax.device_put(RNG.normal(size=(16, 32)))
WEIGHTS = jax.device_put(RNG.normal(size=(4, 32, 32)))


def by_matmul(params, x):
  h = jax.nn.relu(x @ params["first"] + params["bias"])
  return jnp.sum(jnp.sin(h @ params["second"]))


def operands_of(recipe, params=PARAMS):
  quantize = functools.partial(jp.quantize_operand, recipe=recipe)
  return {k: quantize(w) if w.ndim == 2 else w for k, w in params.items()}


class OperandsTest(parameterized.TestCase):
  @pytest.mark.full
  def test_conversions_that_change_nothing(self):
    w = jp.quantize_operand(PARAMS["first"], MXFP8)
    for name, convert in {
      "jnp.asarray": jnp.asarray,  # as layers of flax do
      "jnp.array": jnp.array,
      "astype": lambda w: w.astype(jnp.float32),
      "device_put": jax.device_put,
      "optimization_barrier": lax.optimization_barrier,
    }.items():
      loss = lambda w, x, convert=convert: (x @ convert(w)).sum()
      quantized = jp.quantize_dots(loss, MXFP8)
      gradient = jax.grad(quantized, allow_int=True)
      expected = gradient(w.primal, X)
      for is_jitted in (False, True):
        with self.subTest(name, is_jitted=is_jitted):
          actual = (jax.jit(gradient) if is_jitted else gradient)(w, X)
          np.testing.assert_array_equal(actual.primal, expected)

  @pytest.mark.full
  def test_derivative_that_the_function_takes(self):
    step = jp.quantize_dots(jax.value_and_grad(by_matmul), MXFP8)
    actual = jax.jit(step)(operands_of(MXFP8), X)
    expected = jax.jit(step)(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)

  def test_carry_that_no_trip_changes(self):
    trip = lambda w, _: (w, X @ w)
    function = lambda w, x: lax.scan(trip, w, None, length=2)[1]
    quantized = jp.quantize_dots(function, MXFP8)
    w = PARAMS["first"]
    actual = quantized(jp.quantize_operand(w, MXFP8), X)
    np.testing.assert_array_equal(actual, quantized(w, X))

  @pytest.mark.full
  def test_arguments_by_name(self):
    function = lambda x, w: jnp.sum(x @ w)
    w = PARAMS["first"]
    quantized = jp.quantize_dots(function, MXFP8, params="w")
    actual = quantized(X, w=jp.quantize_operand(w, MXFP8))
    np.testing.assert_array_equal(actual, quantized(X, w=w))


def by_scan(layer):
  return lambda p, x: lax.scan(lambda c, w: (layer(c, w), None), x, p)[0]


def by_unrolled_scan_of_checkpoints(layer):
  layer = jax.checkpoint(layer)

  def function(p, x):
    return lax.scan(lambda c, w: (layer(c, w), None), x, p, unroll=2)[0]

  return function


def by_checkpoint_of_scan_of_jitted(layer):
  policy = jax.checkpoint_policies.dots_saveable
  return jax.checkpoint(by_scan(jax.jit(layer)), policy=policy)


def by_scan_in_a_scan(layer):
  def function(p, x):
    again = lambda c, _: (by_scan(layer)(p, c), None)
    return lax.scan(again, x, None, length=2)[0]

  return function


def by_constant_of_scan(layer):
  return lambda p, x: lax.scan(
    lambda c, _: (layer(c, p), None), x, None, length=3
  )[0]


def by_cond(layer):
  other = lambda x, p: jnp.sin(layer(2 * x, p))
  return lambda p, x: lax.switch(
    jnp.int32(x[0, 0] > 9), [layer, other, lambda x, p: x], x, p
  )


def by_constrained(layer):
  constrained = lambda p: lax.with_sharding_constraint(
    p, jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  return jax.jit(lambda p, x: layer(x, constrained(p)))


class NestedTest(parameterized.TestCase):
  def check(self, around, weights, recipe, key=None):
    """Bits are those without copies, which nothing makes again."""
    layer = around(lambda x, w: jnp.tanh(x @ w))
    loss = lambda p, x: jnp.sum(jnp.sin(layer(p, x)))
    quantized = jp.quantize_dots(loss, recipe, key=key)
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    in_turn = jax.vmap(make) if key is None else lambda w: lax.map(make, w)
    made = jax.jit(make if weights.ndim == 2 else in_turn)(weights)
    once = jp.quantize_dots(jax.value_and_grad(loss, (0, 1)), recipe, key=key)
    if key is not None:  # keys are numbered otherwise there
      once = lambda made, x: jax.value_and_grad(
        lambda w, x: quantized(made.with_primal(w), x), (0, 1)
      )(made.primal, x)

    anew = jax.value_and_grad(quantized, (0, 1))
    value, grads = jax.jit(once)(made, ROWS)
    expected = jax.jit(anew)(weights, ROWS)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), expected)
    self.assertGreater(np.abs(expected[1][0]).max(), 0)
    self.assertEqual(set(quantized_shapes(once, made, ROWS)), {ROWS.shape})
    self.assertIn(WEIGHTS.shape[1:], quantized_shapes(anew, weights, ROWS))

  @parameterized.parameters(
    (by_scan, WEIGHTS),
    (by_unrolled_scan_of_checkpoints, WEIGHTS),
    (by_checkpoint_of_scan_of_jitted, WEIGHTS),
    (by_scan_in_a_scan, WEIGHTS),
    (by_constant_of_scan, WEIGHTS[0]),
    (by_cond, WEIGHTS[0]),
    (by_constrained, WEIGHTS[0]),
  )
  @pytest.mark.sample(6)
  def test_bits_of_quantizing_anew(self, around, weights):
    self.check(around, weights, MXFP8)

  @parameterized.parameters((by_scan, WEIGHTS), (by_cond, WEIGHTS[0]))
  @pytest.mark.full
  def test_keys_and_global_scales(self, around, weights):
    recipe = jp.training.NVFP4_RECIPE
    self.check(around, weights, recipe, key=jax.random.key(3))

  def test_while_loops_of_one_weight(self):
    def function(w, x):
      go_on = lambda c: (c[0] < 3) & (jnp.max(c[1] @ w) < 1e9)
      trip = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
      return lax.while_loop(go_on, trip, (0, x))[1]

    w = WEIGHTS[0]
    quantized = jax.jit(jp.quantize_dots(function, NVFP4))
    made = jp.quantize_operand(w, NVFP4)
    np.testing.assert_array_equal(quantized(made, ROWS), quantized(w, ROWS))
    self.assertEqual(set(quantized_shapes(quantized, made, ROWS)), {ROWS.shape})
    of = lambda w: jnp.sum(quantized(made.with_primal(w), ROWS))
    with self.assertRaisesRegex(ValueError, "Reverse-mode"):  # JAX's own
      jax.grad(of)(w)


class Layer(flax.linen.Module):
  @flax.linen.compact
  def __call__(self, x, _):
    return x + jnp.tanh(flax.linen.Dense(32)(x)), None


class ModelsTest(absltest.TestCase):
  def test_microbatches_of_a_scan_over_checkpointed_layers(self):
    layers = flax.linen.scan(
      flax.linen.remat(Layer),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=3,
    )()
    params = layers.init(jax.random.key(0), ROWS, None)
    loss = lambda p, x: jnp.square(layers.apply(p, x, None)[0]).mean()
    quantized = jp.quantize_dots(loss, MXFP8)
    make = lambda w: jp.quantize_operand(w, MXFP8)

    def step(quantize, params, batches):
      made = jax.tree.map(quantize, params)

      def microbatch(total, x):
        of = lambda p: quantized(jp.training.with_primals(made, p), x)
        return jax.tree.map(jnp.add, total, jax.grad(of)(params)), None

      zeros = jax.tree.map(jnp.zeros_like, params)
      return lax.scan(microbatch, zeros, batches)[0]

    once = functools.partial(
      step, lambda w: lax.map(make, w) if w.ndim == 3 else w
    )
    anew = functools.partial(step, lambda w: w)
    batches = jnp.stack([ROWS, ROWS[::-1]])
    expected = jax.jit(anew)(params, batches)
    actual = jax.jit(once)(params, batches)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    counts = [
      quantized_shapes(f, params, batches).count((32, 32)) for f in (once, anew)
    ]
    # Outside of the microbatches; without, in each pass of each microbatch.
    self.assertEqual(counts[0], 1)
    self.assertGreater(counts[1], 1)


def quantized_shapes(function, *args):
  """Shapes of what a function quantizes, at any depth."""
  return [
    eqn.invars[0].aval.shape
    for eqn in transformations.equations(jax.make_jaxpr(function)(*args).jaxpr)
    if eqn.primitive.name == "block_quantize"
  ]


class ErrorsTest(parameterized.TestCase):
  def check(self, function, params, message, recipe=MXFP8):
    with self.assertRaisesRegex(TypeError, f"^quantize_dots: .*{message}"):
      jp.quantize_dots(function, recipe)(params, X)

  def test_another_recipe(self):
    self.check(
      by_matmul,
      operands_of("mxfp4"),
      "pass the same recipe to quantize_operand",
    )

  def test_another_contraction(self):
    w = jp.quantize_operand(PARAMS["first"], MXFP8, contracting=1)
    self.check(lambda w, x: x @ w, w, "pass contracting=.0,., batch=")

  @parameterized.parameters(jax.custom_jvp, jax.custom_vjp)
  def test_functions_with_rules_of_their_own(self, made_by):
    function = made_by(lambda w, x: x @ w)
    if made_by is jax.custom_vjp:
      function.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: kept)
    else:
      function.defjvp(lambda primals, tangents: (function(*primals), 0))
    w = jp.quantize_operand(PARAMS["first"], MXFP8)
    message = "inside custom_.*_call do not accept, .*apply quantize_dots to"
    self.check(function, w, message)
    in_loop = lambda w, x: lax.map(lambda x: function(w, x), x[None])
    self.check(in_loop, w, message)

  def test_layers_that_were_not_quantized_one_by_one(self):
    stack = jnp.stack([PARAMS["first"]] * 2)
    scan = lambda w, x: lax.scan(lambda c, w: (c, x @ w), 0, w)[1]
    w = jp.quantize_operand(stack, NVFP4, contracting=1, batch=0)
    self.check(scan, w, "not with jax.lax.map", NVFP4)
    w = jp.quantize_operand(stack, MXFP8, contracting=1, batch=0)
    self.check(scan, w, r"got one for \[1\] and \[0\]")

  def test_another_array_in_each_trip(self):
    w = jp.quantize_operand(PARAMS["first"], MXFP8)
    trip = lambda w, _: (2 * w, X @ w)
    scan = lambda w, x: lax.scan(trip, w, None, length=2)
    self.check(
      scan, w, "no matmul used, because it is part of the carry of a loop"
    )
    by_while = lambda w, x: lax.while_loop(
      lambda c: c[0][0] < 3, lambda c: (c[0] + 1, *trip(c[1], 0)), (x[0], w, x)
    )
    square = jp.quantize_operand(jnp.ones((64, 64)), MXFP8)
    self.check(
      by_while, square, "no matmul used, because it is part of the carry"
    )

  @pytest.mark.full
  def test_operand_that_no_product_takes(self):
    made = operands_of(MXFP8)
    self.check(
      lambda p, x: jnp.sum(x @ p["first"]),
      made,
      r"argument 0\['second'\] is a QuantizedOperand that no matmul used,"
      " because it reached no matmul",
    )
    transposed = jp.quantize_operand(PARAMS["first"].T, MXFP8, contracting=1)
    self.check(lambda w, x: x @ w.T, transposed, "it reached no matmul")
    named = lambda w, x: jax.named_scope("lm_head")(lambda: x @ w)()
    self.check(named, made["first"], "it is a last layer: its name")
    jitted = jax.jit(jax.grad(lambda w, x: jnp.sum(x @ w)))
    self.check(jitted, made["first"], "it reached no matmul")
