# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots` of models that are written with equinox and with haiku."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.rewriting import quantized_dots_test as constructs

try:
  import equinox as eqx
except ImportError:
  eqx = None
try:
  import haiku as hk
except ImportError:
  hk = None

MXFP8 = jp.training.MXFP8_RECIPE
X = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32)
assert_same = constructs.assert_same


def quantize(f):
  return jp.quantize_dots(f, MXFP8)


def sites_of(f, *args):
  """Layer, number, and whether it is taken, of each line of the report."""
  found = jp.explain(f, *args).sites
  return sorted((s.layer, s.count, s.is_taken, s.weight) for s in found)


if eqx is not None:

  class Block(eqx.Module):
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


@absltest.skipIf(eqx is None, "needs equinox: pip install equinox")
class EquinoxTest(parameterized.TestCase):
  def loss(self, model, x):
    return (jax.vmap(model)(x) ** 2).mean()

  @pytest.mark.full
  def test_gradients_are_those_of_layers_with_dot_general(self):
    model, gradient = Block(jax.random.key(0)), eqx.filter_value_and_grad
    expected = eqx.filter_jit(gradient(self.loss))(by_hand(model), X)
    actual = eqx.filter_jit(gradient(quantize(self.loss)))(model, X)
    assert_same(actual, expected)
    actual = quantize(eqx.filter_jit(gradient(self.loss)))(model, X)
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
      (f"{attention}/eqx.nn.Linear", 4, True, "lhs"),
      (f"{attention}/sS,Sd->sd", 1, False, ""),
      (f"{attention}/sd,Sd->sS", 1, False, ""),
      (mlp, 1, True, "lhs"),  # two sizes
      (mlp, 1, True, "lhs"),
    ]
    model = Block(jax.random.key(0))
    self.assertCountEqual(sites_of(f, model, X), expected)

  @pytest.mark.full
  def test_rows_of_a_jitted_function_that_maps_are_one_product(self):
    layer = eqx.nn.Linear(64, 64, key=jax.random.key(0))
    for jit, batch in ((lambda f: f, 8), (eqx.filter_jit, 1)):
      f = eqx.filter_value_and_grad(quantize(jit(self.loss)))
      wgrad = jp.explain(f, layer, X[0])[-1]
      self.assertEqual(wgrad.phase, "wgrad")
      self.assertEqual(wgrad.problem.batch, batch)

  @pytest.mark.full
  def test_stacked_layers_in_a_scan_with_checkpoint(self):
    def by_rows(layer, x):
      return jax.vmap(jax.vmap(layer))(x)

    # In a scan's body products have their batch: rows are blocked together.
    def hand(layer, x):
      dot = jp.dot_general(recipe=MXFP8, weight="lhs")
      for i, part in enumerate(layer.layers):
        y = dot(part.weight, x, (((1,), (2,)), ((), ())))
        x = jnp.moveaxis(y, 0, 2) + part.bias
        x = x if i else jax.nn.relu(x)
      return x

    def gradient(apply):
      def loss(layers, x):
        arrays, rest = eqx.partition(layers, eqx.is_array)

        def step(x, arrays):
          layer = eqx.combine(arrays, rest)
          return eqx.filter_checkpoint(apply)(layer, x), None

        return (lax.scan(step, x, arrays)[0] ** 2).mean()

      return eqx.filter_jit(eqx.filter_value_and_grad(loss))

    make = lambda key: eqx.nn.MLP(64, 64, 96, 1, key=key)
    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(1), 2))
    actual = quantize(gradient(by_rows))(layers, X)
    assert_same(actual, gradient(hand)(layers, X))


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


@absltest.skipIf(hk is None, "needs haiku: pip install dm-haiku")
class HaikuTest(parameterized.TestCase):
  def make(self, net):
    """Parameters, the loss, and the same with products written by hand."""

    def hand(x):
      with hk.intercept_methods(haiku_hand):
        return net(x)

    models = [hk.without_apply_rng(hk.transform(f)) for f in (net, hand)]
    params = models[0].init(jax.random.key(0), X)
    loss = lambda model: lambda p, x: (model.apply(p, x) ** 2).mean()
    return params, *map(loss, models)

  def check(self, place, params, loss, hand):
    expected = jax.jit(jax.value_and_grad(hand))(params, X)
    actual = constructs.PLACES[place](loss, quantize)(params, X)
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
    self.assertCountEqual(sites_of(quantize(loss), params, X), expected)

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
    taken = [site[2] for site in sites_of(quantize(loss), params, X)]
    self.assertEqual(taken, [True] * 2)


if __name__ == "__main__":
  absltest.main()
