# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_dots` of a mixture of experts with JAX's ragged dots."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.rewriting import quantized_dots_test as constructs
from jaxplugin.testing import transformations
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import gradients_oracle

MXFP8 = jp.training.MXFP8_RECIPE
NVFP4 = jp.training.NVFP4_RECIPE
KEYED = constructs.KEYED
KEY, key_of = constructs.KEY, constructs.key_of
assert_same = constructs.assert_same
TOKENS, MODEL, HIDDEN, EXPERTS, TOP = 11, 64, 96, 4, 2
_Numbers = lax.RaggedDotDimensionNumbers
# (m, k) x (groups, k, n), as in `lax.ragged_dot`, and (m, k) x (groups, n, k).
JAXS = _Numbers((((1,), (1,)), ((), ())), (0,), (0,))
OURS = _Numbers((((1,), (2,)), ((), ())), (0,), (0,))
# (m, n) x (m, k), as for the gradient of weights.
CONTRACTION = _Numbers((((0,), (0,)), ((), ())), (0,), ())


def normal(seed, *shape, scale=1):
  return jax.device_put(scale * gradients_oracle.fixed_point(seed, *shape))


X = normal(0, TOKENS, MODEL)
PARAMS = {
  "router": normal(1, MODEL, EXPERTS),
  "gate_up": normal(2, EXPERTS, MODEL, 2 * HIDDEN, scale=1 / 8),
  "gate_up_bias": normal(3, EXPERTS, 2 * HIDDEN),
  "down": normal(4, EXPERTS, HIDDEN, MODEL, scale=1 / 8),
  "down_bias": normal(5, EXPERTS, MODEL),
}
ROWS = normal(6, 21, MODEL)
SIZES = jax.device_put(np.array([5, 0, 9, 4], np.int32))


def gpt_oss(first, second, params, x):
  """A layer like gpt-oss's. `first` and `second` are the ragged dots."""
  scores, expert = lax.top_k(x @ params["router"], TOP)
  order = jnp.argsort(expert.ravel())
  of_row = expert.ravel()[order]
  sizes = jnp.bincount(expert.ravel(), length=EXPERTS).astype(jnp.int32)
  y = first(x[order // TOP], params["gate_up"], sizes)
  y = y + params["gate_up_bias"][of_row]
  gate, up = jnp.minimum(y[:, ::2], 7), jnp.clip(y[:, 1::2], -7, 7)
  y = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
  y = second(y, params["down"], sizes) + params["down_bias"][of_row]
  y = jnp.zeros_like(y).at[order].set(y).reshape(len(x), TOP, -1)
  return (jax.nn.softmax(scores)[..., None] * y).sum(1)


def plain(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


def by_hand(recipe, *numbers):
  """A ragged dot of the recipe; its key has these numbers folded in."""
  key = key_of(*numbers) if recipe.stochastic_rounding else None
  return lambda x, w, sizes: jp.training.ragged_dot_general(
    x, w, sizes, JAXS, recipe=recipe, key=key
  )


# Constructs: each takes two ragged dots, and returns a loss of (params, x).


def layer_of(first, second):
  layer = functools.partial(gpt_oss, first, second)
  return lambda params, x: (layer(params, x) ** 2).mean()


def in_jit(first, second):
  return jax.jit(layer_of(first, second))


def in_checkpoint(first, second):
  return jax.checkpoint(layer_of(first, second))


def in_scan(first, second):
  layer = functools.partial(gpt_oss, first, second)

  def loss(params, x):
    stack = jax.tree.map(lambda w: jnp.stack([w, w[::-1]]), params)
    step = jax.checkpoint(lambda x, w: (x + layer(w, x), None))
    return (lax.scan(step, x, stack)[0] ** 2).mean()

  return loss


def in_vmap(first, second):
  layer = functools.partial(gpt_oss, first, second)
  return lambda params, x: (
    jax.vmap(layer, (None, 0))(params, jnp.stack([x, x[::-1]])) ** 2
  ).mean()


def in_shard_map(first, second):
  """Each device has one expert and the rows of that expert."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:EXPERTS]), ("d",))
  spec = P("d")

  def loss(params, x):
    def local(up, down, x, sizes):
      return second(jnp.tanh(first(x, up, sizes)), down, sizes)

    # Not a parameter where a function differentiates by x.
    rows = jnp.concatenate([jnp.sin(x)] * EXPERTS)
    sizes = jnp.array([TOKENS, 3, 0, 7], jnp.int32)
    up, down = params["gate_up"][..., :HIDDEN], params["down"]
    y = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(
      up, down, rows, sizes
    )
    return (y**2).mean()

  return loss


class ConstructsTest(parameterized.TestCase):
  def check(self, f, hand, recipe, places):
    expected = jax.jit(jax.value_and_grad(hand, (0, 1)))(PARAMS, X)
    for gradient in expected[1][0]["down"], expected[1][1]:
      self.assertGreater(float(jnp.abs(gradient).max()), 0)
    quantize = lambda f: jp.quantize_dots(f, recipe, key=KEY)
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1))
    for place in places:
      with self.subTest(place):
        actual = {
          "inside": lambda: jax.jit(gradient(quantize(f))),
          "outside": lambda: jax.jit(quantize(gradient(f))),
          "outside_of_jit": lambda: quantize(jax.jit(gradient(f))),
        }[place]()(PARAMS, X)
        assert_same(actual, expected)

  def test_layer_has_the_bits_of_ragged_dots_by_hand(self):
    hand = layer_of(by_hand(MXFP8), by_hand(MXFP8))
    self.check(layer_of(plain, plain), hand, MXFP8, ("inside",))

  @parameterized.parameters(
    layer_of, in_jit, in_checkpoint, in_scan, in_vmap, in_shard_map
  )
  @pytest.mark.full
  def test_gradients_are_those_of_ragged_dots_by_hand(self, construct):
    hand = construct(by_hand(MXFP8), by_hand(MXFP8))
    places = ("inside", "outside", "outside_of_jit")
    self.check(construct(plain, plain), hand, MXFP8, places)

  @pytest.mark.full
  def test_each_ragged_dot_has_a_key_of_its_own(self):
    hand = layer_of(by_hand(KEYED, 0), by_hand(KEYED, 1))
    self.check(layer_of(plain, plain), hand, KEYED, ("outside",))

  @pytest.mark.full
  def test_explicit_axes_keep_out_sharding_and_bits(self):
    w, x = PARAMS["down"], normal(8, 24, HIDDEN)
    out = P("a")

    def f(w, x):
      return lax.ragged_dot_general(x, w, SIZES, JAXS, out_sharding=out)

    expected = jax.jit(lambda w, x: by_hand(MXFP8)(x, w, SIZES))(w, x)
    mesh = explicit.mesh(self)
    with jax.set_mesh(mesh):
      w, x = (explicit.put(mesh, *each) for each in ((w, P()), (x, out)))
      loss = lambda w, x: (jp.quantize_dots(f, MXFP8)(w, x) ** 2).sum()
      of_w, of_x = jax.eval_shape(jax.grad(loss, (0, 1)), w, x)
      actual = jax.jit(jp.quantize_dots(f, MXFP8))(w, x)
    self.assertEqual(of_w.sharding.spec, P(None, None, None))
    self.assertEqual(of_x.sharding.spec, P("a", None))
    self.assertEqual(jax.typeof(actual).sharding.spec, P("a", None))
    np.testing.assert_array_equal(actual, expected)

  def test_experts_in_a_scan_of_checkpoints_are_taken(self):
    found = jp.explain(
      jp.quantize_dots(jax.grad(in_scan(plain, plain)), MXFP8), PARAMS, X
    )
    ragged = [s for s in found.sites if "ragged" in s.description]
    self.assertEqual([s.is_taken for s in ragged], [True] * 2)
    self.assertNotIn("ragged", str([x.operation for x in found.others]))


class Experts(flax.linen.Module):
  """Experts as a flax model writes them."""

  dot: object = plain

  @flax.linen.compact
  def __call__(self, x, sizes):
    init = flax.linen.initializers.lecun_normal()
    up = self.param("up", init, (EXPERTS, MODEL, HIDDEN))
    down = self.param("down", init, (EXPERTS, HIDDEN, MODEL))
    return self.dot(jax.nn.relu(self.dot(x, up, sizes)), down, sizes)


class Mixture(flax.linen.Module):
  dot: object = plain

  @flax.linen.compact
  def __call__(self, x, sizes):
    x = flax.linen.Dense(MODEL, use_bias=False)(x)
    return Experts(self.dot)(x, sizes)


class SitesTest(parameterized.TestCase):
  def test_sites_of_a_flax_module_are_those_of_dots(self):
    params = jax.eval_shape(Mixture().init, jax.random.key(0), ROWS, SIZES)
    seen = []
    model = jp.quantize_dots(
      lambda params, x: Mixture().apply(params, x, SIZES),
      MXFP8,
      where=lambda site: seen.append(site) or site.is_default,
    )
    found = jp.explain(model, params, ROWS)
    self.assertEqual(
      [(s.layer, s.weight, s.is_taken) for s in found.sites],
      [
        ("Mixture/Dense_0", "rhs", True),
        ("Mixture/Experts_0", "rhs", True),
        ("Mixture/Experts_0", "rhs", True),
      ],
    )
    self.assertEqual(
      found.sites[1].description,
      "ragged_dot_general float32[21, 64] x float32[4, 64, 96] -> float32",
    )
    self.assertIn("quantize_dots took 3 of 3 matmuls:", found.details())
    site = seen[1]
    self.assertEqual(site.operation, "ragged_dot_general")
    self.assertEqual(site.parameter, "params/Experts_0/up")
    self.assertEqual(site.dimension_numbers, (((1,), (1,)), ((), (0,))))

  def test_model_of_flax_has_the_bits_of_ragged_dots_by_hand(self):
    params = jax.jit(Mixture().init)(jax.random.key(0), ROWS, SIZES)
    dense = lambda site: site.operation == "dot_general"
    loss = lambda model: lambda params, x: (
      model.apply(params, x, SIZES) ** 2
    ).mean()
    # `where` leaves the ragged dots to the model.
    hand = jp.quantize_dots(loss(Mixture(by_hand(MXFP8))), MXFP8, where=dense)
    expected = jax.jit(jax.value_and_grad(hand))(params, ROWS)
    actual = jax.value_and_grad(jp.quantize_dots(loss(Mixture()), MXFP8))
    assert_same(jax.jit(actual)(params, ROWS), expected)

  def test_reasons_why_one_stays(self):
    w, x, sizes = PARAMS["gate_up"], ROWS, SIZES
    general = lax.ragged_dot_general
    batched = _Numbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
    dense = lambda w, x: plain(x, w, sizes)
    for f, args, options, reason in (
      (dense, (w[:, :40], x[:, :40]), {}, "contracted size, 40, is not a mult"),
      (
        dense,
        (w[..., :48], x),
        {},
        "other size, 48, is not a multiple of .*32",
      ),
      (dense, (w.astype(int), x.astype(int)), {}, "lhs is int32, not float32"),
      (dense, (w, x), {"where": lambda site: False}, "where returned False"),
      (dense, (w, x), {"params": ()}, "neither operand is a parameter"),
      (dense, (w, x), {"params": 1}, "lhs is the parameter of a ragged dot"),
      (dense, (w, x), {"params": (0, 1)}, "both operands are parameters"),
      (
        *(dense, (w, x), {"implementation": "cudnn"}),
        "a ragged dot has no implementation 'cudnn'",
      ),
      (
        lambda w, x: general(x, w, sizes, CONTRACTION),
        *((x, x), {}, "it contracts the ragged dimension"),
      ),
      (
        lambda w, x: general(x, w, sizes, batched),
        *((w[:, None], x[None]), {}, "it has batch dimensions"),
      ),
      (
        lambda w, x: general(
          x.reshape(21, 2, 32),
          w.reshape(4, 2, 32, -1),
          sizes,
          _Numbers((((1, 2), (1, 2)), ((), ())), (0,), (0,)),
        ),
        *((w, x), {}, "its operands have ranks 3 and 4, not 2 and 3"),
      ),
    ):
      quantized = jp.quantize_dots(f, MXFP8, **options)
      with self.subTest(reason):
        (site,) = jp.explain(quantized, *args).sites
        self.assertFalse(site.is_taken)
        self.assertRegex(site.reason, reason)
        if not options and args[1].dtype == np.float32:
          assert_same(jax.jit(quantized)(*args), jax.jit(f)(*args))

  def test_groups_do_not_count_in_the_sizes_of_a_weight(self):
    # 32 groups of 33 columns are a multiple of 32, but 33 columns are not.
    w, sizes = jnp.ones((32, MODEL, 33)), jnp.full(32, 1)
    dot = jp.quantize_dots(lambda w, x: plain(x, w, sizes), MXFP8)
    (site,) = jp.explain(dot, w, ROWS).sites
    self.assertIn("the weight's other size, 33,", site.reason)

  def test_options_reach_the_ragged_dots(self):
    def calls(**options):
      dot = jp.quantize_dots(lambda w, x: plain(x, w, SIZES), MXFP8, **options)
      gradient = jax.grad(lambda w, x: dot(w, x).sum(), (0, 1))
      jaxpr = jax.make_jaxpr(gradient)(
        PARAMS["down"], ROWS @ jnp.ones((64, 96))
      )
      return [
        eqn.params["call"]
        for eqn in transformations.equations(jaxpr.jaxpr)
        if eqn.primitive.name.startswith("block_scaled_ragged")
      ]

    given = calls(implementation="xla", reduce_dtype=jnp.bfloat16)
    self.assertEqual([c.implementation for c in given], ["xla", "xla", None])
    self.assertEqual({c.reduce_dtype.name for c in given}, {"bfloat16"})
    default = calls()
    self.assertEqual({c.implementation for c in default}, {None})
    self.assertEqual({c.reduce_dtype.name for c in default}, {"float32"})


NEAREST = dataclasses.replace(NVFP4, stochastic_rounding=False)


class OperandsTest(parameterized.TestCase):
  @parameterized.parameters(
    (MXFP8, JAXS, 1),
    (MXFP8, OURS, 2),
    (NEAREST, JAXS, 1),
    (dataclasses.replace(NEAREST, weight_2d=False), JAXS, 1),
  )
  @pytest.mark.sample(1)
  def test_quantized_experts_are_taken(self, recipe, numbers, contracting):
    w, x = PARAMS["down"], normal(8, 21, HIDDEN)
    w = w if contracting == 1 else w.mT
    w_q = jp.quantize_operand(w, recipe, contracting=contracting, batch=0)

    def loss(w, x):
      return (lax.ragged_dot_general(x, w, SIZES, numbers) ** 2).sum()

    quantized = jp.quantize_dots(loss, recipe)
    jaxpr = jax.make_jaxpr(quantized)(w_q, x)
    # The rows are quantized, and the weights are not quantized again.
    self.assertEqual(transformations.count("block_quantize", jaxpr.jaxpr), 1)
    gradient = jax.value_and_grad(quantized, allow_int=True)
    value, of_w = jax.jit(gradient)(w_q, x)
    expected = jax.jit(jax.value_and_grad(quantized))(w, x)
    assert_same((value, of_w.primal), expected)

  def test_experts_quantized_for_another_matmul_are_refused(self):
    quantize = functools.partial(
      jp.quantize_operand, recipe=MXFP8, contracting=2, batch=0
    )
    w_q = jax.jit(quantize)(PARAMS["down"])
    dot = jp.quantize_dots(lambda w, x: plain(x, w, SIZES), MXFP8)
    with self.assertRaisesRegex(
      TypeError,
      r"quantize_dots: rhs must be quantized for .* \[1\] and .* \[0\]",
    ):
      dot(w_q, normal(8, 21, HIDDEN))

  def test_stochastic_gradient_without_key_is_refused(self):
    dot = jp.quantize_dots(lambda w, x: plain(x, w, SIZES).sum(), KEYED)
    with self.assertRaisesRegex(
      ValueError, "^quantize_dots: key must be given"
    ):
      jax.make_jaxpr(jax.grad(dot))(PARAMS["down"], normal(8, 21, HIDDEN))


if __name__ == "__main__":
  absltest.main()
