# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder, whatever its products are computed by.

Each layer is that of Llama (arXiv:2302.13971) without rotated positions: root
mean square norm, attention in which 8 heads share keys and values where their
number allows it (arXiv:2305.13245), norm, and a gated MLP (arXiv:2002.05202).
Every sequence has one new token and a cache of `CACHE_LENGTH` older ones;
putting the new keys and values there is left to the caller, as a copy of the
whole cache would be.

A step returns what went into each product and what came out of it: a check can
then follow it product by product. Compared by its end alone a right one differs
from a reference in f64 by as much as quantization errs: where activations are
quantized, an input beside the middle of two codes becomes the other one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

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

# f32[m, n] of f32[m, k] and a weight.
Linear = Callable[[jax.Array, Any], jax.Array]
# Weights and caches by name.
Layer = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of a decoder, all of which a row tells."""

  rows: int
  channels: int
  hidden: int
  layers: int

  @classmethod
  def of(cls, row: workloads.Row) -> Sizes:
    return cls(rows=row.m, channels=row.k, hidden=row.n, layers=row.layers)

  @property
  def heads(self) -> int:
    return self.channels // workloads.HEAD_SIZE

  @property
  def groups(self) -> int:
    """Heads of keys and values."""
    groups, others = divmod(self.heads, _HEADS_A_GROUP)
    return 1 if others else groups

  @property
  def weights(self) -> dict[str, tuple[int, int]]:
    """(n, k) of each product of a layer."""
    qkv = (self.heads + 2 * self.groups) * workloads.HEAD_SIZE
    return {
      "qkv": (qkv, self.channels),
      "out": (self.channels, self.channels),
      "gate_up": (2 * self.hidden, self.channels),
      "down": (self.channels, self.hidden),
    }

  @property
  def cache(self) -> tuple[int, ...]:
    """Shape of a layer's keys, and of its values."""
    return self.rows, self.groups, CACHE_LENGTH, workloads.HEAD_SIZE

  @property
  def flops(self) -> int:
    """Of all products, those of attention among them."""
    weights = sum(n * k for n, k in self.weights.values())
    attention = 2 * self.channels * (CACHE_LENGTH + 1)
    return 2 * self.rows * self.layers * (weights + attention)


def scanned(
  linear: Linear, x: jax.Array, layers: Layer
) -> tuple[jax.Array, Any]:
  """A step by `lax.scan` over stacked layers.

  Args:
    linear: computes the products.
    x: f32[m, channels].
    layers: weights and caches, each with a leading dimension of layers.

  Returns:
    f32[m, channels]; and for each product {"input": f32[layers, m, k],
    "output": f32[layers, m, n]}.
  """
  return lax.scan(lambda x, layer: _layer(linear, x, layer), x, layers)


def numbered(
  linear: Linear, x: jax.Array, layers: Layer
) -> tuple[jax.Array, Any]:
  """The same by `lax.scan` over the layers' numbers.

  `linear` gets the whole stack of a weight, and the number: (stack, i32[]).
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
  """The same of layers that are arguments of their own.

  Returns:
    As `scanned`, but a tuple of what each layer has instead of stacks.
  """
  seen = []
  for layer in layers:
    x, one = _layer(linear, x, layer)
    seen.append(one)
  return x, tuple(seen)


def of_layer(seen: Any, i: int) -> dict[str, dict[str, Any]]:
  """What was seen in layer i, of either function's second result."""
  return seen[i] if isinstance(seen, tuple) else jax.tree.map(_at(i), seen)


def _at(i: int) -> Callable[[Any], Any]:
  return lambda x: x[i]


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
  """f32[m, channels] of a token's queries, keys and values, and the cache."""
  m, groups, _, size = keys.shape
  query, key, value = split_qkv(qkv, groups)
  query = query * np.float32(size**-0.5)
  # Without HIGHEST a GPU multiplies in TF32.
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
  """Queries [m, groups, heads, d], keys and values [m, groups, 1, d]."""
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
