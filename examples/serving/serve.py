# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves a small model from weights that are quantized once.

A stack of residual layers with random weights decodes token by token. The
weights stay quantized. `jax.lax.scan` runs over the numbers of the layers, so
one compiled matmul reads each layer's weight in place. The program compares
the results and the time with the same model in f32.

  python examples/serving/serve.py
  python examples/serving/serve.py --format mxfp8 --tokens 64
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

LAYERS: Final = 8
WIDTH: Final = 512
VOCABULARY: Final = 1024

Params = dict[str, Any]


def make_params(layers: int = LAYERS, width: int = WIDTH) -> Params:
  """f32 weights (n, k) of one matrix, (layers, n, k) of a stack."""
  rng = np.random.default_rng(0)

  def normal(*shape: int) -> jax.Array:
    x = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
    return jnp.asarray(x.astype(np.float32))

  return {
    "embed": normal(VOCABULARY, width) * np.sqrt(width),
    "up": normal(layers, 2 * width, width),
    "down": normal(layers, width, 2 * width),
    "norm": jnp.ones((layers, width)),
    "head": normal(VOCABULARY, width),
  }


def quantize_params(params: Params, format: str) -> Params:
  """Quantizes the weights of dots, once; the rest stays as it is."""
  # A global scale for each layer, where the format has one.
  quantize = functools.partial(jp.quantize, format=format)
  return jp.prepare_weights(
    params
    | {
      "up": quantize(params["up"], batch_dims=1),
      "down": quantize(params["down"], batch_dims=1),
      "head": quantize(params["head"]),
    }
  )


def linear(
  x: jax.Array, w: Any, layer: Any = None, activation: Any = None
) -> jax.Array:
  """activation(x @ w^T), of a weight, or that of a layer, quantized or not."""
  if isinstance(w, jp.ScaledArray):
    return jp.linear(x, w, layer=layer, activation=activation)
  w = w if layer is None else w[layer]
  y = jnp.matmul(x, w.T, precision="highest")
  return jax.nn.gelu(y) if activation == "gelu" else y


def next_logits(params: Params, token: jax.Array) -> jax.Array:
  """f32[batch, VOCABULARY] of int[batch]."""

  def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
    size = jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    hidden = linear(x / size * params["norm"][i], params["up"], i, "gelu")
    return x + linear(hidden, params["down"], i), None

  numbers = jnp.arange(len(params["norm"]))
  x, _ = jax.lax.scan(layer, params["embed"][token], numbers)
  return linear(x, params["head"])


@functools.partial(jax.jit, static_argnames="num_tokens")
def decode(params: Params, token: jax.Array, num_tokens: int) -> jax.Array:
  """int[num_tokens, batch]: the tokens that follow, each the likeliest."""

  def step(token: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
    token = next_logits(params, token).argmax(-1)
    return token, token

  return jax.lax.scan(step, token, length=num_tokens)[1]


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
  """Root mean square of the error, divided by that of what is expected."""
  error = jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)
  return float(error)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--format", default="nvfp4", help="format of the weights; default: nvfp4"
  )
  parser.add_argument(
    "--tokens", type=int, default=32, help="tokens to decode; default: 32"
  )
  parser.add_argument(
    "--layers", type=int, default=LAYERS, help="default: %(default)s"
  )
  parser.add_argument(
    "--width", type=int, default=WIDTH, help="channels; default: %(default)s"
  )
  args = parser.parse_args()

  params = make_params(args.layers, args.width)
  params_q = quantize_params(params, args.format)
  token = jnp.zeros(1, jnp.int32)
  print(jp.explain(next_logits, params_q, token))
  print()
  error = relative_error(
    next_logits(params_q, token), next_logits(params, token)
  )
  print(f"error of the logits: {error:.1%}, in norm, of those in f32")
  for name, weights in (("f32", params), (args.format, params_q)):
    size = sum(x.nbytes for x in jax.tree.leaves(weights)) / 1e6
    tokens = decode(weights, token, args.tokens).block_until_ready()
    start = time.perf_counter()
    decode(weights, token, args.tokens).block_until_ready()
    per_token = (time.perf_counter() - start) / args.tokens * 1e3
    first = " ".join(str(t) for t in tokens[:5, 0])
    print(f"{name:6} {size:6.1f} MB, {per_token:5.2f} ms a token: {first} ...")


if __name__ == "__main__":
  main()
