# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times a step of several microbatches whose operands are quantized once.

    python examples/training/microbatches.py --json times.json

The step computes the gradients of a block's weights: query, key, value, out,
gate, up and down, without attention. It scans over microbatches, and inside
over layers with `jax.checkpoint`:

    each       every matmul quantizes its operands
    weights    weights are quantized once for all microbatches
    operands   also, an input is quantized once for all its matmuls
    f32        matmuls in f32, by XLA

The first three must have the same bits, which is checked before they are timed
in turns. Without the scan over layers, XLA itself moves the quantization of
weights out of the loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import jaxplugin as jp
from jaxplugin.lab.bench import timing

RECIPES: Final = {
  "mxfp8": jp.training.MXFP8_RECIPE,
  "nvfp4": jp.training.NVFP4_RECIPE,
  "mxfp4": jp.training.MXFP4_RECIPE,
}
VARIANTS: Final = ("each", "weights", "operands", "f32")
MATMUL: Final = (((1,), (0,)), ((), ()))

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of the blocks and of their input."""

  layers: int
  width: int
  hidden: int
  tokens: int
  microbatches: int

  def params(self) -> Params:
    """f32 (layers, k, n), random."""
    width, hidden = self.width, self.hidden
    shapes = {
      **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
      **dict.fromkeys(("gate", "up"), (width, hidden)),
      "down": (hidden, width),
    }
    random = np.random.default_rng(0)
    return {
      name: jnp.asarray(
        random.normal(size=(self.layers, *s)) / np.sqrt(s[0]), jnp.float32
      )
      for name, s in shapes.items()
    }

  def batches(self) -> jax.Array:
    """f32 (microbatches, tokens, width), random."""
    shape = (self.microbatches, self.tokens, self.width)
    x = np.random.default_rng(1).normal(size=shape)
    return jnp.asarray(x, jnp.float32)


def block(
  dot: Callable[..., jax.Array],
  share: Callable[[jax.Array], Any],
  x: jax.Array,
  weights: Params,
) -> jax.Array:
  """One layer, of rows.

  Args:
    dot: (rows, weight) -> rows.
    share: of rows, what several products take.
    x: f32 (tokens, width).
    weights: of the layer.
  """
  given = share(x)
  mixed = jnp.tanh(dot(given, weights["query"]) * dot(given, weights["key"]))
  x = x + dot(mixed + dot(given, weights["value"]), weights["out"])
  given = share(x)
  gated = jax.nn.silu(dot(given, weights["gate"])) * dot(given, weights["up"])
  return x + dot(gated, weights["down"])


def step(
  variant: str, recipe: jp.training.Recipe, params: Params, batches: jax.Array
) -> Params:
  """The gradient of all microbatches."""
  share = lambda x: x
  dot = functools.partial(jax.lax.dot_general, dimension_numbers=MATMUL)
  taken = params
  if variant != "f32":
    dot = functools.partial(
      jp.dot_general(recipe=recipe, weight="rhs"),
      dimension_numbers=MATMUL,
      key=jax.random.key(0),
    )
  if variant in ("weights", "operands"):
    make = functools.partial(jp.quantize_operand, recipe=recipe)
    taken = jax.tree.map(jax.vmap(make), params)
  if variant == "operands":
    share = functools.partial(make, role="activation")

  def microbatch(total: Params, x: jax.Array) -> tuple[Params, None]:
    layer = jax.checkpoint(functools.partial(block, dot, share))

    def of(params: Params) -> jax.Array:
      stack = jp.training.with_primals(taken, params)
      y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)
      return jnp.square(y).mean()

    return jax.tree.map(jnp.add, total, jax.grad(of)(params)), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  return jax.lax.scan(microbatch, zeros, batches)[0]


def measure(recipe: str, sizes: Sizes, rounds: int) -> dict[str, Any]:
  """Times of each variant, and its ratio to "each", round by round.

  Raises:
    AssertionError: gradients of the first three differ in a bit.
  """
  given = sizes.params(), sizes.batches()
  steps = {
    name: jax.jit(functools.partial(step, name, RECIPES[recipe]))
    for name in VARIANTS
  }
  results = {
    name: jax.block_until_ready(f(*given)) for name, f in steps.items()
  }
  for name in ("weights", "operands"):
    for weight, expected in results["each"].items():
      np.testing.assert_array_equal(results[name][weight], expected, weight)

  def timed(name: str) -> float:
    start = time.perf_counter()
    jax.block_until_ready(steps[name](*given))
    return 1e3 * (time.perf_counter() - start)

  times = timing.in_turns(
    {name: functools.partial(timed, name) for name in steps},
    rounds=rounds,
    seconds=float("inf"),
  )
  found: dict[str, Any] = {}
  for name, samples in times.items():
    ratio = timing.ratio(times["each"], samples)
    assert ratio is not None
    milliseconds = timing.stats([x for x in samples if x is not None])
    found[name] = {
      "ms": dataclasses.asdict(milliseconds),
      "each_over_this": dataclasses.asdict(ratio),
    }
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--recipes", default="mxfp8,nvfp4")
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--width", type=int, default=512)
  parser.add_argument("--hidden", type=int, default=1536)
  parser.add_argument("--tokens", type=int, default=128)
  parser.add_argument("--microbatches", type=int, default=4)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  sizes = Sizes(
    layers=args.layers,
    width=args.width,
    hidden=args.hidden,
    tokens=args.tokens,
    microbatches=args.microbatches,
  )
  found = {}
  for recipe in args.recipes.split(","):
    found[recipe] = measure(recipe, sizes, args.rounds)
    for name, row in found[recipe].items():
      ms, ratio = row["ms"], row["each_over_this"]
      print(
        f"{recipe} {name:9} {ms['median']:8.1f} ms   each takes"
        f" {ratio['median']:.2f} times as long"
        f" ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
      )
  if args.json:
    run = {
      "device": jax.devices()[0].device_kind,
      "machine": platform.machine(),
      "jax": jax.__version__,
      "cpu_kernels": str(jp.detect_target().cpu_kernels),
      "sizes": dataclasses.asdict(sizes),
      "recipes": found,
    }
    args.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
  main()
