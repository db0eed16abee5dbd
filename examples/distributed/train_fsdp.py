# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model in block formats over several processes.

  python examples/distributed/train_fsdp.py                    # two processes
  python examples/distributed/train_fsdp.py --processes 4 --recipe nvfp4
  python examples/distributed/train_fsdp.py --checkpoint /tmp/a --processes 4
  python examples/distributed/train_fsdp.py --checkpoint /tmp/a --processes 2

Each process has two devices, which are parts of this machine's CPU. All devices
are one mesh. Weights and tokens are split over all devices. A matmul gathers
its weight as quantized bytes (FSDP). On a cluster, the scheduler replaces the
launcher, and `jax.distributed.initialize()` replaces `join`.

Each process writes its own shards of a checkpoint. Any number of processes
reads it: the last command continues the one before on fewer devices.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import launcher
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp

CHANNELS: Final = 128
HIDDEN: Final = 256
TOKENS: Final = 256  # of a step, on all devices
LEARNING_RATE: Final = 0.05
DEVICES: Final = 2  # of a process
TIMEOUT_S: Final = 300

RECIPES: Final = {
  "mxfp8": jp.training.MXFP8_RECIPE,
  "nvfp4": jp.training.NVFP4_RECIPE,
}
Weights = dict[str, jax.Array]


def make_mesh() -> Mesh:
  """All devices of all processes, along one axis."""
  return Mesh(np.asarray(jax.devices()), ("fsdp",))


def placed(array: np.ndarray, mesh: Mesh) -> jax.Array:
  """The array, its rows split over the mesh; each process has its own."""
  sharding = NamedSharding(mesh, P("fsdp"))
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


def initial(mesh: Mesh) -> Weights:
  rng = np.random.default_rng(0)
  shapes = {"up": (CHANNELS, HIDDEN), "down": (HIDDEN, CHANNELS)}
  return {
    name: placed(
      (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32), mesh
    )
    for name, shape in shapes.items()
  }


def batch(step: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
  """Returns tokens and targets: a fixed mixing of the tokens."""
  rng = np.random.default_rng(1)
  mixing = rng.standard_normal((CHANNELS, CHANNELS)) / CHANNELS**0.5
  x = np.random.default_rng([2, step]).standard_normal((TOKENS, CHANNELS))
  y = np.tanh(x @ mixing)
  return tuple(placed(a.astype(np.float32), mesh) for a in (x, y))


def make_step(recipe: str, mesh: Mesh) -> Any:
  """step(weights, x, y, key) -> (weights, loss)."""
  dot_general = jp.dot_general(recipe=RECIPES[recipe], weight="rhs")
  tokens = NamedSharding(mesh, P("fsdp"))
  numbers = (((1,), (0,)), ((), ()))

  def loss_of(
    weights: Weights, x: jax.Array, y: jax.Array, key: jax.Array
  ) -> jax.Array:
    keys = jax.random.split(key)
    hidden = dot_general(x, weights["up"], numbers, key=keys[0])
    hidden = jax.lax.with_sharding_constraint(jax.nn.silu(hidden), tokens)
    result = dot_general(hidden, weights["down"], numbers, key=keys[1])
    return jnp.mean(jnp.square(result - y)) * CHANNELS

  def step(
    weights: Weights, x: jax.Array, y: jax.Array, key: jax.Array
  ) -> tuple[Weights, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(weights, x, y, key)
    weights = jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, grads)
    return jax.lax.with_sharding_constraint(weights, tokens), loss

  return jax.jit(step, donate_argnums=0)


def train(arguments: argparse.Namespace) -> None:
  """Some steps, on all devices that there are."""
  mesh = make_mesh()
  weights, first = initial(mesh), 0
  manager = None
  if arguments.checkpoint is not None:
    manager = ocp.CheckpointManager(arguments.checkpoint.absolute())
    if manager.latest_step() is not None:
      first = manager.latest_step()
      weights = manager.restore(first, args=ocp.args.StandardRestore(weights))
  step = make_step(arguments.recipe, mesh)
  for number in range(first, first + arguments.steps):
    key = jax.random.key(number)
    weights, loss = step(weights, *batch(number, mesh), key)
    if jax.process_index() == 0:
      print(f"step {number}: loss {float(loss):.6f}", flush=True)
  if manager is not None:
    last = first + arguments.steps
    manager.save(last, args=ocp.args.StandardSave(weights))
    manager.close()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--processes", type=int, default=2, metavar="N")
  parser.add_argument("--recipe", choices=tuple(RECIPES), default="mxfp8")
  parser.add_argument("--steps", type=int, default=10, metavar="N")
  parser.add_argument(
    "--checkpoint",
    type=pathlib.Path,
    metavar="FOLDER",
    help="folder to continue from, and to write to",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
  arguments = parse_arguments(argv)
  if launcher.is_launched():
    launcher.join(DEVICES)
    train(arguments)
    jax.distributed.shutdown()
    return
  given = sys.argv[1:] if argv is None else [*argv]
  outputs = launcher.launch(
    [sys.executable, __file__, *given],
    arguments.processes,
    timeout_s=TIMEOUT_S,
  )
  print(outputs[0], end="")


if __name__ == "__main__":
  main()
