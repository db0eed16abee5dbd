# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes: their formulas, transformations and errors.

At equal keys, transformations give equal bits: sums of products of so few bits
are exact in f32, in any order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit
from jaxplugin.testing.oracles import gradients_oracle, recipes_oracle

training = jp.training
MATMUL = (((1,), (0,)), ((), ()))


fixed_point = gradients_oracle.fixed_point
X, W, G = fixed_point(0, 40, 96), fixed_point(1, 96, 72), fixed_point(2, 40, 72)


def changed(recipe, **fields):
  return dataclasses.replace(recipe, **fields)


def step(recipe, key=None, weight="rhs"):
  """The result and both gradients, of what is given."""
  function = jp.dot_general(recipe=recipe, weight=weight)
  return gradients_oracle.with_gradients(
    lambda x, w: function(x, w, MATMUL, key=key)
  )


class ValuesTest(parameterized.TestCase):
  """The three products of a recipe, against NumPy."""

  @parameterized.named_parameters(
    *recipes_oracle.CASES,
    ("mxfp8_e5m2", training.MXFP8_RECIPE, {"grad_format": jp.MXFP8_E5M2}),
    ("nvfp4_1d", training.NVFP4_RECIPE, {"weight_2d": False}),
    ("nvfp4_scales_up_to_nearest", training.NVFP4_RECIPE,
      {"grad_scale_up": True, "stochastic_rounding": False}),
    (
      "nvfp4_e4m3_gradients",
      training.NVFP4_RECIPE,
      {
        "grad_format": jp.MXFP8,
        "four_over_six": True,
        "scale_rounding": "floor",  # of the gradients
      },
    ),
    ("mxfp8_from_quantized", training.MXFP8_RECIPE,
      {"backward_from_quantized": True}),
    ("mxfp4_plain_weights", training.MXFP4_RECIPE,
      {"weight_format": None, "dgrad_hadamard": 16}),
  )  # fmt: skip
  @pytest.mark.sample(16)
  def test_products_are_those_of_the_formulas(self, recipe, fields):
    recipe = changed(recipe, **fields)
    key = jax.random.key(7)
    actual = step(recipe, key)(X, W, G)
    expected = recipes_oracle.products(recipe, X, W, G, key)
    names = ("forward", "dgrad", "wgrad")
    for name, a, e in zip(names, actual, expected, strict=True):
      with self.subTest(name):
        # A product of quantized numbers that are off would be off by 2^-4.
        np.testing.assert_array_less(
          np.abs(np.asarray(a, np.float64) - e.value),
          gradients_oracle.BOUND * e.magnitude + 1e-300,
        )

  def test_weight_may_be_either_side(self):
    # (x w)' = w' x', whose weight is the left side.
    recipe = changed(training.NVFP4_RECIPE, stochastic_rounding=False)
    right = step(recipe)(X, W, G)
    result, of_w, of_x = step(recipe, weight="lhs")(W.T, X.T, G.T)
    for a, e in zip((result.T, of_x.T, of_w.T), right, strict=True):
      np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * np.abs(e).max())

  @pytest.mark.full
  def test_activations_on_both_sides_are_alike(self):
    recipe = changed(training.NVFP4_RECIPE, stochastic_rounding=False)
    result, of_x, of_y = step(recipe, weight=None)(X, W, G)
    plain = changed(recipe, weight_2d=False, wgrad_hadamard=None)
    for a, e in zip((result, of_x, of_y), step(plain)(X, W, G), strict=True):
      np.testing.assert_array_equal(a, e)

  def test_no_part_of_backward_changes_the_forward_value(self):
    base, key = training.NVFP4_RECIPE, jax.random.key(0)
    every = (
      {},
      {"stochastic_rounding": False},
      {"wgrad_hadamard": None},
      {"quantize_dgrad": False},
      {"quantize_wgrad": False},
      {"grad_format": jp.MXFP8_E5M2},
      {"backward_from_quantized": True},
    )

    def dot(recipe):
      function = jp.dot_general(recipe=recipe, weight="rhs")
      return lambda x, w: function(x, w, MATMUL, key=key)

    @jax.jit
    def run(x, w):
      recipes = [changed(base, **fields) for fields in every]
      return [jax.vjp(dot(recipe), x, w)[0] for recipe in recipes]

    expected = jax.jit(dot(base))(X, W)
    for fields, found in zip(every, run(X, W), strict=True):
      np.testing.assert_array_equal(found, expected, str(fields))


OWN_FORMAT = contract.block_format(
  "own", jp.MXFP8.values_dtype, jp.MXFP8.scale_dtype, 24
)

# A recipe, the fields that are wrong, the error and words of its message.
BAD_FIELDS = (
  ("NVFP4", {"activation_format": 8}, TypeError, "activation_format.* 8"),
  ("NVFP4", {"grad_scale_up": 1}, TypeError, "grad_scale_up .*True.* 1"),
  ("NVFP4", {"grad_format": "fp3"}, ValueError, "grad_format.*fp3.*mxfp8"),
  ("NVFP4",
    {"grad_scale_up": True, "grad_format": None, "stochastic_rounding": False},
    ValueError, "grad_scale_up .*got grad_format=None"),
  ("NVFP4", {"weight_format": None}, ValueError,
    "weight_2d .*weight_format is None"),
  ("NVFP4", {"dgrad_hadamard": 16}, ValueError, "with weight_2d.*_hadamard=16"),
  ("NVFP4", {"scale_rounding": "floor"}, ValueError,
    'scale_rounding must be "up" .*E8M0.* for nvfp4, .*leave scale_rounding'),
  ("MXFP8", {"activation_format": None, "weight_format": None}, TypeError,
    "activation_format or weight_format.*None for both"),
  ("MXFP8", {"weight_2d": 16}, TypeError, "weight_2d .*True.* 16"),
  ("MXFP8", {"wgrad_hadamard": 16.0}, TypeError, "wgrad_hadamard.* 16.0"),
  ("MXFP8", {"wgrad_hadamard": True}, TypeError, "wgrad_hadamard.* True"),
  ("MXFP8", {"scale_rounding": "down"}, ValueError, "scale_.*'down'"),
  ("MXFP8", {"dgrad_hadamard": 24}, ValueError, "dgrad_.*from 2 to 256.*24"),
  ("MXFP8", {"wgrad_hadamard": 512}, ValueError, "wgrad_.* 256, got 512"),
  ("MXFP8", {"activation_format": OWN_FORMAT, "wgrad_hadamard": 16}, ValueError,
    "wgrad_hadamard .*got 16 and own with blocks of 24"),
  ("MXFP8", {"grad_format": None, "stochastic_rounding": True}, ValueError,
    "stochastic_rounding .*grad_format is None"),
  ("MXFP8", {"grad_scale_up": True}, ValueError,
    "grad_scale_up .*got grad_format=mxfp8; .*scale_rounding"),
  ("MXFP8", {"backward_from_quantized": True, "quantize_forward": False},
    ValueError, "backward_from_quantized .*quantize_forward is False"),
  ("MXFP4", {"four_over_six": True}, ValueError, "four_.*got mxfp4"),
)  # fmt: skip


class ArgumentsTest(absltest.TestCase):
  def test_nvfp4_recipe_is_that_of_the_paper(self):
    # arXiv 2509.25149: squares of weights, a transform of size 16 in wgrad.
    nvfp4 = training.Recipe(
      activation_format="nvfp4",
      weight_format="nvfp4",
      grad_format="nvfp4",
      stochastic_rounding=True,
      weight_2d=True,
      wgrad_hadamard=16,
      dgrad_hadamard=None,
    )
    self.assertEqual(training.NVFP4_RECIPE, nvfp4)

  def test_recipes_are_hashable_values(self):
    self.assertEqual(changed(training.MXFP8_RECIPE), training.MXFP8_RECIPE)
    self.assertLen({training.NVFP4_RECIPE, changed(training.NVFP4_RECIPE)}, 1)
    by_name = training.Recipe(
      activation_format="mxfp8", weight_format="mxfp8", grad_format="mxfp8"
    )
    self.assertEqual(by_name, training.MXFP8_RECIPE)

  def test_bad_fields_are_refused_with_values(self):
    for name, fields, error, pattern in BAD_FIELDS:
      with (
        self.subTest(pattern),
        self.assertRaisesRegex(error, f"Recipe: .*{pattern}"),
      ):
        changed(getattr(training, f"{name}_RECIPE"), **fields)

  def test_a_name_is_a_format_everywhere_and_no_named_recipe(self):
    w = jnp.ones((64, 64))
    expected = training.recipes.resolve("f", "recipe", "nvfp4")
    self.assertEqual(
      expected,
      training.Recipe(
        activation_format=jp.NVFP4, weight_format=jp.NVFP4, grad_format=jp.NVFP4
      ),
    )
    # A recipe that rounds stochastically would need a key here.
    for dot in (
      jp.dot_general(recipe="nvfp4", weight="rhs"),
      jp.quantize_dots(lambda w, x, *_: x @ w, "nvfp4", params=1),
    ):
      jax.make_jaxpr(jax.grad(lambda w, dot=dot: dot(w, w, MATMUL).sum()))(w)
    sizes = jnp.array([64], jnp.int32)
    jax.make_jaxpr(
      jax.grad(
        lambda w: training.ragged_dot_general(
          w, w[None], sizes, recipe="nvfp4"
        ).sum()
      )
    )(w)

  def test_bad_arguments_of_dot_general_are_refused(self):
    recipe = training.MXFP8_RECIPE
    make = jp.dot_general
    plain = changed(recipe, activation_format=None)
    floor = {"scale_rounding": "floor"}
    for error, pattern, call in (
      (TypeError, "recipe must be .*got 8", lambda: make(recipe=8)),
      (TypeError, "weight must be given", lambda: make(recipe=recipe)),
      (TypeError, "got lhs_format=mxfp8, scale_rounding='floor'; change",
        lambda: make(jp.MXFP8, recipe=recipe, weight="rhs", **floor)),
      (TypeError, "no lhs_format and no rhs_format", lambda: make()),
      (TypeError, "no rhs_format", lambda: make(jp.MXFP8)),
      (TypeError, "without a recipe, got weight='rhs'",
        lambda: make(jp.MXFP8, jp.MXFP8, weight="rhs")),
      (TypeError, "weight=None .*activation_format is None",
        lambda: make(recipe=plain, weight=None)),
      (TypeError, "key must be one jax.random key, got 7",
        lambda: make(recipe=recipe, weight="rhs")(X, W, MATMUL, key=7)),
      (ValueError, 'weight must be "lhs", "rhs" or None, got 1',
        lambda: make(recipe=recipe, weight=1)),
      (ValueError, "scale_rounding .*'floor' for nvfp4,.*leave",
        lambda: make(jp.NVFP4, jp.NVFP4, **floor)),
    ):  # fmt: skip
      with (
        self.subTest(pattern),
        self.assertRaisesRegex(error, f"dot_general: .*{pattern}"),
      ):
        call()
    make(jp.NVFP4, jp.NVFP4, grad_format=jp.MXFP8, **floor)

  def test_missing_key_is_an_error_where_a_gradient_is_rounded(self):
    function = jp.dot_general(recipe=training.NVFP4_RECIPE, weight="rhs")
    dot = lambda x, w: function(x, w, MATMUL)
    loss = lambda x, w: dot(x, w).sum()
    pattern = "dot_general: .*key=None. .*fold_in.*stochastic_rounding=False"
    for argnums in (0, 1, (0, 1)):
      with self.assertRaisesRegex(ValueError, pattern):
        jax.make_jaxpr(jax.grad(loss, argnums))(X, W)
    # Neither a value nor a tangent is rounded at random.
    jax.make_jaxpr(dot)(X, W)
    jax.make_jaxpr(lambda x, w: jax.jvp(dot, (x, w), (x, w)))(X, W)
    exact = changed(
      training.NVFP4_RECIPE, quantize_dgrad=False, quantize_wgrad=False
    )
    function = jp.dot_general(recipe=exact, weight="rhs")
    jax.make_jaxpr(jax.grad(loss))(X, W)


NVFP4 = training.NVFP4_RECIPE
# Compiled in less time.
ROUNDED = dataclasses.replace(
  training.MXFP8_RECIPE, stochastic_rounding=True, weight_2d=True
)


# Each of three products.
XS, WS, GS = (
  fixed_point(seed, *shape, bits=6)
  for seed, shape in enumerate(((3, 40, 64), (3, 64, 48), (3, 40, 48)))
)
KEYS = jax.random.split(jax.random.key(5), 3)


def loss_of(recipe, wrap=lambda f: f):
  """sum(g * x w): its gradients are the backward products of g."""
  function = jp.dot_general(recipe=recipe, weight="rhs")
  dot = wrap(lambda x, w, key: function(x, w, MATMUL, key=key))
  return lambda x, w, g, key: (dot(x, w, key) * g).sum()


def assert_same(actual, expected):
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(a, e)


@functools.cache
def grad_of(recipe):
  return jax.jit(jax.grad(loss_of(recipe), (0, 1)))


@functools.cache
def plain():
  """Gradients of each of three products."""
  grad = grad_of(NVFP4)
  each = [grad(*args) for args in zip(XS, WS, GS, KEYS, strict=True)]
  return [np.stack(x) for x in zip(*each, strict=True)]


class TransformationsTest(parameterized.TestCase):
  @pytest.mark.full
  def test_vmap_and_scan_are_the_loop(self):
    loss = loss_of(NVFP4)

    def mapped(x, w, keys):
      return jax.vmap(loss)(x, w, GS, keys).sum()

    def scanned(x, w, keys):
      step = lambda c, args: (c + loss(*args), None)
      return jax.lax.scan(step, 0.0, (x, w, GS, keys))[0]

    def gradients(x, w, keys):
      return [
        jax.vmap(jax.grad(loss, (0, 1)))(x, w, GS, keys),
        jax.grad(mapped, (0, 1))(x, w, jax.random.key_data(keys)),
        jax.grad(scanned, (0, 1))(x, w, keys),
      ]

    for actual in jax.jit(gradients)(XS, WS, KEYS):
      assert_same(actual, plain())

  def test_vmap_with_one_key_is_the_loop_with_that_key(self):
    grad = jax.grad(loss_of(NVFP4), (0, 1))
    mapped = jax.jit(jax.vmap(grad, in_axes=(0, None, 0, None)))
    actual = mapped(XS, WS[0], GS, KEYS[0])
    for i in range(3):
      expected = grad_of(NVFP4)(XS[i], WS[0], GS[i], KEYS[0])
      assert_same([a[i] for a in actual], expected)

  @parameterized.parameters(
    None,
    jp.checkpoint_policies.dots_saveable,
    jp.checkpoint_policies.quantized_saveable,
    jax.checkpoint_policies.everything_saveable,
  )
  @pytest.mark.sample(1)
  def test_remat_changes_no_bit(self, policy):
    # JAX rounds floats that a policy saves as if their types had an Inf: of
    # scales of NVFP4 above 240 that would be NaN.
    wrap = functools.partial(jax.checkpoint, policy=policy)
    grad = jax.jit(jax.grad(loss_of(NVFP4, wrap), (0, 1)))
    assert_same(grad(XS[0], WS[0], GS[0], KEYS[0]), [e[0] for e in plain()])

  def test_other_keys_have_other_bits_in_both_gradients(self):
    actual = grad_of(NVFP4)(XS[0], WS[0], GS[0], KEYS[1])
    for a, e in zip(actual, plain(), strict=True):
      self.assertGreater(np.mean(np.asarray(a) != e[0]), 0.5)

  def test_sharded_tokens_are_rounded_as_those_of_one_device(self):
    explicit.need_devices(self, 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    # Each device has a block of tokens, and so gathers no gradient.
    x, g = (fixed_point(1, 64, size, bits=6) for size in (64, 48))
    given, grad = (x, WS[0], g, KEYS[0]), grad_of(ROUNDED)
    specs = [jax.sharding.PartitionSpec(*axes) for axes in ("d", "", "d", "")]
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    assert_same(grad(*map(put, given, specs)), grad(*given))

  @parameterized.parameters(True, False)
  @pytest.mark.full
  def test_shard_map_rounds_each_shard_by_its_key(self, one_key):
    explicit.need_devices(self, 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = jax.sharding.PartitionSpec
    loss = loss_of(ROUNDED)

    @jax.shard_map(
      mesh=mesh,
      in_specs=(spec("d"), spec(), spec("d"), spec()),
      out_specs=(spec("d"), spec()),
    )
    def step(x, w, g, key):
      if not one_key:
        key = jax.random.fold_in(key, jax.lax.axis_index("d"))
      of_x, of_w = jax.grad(
        lambda x, w: loss(x[0], w, g[0], key), argnums=(0, 1)
      )(x, w)
      # w is the same on both devices: its gradient is their sum.
      return of_x, of_w

    actual = jax.jit(step)(XS[:2], WS[0], GS[:2], KEYS[0])
    grad = jax.jit(jax.grad(loss, (0, 1)))
    keys = [KEYS[0]] * 2
    if not one_key:
      keys = [jax.random.fold_in(KEYS[0], i) for i in range(2)]
    each = [grad(XS[i], WS[0], GS[i], keys[i]) for i in range(2)]
    np.testing.assert_array_equal(actual[0], np.stack([e[0] for e in each]))
    np.testing.assert_array_equal(actual[1], each[0][1] + each[1][1])
