# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots` of models, and which of their products it takes."""

import collections
import dataclasses
import pathlib

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax import lax

import jaxplugin as jp
from jaxplugin.rewriting import quantized_dots_test as constructs

MXFP8 = jp.training.MXFP8_RECIPE
HAND = jp.dot_general(recipe=MXFP8, weight="rhs")
X, KEY = constructs.X, constructs.KEY
plain, assert_same = constructs.plain, constructs.assert_same
gradient = jax.value_and_grad


def quantize(f):
  return jp.quantize_dots(f, MXFP8)


class Block(flax.linen.Module):
  """Whose dots but those of attention are `dot`."""

  dot: object = lax.dot_general

  @flax.linen.compact
  def __call__(self, x):
    attention = flax.linen.MultiHeadDotProductAttention(
      4, qkv_dot_general=self.dot, out_dot_general=self.dot
    )
    x = attention(x[None])[0]
    x = flax.linen.Dense(96, dot_general=self.dot, dtype=jnp.bfloat16)(x)
    return flax.linen.Dense(32, dot_general=self.dot)(flax.linen.relu(x))


class Language(flax.linen.Module):
  dot: object = lax.dot_general

  @flax.linen.compact
  def __call__(self, x):
    x = Block(self.dot)(x)
    return flax.linen.Dense(33, name="lm_head")(x)


def linen_loss(model):
  return lambda params, x: (model.apply(params, x) ** 2).mean()


class LinenTest(parameterized.TestCase):
  @pytest.mark.full
  def test_gradients_are_those_of_layers_with_dot_general(self):
    params = jax.jit(Language().init)(jax.random.key(0), X)
    f = linen_loss(Language())
    expected = jax.jit(gradient(linen_loss(Language(HAND))))(params, X)
    for place in ("inside", "outside_of_jit"):
      actual = constructs.PLACES[place](f, quantize)(params, X)
      assert_same(actual, expected)

  @parameterized.parameters(False, True)
  def test_explain_tells_each_product_by_its_layer(self, jitted):
    params = jax.eval_shape(Language().init, jax.random.key(0), X)
    f = linen_loss(Language())
    f = jax.jit(f) if jitted else f
    explanation = jp.explain(quantize(f), params, X)
    attention = "Language/Block_0/MultiHeadDotProductAttention_0"
    found = collections.Counter(
      (site.layer, site.is_taken, site.weight) for site in explanation.sites
    )
    taken = [f"{attention}/{x}" for x in ("query", "key", "value", "out")]
    taken += ["Language/Block_0/Dense_0", "Language/Block_0/Dense_1"]
    expected = {(name, True, "rhs"): 1 for name in taken}
    # jnp.einsum has a scope for each of its equations.
    for equation in ("...qhd,...khd->...hqk", "...hqk,...khd->...qhd"):
      expected[(f"{attention}/{equation}", False, "")] = 1
    expected[("Language/lm_head", False, "rhs")] = 1
    self.assertEqual(found, expected)
    text = explanation.details()
    self.assertIn("quantize_dots took 6 of 9 matmuls:", text)
    self.assertIn("left: neither operand is a parameter, as in attention", text)
    self.assertIn("left: it is a last layer: its name contains", text)
    self.assertIn(f"{pathlib.Path(__file__).name}:", text)


class Perceptron(nnx.Module):
  def __init__(self, dot):
    rngs = nnx.Rngs(0)
    self.first = nnx.Linear(64, 96, dot_general=dot, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.second = nnx.Linear(96, 32, dot_general=dot, rngs=rngs)

  def __call__(self, x):
    return self.second(self.dropout(nnx.relu(self.first(x))))


class NnxTest(parameterized.TestCase):
  @parameterized.parameters("loss", "step")
  @pytest.mark.full
  def test_modules_train_and_keep_their_state(self, where):
    def train(dot, of_loss, of_step):
      model = Perceptron(dot)
      loss = of_loss(lambda model, x: (model(x) ** 2).mean())
      step = lambda model, x: nnx.value_and_grad(loss)(model, x)
      step = nnx.jit(of_step(step))
      # Dropout changes the module: another mask in each step.
      return [jax.tree.map(jnp.copy, step(model, X)) for _ in range(2)]

    same = lambda f: f
    expected = train(HAND, same, same)
    of_loss, of_step = (quantize, same) if where == "loss" else (same, quantize)
    actual = train(lax.dot_general, of_loss, of_step)
    assert_same(actual, expected)
    self.assertNotEqual(float(expected[0][0]), float(expected[1][0]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
  """A layer in equinox' style: a pytree that is called, of one example."""

  weight: jax.Array
  bias: jax.Array

  def __call__(self, x):
    return self.weight @ x + self.bias


class PytreeTest(parameterized.TestCase):
  @parameterized.parameters("inside", "outside_of_jit")
  @pytest.mark.sample(1)
  def test_mapped_layers_with_the_weight_first(self, place):
    layer = Linear(jnp.asarray(constructs.W[0]), jnp.ones(64))
    loss = lambda layer, x: (jnp.tanh(jax.vmap(layer)(x)) ** 2).mean()
    dot = jp.dot_general(recipe=MXFP8, weight="lhs")

    def hand(layer, x):
      numbers = (((1,), (0,)), ((), ()))
      each = lambda x: dot(layer.weight, x, numbers) + layer.bias
      return (jnp.tanh(jax.vmap(each)(x)) ** 2).mean()

    actual = constructs.PLACES[place](loss, quantize)(layer, X)
    assert_same(actual, jax.jit(gradient(hand))(layer, X))

  def test_parameters_in_other_arguments(self):
    f = lambda x, w, *, head: plain(plain(x, w), head)
    w, head = constructs.W[:2]
    for params, taken in ((0, 0), (1, 1), ("head", 1), ((1, "head"), 2)):
      quantized = jp.quantize_dots(f, MXFP8, params=params)
      sites = jp.explain(quantized, X, w, head=head).sites
      self.assertEqual(sum(s.is_taken * s.count for s in sites), taken)


BATCH = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32)


def sites_of(f, *args):
  """Layer, number, and whether it is taken, of each line of the report."""
  found = jp.explain(f, *args).sites
  return sorted((s.layer, s.count, s.is_taken, s.weight) for s in found)


class EquinoxBlock(eqx.Module):
  attention: eqx.nn.MultiheadAttention
  mlp: eqx.nn.MLP

  def __init__(self, key):
    keys = jax.random.split(key)
    self.attention = eqx.nn.MultiheadAttention(4, 64, key=keys[0])
    self.mlp = eqx.nn.MLP(64, 64, 96, 1, key=keys[1])

  def __call__(self, x):
    x = x + self.attention(x, x, x)
    return x + jax.vmap(self.mlp)(x)


class Hand(eqx.Module):
  """A `Linear` whose product is `dot_general`."""

  layer: eqx.nn.Linear

  def __call__(self, x, *, key=None):
    dot = jp.dot_general(recipe=MXFP8, weight="lhs")
    y = dot(self.layer.weight, x, (((1,), (0,)), ((), ())))
    return y if self.layer.bias is None else y + self.layer.bias


def by_hand(model):
  is_layer = lambda x: isinstance(x, eqx.nn.Linear)
  change = lambda x: Hand(x) if is_layer(x) else x
  return jax.tree.map(change, model, is_leaf=is_layer)


class EquinoxTest(parameterized.TestCase):
  def loss(self, model, x):
    return (jax.vmap(model)(x) ** 2).mean()

  @pytest.mark.full
  def test_gradients_are_those_of_layers_with_dot_general(self):
    model, gradient = EquinoxBlock(jax.random.key(0)), eqx.filter_value_and_grad
    expected = eqx.filter_jit(gradient(self.loss))(by_hand(model), BATCH)
    actual = eqx.filter_jit(gradient(quantize(self.loss)))(model, BATCH)
    assert_same(actual, expected)
    actual = quantize(eqx.filter_jit(gradient(self.loss)))(model, BATCH)
    assert_same(actual, expected)

  @parameterized.parameters("jitted", "gradient")
  @pytest.mark.full
  def test_explain_tells_each_product_of_a_module_with_functions(self, what):
    f = {
      "jitted": quantize(eqx.filter_jit(self.loss)),
      "gradient": eqx.filter_value_and_grad(quantize(self.loss)),
    }[what]
    attention, mlp = "eqx.nn.MultiheadAttention", "eqx.nn.MLP/eqx.nn.Linear"
    expected = [
      *[(f"{attention}/eqx.nn.Linear", 1, True, "lhs")] * 4,  # four weights
      (f"{attention}/sS,Sd->sd", 1, False, ""),
      (f"{attention}/sd,Sd->sS", 1, False, ""),
      (mlp, 1, True, "lhs"),  # two sizes
      (mlp, 1, True, "lhs"),
    ]
    model = EquinoxBlock(jax.random.key(0))
    self.assertCountEqual(sites_of(f, model, BATCH), expected)

  @pytest.mark.full
  def test_rows_of_a_jitted_function_that_maps_are_one_product(self):
    layer = eqx.nn.Linear(64, 64, key=jax.random.key(0))
    for jit, batch in ((lambda f: f, 8), (eqx.filter_jit, 1)):
      f = eqx.filter_value_and_grad(quantize(jit(self.loss)))
      wgrad = jp.explain(f, layer, BATCH[0])[-1]
      self.assertEqual(wgrad.phase, "wgrad")
      self.assertEqual(wgrad.problem.batch, batch)


def haiku_hand(call, args, kwargs, context):
  """Calls hk.Linear with `dot_general` as its product, all else as it is."""
  is_call = context.method_name == "__call__"
  if not (is_call and isinstance(context.module, hk.Linear)):
    return call(*args, **kwargs)
  (x,), size = args, context.module.output_size
  w = hk.get_parameter("w", (x.shape[-1], size), x.dtype, init=jnp.zeros)
  b = hk.get_parameter("b", (size,), x.dtype, init=jnp.zeros)
  dot = jp.dot_general(recipe=MXFP8, weight="rhs")
  return dot(x, w, (((x.ndim - 1,), (0,)), ((), ()))) + b


class HaikuTest(parameterized.TestCase):
  def make(self, net):
    """Parameters, the loss, and the same with products written by hand."""

    def hand(x):
      with hk.intercept_methods(haiku_hand):
        return net(x)

    models = [hk.without_apply_rng(hk.transform(f)) for f in (net, hand)]
    params = models[0].init(jax.random.key(0), BATCH)
    loss = lambda model: lambda p, x: (model.apply(p, x) ** 2).mean()
    return params, *map(loss, models)

  def check(self, place, params, loss, hand):
    expected = jax.jit(jax.value_and_grad(hand))(params, BATCH)
    actual = constructs.PLACES[place](loss, quantize)(params, BATCH)
    assert_same(actual, expected)

  @pytest.mark.full
  def test_gradients_and_sites_of_attention_and_an_mlp(self):
    def net(x):
      init = hk.initializers.VarianceScaling()
      x = hk.MultiHeadAttention(4, 16, w_init=init, model_size=64)(x, x, x)
      return hk.nets.MLP([64])(x)

    params, loss, hand = self.make(net)
    self.check("inside", params, loss, hand)
    attention = "multi_head_attention"
    names = [f"{attention}/{x}" for x in ("query", "key", "value", "linear")]
    names += ["mlp/linear_0"]
    expected = [(name, 1, True, "rhs") for name in names]
    for equation in ("...thd,...Thd->...htT", "...htT,...Thd->...thd"):
      expected.append((f"{attention}/{equation}", 1, False, ""))
    self.assertCountEqual(sites_of(quantize(loss), params, BATCH), expected)

  @pytest.mark.full
  def test_stacked_layers_with_remat_and_one_layer_in_a_scan(self):
    def net(x):
      layer = hk.Linear(64)
      step = lambda x, _: (jnp.tanh(layer(x)), None)
      x, _ = hk.scan(step, x, None, length=3)
      stack = hk.experimental.layer_stack(2)
      return stack(lambda x: x + hk.remat(hk.nets.MLP([64]))(x))(x)

    params, loss, hand = self.make(net)
    self.check("outside_of_jit", params, loss, hand)
    taken = [site[2] for site in sites_of(quantize(loss), params, BATCH)]
    self.assertEqual(taken, [True] * 2)


class SitesTest(parameterized.TestCase):
  def reason(self, f, *args, recipe=MXFP8, **options):
    quantized = jp.quantize_dots(f, recipe, **options)
    (site,) = jp.explain(quantized, *args).sites
    self.assertEqual(site.is_taken, not site.reason)
    return site.reason

  def test_sizes_dtypes_and_names(self):
    mixed = dataclasses.replace(jp.training.NVFP4_RECIPE, grad_format="mxfp8")
    single = jnp.float32
    for shape, dtype, scope, recipe, expected in (
      ((64, 64), single, "", MXFP8, "^$"),
      (
        (64, 48),
        single,
        "",
        MXFP8,
        "other size, 48, is not a multiple of .*32",
      ),
      ((40, 64), single, "", MXFP8, "contracted size, 40, is not a .* 32"),
      ((16, 64), single, "", MXFP8, "weight's contracted size, 16, "),
      # The largest block of a recipe decides.
      ((48, 64), single, "", mixed, "size, 48, is not a multiple of .* 32"),
      ((64, 64), jnp.int8, "", MXFP8, "lhs is int8, not float32"),
      ((64, 64), jnp.complex64, "", MXFP8, "lhs is complex64"),
      ((64, 64), jnp.float16, "", MXFP8, "^$"),
      ((64, 64), single, "lm_head", MXFP8, "last layer: its name contains"),
      ((64, 64), single, "decoder/logits_dense", MXFP8, "its name contains"),
      ((64, 64), single, "embedder", MXFP8, "an embedding: its name contains"),
      ((64, 64), single, "moe/router", MXFP8, "a router of experts: its name"),
      ((64, 64), single, "multi_head_attention", MXFP8, "^$"),
      ((64, 64), single, "heading", MXFP8, "^$"),
    ):
      f = lambda w, x: plain(x, w)
      f = jax.named_call(f, name=scope) if scope else f
      w, x = np.ones(shape, dtype), np.ones((7, shape[0]), dtype)
      with self.subTest(shape=shape, dtype=dtype, scope=scope):
        self.assertRegex(self.reason(f, w, x, recipe=recipe), expected)

  @parameterized.parameters("scan", "while")
  def test_a_carry_that_begins_as_a_parameter_is_none(self, loop):
    def body(carry):
      w, x = carry
      return w * 2, plain(x, w)

    def f(w, x):
      if loop == "while":
        return lax.while_loop(lambda c: c[1][0, 0] < 1, body, (w, x))
      return lax.scan(lambda c, _: (body(c), None), (w, x), None, length=2)[0]

    reason = self.reason(f, jnp.asarray(constructs.W[0]), X)
    self.assertIn("neither operand is a parameter", reason)

  def test_sites_and_norms_count_the_trips_of_their_loops(self):
    def layer(x, w):
      norm = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
      return plain(norm, w)

    def f(w, x):
      layers = lambda x, _: (lax.scan(step, x, w)[0], None)
      step = lambda x, w: (layer(x, w), None)
      x = lax.scan(layers, x, None, length=5)[0]
      x = lax.while_loop(lambda x: x[0, 0] < 0, lambda x: layer(x, w[0]), x)
      x = lax.cond(x[0, 0] > 0, lambda: layer(x, w[0]), lambda: x)
      return layer(x, w[1])

    for function in (f, jax.jit(f)):
      found = jp.explain(quantize(function), jnp.asarray(constructs.W), X)
      for items in found.sites, found.chains:
        self.assertEqual(
          [(item.trips, item.is_conditional) for item in items],
          [(15, False), (None, False), (1, True), (1, False)],
        )

  def test_where_decides_and_may_give_another_recipe(self):
    seen = []

    def where(site):
      seen.append(site)
      if site.name == "first":
        return jp.NVFP4
      return site.is_default and "second" in site.name

    def f(w, x):
      for i, name in enumerate(("first", "second", "third")):
        with jax.named_scope(name):
          x = plain(x, w[i])
      return x

    nvfp4 = jp.training.Recipe(
      activation_format=jp.NVFP4, weight_format=jp.NVFP4, grad_format=jp.NVFP4
    )
    first = jp.dot_general(recipe=nvfp4, weight="rhs")
    x = first(X, constructs.W[0], constructs.NUMBERS)
    x = HAND(x, constructs.W[1], constructs.NUMBERS)
    expected = plain(x, constructs.W[2])
    quantized = jp.quantize_dots(f, MXFP8, where=where)
    assert_same(quantized(jnp.asarray(constructs.W), X), expected)
    self.assertEqual([s.name for s in seen], ["first", "second", "third"])
    site = seen[0]
    self.assertEqual((site.lhs_shape, site.rhs_shape), ((8, 64), (64, 64)))
    self.assertEqual(site.lhs_dtype, np.float32)
    self.assertEqual((site.weight, site.is_default), ("rhs", True))
    self.assertIn(pathlib.Path(__file__).name, site.source)
    reasons = [s.reason for s in jp.explain(quantized, constructs.W, X).sites]
    self.assertEqual(reasons, ["", "", "where returned False"])

  @pytest.mark.full
  def test_where_may_take_attention(self):
    f = lambda w, x: plain(x, x.T)
    quantized = jp.quantize_dots(f, MXFP8, where=lambda site: True)
    dot = jp.dot_general(recipe=MXFP8, weight=None)
    actual = jax.jit(jax.grad(lambda x: quantized(None, x).sum()))(X)
    hand = lambda x: dot(x, x.T, constructs.NUMBERS).sum()
    assert_same(actual, jax.jit(jax.grad(hand))(X))

  def test_rules_of_custom_vjp_are_entered_where_where_says_so(self):
    f = constructs.in_custom_vjp(plain, plain)
    found = [
      jp.explain(jp.quantize_dots(gradient(f), MXFP8, where=w), constructs.W, X)
      for w in (None, lambda site: True)
    ]
    taken = [sum(s.is_taken * s.count for s in e.sites) for e in found]
    self.assertGreaterEqual(taken[0], 2)
    self.assertEqual(taken[1], taken[0] + 2)

  def test_inside_of_a_jitted_step_frozen_weights_are_taken(self):
    @jax.jit
    def step(w, frozen, x):
      loss = lambda w: (plain(jnp.tanh(plain(x, w)), frozen) ** 2).mean()
      return jax.grad(loss)(w)

    sites = jp.explain(quantize(step), *constructs.W[:2], X).sites
    (site,) = sites  # both are on one line
    self.assertEqual((site.count, site.weight, site.is_taken), (2, "rhs", True))
