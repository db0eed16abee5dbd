# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times a layer of a model on the attached device, with each variant in turns.

    python examples/benchmarks/layer_times.py llama3-8b --sequence 16 4096

The variants are bf16, a block format, and the format "fused": norms and
activations write quantized results. The forward pass has quantized weights.
`--train` times the forward and backward pass of bf16 weights instead, whose
matmuls `jp.quantize_dots` quantizes. `python -m jaxplugin plan MODEL --traffic`
counts the bytes of the same programs.

Times are medians. A speedup is the median of the ratios of the rounds, with its
quartiles, and can differ from the ratio of the medians. The error of a variant
is the norm of the difference to the bf16 layer's output, divided by the norm of
that output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxplugin as jp
from jaxplugin.lab.bench import devices, timing
from jaxplugin.lab.planning import blocks, plans

# Many calls run before the last one is waited for, so that the time of a short
# program on a GPU is not the time to launch it.
_LEAST_SECONDS: Final = 0.05


def _random(block: blocks.TransformerBlock) -> tuple[Any, jax.Array, jax.Array]:
  """Returns weights, rows and an output's cotangent, all bf16."""

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def normal(i: int, shape: tuple[int, ...], scale: float) -> jax.Array:
    x = scale * jax.random.normal(jax.random.key(i), shape)
    return x.astype(jnp.bfloat16)

  weights = {
    name: normal(i, shape, shape[-2] ** -0.5)
    for i, (name, shape) in enumerate(block.weights.items())
  }
  return weights, normal(100, block.rows, 1.0), normal(101, block.rows, 1.0)


def _compiled(
  block: blocks.TransformerBlock,
  format: str,
  given: tuple[Any, jax.Array, jax.Array],
  *,
  fuses: bool,
  trains: bool,
) -> Callable[[], Any]:
  """Returns the compiled program of a layer, with its arguments."""
  mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
  program = plans.on_one_device(block, format, mesh, fuses=fuses, trains=trains)
  weights, *rows = given if trains else given[:2]
  if not trains and format != plans.PLAIN:
    quantize = jax.jit(lambda w: jp.quantize(w.mT, format))
    weights = {name: quantize(w) for name, w in weights.items()}
  args = weights, *rows
  return functools.partial(jax.jit(program.fn).lower(*args).compile(), *args)


def _output(result: Any) -> np.ndarray:
  first = result[0] if isinstance(result, tuple) else result
  return np.asarray(first).astype(np.float64)


def _milliseconds(call: Callable[[], Any], count: int) -> float:
  start = time.perf_counter()
  for _ in range(count):
    result = call()
  jax.block_until_ready(result)
  return 1e3 * (time.perf_counter() - start) / count


def measure(
  block: blocks.TransformerBlock,
  formats: Sequence[str],
  *,
  trains: bool,
  rounds: int,
) -> dict[str, Any]:
  """Returns times of each variant, and its ratio to bf16, round by round."""
  given = _random(block)
  kinds = [(plans.PLAIN, False)]
  kinds += [(format, fuses) for format in formats for fuses in (False, True)]
  calls, errors = {}, {}
  exact = None
  for format, fuses in kinds:
    name = format + plans.FUSED * fuses
    call = _compiled(block, format, given, fuses=fuses, trains=trains)
    output = _output(call())
    exact = output if exact is None else exact
    errors[name] = np.linalg.norm(output - exact) / np.linalg.norm(exact)
    _milliseconds(call, 2)
    count = max(1, round(1e3 * _LEAST_SECONDS / _milliseconds(call, 2)))
    calls[name] = functools.partial(_milliseconds, call, count)
  times = timing.in_turns(calls, rounds=rounds, seconds=float("inf"))
  found: dict[str, Any] = {}
  for name, samples in times.items():
    row = {"ms": timing.stats([x for x in samples if x is not None])}
    row["speedup_over_bf16"] = timing.ratio(times[plans.PLAIN], samples)
    if name.endswith(plans.FUSED):
      separate = times[name.removesuffix(plans.FUSED)]
      row["speedup_over_separate"] = timing.ratio(separate, samples)
    found[name] = {k: dataclasses.asdict(v) for k, v in row.items()}
    found[name]["error"] = timing.significant(errors[name])
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("model", choices=blocks.MODELS)
  parser.add_argument(
    "--sequence",
    type=int,
    nargs="+",
    default=[4096],
    help="numbers of tokens; default: 4096",
  )
  parser.add_argument(
    "--formats", nargs="+", default=["mxfp8"], help="default: mxfp8"
  )
  parser.add_argument("--train", action="store_true")
  parser.add_argument("--rounds", type=int, default=15)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  rows = {}
  for sequence in args.sequence:
    block = dataclasses.replace(blocks.MODELS[args.model], sequence=sequence)
    found = measure(block, args.formats, trains=args.train, rounds=args.rounds)
    rows[str(sequence)] = found
    print(f"{args.model}, {sequence} tokens")
    for name, row in found.items():
      print(f"  {name:14} {row['ms']['median']:9.3f} ms", end="")
      for key in ("speedup_over_bf16", "speedup_over_separate"):
        if ratio := row.get(key):
          print(
            f"   {key.replace('_', ' ')} {ratio['median']:.2f}"
            f" ({ratio['q1']:.2f}-{ratio['q3']:.2f})",
            end="",
          )
      print(f"   error {row['error']:.1e}", flush=True)
    if args.json:
      run = {
        "command": sys.argv[1:],
        "environment": devices.environment(devices.find(None)),
        "tokens": rows,
      }
      args.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
  main()
