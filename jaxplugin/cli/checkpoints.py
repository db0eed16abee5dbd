# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`checkpoint` and `quantize`: read a checkpoint, and write a quantized one."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Mapping
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments

_WRONG: Final = 1


def _add_globs(
  command: argparse.ArgumentParser, helps: Mapping[str, str]
) -> None:
  for name, text in helps.items():
    command.add_argument(
      name, metavar="GLOB", action="extend", nargs="+", default=[], help=text
    )


def _add_checkpoint_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "path",
    metavar="PATH",
    help="a folder, or a .safetensors, .safetensors.index.json or .gguf file",
  )
  _add_globs(command, {"--skip": "leave these tensors out"})
  command.add_argument(
    "--check",
    choices=("numbers",),
    help="read all tensors, and count NaNs, infinities and global scales that"
    " are 0 or infinite",
  )
  command.add_argument(
    "--layout",
    choices=checkpoints.OPEN_LAYOUTS,
    metavar="LAYOUT",
    help=f"the layout, if names, dtypes and shapes fit several:"
    f" {', '.join(checkpoints.OPEN_LAYOUTS)}",
  )
  arguments.add_json(command)


def _run_checkpoint(args: argparse.Namespace) -> int:
  load = functools.partial(
    checkpoints.load,
    args.path,
    skip=args.skip,
    check=args.check,
    layout=args.layout,
  )
  with warnings.catch_warnings():
    # The table has all that these warnings say.
    warnings.simplefilter("ignore", checkpoints.NumbersWarning)
    warnings.simplefilter("ignore", checkpoints.LayoutWarning)
    try:
      found = load()
    except checkpoints.CheckpointError:
      found = load(strict=False)
  arguments.print_result(found, found.parts(), as_json=args.json)
  return _WRONG if found.misfits or found.numbers else 0


CHECKPOINT: Final = arguments.Command(
  help="list the tensors of a checkpoint, and whether it loads",
  description="Prints the layout, format, shape and bytes of a checkpoint's"
  " tensors, and whether jp.checkpoints.load reads them.",
  epilog="Without --check only the files' headers are read. GLOB matches names"
  " of tensors, with or without .weight.",
  examples=("gpt-oss-20b", "qwen3-8b-nvfp4 --check numbers"),
  failure="tensors cannot be read or --check finds something",
  add_arguments=_add_checkpoint_arguments,
  run=_run_checkpoint,
)


def _add_quantize_arguments(command: argparse.ArgumentParser) -> None:
  source = "a folder, or a .safetensors or .safetensors.index.json file"
  target = "the output path: a folder if IN is a folder, otherwise a file"
  command.add_argument("source", metavar="IN", help=source)
  command.add_argument("target", metavar="OUT", help=target)
  command.add_argument(
    "--format",
    default="nvfp4",
    choices=checkpoints.WRITTEN_FORMATS,
    metavar="FORMAT",
    help="format of the weights:"
    f" {', '.join(checkpoints.WRITTEN_FORMATS)}; default: %(default)s",
  )
  command.add_argument(
    "--layout",
    default=checkpoints.WRITTEN_LAYOUTS[0],
    choices=checkpoints.WRITTEN_LAYOUTS,
    metavar="LAYOUT",
    help="layout of the output:"
    f" {', '.join(checkpoints.WRITTEN_LAYOUTS)}; default: %(default)s; gpt-oss"
    " requires mxfp4",
  )
  _add_globs(
    command,
    {
      "--include": "quantize these tensors and no others",
      "--exclude": "do not quantize these tensors",
      "--transposed": "experts whose shape is [E, k, n]; gpt_oss and llama4"
      " need no GLOB",
    },
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


def _run_quantize(args: argparse.Namespace) -> int:
  done = checkpoints.quantize(
    args.source,
    args.target,
    args.format,
    layout=args.layout,
    include=args.include or None,
    exclude=args.exclude,
    transposed=args.transposed,
    allow_nonfinite=args.allow_nonfinite,
    verify=args.verify,
    dry_run=args.dry_run,
  )
  return arguments.print_result(done, done.parts(), as_json=args.json)


QUANTIZE: Final = arguments.Command(
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
  add_arguments=_add_quantize_arguments,
  run=_run_quantize,
  uses_devices=True,
)
