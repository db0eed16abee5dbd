# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A classifier of digits in plain JAX: three linear layers and ReLU.

The last layer stays in f32, as in `transformer_linen`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp

SIZES: Final = (64, 256, 256, 10)
_NUMBERS: Final = (((1,), (0,)), ((), ()))

Params = list[dict[str, jax.Array]]


def init(key: jax.Array) -> Params:
  """Weights f32[n_in, n_out] of variance 2 / n_in, and biases of 0."""
  sizes = list(itertools.pairwise(SIZES))
  return [
    {
      "weight": jax.random.normal(key, size) * jnp.sqrt(2 / size[0]),
      "bias": jnp.zeros(size[1]),
    }
    for key, size in zip(jax.random.split(key, len(sizes)), sizes, strict=True)
  ]


def logits(
  params: Params,
  images: jax.Array,
  dot_general: Callable[..., jax.Array],
  key: jax.Array | None,
) -> jax.Array:
  """f32[rows, 64] to f32[rows, 10]."""
  *hidden, last = params
  keys = [None] * len(hidden)
  if key is not None:
    keys = list(jax.random.split(key, len(hidden)))
  x = images
  for layer, layer_key in zip(hidden, keys, strict=True):
    x = dot_general(x, layer["weight"], _NUMBERS, key=layer_key)
    x = jax.nn.relu(x + layer["bias"])
  return x @ last["weight"] + last["bias"]
