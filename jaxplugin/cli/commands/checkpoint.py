# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`checkpoint`: what a checkpoint holds, and in which layout."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin import checkpoints
from jaxplugin.cli import arguments

_EPILOG: Final = """\
Only what describes the tensors is read.

example:
  python -m jaxplugin checkpoint gpt-oss-20b
"""


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "path",
    metavar="PATH",
    help="a folder, or a .safetensors, .safetensors.index.json or .gguf file",
  )


def _run(args: argparse.Namespace) -> int:
  print(checkpoints.load(args.path))
  return 0


COMMAND: Final = arguments.Command(
  name="checkpoint",
  help="what a checkpoint holds, and in which layout",
  description="Tells whose quantized weights a checkpoint holds, in which"
  " formats, and\nwhat else there is.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
)
