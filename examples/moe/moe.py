# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks and times a mixture-of-experts layer of gpt-oss's shape in MXFP4.

A router sends each token to 4 of 32 experts. An expert has two matmuls, with
gpt-oss's gated activation between them. Tokens are sorted by expert, each
matmul is one `jp.ragged_dot`, and the results return to their tokens:

  python examples/moe/moe.py

The program compares a layer with NumPy in f64. It then measures tokens a second
for several numbers of tokens, next to experts in f32 and next to
`jax.lax.ragged_dot` with dequantized weights. The weights are random.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp

TOP: Final = 4  # experts of a token


class Sizes(NamedTuple):
  """experts; channels of the model; channels of an expert."""

  experts: int
  model: int
  hidden: int


GPT_OSS_20B: Final = Sizes(experts=32, model=2880, hidden=2880)
SMALL: Final = Sizes(experts=8, model=128, hidden=192)


class Layer(NamedTuple):
  """Weights: up and down are arrays or `ScaledArray`s.

  Attributes:
    router: f32[experts, model].
    up: [experts, 2 * hidden, model], rows of gate and value in turns.
    up_bias: f32[experts, 2 * hidden].
    down: [experts, model, hidden].
    down_bias: f32[experts, model].
  """

  router: Any
  up: Any
  up_bias: Any
  down: Any
  down_bias: Any


def make_layer(sizes: Sizes, seed: int = 0) -> Layer:
  """Random weights in f32, as the dequantized checkpoint would be."""
  rng = np.random.default_rng(seed)
  normal = functools.partial(rng.standard_normal, dtype=np.float32)
  experts, model, hidden = sizes
  return Layer(
    router=normal((experts, model)) / np.float32(model**0.5),
    up=normal((experts, 2 * hidden, model)) / np.float32(model**0.5),
    up_bias=normal((experts, 2 * hidden)) * np.float32(0.1),
    down=normal((experts, model, hidden)) / np.float32(hidden**0.5),
    down_bias=normal((experts, model)) * np.float32(0.1),
  )


def quantized(layer: Layer, format: Any) -> Layer:
  """The layer with its experts in a block format, one expert at a time."""

  def quantize(w: np.ndarray) -> jp.ScaledArray:
    experts = [jp.quantize(w[i : i + 1], format) for i in range(len(w))]
    return jp.prepare_weights(jp.concatenate(experts))

  return layer._replace(up=quantize(layer.up), down=quantize(layer.down))


def dequantized(layer: Layer) -> Layer:
  """The quantized layer's experts in f32."""
  return layer._replace(
    up=jp.dequantize(layer.up), down=jp.dequantize(layer.down)
  )


def route(layer: Layer, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Each token's experts, and their weights, softmax of the best scores.

  Args:
    layer: weights.
    x: f32[tokens, model].

  Returns:
    (i32[tokens, TOP], f32[tokens, TOP]).
  """
  scores, experts = jax.lax.top_k(x @ layer.router.T, TOP)
  return experts, jax.nn.softmax(scores)


def apply(
  layer: Layer,
  x: jax.Array,
  experts_of: Callable[..., jax.Array],
) -> jax.Array:
  """The layer's result, f32[tokens, model].

  Args:
    layer: weights.
    x: f32[tokens, model].
    experts_of: (layer, rows sorted by expert, group sizes) -> rows.
  """
  experts, weights = route(layer, x)
  flat = experts.reshape(-1)
  order = jnp.argsort(flat)
  rows = x[order // TOP]
  sizes = jnp.bincount(flat, length=layer.router.shape[0])
  results = experts_of(layer, rows, sizes.astype(jnp.int32))
  weighted = results * weights.reshape(-1)[order][:, None]
  return jnp.zeros_like(x).at[order // TOP].add(weighted)


def ours(layer: Layer, rows: jax.Array, sizes: jax.Array) -> jax.Array:
  """Both products by `jp.ragged_dot`, the activation inside of the first."""
  hidden = jp.ragged_dot(
    rows, layer.up, sizes, bias=layer.up_bias, activation="swigluoai"
  )
  return jp.ragged_dot(hidden, layer.down, sizes, bias=layer.down_bias)


def by_lax(layer: Layer, rows: jax.Array, sizes: jax.Array) -> jax.Array:
  """Both products by `jax.lax.ragged_dot` of weights in f32."""
  of_row = jnp.repeat(
    jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows)
  )
  dot = lambda x, w: jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), sizes)
  z = dot(rows, layer.up) + layer.up_bias[of_row]
  gate = jnp.minimum(z[:, 0::2], 7)
  value = jnp.clip(z[:, 1::2], -7, 7)
  hidden = gate * jax.nn.sigmoid(1.702 * gate) * (value + 1)
  return dot(hidden, layer.down) + layer.down_bias[of_row]


def by_lax_dequantizing(
  layer: Layer, rows: jax.Array, sizes: jax.Array
) -> jax.Array:
  """`by_lax` of a quantized layer, dequantized at each call."""
  return by_lax(dequantized(layer), rows, sizes)


def oracle(
  layer: Layer, x: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray:
  """The layer in NumPy and f64, token by token, of weights in f32.

  Args:
    layer: weights.
    x: [tokens, model].
    seen: what experts see of the tokens, where these are quantized.
  """
  f64 = Layer(*(np.asarray(w, np.float64) for w in layer))
  x = np.asarray(x, np.float64)
  seen = x if seen is None else np.asarray(seen, np.float64)
  result = np.zeros(x.shape)
  for i, token in enumerate(x):
    scores = f64.router @ token
    best = np.argsort(-scores, kind="stable")[:TOP]
    weights = np.exp(scores[best] - scores[best].max())
    weights /= weights.sum()
    for expert, weight in zip(best, weights, strict=True):
      result[i] += weight * expert_in_f64(f64, expert, seen[i])
  return result


def expert_in_f64(layer: Layer, expert: int, token: np.ndarray) -> np.ndarray:
  """One expert's result of one token, of weights in f64."""
  z = layer.up[expert] @ token + layer.up_bias[expert]
  gate, value = np.minimum(z[0::2], 7), np.clip(z[1::2], -7, 7)
  hidden = gate / (1 + np.exp(-1.702 * gate)) * (value + 1)
  return layer.down[expert] @ hidden + layer.down_bias[expert]


def relative_error(actual: Any, exact: np.ndarray) -> float:
  """Norm of the difference over the norm of the exact result."""
  difference = np.asarray(actual, np.float64) - exact
  return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def milliseconds(
  functions: Sequence[Callable[[jax.Array], jax.Array]],
  inputs: Sequence[jax.Array],
  rounds: int,
) -> list[float]:
  """Medians of calls, of one function after the other, after two untimed.

  Not in turns: what needs gigabytes for a call would slow the next one's.
  """
  medians = []
  for function in functions:
    times = []
    for i in range(-2, rounds):
      begin = time.perf_counter()
      jax.block_until_ready(function(inputs[i % len(inputs)]))
      if i >= 0:
        times.append(time.perf_counter() - begin)
    medians.append(1e3 * statistics.median(times))
  return medians


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--small", action="store_true", help="a layer of 1 MB, in seconds"
  )
  parser.add_argument(
    "--format", default="mxfp4", help="format of the experts; default: mxfp4"
  )
  parser.add_argument(
    "--tokens", default="1,8,64", help="numbers of tokens, separated by commas"
  )
  parser.add_argument(
    "--rounds", type=int, default=5, help="timed calls of each; default: 5"
  )
  args = parser.parse_args()
  sizes = SMALL if args.small else GPT_OSS_20B
  print(
    f"{sizes.experts} experts of {sizes.model} x {sizes.hidden} channels,"
    f" {TOP} a token, in {args.format}"
  )
  layer = quantized(make_layer(sizes), args.format)
  plain = dequantized(layer)
  rng = np.random.default_rng(1)
  draw = lambda tokens: jnp.asarray(
    rng.standard_normal((tokens, sizes.model), dtype=np.float32)
  )
  x = draw(4)
  run = jax.jit(functools.partial(apply, experts_of=ours))
  error = relative_error(run(layer, x), oracle(plain, np.asarray(x)))
  print(f"relative error to NumPy in f64, of the same weights: {error:.1e}")
  print(jp.explain(functools.partial(apply, experts_of=ours), layer, x))

  print("tokens  here, ms  tokens/s  f32 lax  dequantize + lax (times as long)")
  for tokens in map(int, args.tokens.split(",")):
    inputs = [draw(tokens) for _ in range(4)]
    variants = [
      functools.partial(
        jax.jit(functools.partial(apply, experts_of=experts_of)), weights
      )
      for weights, experts_of in (
        (layer, ours),
        (plain, by_lax),
        (layer, by_lax_dequantizing),
      )
    ]
    here, lax, dequantizing = milliseconds(variants, inputs, args.rounds)
    print(
      f"{tokens:6d}  {here:8.2f}  {1e3 * tokens / here:8.0f}"
      f"  {lax / here:7.1f}  {dequantizing / here:7.1f}",
      flush=True,
    )


if __name__ == "__main__":
  main()
