# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times a training step of the transformer, with each variant in turns.

    python examples/training/step_times.py
    python examples/training/step_times.py --before ../other/.venv/bin/python
    python examples/training/step_times.py --variants mxfp8:dots mxfp8:fused

A recipe's name with ":dots" applies `quantize_dots` to the model, and ":fused"
the same with `fuse_activations=True`. Each variant runs in a process that keeps
its compiled step. `--before` also runs the recipes with the Python of another
environment, which has another version of jaxplugin.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any, Final

import jax
import training_runs
import training_tasks
import training_variants

import jaxplugin as jp
from jaxplugin.lab.bench import timing

_DEFAULT: Final = training_tasks.PRESETS["default"]
SIZES: Final = {
  "quick": training_tasks.PRESETS["quick"],
  "default": _DEFAULT,
  "wide": dataclasses.replace(_DEFAULT, context=256, width=512, blocks=4),
}
BEFORE: Final = " before"
SEPARATE: Final = ":dots"
FUSED: Final = ":fused"
# Small steps are timed together.
_LEAST_SECONDS: Final = 0.2


def serve(size: str, variant: str) -> None:
  """Prints the milliseconds of a step for each line of the input."""
  task = training_tasks.linen(SIZES[size])
  optimizer = training_runs.optimizer_of(task, SIZES[size].steps)
  name, _, form = variant.partition(":")
  if form:
    loss_fn = training_runs.one_line_loss(
      task,
      training_variants.RECIPES[name],
      fuse_activations=variant.endswith(FUSED),
    )
  else:
    loss_fn = training_runs.loss_of(task, variant)
  step = training_runs.step_of(loss_fn, optimizer)
  params = task.init(jax.random.key(0))
  batch = jax.tree.map(jax.numpy.asarray, next(iter(task.batches(0))))
  given = params, optimizer.init(params), batch, jax.random.key(1)

  def seconds(count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
      jax.block_until_ready(step(*given))
    return time.perf_counter() - start

  seconds(2)
  count = max(1, round(_LEAST_SECONDS / seconds(1)))
  print(count, flush=True)  # No other process compiles while steps are timed.
  for _ in sys.stdin:
    print(1e3 * seconds(count) / count, flush=True)


def _started(size: str, variant: str, python: str) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [python, __file__, "--sizes", size, "--serve", variant],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def _asked(process: subprocess.Popen[str]) -> float:
  assert process.stdin is not None and process.stdout is not None
  process.stdin.write("\n")
  process.stdin.flush()
  return float(process.stdout.readline())


def measure(
  size: str, names: list[str], before: str | None, rounds: int
) -> dict[str, Any]:
  """Returns times of each variant, and its ratio to f32, round by round."""
  processes = {name: _started(size, name, sys.executable) for name in names}
  if before is not None:
    processes |= {
      name + BEFORE: _started(size, name, before)
      for name in names
      if name in training_variants.RECIPES
    }
  try:
    for process in processes.values():
      assert process.stdout is not None
      process.stdout.readline()
    times = timing.in_turns(
      {name: functools.partial(_asked, p) for name, p in processes.items()},
      rounds=rounds,
      seconds=float("inf"),
    )
  finally:
    for process in processes.values():
      process.kill()
      process.wait()
  found: dict[str, Any] = {}
  for name, samples in times.items():
    row = {"ms": timing.stats([x for x in samples if x is not None])}
    row["speedup_over_f32"] = timing.ratio(times["f32"], samples)
    separate = name.removesuffix(FUSED) + SEPARATE
    if name.endswith(FUSED) and separate in times:
      row["speedup_over_separate"] = timing.ratio(times[separate], samples)
    if name + BEFORE in times:
      row["speedup_over_before"] = timing.ratio(times[name + BEFORE], samples)
    found[name] = {k: dataclasses.asdict(v) for k, v in row.items() if v}
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--sizes",
    choices=SIZES,
    default="wide",
    help="size of the model; default: wide",
  )
  parser.add_argument(
    "--variants",
    nargs="+",
    default=["bf16", "mxfp8"],
    metavar="NAME",
    help="variants of train.py; NAME:dots is quantize_dots of the whole model,"
    " NAME:fused also fuses activations; default: bf16 mxfp8",
  )
  parser.add_argument(
    "--before",
    metavar="PYTHON",
    help="the Python of an environment with another version of jaxplugin, which"
    " is timed too",
  )
  parser.add_argument("--rounds", type=int, default=15, help="default: 15")
  parser.add_argument("--json", type=pathlib.Path, help="output file")
  parser.add_argument("--serve", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    serve(args.sizes, args.serve)
    return
  names = ["f32", *(name for name in args.variants if name != "f32")]
  found = measure(args.sizes, names, args.before, args.rounds)
  for name, row in found.items():
    print(f"{name:14} {row['ms']['median']:8.2f} ms", end="")
    for key, ratio in row.items():
      if key != "ms":
        print(
          f"   {key.replace('_', ' ')} {ratio['median']:.2f}"
          f" ({ratio['q1']:.2f}-{ratio['q3']:.2f})",
          end="",
        )
    print()
  if args.json:
    run = {
      "device": jax.devices()[0].device_kind,
      "machine": platform.machine(),
      "jax": jax.__version__,
      "cpu_kernels": str(jp.detect_target().cpu_kernels),
      "sizes": dataclasses.asdict(SIZES[args.sizes]),
      "variants": found,
    }
    args.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
  main()
