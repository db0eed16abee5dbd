# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: a checkpoint of plain weights into one of quantized weights."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments

_EPILOG: Final = """\
Memory holds one tensor. OUT appears when all of it is on the disk; until then
it is OUT.partial, and the same command goes on after the files that are
finished. GLOB is of a tensor's name, with or without .weight.

examples:
  python -m jaxplugin quantize qwen3-8b qwen3-8b-nvfp4 --dry-run
  python -m jaxplugin quantize qwen3-8b qwen3-8b-nvfp4 --exclude '*.down_proj'
"""


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "source",
    metavar="IN",
    help="a folder, or a .safetensors or .safetensors.index.json file",
  )
  command.add_argument(
    "target", metavar="OUT", help="a folder of a folder, a file of a file"
  )
  command.add_argument(
    "--format",
    default="nvfp4",
    choices=checkpoints.WRITTEN_FORMATS,
    help="of the weights (default: %(default)s)",
  )
  command.add_argument(
    "--layout",
    default=checkpoints.WRITTEN_LAYOUTS[0],
    choices=checkpoints.WRITTEN_LAYOUTS,
    help="whose names and files (default: %(default)s); gpt-oss has mxfp4",
  )
  command.add_argument(
    "--include",
    metavar="GLOB",
    action="extend",
    nargs="+",
    help="quantize just these, whatever they are called",
  )
  command.add_argument(
    "--exclude",
    metavar="GLOB",
    action="extend",
    nargs="+",
    default=[],
    help="leave these as they are",
  )
  command.add_argument(
    "--transposed",
    metavar="GLOB",
    action="extend",
    nargs="+",
    default=[],
    help="experts [E, k, n]; those of gpt_oss and llama4 are known",
  )
  command.add_argument(
    "--allow-nonfinite",
    action="store_true",
    help="quantize weights with NaNs or infinities, which are an error without",
  )
  command.add_argument(
    "--verify",
    action="store_true",
    help="read the result back, and compare it bit by bit with the source's"
    " weights, quantized anew",
  )
  command.add_argument(
    "--dry-run", action="store_true", help="tell what would be done"
  )


def _run(args: argparse.Namespace) -> int:
  print(
    checkpoints.quantize(
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
  )
  return 0


COMMAND: Final = arguments.Command(
  name="quantize",
  help="a checkpoint with its weights quantized",
  description="Writes a checkpoint whose matrices are quantized, in the layout"
  " of a tool, and\ntells what became of each tensor.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
  uses_devices=True,
)
