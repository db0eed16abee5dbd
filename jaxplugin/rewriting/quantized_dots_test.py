# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots`: the same bits as a model whose dots are written by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes import explicit

MXFP8 = jp.training.MXFP8_RECIPE
NVFP4 = jp.training.NVFP4_RECIPE
# What needs keys, compiled in a third of the time.
KEYED = dataclasses.replace(MXFP8, stochastic_rounding=True)
NUMBERS = (((1,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 64, 64)).astype(np.float32)
X = RNG.normal(size=(8, 64)).astype(np.float32)
KEY = jax.random.key(3)

plain = functools.partial(lax.dot_general, dimension_numbers=NUMBERS)


def key_of(*numbers):
  return functools.reduce(jax.random.fold_in, numbers, KEY)


def by_hand(recipe, *numbers, weight="rhs"):
  """A dot of the recipe; its key has these numbers folded in."""
  dot = jp.dot_general(recipe=recipe, weight=weight)
  key = key_of(*numbers) if recipe.stochastic_rounding else None
  return lambda lhs, rhs: dot(lhs, rhs, NUMBERS, key=key)


def assert_same(actual, expected):
  """Equal to the bit, and of equal types."""
  leaves = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
  for a, e in leaves:
    np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
    assert jax.typeof(a).strip_weak_type() == jax.typeof(e).strip_weak_type()


# Constructs: each takes as many dots as it makes, and whether they have keys by
# themselves or by the trip, and returns a loss of (w, x).


def two_layers(first, second):
  def loss(w, x):
    h = jnp.tanh(first(x, w[0]))
    scores = jax.nn.softmax(plain(h, h.T))  # as in attention
    return (second(plain(scores, h), w[1]) ** 2).mean()

  return loss


def in_jit(first, second):
  return jax.jit(two_layers(first, second))


def in_checkpoint(first, second):
  return jax.checkpoint(two_layers(first, second))


def in_cond(first, second):
  def loss(w, x):
    branches = [lambda: first(x, w[0]), lambda: 2 * second(x, w[1])]
    return (lax.cond(x[0, 0] > 0, *branches) ** 2).mean()

  return loss


def in_vmap(first, second):
  def loss(w, x):
    each = lambda x: second(jnp.tanh(first(x, w[0])), w[1])
    return (jax.vmap(each)(jnp.stack([x, 3 * x])) ** 2).mean()

  return loss


def in_custom_jvp(first, second):
  @jax.custom_jvp
  def layer(x, w):
    return jnp.tanh(first(x, w))

  @layer.defjvp
  def _(primals, tangents):
    return jax.jvp(lambda x, w: jnp.tanh(plain(x, w)), primals, tangents)

  return lambda w, x: (second(layer(x, w[0]), w[1]) ** 2).mean()


def in_custom_vjp(first, second):
  @jax.custom_vjp
  def layer(x, w):
    return jnp.tanh(first(x, w))

  layer.defvjp(
    lambda x, w: (jnp.tanh(first(x, w)), (x, w)),
    lambda kept, g: (plain(g, kept[1].T), plain(kept[0].T, g)),
  )
  return lambda w, x: (second(layer(x, w[0]), w[1]) ** 2).mean()


def in_shard_map(first, second):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
  spec = jax.sharding.PartitionSpec

  def loss(w, x):
    def local(w, x):
      first_w = lax.all_gather(w[0], "d", axis=0, tiled=True)
      second_w = lax.all_gather(w[1], "d", axis=0, tiled=True)
      y = second(jnp.tanh(first(x, first_w)), second_w)
      return lax.pmean((y**2).mean(), "d")

    return jax.shard_map(
      local, mesh=mesh, in_specs=(spec(None, "d"), spec("d")), out_specs=spec()
    )(w, x)

  return loss


CONSTRUCTS = (
  two_layers,
  in_jit,
  in_checkpoint,
  in_cond,
  in_vmap,
  in_shard_map,
  in_custom_jvp,
  in_custom_vjp,
)

# Where the transform, jit and the gradient go about each other.
gradient = jax.value_and_grad
PLACES = {
  "inside": lambda f, q: jax.jit(gradient(q(f))),
  "inside_around_jit": lambda f, q: jax.jit(gradient(q(jax.jit(f)))),
  "outside": lambda f, q: jax.jit(q(gradient(f))),
  "outside_of_jit": lambda f, q: q(jax.jit(gradient(f))),
  "outside_of_both": lambda f, q: q(jax.jit(gradient(jax.jit(f)))),
}

PLACES_OF_ALL_DEPTHS = ("inside_around_jit", "outside", "outside_of_both")


class ConstructsTest(parameterized.TestCase):
  def check(self, f, hand, recipe, places):
    quantize = lambda f: jp.quantize_dots(f, recipe, key=KEY)
    expected = jax.jit(gradient(hand))(W, X)
    for place in places:
      with self.subTest(place):
        assert_same(PLACES[place](f, quantize)(W, X), expected)

  @parameterized.parameters(*CONSTRUCTS)
  @pytest.mark.full
  def test_gradients_are_those_of_dots_by_hand(self, construct):
    hand = construct(by_hand(MXFP8), by_hand(MXFP8))
    places = PLACES if construct is two_layers else PLACES_OF_ALL_DEPTHS
    if construct is in_vmap:
      # In a jitted function that is differentiated from outside it is seen with
      # its batch dimension, and wgrad's blocks go over examples.
      places = ("inside", "outside", "outside_of_jit")
    self.check(construct(plain, plain), hand, MXFP8, places)

  @parameterized.parameters(
    *(c for c in CONSTRUCTS if "custom" not in c.__name__)
  )
  @pytest.mark.full
  def test_each_dot_has_a_key_of_its_own(self, construct):
    second = 0 if construct is in_cond else 1  # of two branches one runs
    recipe = NVFP4 if construct is two_layers else KEYED
    hand = construct(by_hand(recipe, 0), by_hand(recipe, second))
    places = ("outside_of_jit",)
    self.check(construct(plain, plain), hand, recipe, places)

  @parameterized.parameters(False, True)
  @pytest.mark.sample(1)
  def test_each_trip_of_a_scan_has_a_key_of_its_own(self, remat):
    def model(body):
      body = jax.checkpoint(body) if remat else body

      def loss(w, x):
        trips = jnp.arange(3, dtype=jnp.uint32)
        return (lax.scan(body, x, (w, trips))[0] ** 2).mean()

      return loss

    dot = jp.dot_general(recipe=KEYED, weight="rhs")

    def by_trip(x, each):
      w, trip = each
      base = jax.random.fold_in(key_of(0), trip)
      key = jax.random.fold_in(base, 0)
      return jnp.tanh(dot(x, w, NUMBERS, key=key)), None

    f = model(lambda x, each: (jnp.tanh(plain(x, each[0])), None))
    places = ("inside", "outside", "outside_of_both")
    self.check(f, model(by_trip), KEYED, places)

  @parameterized.product(jitted=(False, True), key=(None, KEY))
  @pytest.mark.sample(2)
  def test_while_loop_and_its_condition_are_quantized(self, jitted, key):
    def model(dot):
      def f(w, x):
        go_on = lambda s: (s[0] < 2) & (jnp.abs(dot(s[1], w[0])).sum() > 300)
        body = lambda s: (s[0] + 1, jnp.tanh(dot(s[1], w[1])))
        return lax.while_loop(go_on, body, (0, x))

      return f

    f = model(plain)
    f = jax.jit(f) if jitted else f
    actual = jax.jit(jp.quantize_dots(f, NVFP4, key=key))(W, X)
    assert_same(actual, jax.jit(model(by_hand(NVFP4, 0)))(W, X))

  @pytest.mark.full
  def test_eager_calls_are_the_same_to_the_bit(self):
    f, hand = (
      two_layers(plain, plain),
      two_layers(by_hand(MXFP8), by_hand(MXFP8)),
    )
    w = jnp.asarray(W)
    expected = gradient(hand)(w, X)
    assert_same(gradient(jp.quantize_dots(f, MXFP8))(w, X), expected)
    assert_same(jp.quantize_dots(gradient(f), MXFP8)(w, X), expected)

  def test_matmul_einsum_and_batch_dimensions(self):
    w = RNG.normal(size=(2, 64, 32)).astype(np.float32)
    x = RNG.normal(size=(2, 5, 64)).astype(np.float32)
    dot = jp.dot_general(recipe=MXFP8, weight="rhs")
    expected = jax.jit(lambda x, w: dot(x, w, (((2,), (1,)), ((0,), (0,)))))
    for f in (jnp.matmul, functools.partial(jnp.einsum, "bmk,bkn->bmn")):
      quantized = jp.quantize_dots(lambda w, x, f=f: f(x, w), "mxfp8")
      assert_same(jax.jit(quantized)(w, x), expected(x, w))

  def test_dtypes_are_kept(self):
    def f(w, x):
      y = plain(x.astype(jnp.bfloat16), w[0].astype(jnp.bfloat16))
      return y, plain(x, w[1], preferred_element_type=jnp.bfloat16)

    quantized = jax.jit(jp.quantize_dots(f, MXFP8))
    self.assertEqual(jax.eval_shape(quantized, W, X), jax.eval_shape(f, W, X))
    sites = jp.explain(quantized, W, X).sites
    self.assertEqual([s.is_taken for s in sites], [True, True])

  def test_second_call_traces_and_compiles_nothing(self):
    f = jax.jit(two_layers(plain, plain))
    quantized = jp.quantize_dots(gradient(f), MXFP8)
    quantized(W, X)
    with jax.log_compiles(), self.assertNoLogs("jax", "WARNING"):
      jp.quantize_dots(gradient(f), MXFP8)(W, X)

  def test_function_with_nothing_to_take_is_traced_to_the_same(self):
    def f(w, x):
      image = x.reshape(1, 8, 8, 8)
      y = lax.conv(image, w[0].reshape(8, 8, 8, 8), (1, 1), "SAME")
      return y.sum() + plain(x.astype(jnp.int32), x.T.astype(jnp.int32)).sum()

    jaxpr = jax.make_jaxpr(jp.quantize_dots(f, MXFP8))(W, X)
    self.assertEqual(str(jaxpr), str(jax.make_jaxpr(f)(W, X)))


class KeysTest(parameterized.TestCase):
  @parameterized.parameters("threefry2x32", "rbg", "unsafe_rbg")
  @pytest.mark.sample(1)
  def test_products_and_trips_never_share_noise(self, impl):
    # fold_in of unsafe_rbg does not see the order of numbers: product 0 of
    # trip 1 and product 1 of trip 0 need other keys than fold_in makes.
    recipe = dataclasses.replace(KEYED, wgrad_hadamard=None, weight_2d=False)
    w = np.ones((32, 32), np.float32)
    x = np.ones((2, 2, 32, 32), np.float32)
    slopes = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)

    def loss(w, x):
      def trip(total, rows):
        return total + sum((slopes * (r @ w)).sum() for r in rows), None

      return lax.scan(trip, jnp.float32(0), x)[0]

    key = jax.random.key(3, impl=impl)
    quantized = jp.quantize_dots(loss, recipe, key=key)
    by_rows = np.asarray(jax.jit(jax.grad(quantized, 1))(w, x))
    self.assertLen(np.unique(by_rows.reshape(4, -1), axis=0), 4)

  def test_key_after_a_cond_is_that_of_none_of_its_branches(self):
    def model(first, second, third):
      def f(w, x):
        two = lambda x: jnp.tanh(second(jnp.tanh(first(x, w[0])), w[1]))
        # The branch without dots is the first one of the operation.
        x = lax.cond(jnp.sum(x) < 1e9, two, lambda x: x, x)
        return (third(x, w[2]) ** 2).mean()

      return f

    hand = model(*(by_hand(KEYED, i) for i in range(3)))
    quantized = jp.quantize_dots(model(plain, plain, plain), KEYED, key=KEY)
    actual = jax.jit(jax.grad(quantized))(W, X)
    assert_same(actual, jax.jit(jax.grad(hand))(W, X))

  def test_jitted_functions_that_differentiate_have_keys_of_their_own(self):
    @jax.jit
    def step(w, x):
      return jax.grad(lambda w: (plain(x, w) ** 2).mean())(w)

    twice = jax.jit(lambda w, x: (step(w, x), step(w, x)))
    first, second = jp.quantize_dots(twice, KEYED, key=KEY)(W[0], X)
    self.assertTrue(bool((first != second).any()))

  @pytest.mark.full
  def test_step_that_is_scanned_has_another_key_in_each_trip(self):
    f = two_layers(plain, plain)

    def train(w, x):
      body = lambda w, _: (w, jax.grad(f)(w, x))
      return lax.scan(body, w, None, length=2)[1]

    for q in (
      jp.quantize_dots(train, KEYED, key=KEY),
      jp.quantize_dots(jax.jit(train), KEYED, key=KEY),
    ):
      first, second = jax.jit(q)(W, X)
      self.assertTrue(bool((first != second).any()))
      hand = [
        jax.jit(
          jax.grad(two_layers(by_hand(KEYED, 0, t, 0), by_hand(KEYED, 0, t, 1)))
        )(W, X)
        for t in range(2)
      ]
      assert_same([first, second], hand)


GOOD = (plain, MXFP8)
BAD_ARGUMENTS = {
  (TypeError, "fn must be a function, got 3"): ((3, MXFP8), {}),
  (TypeError, "recipe must be .*Recipe.*got 8"): ((plain, 8), {}),
  (ValueError, "recipe: .*'mxfp7'"): ((plain, "mxfp7"), {}),
  (NotImplementedError, "recipe must have no zero points"): (
    (plain, jp.UINT4_128),
    {},
  ),
  (TypeError, "where must be a function.*'x'"): (GOOD, {"where": "x"}),
  (TypeError, "key must be one key"): (GOOD, {"key": 1.5}),
  (TypeError, "params must be positions.*1.5"): (GOOD, {"params": (1.5,)}),
  (TypeError, "params .* from 0, or their names, got -1; pass params=0 if"): (
    GOOD,
    {"params": -1},
  ),
  (TypeError, r"params .* names, got \(0, -2\); pass"): (
    GOOD,
    {"params": (0, -2)},
  ),
  (ValueError, "implementation .*'gpu'"): (GOOD, {"implementation": "gpu"}),
}


class ErrorsTest(parameterized.TestCase):
  def test_bad_arguments_are_refused_at_once(self):
    for (error, text), (args, keywords) in BAD_ARGUMENTS.items():
      with (
        self.subTest(text),
        self.assertRaisesRegex(error, f"quantize_dots: {text}"),
      ):
        jp.quantize_dots(*args, **keywords)

  def test_errors_from_inside_name_the_function_that_was_called(self):
    def gradient(recipe, order=1, **options):
      loss = jp.quantize_dots(
        lambda w, x: jnp.square(x @ w).sum(), recipe, **options
      )
      for _ in range(order):
        loss = jax.grad(lambda w, x, f=loss: f(w, x).sum())
      return jax.jit(loss).lower(W[0], X)

    for error, text, call in (
      (ValueError, "key must be given", lambda: gradient(NVFP4)),
      (
        NotImplementedError,
        "a gradient .* has no derivative; .*recipe, quantize_dgrad=False",
        lambda: gradient(MXFP8, order=2),
      ),
      (
        NotImplementedError,
        "implementation='cudnn' does not support",
        lambda: gradient(MXFP8, implementation="cudnn"),
      ),
    ):
      with (
        self.subTest(text),
        self.assertRaisesRegex(error, f"^quantize_dots: {text}"),
      ):
        call()

  def test_where_must_answer(self):
    f = jp.quantize_dots(two_layers(plain, plain), MXFP8, where=lambda s: None)
    with self.assertRaisesRegex(
      TypeError, "where must return .*None for .* at"
    ):
      f(W, X)

  def test_exception_leaves_jax_as_it_was(self):
    def f(w, x):
      plain(x, w[0])
      raise KeyError("mine")

    with self.assertRaisesRegex(KeyError, "mine"):
      jp.quantize_dots(f, MXFP8)(W, X)
    self.assertNotIn("bind", vars(lax.dot_general_p))

  @parameterized.parameters(1, "w")
  def test_parameters_that_are_not_given_are_an_error(self, params):
    quantized = jp.quantize_dots(plain, MXFP8, params=params)
    with self.assertRaisesRegex(
      TypeError,
      f"got {params!r} for a call with 1 positional .* keywords \\[\\]",
    ):
      quantized(jnp.ones((32, 32)))


class PlacementTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_jitted_functions_keep_their_shardings(self, inline):
    mesh = explicit.mesh(self, kind=AxisType.Auto)
    wanted = NamedSharding(mesh, P(None, "b"))
    dot = jax.jit(lambda x, w: x @ w, inline=inline, out_shardings=wanted)
    function = lambda w, x: dot(x, w)
    w_q = jp.quantize(W[0], "mxfp8", axis=0)
    for changed, w in (
      (jp.quantize_dots(function, "mxfp8"), W[0]),
      (jp.accept_quantized(function), w_q),
    ):
      self.assertEqual(jax.jit(changed)(w, X).sharding.spec, wanted.spec)
