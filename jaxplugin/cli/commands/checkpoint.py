# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`checkpoint`: what a checkpoint holds, and in which layout."""

from __future__ import annotations

import argparse
import functools
import warnings
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments

_EPILOG: Final = """\
Without --check only what describes the tensors is read. The exit status is 1 if
tensors cannot be read, or --check finds something. GLOB matches names of
tensors, with or without .weight.

examples:
  python -m jaxplugin checkpoint gpt-oss-20b
  python -m jaxplugin checkpoint qwen3-8b-nvfp4 --check numbers
"""
_WRONG: Final = 1


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "path",
    metavar="PATH",
    help="a folder, or a .safetensors, .safetensors.index.json or .gguf file",
  )
  command.add_argument(
    "--skip",
    metavar="GLOB",
    action="extend",
    nargs="+",
    default=[],
    help="leave these tensors out",
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
    help="whose weights are, if names, dtypes and shapes are those of several",
  )


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
  print(found)
  return _WRONG if found.misfits or found.numbers else 0


COMMAND: Final = arguments.Command(
  name="checkpoint",
  help="what a checkpoint holds, and in which layout",
  description="Tells whose quantized weights a checkpoint holds, in which"
  " formats, and\nwhat else there is.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
)
