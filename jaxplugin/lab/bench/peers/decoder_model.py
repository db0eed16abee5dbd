# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder's step. The caller passes a function for matmuls with weights.

A layer is that of Llama (arXiv:2302.13971) without rotary embeddings: root mean
square norm, attention, norm, and a gated MLP (arXiv:2002.05202). 8 heads share
keys and values if 8 divides the number of heads, otherwise all heads do
(arXiv:2305.13245). Each sequence has one new token and a cache of
`CACHE_LENGTH` older tokens. The step does not write to the cache, so XLA does
not copy the cache.

A step returns the input and output of each matmul, so that a check can compare
the matmuls one by one. The final result is not enough: it differs from an f64
reference by the error of quantization, because an input near the midpoint of
two codes may be rounded to either code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.lab.bench import workloads

PRODUCTS: Final = ("qkv", "out", "gate_up", "down")
CACHES: Final = ("keys", "values")
CACHE_LENGTH: Final = 512
NORM_EPSILON: Final = 1e-5
_HEADS_A_GROUP: Final = 8

# Multiplies f32[m, k] with a weight. The result is f32[m, n].
Linear = Callable[[jax.Array, Any], jax.Array]
# Weights and caches by name.
Layer = dict[str, Any]


# Sizes of a decoder, from its row of k channels and n channels of the MLP.


def groups(row: workloads.BenchRow) -> int:
  """Returns the number of key and value heads."""
  found, others = divmod(row.k // workloads.HEAD_SIZE, _HEADS_A_GROUP)
  return 1 if others else found


def weight_shapes(row: workloads.BenchRow) -> dict[str, tuple[int, int]]:
  """Returns the shape (n, k) of each weight of a layer."""
  return {
    "qkv": (row.k + 2 * groups(row) * workloads.HEAD_SIZE, row.k),
    "out": (row.k, row.k),
    "gate_up": (2 * row.n, row.k),
    "down": (row.k, row.n),
  }


def flops(row: workloads.BenchRow) -> int:
  """Returns the FLOPs of all matmuls, including attention."""
  weights = sum(n * k for n, k in weight_shapes(row).values())
  attention = 2 * row.k * (CACHE_LENGTH + 1)
  return 2 * row.m * row.layers * (weights + attention)


def scanned(
  linear: Linear, x: jax.Array, layers: Layer
) -> tuple[jax.Array, Any]:
  """Computes a step by `lax.scan` over stacked layers.

  Args:
    linear: computes the matmuls with weights.
    x: f32[m, channels].
    layers: weights and caches, each with a leading dimension of layers.

  Returns:
    f32[m, channels]; and for each matmul {"input": f32[layers, m, k],
    "output": f32[layers, m, n]}.
  """
  return lax.scan(lambda x, layer: _layer(linear, x, layer), x, layers)


def numbered(
  linear: Linear, x: jax.Array, layers: Layer
) -> tuple[jax.Array, Any]:
  """Computes a step by `lax.scan` over the layers' indices.

  The weight passed to `linear` is the pair (stack, i32[] index).
  """
  weights = {name: layers[name] for name in PRODUCTS}
  caches = {name: layers[name] for name in CACHES}

  def step(x: jax.Array, given: Any) -> Any:
    i, own = given
    pairs = {name: (stack, i) for name, stack in weights.items()}
    return _layer(linear, x, {**pairs, **own})

  count = len(caches[CACHES[0]])
  return lax.scan(step, x, (jnp.arange(count), caches))


def unrolled(
  linear: Linear, x: jax.Array, layers: Sequence[Layer]
) -> tuple[jax.Array, Any]:
  """Computes a step with separate arguments for each layer.

  Returns:
    The same as `scanned`, but with a tuple of layers instead of stacks.
  """
  seen = []
  for layer in layers:
    x, one = _layer(linear, x, layer)
    seen.append(one)
  return x, tuple(seen)


def of_layer(seen: Any, i: int) -> dict[str, dict[str, Any]]:
  """Returns the inputs and outputs of layer i, from a step's second result."""
  if isinstance(seen, tuple):
    return seen[i]
  return jax.tree.map(lambda stack: stack[i], seen)


def _layer(
  linear: Linear, x: jax.Array, layer: Layer
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
  seen = {}

  def product(name: str, x: jax.Array) -> jax.Array:
    y = linear(x, layer[name])
    seen[name] = {"input": x, "output": y}
    return y

  qkv = product("qkv", _norm(x))
  x = x + product("out", _attention(qkv, layer["keys"], layer["values"]))
  gate, up = jnp.split(product("gate_up", _norm(x)), 2, axis=1)
  x = x + product("down", jax.nn.silu(gate) * up)
  return x, seen


def _norm(x: jax.Array) -> jax.Array:
  mean = jnp.square(x).mean(axis=-1, keepdims=True)
  return x * lax.rsqrt(mean + NORM_EPSILON)


def _attention(qkv: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
  """Returns attention f32[m, channels] of a token's qkv and the caches."""
  m, groups, _, size = keys.shape
  query, key, value = split_qkv(qkv, groups)
  query = query * np.float32(size**-0.5)
  # Without HIGHEST, a GPU multiplies in TF32.
  dot = lambda formula, *operands: jnp.einsum(
    formula, *operands, precision=lax.Precision.HIGHEST
  )
  old = dot("mghd,mgsd->mghs", query, keys)
  new = jnp.sum(query * key, axis=-1, keepdims=True)
  largest = jnp.maximum(old.max(axis=-1, keepdims=True), new)
  old, new = jnp.exp(old - largest), jnp.exp(new - largest)
  weighted = dot("mghs,mgsd->mghd", old, values) + new * value
  total = old.sum(axis=-1, keepdims=True) + new
  return (weighted / total).reshape(m, -1)


def split_qkv(qkv: Any, groups: int) -> tuple[Any, Any, Any]:
  """Returns queries [m, groups, heads, d]; keys, values [m, groups, 1, d]."""
  size = workloads.HEAD_SIZE
  m, width = qkv.shape
  shared = groups * size
  query = qkv[:, : width - 2 * shared].reshape(m, groups, -1, size)
  key = qkv[:, width - 2 * shared : width - shared]
  value = qkv[:, width - shared :]
  return (
    query,
    key.reshape(m, groups, 1, size),
    value.reshape(m, groups, 1, size),
  )
