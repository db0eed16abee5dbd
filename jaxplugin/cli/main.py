# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m jaxplugin`: one of `COMMANDS` is run."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.cli.commands import bench
from jaxplugin.cli.commands import checkpoint
from jaxplugin.cli.commands import compile
from jaxplugin.cli.commands import explain
from jaxplugin.cli.commands import info
from jaxplugin.cli.commands import kernels
from jaxplugin.cli.commands import plan
from jaxplugin.cli.commands import quantize
from jaxplugin.cli.commands import rewrite
from jaxplugin.cli.commands import tune

# In the order of --help.
COMMANDS: Final[tuple[arguments.Command, ...]] = (
  info.COMMAND,
  explain.COMMAND,
  rewrite.COMMAND,
  compile.COMMAND,
  kernels.COMMAND,
  plan.COMMAND,
  checkpoint.COMMAND,
  quantize.COMMAND,
  bench.COMMAND,
  tune.COMMAND,
)

_BAD_ARGUMENTS: Final = 2


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jaxplugin",
    description="Block-scaled dot for JAX: what is chosen, where, and why.",
  )
  parsers = parser.add_subparsers(dest="command", required=True)
  for command in COMMANDS:
    command.add_to(parsers)
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status (2 for bad arguments)."""
  args = _parser().parse_args(argv)
  (command,) = (c for c in COMMANDS if c.name == args.command)
  if not command.uses_devices or not has_nvidia_gpu():
    # Without it JAX logs a traceback where its CUDA plugin, but not cuDNN, is
    # installed. Other commands decide for devices that need not be there.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  status = 0
  try:
    status = command.run(args)
    sys.stdout.flush()
  except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (ValueError, TypeError, RuntimeError, OSError) as error:
    print(f"error: {_message(error)}", file=sys.stderr)
    return _BAD_ARGUMENTS
  return status


def has_nvidia_gpu() -> bool:
  """Whether the system has one, as far as Linux (and WSL) tells."""
  return any(glob.glob(path) for path in ("/dev/nvidia[0-9]*", "/dev/dxg"))


def _message(error: Exception) -> str:
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return str(error)
