# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What several commands take: a device by name, sizes, files of modules."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Final

from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot.plugins import registry
from jaxplugin.explanation import report

FILE_HELP: Final = (
  "a module: StableHLO text, HLO text, MLIR bytecode or a StableHLO portable"
  " artifact; - reads standard input"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """One command.

  Attributes:
    name, help, description, epilog: as `argparse` takes them.
    add_arguments: adds what the command takes to its parser.
    run: does it, and returns the exit status. Raises ValueError, TypeError,
      RuntimeError or OSError with the reason where it cannot.
    uses_devices: whether it looks at the GPUs of this machine.
  """

  name: str
  help: str
  description: str
  epilog: str = ""
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[argparse.Namespace], int]
  uses_devices: bool = False

  def add_to(self, commands: argparse._SubParsersAction) -> None:
    """Adds the command's parser to those of the command line."""
    self.add_arguments(
      commands.add_parser(
        self.name,
        help=self.help,
        description=self.description,
        epilog=self.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
      )
    )


def size(least: int) -> Callable[[str], int]:
  """Reads a size of at least `least`."""

  def parse(text: str) -> int:
    try:
      value = int(text)
    except ValueError:
      raise argparse.ArgumentTypeError(
        f"must be a whole number, got {text!r}"
      ) from None
    if value < least:
      raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value

  return parse


def gpu_names(*platforms: str) -> list[str]:
  """Names of the GPUs of these platforms."""
  return [
    name
    for name in targets.TARGET_NAMES
    if targets.named_target(name).platform in platforms
  ]


def add_target(command: argparse.ArgumentParser) -> None:
  """The arguments that name a device, and force an implementation."""
  command.add_argument(
    "--target",
    metavar="NAME",
    help=f"a device by name ({', '.join(targets.TARGET_NAMES)}); cpu is one"
    " without C++ kernels, which any process can run; default: the local"
    " device",
  )
  command.add_argument(
    "--cudnn",
    metavar="VERSION",
    help="the cuDNN version to assume with --target, e.g. 9.13",
  )
  add_ptxas(command)
  command.add_argument(
    "--implementation",
    type=_implementation,
    metavar="NAME",
    help=f"the one that all dots are to use: {', '.join(backends.NAMES)}, or"
    " one of another package (info lists them); default: chosen for each",
  )


def add_ptxas(command: argparse._ActionsContainer) -> None:
  """The argument that says what assembles kernels of a device by name."""
  command.add_argument(
    "--ptxas",
    metavar="VERSION",
    help="the version of ptxas to assume with --target, e.g. 13.2; default: an"
    " old one",
  )


def add_strict(command: argparse._ActionsContainer) -> None:
  """The argument that makes a refused call of a module an error."""
  command.add_argument(
    "--strict",
    action="store_true",
    help="fail if a call of a module cannot be lowered; default: leave that"
    " call as it is, and say why",
  )


def print_missing_cudnn(target: targets.Target) -> None:
  """Prints on standard error that no cuDNN is assumed, if one might serve."""
  notice = report.missing_cudnn(target)
  assumed = dataclasses.replace(
    target, cudnn_version=targets.MIN_BLOCK_SCALED_CUDNN
  )
  if notice and assumed.has_block_scaled_cudnn:
    print(f"{notice}; pass --cudnn 9.13", file=sys.stderr)


def _implementation(text: str) -> str:
  # No `choices`: those of other packages would be loaded for any command.
  if text not in backends.table():
    missing = registry.reason_missing(text)
    known = ", ".join(backends.table())
    why = f"; {missing}" if missing else ""
    raise argparse.ArgumentTypeError(
      f"invalid choice: {text!r} (choose from {known}){why}"
    )
  return text


def target(args: argparse.Namespace) -> targets.Target | None:
  """The device of `add_target`'s arguments; None for the local one.

  Raises:
    ValueError: there is no such device or version, or a version alone.
  """
  if args.target is not None:
    return targets.named_target(args.target, cudnn=args.cudnn, ptxas=args.ptxas)
  for name in ("cudnn", "ptxas"):
    if getattr(args, name) is not None:
      raise ValueError(f"--{name} needs --target")
  return None
