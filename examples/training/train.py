# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains small models on real data in block formats, and compares with f32.

  cd examples/training
  python train.py                              # minutes: the transformer, linen
  python train.py --task digits --seeds 10
  python train.py --task nnx --variants f32 nvfp4
  python train.py --task nnx --one-line        # by jp.quantize_dots
  python train.py --long                       # hours
  python train.py --report                     # no training: table and plot

A run is one variant with one seed. Runs that are in the results are not made
again, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Final

import tqdm
import training_plots
import training_runs
import training_statistics
import training_tasks
import training_variants

FOLDER: Final = pathlib.Path(__file__).resolve().parent / "results"


def parse_arguments(
  arguments: Sequence[str] | None,
) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--task",
    choices=training_tasks.TASKS,
    default="linen",
    help="model and data; default: linen",
  )
  parser.add_argument(
    "--variants",
    nargs="+",
    choices=training_variants.VARIANTS,
    default=list(training_variants.VARIANTS),
    metavar="NAME",
    help=f"some of {', '.join(training_variants.VARIANTS)} (default: all)",
  )
  size = parser.add_mutually_exclusive_group()
  for name, what in (("quick", "seconds, to try"), ("long", "hours")):
    size.add_argument(
      f"--{name}", dest="preset", action="store_const", const=name, help=what
    )
  parser.add_argument(
    "--seeds", type=int, metavar="N", help="seeds from 0 to N - 1"
  )
  parser.add_argument(
    "--against",
    choices=training_variants.VARIANTS,
    default=training_variants.BASELINE,
    metavar="NAME",
    help="variant to compare with (default: f32)",
  )
  parser.add_argument(
    "--results",
    type=pathlib.Path,
    default=FOLDER,
    metavar="FOLDER",
    help="folder of the results",
  )
  parser.add_argument(
    "--one-line",
    action="store_true",
    help=(
      "apply recipes by jp.quantize_dots to the f32 model, instead of a"
      " dot_general and a key for each layer"
    ),
  )
  parser.add_argument(
    "--report", action="store_true", help="only show existing results"
  )
  parser.set_defaults(preset="default")
  return parser.parse_args(arguments)


def train_missing(
  results: training_runs.Results,
  task: training_tasks.Task,
  wanted: Sequence[tuple[int, str]],
  steps: int,
  *,
  is_one_line: bool,
) -> None:
  """Makes the runs (seed, variant) of `wanted` that are not there."""
  missing = [
    (seed, variant)
    for seed, variant in wanted
    if not results.has(variant, seed)
  ]
  with tqdm.tqdm(total=len(missing) * steps, unit="step") as bar:
    for seed, variant in missing:
      bar.set_description(f"{variant}, seed {seed}")

      def on_step(step: int, loss: float) -> None:
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        bar.update()

      run, _ = training_runs.train(
        task, variant, seed, steps, on_step, is_one_line=is_one_line
      )
      results.add(run)


def main(arguments: Sequence[str] | None = None) -> None:
  options = parse_arguments(arguments)
  preset = training_tasks.PRESETS[options.preset]
  task = training_tasks.TASKS[options.task](preset)
  suffix = "_one_line" if options.one_line else ""
  if options.preset != "default":
    suffix += f"_{options.preset}"
  path = options.results / f"{task.name}{suffix}.json"
  results = training_runs.Results(
    path, task, preset, is_one_line=options.one_line
  )
  if not options.report:
    seeds = range(options.seeds or preset.seeds)
    # Seed by seed: an interrupted comparison is fair as far as it got.
    wanted = [(seed, variant) for seed in seeds for variant in options.variants]
    train_missing(
      results, task, wanted, preset.steps, is_one_line=options.one_line
    )
  if options.against not in training_statistics.variants(results.runs):
    raise SystemExit(
      f"train.py: {path.name} has no run of {options.against} to compare with;"
      f" add it by --variants {options.against}, or choose another by --against"
    )
  title = task.title + (", by quantize_dots" if options.one_line else "")
  print(f"{title}; cross entropy on validation data\n")
  print(training_statistics.table(results.runs, options.against))
  picture = path.with_suffix(".png")
  training_plots.draw(results, title, options.against, picture)
  print(f"\n{path.name} and {picture.name} are in {options.results}")


if __name__ == "__main__":
  main()
