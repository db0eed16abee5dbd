# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dot_general` in the layers of flax (nnx and linen) and in `jnp.einsum`.

The same layers with `dot_general` in NumPy give the expected values, and their
gradients: both run operation by operation, so that what is quantized has the
same bits in both.
"""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

import jaxplugin as jp
from jaxplugin.testing.oracles import gradients_oracle as oracle

TOKENS, FEATURES, HEADS = 6, 40, 4
X = np.random.default_rng(0).normal(size=(2, TOKENS, FEATURES))
X = X.astype(np.float32)

# The error of a layer besides that of its dot, relative to the largest number
# of an array. Results are sums of up to 12 * 40 products. Their bound is that
# of 16 roundings of the sum of magnitudes, which is below 32 times the largest
# number. Softmax and a second dot at most double the first one's error, twice.
TOLERANCE = 4 * 32 * oracle.BOUND


def dots(format):
  return (
    jp.dot_general(format, format),
    oracle.reference_dot_general(format, format),
  )


def nnx_layers():
  """Names, and functions of a `dot_general` that make a layer."""
  rngs = lambda: nnx.Rngs(0)
  attention = functools.partial(
    nnx.MultiHeadAttention,
    num_heads=HEADS,
    in_features=FEATURES,
    decode=False,
    use_bias=False,  # softmax leaves none of the gradient of a key's bias
  )
  return {
    "linear": lambda dot: nnx.Linear(
      FEATURES, 24, dot_general=dot, rngs=rngs()
    ),
    "linear_general": lambda dot: nnx.LinearGeneral(
      FEATURES, (HEADS, 6), dot_general=dot, rngs=rngs()
    ),
    "linear_general_of_two_axes": lambda dot: nnx.LinearGeneral(
      (TOKENS, FEATURES), 5, axis=(-2, -1), dot_general=dot, rngs=rngs()
    ),
    # The second dot quantizes the result of the first one's softmax, whose
    # roundings differ. So only one dot of a layer is quantized.
    "attention_in": lambda dot: attention(qkv_dot_general=dot, rngs=rngs()),
    "attention_out": lambda dot: attention(out_dot_general=dot, rngs=rngs()),
  }


def linen_layers():
  attention = functools.partial(
    flax.linen.MultiHeadDotProductAttention,
    num_heads=HEADS,
    use_bias=False,
  )
  return {
    "dense": lambda dot: flax.linen.Dense(24, dot_general=dot),
    "dense_general": lambda dot: flax.linen.DenseGeneral(
      (HEADS, 6), dot_general=dot
    ),
    "dense_general_of_two_axes": lambda dot: flax.linen.DenseGeneral(
      5, axis=(-2, -1), dot_general=dot
    ),
    "attention_in": lambda dot: attention(qkv_dot_general=dot),
    "attention_out": lambda dot: attention(out_dot_general=dot),
  }


def assert_close_and_not_zero(actual, expected):
  """Asserts that arrays of two trees are close and not zero."""
  actual, tree = jax.tree.flatten(actual)
  expected, expected_tree = jax.tree.flatten(expected)
  assert tree == expected_tree, (tree, expected_tree)
  for a, e in zip(actual, expected, strict=True):
    e = np.asarray(e, np.float64)
    largest = np.abs(e).max()
    assert largest > 0
    np.testing.assert_allclose(a, e, rtol=0, atol=TOLERANCE * largest)


def nnx_model(layer):
  """A function of parameters and x, and the parameters."""
  graph, params = nnx.split(layer, nnx.Param)
  return lambda params, x: nnx.merge(graph, params)(x), params


def linen_model(layer):
  return layer.apply, layer.init(jax.random.key(0), X)


class LayersTest(parameterized.TestCase):
  @parameterized.parameters(
    *((linen_model, linen_layers, name, jp.MXFP8) for name in linen_layers()),
    (linen_model, linen_layers, "dense", jp.NVFP4),
    *((nnx_model, nnx_layers, name, jp.MXFP8) for name in nnx_layers()),
    (nnx_model, nnx_layers, "linear", jp.NVFP4),
  )
  @pytest.mark.sample(1)
  def test_values_and_gradients_are_those_of_quantized_products(
    self, model, layers, name, format
  ):
    results = []
    params = None
    for dot_general in dots(format):
      apply, own = model(layers()[name](dot_general))
      params = own if params is None else params
      # Not symmetric: the gradients of a plain sum over tokens would cancel.
      loss = lambda p, x, apply=apply: jnp.sin(3 * apply(p, x)).sum()
      grads = jax.grad(loss, argnums=(0, 1))(params, jnp.asarray(X))
      results.append((apply(params, X), grads))
    assert_close_and_not_zero(*jax.tree.map(np.asarray, results))
