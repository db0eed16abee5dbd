# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small character model in f32, MXFP8 and NVFP4, and compares.

The model guesses the next character of sentences.txt from the 16 before it.
Its layers are flax's, and get their products from `jaxplugin.dot_general`:
operands and gradients are quantized on the fly, weights and the optimizer stay
in f32. It needs flax (`pip install flax`).

  python examples/training/train.py
  python examples/training/train.py --steps 300
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxplugin as jp

EXAMPLES: Final = pathlib.Path(__file__).parents[1]
TEXT: Final = EXAMPLES / "quickstart" / "sentences.txt"
CONTEXT: Final = 16
NUM_CHARACTERS: Final = 128  # ASCII
BATCH: Final = 128

DotGeneral = Callable[..., jax.Array]

DOTS: Final[dict[str, DotGeneral]] = {
  "f32": jax.lax.dot_general,
  "mxfp8": jp.dot_general(jp.MXFP8, jp.MXFP8),
  "nvfp4": jp.dot_general(jp.NVFP4, jp.NVFP4),
  "nvfp4, gradients mxfp8": jp.dot_general(
    jp.NVFP4, jp.NVFP4, grad_format=jp.MXFP8
  ),
}


class Model(nnx.Module):
  def __init__(self, dot_general: DotGeneral, rngs: nnx.Rngs) -> None:
    width = 32
    self.embed = nnx.Embed(NUM_CHARACTERS, width, rngs=rngs)
    linear = lambda n_in, n_out: nnx.Linear(
      n_in, n_out, dot_general=dot_general, rngs=rngs
    )
    self.first = linear(CONTEXT * width, 256)
    self.last = linear(256, NUM_CHARACTERS)

  def __call__(self, context: jax.Array) -> jax.Array:
    x = self.embed(context).reshape(len(context), -1)
    return self.last(nnx.gelu(self.first(x)))


@nnx.jit
def train_step(
  model: Model, optimizer: nnx.Optimizer, context: jax.Array, target: jax.Array
) -> jax.Array:
  def loss(model: Model) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
      model(context), target
    ).mean()

  value, grads = nnx.value_and_grad(loss)(model)
  optimizer.update(model, grads)
  return value


def batches(steps: int) -> Any:
  """Contexts int[BATCH, CONTEXT] of the text, and the characters after them."""
  text = np.frombuffer(TEXT.read_bytes(), np.uint8) % NUM_CHARACTERS
  windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
  rng = np.random.default_rng(0)
  for _ in range(steps):
    chosen = windows[rng.integers(len(windows), size=BATCH)].astype(np.int32)
    yield jnp.asarray(chosen[:, :-1]), jnp.asarray(chosen[:, -1])


def train(dot_general: DotGeneral, steps: int) -> list[float]:
  """The loss at each step, from the same weights and on the same batches."""
  model = Model(dot_general, nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
  return [
    float(train_step(model, optimizer, *batch)) for batch in batches(steps)
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=200)
  steps = parser.parse_args().steps
  print(f"cross entropy, a mean over {min(steps, 20)} steps:")
  for name, dot_general in DOTS.items():
    losses = train(dot_general, steps)
    first, last = np.mean(losses[:20]), np.mean(losses[-20:])
    print(f"  {name:22} {first:.3f} at first, {last:.3f} at last")


if __name__ == "__main__":
  main()
