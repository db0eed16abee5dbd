# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands, and arguments that several commands share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Final

from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.explanation import report
from jaxplugin.plugins import registry
from jaxplugin.printing import console

PROGRAM: Final = "jaxplugin"
FILE_HELP: Final = (
  "a module: StableHLO text, HLO text, MLIR bytecode or a StableHLO portable"
  " artifact; - reads standard input"
)
_LARGEST_SIZE: Final = 2**63 - 1  # XLA's
_LONG: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def long_dtypes(text: str) -> str:
  """Returns a name in lower case, and that of a dtype for "BF16" or "f32"."""
  return _LONG.get(text.lower(), text.lower())


def short_dtypes(text: str) -> str:
  """Returns formats with "bf16" for "bfloat16", as in "bf16xnvfp4"."""
  for short, long in _LONG.items():
    text = text.replace(long, short)
  return text


class HelpFormatter(argparse.HelpFormatter):
  """Fills paragraphs; keeps lines of a paragraph that has indented ones."""

  def _fill_text(self, text: str, width: int, indent: str) -> str:
    return "\n\n".join(
      textwrap.dedent(part)
      if "\n  " in part
      else super(HelpFormatter, self)._fill_text(part, width, indent)
      for part in text.strip().split("\n\n")
    )


class Parser(argparse.ArgumentParser):
  """Raises OSError if help cannot be printed, which argparse ignores."""

  def print_help(self, file: Any = None) -> None:
    print(self.format_help(), end="", file=file, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """One command.

  Attributes:
    help: its line in the list of commands.
    description: the first paragraph of its `--help`.
    epilog: paragraphs after its arguments.
    examples: command lines without the program's name.
    failure: when the exit status is 1; "" if it never is.
    add_arguments: adds the command's arguments to its parser.
    run: runs the command and returns the exit status. Raises ValueError,
      TypeError, RuntimeError or OSError with the reason if it cannot run.
    uses_devices: whether it looks at the GPUs of this machine.
  """

  help: str
  description: str
  epilog: str = ""
  examples: tuple[str, ...] = ()
  failure: str = ""
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[argparse.Namespace], int]
  uses_devices: bool = False

  def add_to(self, commands: argparse._SubParsersAction, name: str) -> None:
    """Adds the command's parser to those of the command line."""
    failure = f"1 if {self.failure}, " if self.failure else ""
    epilog = [
      self.epilog,
      f"Exit status: 0 if it succeeds, {failure}2 if an argument or an input"
      " is wrong, 130 after Ctrl-C.",
    ]
    if self.examples:
      lines = [f"  {PROGRAM} {name} {line}".rstrip() for line in self.examples]
      epilog.append("\n".join(["examples:", *lines]))
    self.add_arguments(
      commands.add_parser(
        name,
        description=self.description,
        epilog="\n\n".join(epilog),
        formatter_class=HelpFormatter,
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
    if value > _LARGEST_SIZE:
      raise argparse.ArgumentTypeError(
        f"must be at most {_LARGEST_SIZE}, got {value}"
      )
    return value

  return parse


def gpu_names(*platforms: str) -> list[str]:
  """Names of the GPUs of these platforms."""
  return [
    name
    for name in targets.KNOWN_NAMES
    if targets.named_target(name).platform in platforms
  ]


def add_target(command: argparse.ArgumentParser) -> None:
  """Adds the arguments that name a device and force an implementation."""
  add_values(
    command,
    {
      "--target NAME": f"a device by name ({', '.join(targets.KNOWN_NAMES)});"
      " cpu is a CPU without C++ kernels; default: the local device"
    },
  )
  add_cudnn(command)
  add_ptxas(command)
  command.add_argument(
    "--implementation",
    type=_implementation,
    metavar="NAME",
    help=f"the backend of all dots: {', '.join(backends.NAMES)}, or one of"
    " another package (`info` lists them); default: chosen for each dot",
  )


def add_switches(
  command: argparse._ActionsContainer, helps: Mapping[str, str]
) -> None:
  """Adds arguments that are true if they are given."""
  for name, text in helps.items():
    command.add_argument(name, action="store_true", help=text)


def add_values(
  command: argparse._ActionsContainer,
  helps: Mapping[str, str],
  *,
  type: Callable[[str], Any] = str,
  **defaults: Any,
) -> None:
  """Adds arguments with a value.

  Args:
    helps: their help, by "--name METAVAR".
    defaults: by name; the others have None.
  """
  for name, text in helps.items():
    flag, metavar = name.split()
    command.add_argument(flag, metavar=metavar, type=type, help=text)
  command.set_defaults(**defaults)


def add_gpu(
  command: argparse.ArgumentParser, kind: str, *platforms: str
) -> None:
  """Adds the required --target, a GPU of these platforms."""
  text = f"{kind} by name ({', '.join(gpu_names(*platforms))})"
  command.add_argument("--target", metavar="NAME", required=True, help=text)


def add_output(
  command: argparse._ActionsContainer, text: str, metavar: str = "OUT"
) -> None:
  """Adds -o, the output file."""
  command.add_argument("-o", "--output", metavar=metavar, help=text)


def add_cudnn(command: argparse._ActionsContainer) -> None:
  """Adds the cuDNN version of a device by name."""
  text = "the cuDNN version to assume with --target, e.g. 9.13"
  add_values(command, {"--cudnn VERSION": text})


def add_ptxas(command: argparse._ActionsContainer) -> None:
  """Adds the ptxas version of a device by name."""
  text = (
    "the ptxas version to assume with --target, e.g. 13.2; default: the oldest"
    " that is supported"
  )
  add_values(command, {"--ptxas VERSION": text})


def add_strict(command: argparse._ActionsContainer) -> None:
  """Adds the argument that makes a refused call of a module an error."""
  add_switches(
    command,
    {
      "--strict": "fail if a call of a module cannot be lowered; default: do"
      " not change that call, and print why"
    },
  )


def add_json(command: argparse._ActionsContainer) -> None:
  """Adds the argument that prints JSON in place of a report."""
  add_switches(command, {"--json": "print JSON"})


def print_result(
  found: Any,
  parts: Iterable[console.Part],
  *,
  as_json: bool,
  stream: IO[str] | None = None,
) -> int:
  """Prints a result as JSON, or its report; returns the exit status 0."""
  if as_json:
    print(found.to_json(), file=stream)
  else:
    console.show(parts, stream or sys.stdout)
  return 0


def print_missing_cudnn(target: targets.Target) -> None:
  """Prints on standard error that no cuDNN is assumed, if one might help."""
  if notice := report.missing_cudnn(target):
    console.show([f"{notice}; pass --cudnn 9.13"], sys.stderr)


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
  """Returns the device of `add_target`'s arguments; None is the local one.

  Raises:
    ValueError: If the device or a version is unknown, or a version is given
      without a device.
  """
  if args.target is not None:
    return targets.named_target(args.target, cudnn=args.cudnn, ptxas=args.ptxas)
  for name in ("cudnn", "ptxas"):
    if getattr(args, name) is not None:
      raise ValueError(f"--{name} needs --target; pass the GPU by its name")
  return None
