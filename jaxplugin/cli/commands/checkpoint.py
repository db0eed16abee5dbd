# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`checkpoint`: the tensors of a checkpoint, and whether it loads."""

from __future__ import annotations

import argparse
import functools
import warnings
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments

_WRONG: Final = 1


def _add_arguments(command: argparse.ArgumentParser) -> None:
  arguments.add_options(
    command,
    "PATH",
    {
      "path": "a folder, or a .safetensors, .safetensors.index.json or .gguf"
      " file"
    },
  )
  arguments.add_options(
    command,
    "GLOB",
    {"--skip": "leave these tensors out"},
    action="extend",
    nargs="+",
    default=[],
  )
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


def _run(args: argparse.Namespace) -> int:
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


COMMAND: Final = arguments.Command(
  name="checkpoint",
  group="inspect",
  help="list the tensors of a checkpoint, and whether it loads",
  description="Prints the layout, format, shape and bytes of a checkpoint's"
  " tensors, and whether jp.checkpoints.load reads them.",
  epilog="Without --check only the files' headers are read. GLOB matches names"
  " of tensors, with or without .weight.",
  examples=("gpt-oss-20b", "qwen3-8b-nvfp4 --check numbers"),
  failure="tensors cannot be read or --check finds something",
  add_arguments=_add_arguments,
  run=_run,
)
