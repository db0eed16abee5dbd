# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: writes a checkpoint with quantized weights."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments
from jaxplugin.printing import console


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "source",
    metavar="IN",
    help="a folder, or a .safetensors or .safetensors.index.json file",
  )
  command.add_argument(
    "target",
    metavar="OUT",
    help="the output path: a folder if IN is a folder, otherwise a file",
  )
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
  command.add_argument(
    "--include",
    metavar="GLOB",
    action="extend",
    nargs="+",
    help="quantize these tensors and no others",
  )
  command.add_argument(
    "--exclude",
    metavar="GLOB",
    action="extend",
    nargs="+",
    default=[],
    help="do not quantize these tensors",
  )
  command.add_argument(
    "--transposed",
    metavar="GLOB",
    action="extend",
    nargs="+",
    default=[],
    help="experts whose shape is [E, k, n]; gpt_oss and llama4 need no GLOB",
  )
  command.add_argument(
    "--allow-nonfinite",
    action="store_true",
    help="quantize weights with NaNs or infinities; default: an error",
  )
  command.add_argument(
    "--verify",
    action="store_true",
    help="read the result, and compare each bit with newly quantized weights",
  )
  command.add_argument(
    "--dry-run",
    action="store_true",
    help="print what would be quantized, and write nothing",
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
  if args.json:
    print(done.to_json())
  else:
    console.show(done.parts())
  return 0


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
