# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small transformer that predicts the next character, in flax linen.

`transformer_nnx` computes the same function, and its parameters have the same
names. `dot_general` computes the matmuls of the four linear layers of a block.
The matmuls inside attention, the embeddings and the last layer stay in f32, as
in NVIDIA's recipes (arXiv 2506.08027, 2509.25149).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

DotGeneral = Callable[..., jax.Array]
# The stream of keys from which each layer takes its own.
KEYS = "quantization"
# A name by which `jp.quantize_dots` knows the last layer, and leaves it.
LAST_LAYER = "logits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of a transformer; `width` is split among `heads`."""

  characters: int
  context: int
  width: int = 128
  heads: int = 4
  blocks: int = 2


def _linear(
  module: nn.Module, dot_general: DotGeneral, features: int, name: str
) -> nn.Dense:
  """Returns an `nn.Dense` whose matmul has its own key, if keys are passed."""
  key = module.make_rng(KEYS) if module.has_rng(KEYS) else None
  product = functools.partial(dot_general, key=key)
  return nn.Dense(features, name=name, dot_general=product)


class Block(nn.Module):
  config: Config
  dot_general: DotGeneral

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """f32[rows, context, width] to the same."""
    config = self.config
    linear = functools.partial(_linear, self, self.dot_general)
    y = nn.LayerNorm(name="attention_norm")(x)
    y = linear(3 * config.width, "attention_in")(y)
    y = y.reshape(*y.shape[:2], 3, config.heads, -1)
    query, key, value = (y[:, :, i] for i in range(3))
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + linear(config.width, "attention_out")(y.reshape(x.shape))
    y = nn.LayerNorm(name="mlp_norm")(x)
    y = nn.gelu(linear(4 * config.width, "mlp_in")(y))
    return x + linear(config.width, "mlp_out")(y)


class Transformer(nn.Module):
  config: Config
  dot_general: DotGeneral

  @nn.compact
  def __call__(self, characters: jax.Array) -> jax.Array:
    """i32[rows, context] to logits f32[rows, context, characters]."""
    config = self.config
    x = nn.Embed(config.characters, config.width, name="embed")(characters)
    x += nn.Embed(config.context, config.width, name="position")(
      jnp.arange(config.context)
    )
    for index in range(config.blocks):
      x = Block(config, self.dot_general, name=f"block_{index}")(x)
    x = nn.LayerNorm(name="last_norm")(x)
    with jax.named_scope(LAST_LAYER):
      return nn.Dense(config.characters, name="last")(x)
