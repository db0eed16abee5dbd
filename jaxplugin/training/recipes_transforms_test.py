# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes under transformations and in layers: at equal keys, equal bits.

Operands of so few bits have products whose sums f32 holds exactly, so no order
of summation changes them.
"""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx

import jaxplugin as jp
from jaxplugin.testing.oracles import recipes_oracle

MATMUL = (((1,), (0,)), ((), ()))
NVFP4 = jp.training.NVFP4_RECIPE
# Compiled in less time.
ROUNDED = dataclasses.replace(
  jp.training.MXFP8_RECIPE, stochastic_rounding=True, weight_2d=True
)
NUM_DEVICES = 4


def normal(seed, *shape):
  """Of 2^-6, so that the transform's sums are exact too."""
  x = np.random.default_rng(seed).normal(size=shape)
  return (np.round(x * 64) / 64).astype(np.float32)


X, W, G = normal(0, 3, 40, 64), normal(1, 3, 64, 48), normal(2, 3, 40, 48)
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
  each = [grad(*args) for args in zip(X, W, G, KEYS, strict=True)]
  return [np.stack(x) for x in zip(*each, strict=True)]


class TransformationsTest(parameterized.TestCase):
  @pytest.mark.full
  def test_vmap_of_the_gradient_is_the_loop(self):
    actual = jax.jit(jax.vmap(jax.grad(loss_of(NVFP4), (0, 1))))(X, W, G, KEYS)
    assert_same(actual, plain())

  @pytest.mark.full
  def test_gradient_of_vmap_is_the_loop_with_raw_keys_too(self):
    each = jax.vmap(loss_of(NVFP4))
    total = lambda x, w, g, keys: each(x, w, g, keys).sum()
    data = jax.random.key_data(KEYS)
    assert_same(jax.jit(jax.grad(total, (0, 1)))(X, W, G, data), plain())

  @pytest.mark.full
  def test_vmap_with_one_key_is_the_loop_with_that_key(self):
    grad = jax.grad(loss_of(NVFP4), (0, 1))
    mapped = jax.jit(jax.vmap(grad, in_axes=(0, None, 0, None)))
    actual = mapped(X, W[0], G, KEYS[0])
    for i in range(3):
      expected = grad_of(NVFP4)(X[i], W[0], G[i], KEYS[0])
      assert_same([a[i] for a in actual], expected)

  @pytest.mark.full
  def test_scan_is_the_loop(self):
    loss = loss_of(NVFP4)

    def total(x, w):
      step = lambda c, args: (c + loss(*args), None)
      return jax.lax.scan(step, 0.0, (x, w, G, KEYS))[0]

    assert_same(jax.jit(jax.grad(total, (0, 1)))(X, W), plain())

  @parameterized.parameters(
    None,
    jp.checkpoint_policies.quantized_saveable,
    jax.checkpoint_policies.everything_saveable,
  )
  @pytest.mark.sample(1)
  def test_remat_changes_no_bit(self, policy):
    # JAX rounds floats that a policy saves as if their types had an Inf: of
    # scales of NVFP4 above 240 that would be NaN.
    wrap = functools.partial(jax.checkpoint, policy=policy)
    grad = jax.jit(jax.grad(loss_of(NVFP4, wrap), (0, 1)))
    assert_same(grad(X[0], W[0], G[0], KEYS[0]), [e[0] for e in plain()])

  def test_other_keys_have_other_bits_in_both_gradients(self):
    actual = grad_of(NVFP4)(X[0], W[0], G[0], KEYS[1])
    for a, e in zip(actual, plain(), strict=True):
      self.assertGreater(np.mean(np.asarray(a) != e[0]), 0.5)

  @pytest.mark.full
  def test_sharded_tokens_are_rounded_as_those_of_one_device(self):
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("d",))
    put = lambda x, *spec: jax.device_put(
      x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    actual = grad_of(NVFP4)(put(X[0], "d"), put(W[0]), put(G[0], "d"), KEYS[0])
    assert_same(actual, [e[0] for e in plain()])

  @parameterized.parameters(True, False)
  @pytest.mark.full
  def test_shard_map_rounds_each_shard_by_its_key(self, one_key):
    if jax.device_count() < 2:
      self.skipTest(f"needs 2 devices, has {jax.device_count()}")
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

    actual = jax.jit(step)(X[:2], W[0], G[:2], KEYS[0])
    grad = jax.jit(jax.grad(loss, (0, 1)))
    keys = [KEYS[0]] * 2
    if not one_key:
      keys = [jax.random.fold_in(KEYS[0], i) for i in range(2)]
    each = [grad(X[i], W[0], G[i], keys[i]) for i in range(2)]
    np.testing.assert_array_equal(actual[0], np.stack([e[0] for e in each]))
    np.testing.assert_array_equal(actual[1], each[0][1] + each[1][1])

  @pytest.mark.full
  def test_integers_have_exact_gradients(self):
    # All values have one magnitude, which every format represents exactly.
    rng = np.random.default_rng(0)
    signs = lambda *shape: rng.choice([-1, 1], shape).astype(np.float32)
    x, w, g = signs(32, 64), signs(64, 32), signs(32, 32)
    expected = (g @ w.T, x.T @ g)
    assert_same(grad_of(ROUNDED)(x, w, g, KEYS[0]), expected)
    recipe = dataclasses.replace(NVFP4, wgrad_hadamard=None)
    actual = grad_of(recipe)(x, w, g, KEYS[0])
    for a, e in zip(actual, expected, strict=True):
      # A scale of 1 is 448 times an f32, in each operand.
      np.testing.assert_allclose(a, e, rtol=2.0**-21)


class LayersTest(absltest.TestCase):
  """What layers call, with the gradients that the formulas have."""

  def assert_products(self, actual, key):
    expected = recipes_oracle.products(ROUNDED, X[0], W[0], G[0], key)
    for a, e in zip(actual, expected, strict=True):
      np.testing.assert_allclose(
        a, e.value, rtol=0, atol=2.0**-20 * np.abs(e.magnitude).max()
      )

  def function(self, key):
    function = jp.dot_general(recipe=ROUNDED, weight="rhs")
    return functools.partial(function, key=key)

  @pytest.mark.full
  def test_linen(self):
    @jax.jit
    def step(w, x, g, key):
      layer = flax.linen.Dense(
        48, use_bias=False, dot_general=self.function(key)
      )
      apply = lambda w, x: layer.apply({"params": {"kernel": w}}, x)
      result, vjp = jax.vjp(apply, w, x)
      of_w, of_x = vjp(g)
      return result, of_x, of_w

    self.assert_products(step(W[0], X[0], G[0], KEYS[0]), KEYS[0])

  @pytest.mark.full
  def test_nnx(self):
    layer = nnx.Linear(64, 48, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(W[0])

    @nnx.jit
    def step(layer, x, g, key):
      def loss(layer, x):
        layer.dot_general = self.function(key)
        result = layer(x)
        return (result * g).sum(), result

      grads, result = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
      return result, grads[1], grads[0].kernel[...]

    self.assert_products(step(layer, X[0], G[0], KEYS[0]), KEYS[0])

  @pytest.mark.full
  def test_einsum(self):
    @jax.jit
    def step(x, w, g, key):
      dot = self.function(key)
      result, vjp = jax.vjp(
        lambda x, w: jnp.einsum("mk,kn->mn", x, w, _dot_general=dot), x, w
      )
      return result, *vjp(g)

    self.assert_products(step(X[0], W[0], G[0], KEYS[0]), KEYS[0])


if __name__ == "__main__":
  absltest.main()
