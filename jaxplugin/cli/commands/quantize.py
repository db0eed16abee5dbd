# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: writes a checkpoint with quantized weights."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments


def _add_arguments(command: argparse.ArgumentParser) -> None:
  source = "a folder, or a .safetensors or .safetensors.index.json file"
  target = "the output path: a folder if IN is a folder, otherwise a file"
  arguments.add_options(command, "IN", {"source": source})
  arguments.add_options(command, "OUT", {"target": target})
  command.add_argument(
    "--format",
    default="nvfp4",
    choices=checkpoints.WRITTEN_FORMATS,
    metavar="FORMAT",
    help=f"of the weights: {', '.join(checkpoints.WRITTEN_FORMATS)}; default:"
    " %(default)s",
  )
  command.add_argument(
    "--layout",
    default=checkpoints.WRITTEN_LAYOUTS[0],
    choices=checkpoints.WRITTEN_LAYOUTS,
    metavar="LAYOUT",
    help=f"of the output: {', '.join(checkpoints.WRITTEN_LAYOUTS)}; default:"
    " %(default)s; gpt-oss requires mxfp4",
  )
  globs = {"action": "extend", "nargs": "+"}
  arguments.add_options(
    command,
    "GLOB",
    {"--include": "quantize these tensors and no others"},
    **globs,
  )
  arguments.add_options(
    command,
    "GLOB",
    {
      "--exclude": "do not quantize these tensors",
      "--transposed": "experts whose shape is [E, k, n]; gpt_oss and llama4"
      " need no GLOB",
    },
    default=[],
    **globs,
  )
  arguments.add_switches(
    command,
    {
      "--allow-nonfinite": "quantize weights with NaNs or infinities; default:"
      " an error",
      "--verify": "read the result, and compare each bit with newly quantized"
      " weights",
      "--dry-run": "print what would be quantized, and write nothing",
    },
  )
  arguments.add_json(command)


def _run(args: argparse.Namespace) -> int:
  done = checkpoints.quantize(
    args.source,
    args.target,
    args.format,
    layout=args.layout,
    include=args.include,
    exclude=args.exclude,
    transposed=args.transposed,
    allow_nonfinite=args.allow_nonfinite,
    verify=args.verify,
    dry_run=args.dry_run,
  )
  return arguments.print_result(done, done.parts(), as_json=args.json)


COMMAND: Final = arguments.Command(
  name="quantize",
  group="models",
  help="quantize the weights of a checkpoint",
  description="Writes a checkpoint with quantized weights in the layout of"
  " another tool, and prints what was quantized.",
  epilog="Memory holds one tensor at a time. Files are written to OUT.partial,"
  " which becomes OUT when all are on the disk; after an interruption the same"
  " command continues. GLOB matches names of tensors, with or without .weight.",
  examples=(
    "qwen3-8b qwen3-8b-nvfp4 --dry-run",
    "qwen3-8b qwen3-8b-nvfp4 --exclude '*.down_proj'",
  ),
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
