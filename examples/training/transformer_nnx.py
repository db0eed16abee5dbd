# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transformer of `transformer_linen`, in flax nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import transformer_linen
from flax import nnx

DotGeneral = transformer_linen.DotGeneral


class Linear(nnx.Linear):
  """`nnx.Linear` that hands a key to its `dot_general`."""

  def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    y = self.dot_general(x, self.kernel[...], numbers, key=key)
    return y + self.bias[...]


class Block(nnx.Module):
  def __init__(
    self,
    config: transformer_linen.Config,
    dot_general: DotGeneral,
    rngs: nnx.Rngs,
  ) -> None:
    def linear(n_in: int, n_out: int) -> Linear:
      return Linear(n_in, n_out, dot_general=dot_general, rngs=rngs)

    width = config.width
    self.heads = config.heads
    self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
    self.attention_in = linear(width, 3 * width)
    self.attention_out = linear(width, width)
    self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
    self.mlp_in = linear(width, 4 * width)
    self.mlp_out = linear(4 * width, width)

  def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """f32[rows, context, width] to the same."""
    keys = [None] * 4 if key is None else jax.random.split(key, 4)
    y = self.attention_in(self.attention_norm(x), keys[0])
    y = y.reshape(*y.shape[:2], 3, self.heads, -1)
    query, keyed, value = (y[:, :, i] for i in range(3))
    y = jax.nn.dot_product_attention(query, keyed, value, is_causal=True)
    x = x + self.attention_out(y.reshape(x.shape), keys[1])
    y = nnx.gelu(self.mlp_in(self.mlp_norm(x), keys[2]))
    return x + self.mlp_out(y, keys[3])


class Transformer(nnx.Module):
  def __init__(
    self,
    config: transformer_linen.Config,
    dot_general: DotGeneral,
    *,
    rngs: nnx.Rngs,
  ) -> None:
    width = config.width
    self.context = config.context
    self.embed = nnx.Embed(config.characters, width, rngs=rngs)
    self.position = nnx.Embed(config.context, width, rngs=rngs)
    self.names = tuple(f"block_{index}" for index in range(config.blocks))
    for name in self.names:
      setattr(self, name, Block(config, dot_general, rngs))
    self.last_norm = nnx.LayerNorm(width, rngs=rngs)
    self.last = nnx.Linear(width, config.characters, rngs=rngs)

  def __call__(
    self, characters: jax.Array, key: jax.Array | None = None
  ) -> Any:
    """i32[rows, context] to logits f32[rows, context, characters]."""
    x = self.embed(characters) + self.position(jnp.arange(self.context))
    for index, name in enumerate(self.names):
      block_key = None if key is None else jax.random.fold_in(key, index)
      x = getattr(self, name)(x, block_key)
    with jax.named_scope(transformer_linen.LAST_LAYER):
      return self.last(self.last_norm(x))
