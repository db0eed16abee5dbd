# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows how a model runs on GPUs that are not attached.

  python examples/without_gpu/without_gpu.py

The model is one transformer MLP with NVFP4 weights. The program prints the
chosen backends on an H200, and on a B200 with three versions of cuDNN. It then
compiles the MLP with XLA's GPU compiler, for one and for four B200s. It needs
jaxplugin[deviceless] and jax-triton.
"""

import os
import re

# No device is needed, so none is looked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless

TOKENS, WIDTH, HIDDEN = 16, 4096, 14336  # the MLP of Llama 3 8B
BF16 = jnp.bfloat16


def mlp(x, up, down):
  """(tokens, width) -> (tokens, width); weights are ScaledArrays."""
  x = jp.quantize(x, jp.NVFP4)
  hidden = jp.block_scaled_dot(
    x, up, activation="silu", preferred_element_type=BF16
  )
  hidden = jp.quantize(hidden, jp.NVFP4)
  return jp.block_scaled_dot(hidden, down, preferred_element_type=BF16)


def weight(rows, k):
  """An abstract NVFP4 weight (rows, k)."""
  spec = jax.ShapeDtypeStruct((rows, k), BF16)
  return jax.eval_shape(lambda w: jp.quantize(w, jp.NVFP4), spec)


def sharded(x, mesh, *spec):
  """The same abstract array, or ScaledArray, laid over a mesh."""

  def place(leaf):
    axes = PartitionSpec(*spec) if leaf.size > 1 else PartitionSpec()
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes)
    )

  return jax.tree_util.tree_map(place, x)


def print_calls(compiled):
  """Prints the custom calls and collectives of optimized HLO, and results."""
  operation = re.compile(
    r" = \(?(\w+\[[\d,]*\]).*? (custom-call|all-[a-z-]+|reduce-scatter)\("
  )
  for line in compiled.as_text().splitlines():
    found = operation.search(line)
    if found and not found[2].endswith("-done"):
      called = re.search(r'custom_call_target="(.*?)"', line)
      # jax-triton 0.4 names its call so.
      name = called[1] if called else ""
      print(f"  {found[1]} {found[2]} {name}")


def main():
  args = (
    jax.ShapeDtypeStruct((TOKENS, WIDTH), BF16),
    weight(HIDDEN, WIDTH),
    weight(WIDTH, HIDDEN),
  )
  for name, cudnn in (
    ("h200", None),
    ("b200", "9.9"),
    ("b200", "9.12"),
    ("b200", "9.13"),
  ):
    target = jp.named_target(name, cudnn=cudnn)
    print(jp.explain(mlp, *args, target=target).details(), end="\n\n")

  b200 = jp.named_target("b200", cudnn="9.13")
  print(f"optimized HLO for one {b200}:")
  compiled = deviceless.compile(mlp, *args, target=b200)
  print_calls(compiled)

  print("\nand for four, the weights split over their hidden dimension:")
  mesh = deviceless.mesh(b200, (4,), ("model",))
  x, up, down = args
  on_mesh = (
    sharded(x, mesh),
    sharded(up, mesh, "model"),
    sharded(down, mesh, None, "model"),
  )
  compiled = deviceless.compile(mlp, *on_mesh, target=b200, mesh=mesh)
  print_calls(compiled)


if __name__ == "__main__":
  main()
