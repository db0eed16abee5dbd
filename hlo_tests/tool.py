# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command that the RUN lines of golden files call.

  python hlo_tests/tool.py emit DOT       StableHLO that the primitive lowers to
  python hlo_tests/tool.py refuse DOT     the error of a dot that is refused
  python hlo_tests/tool.py optimize DOT   optimized HLO from XLA's GPU compiler,
                                          without a GPU
  python hlo_tests/tool.py optimize FILE --target b200 ... [--rewrite]
                                          the same for a StableHLO file; with
                                          --rewrite it is rewritten for the
                                          target first
  python hlo_tests/tool.py rewrite FILE --target b200 ... [--refused]
                                          the result of jaxplugin.rewrite, or
                                          its error
  python hlo_tests/tool.py regenerate [FILE ...]
                                          writes the CHECK lines of the files
                                          whose line 1 says GENERATED (default:
                                          all of them)

dots.py describes DOT. Versions and architectures are always arguments.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before JAX is imported; no GPU is needed
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import dots
import files
import golden

from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.jaxext import jax_private
from jaxplugin.lab.compilation import deviceless
from jaxplugin.stablehlo import rewriter


@functools.cache
def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="tool.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(dest="command", required=True)
  for name in ("emit", "refuse", "optimize"):
    command = commands.add_parser(name)
    dots.add_target(command)
    dots.add_dot(command)
    if name == "optimize":
      dots.add_mesh(command)
      command.add_argument("file", type=pathlib.Path, nargs="?")
      command.add_argument("--rewrite", action="store_true")
  command = commands.add_parser("rewrite")
  command.add_argument("file", type=pathlib.Path)
  dots.add_target(command)
  command.add_argument("--implementation", choices=backends.NAMES)
  command.add_argument("--refused", action="store_true")
  command = commands.add_parser("regenerate")
  command.add_argument("files", type=pathlib.Path, nargs="*")
  return parser


def _optimize(args: argparse.Namespace) -> str:
  if args.file is None:
    if args.rewrite:
      raise ValueError("--rewrite needs a FILE")
    return jax_private.optimized_hlo(dots.compile(args))
  if args.lhs is not None or args.rhs is not None or args.mesh is not None:
    raise ValueError("--lhs, --rhs and --mesh must be left out with a FILE")
  target = dots.target(args)
  text = files.text_of(args.file)
  if args.rewrite:
    text = rewriter.rewrite(
      text, target, implementation=args.implementation, strict=True
    )
  return jax_private.optimized_hlo(files.compile(text, target))


@functools.cache
def missing_compiler() -> str:
  """Returns why `optimize` cannot compile on this machine, or ""."""
  try:
    deviceless.mesh(targets.named_target("b200"))
  except deviceless.DevicelessError as error:
    return str(error)
  return ""


def _refuse(args: argparse.Namespace) -> str:
  try:
    dots.emit(args)
  except (NotImplementedError, TypeError) as error:
    return str(error)
  raise ValueError("the dot is not refused")


def _rewrite(args: argparse.Namespace) -> str:
  """Returns the rewritten text; with --refused, the error it must raise."""
  try:
    text = rewriter.rewrite(
      files.text_of(args.file),
      dots.target(args),
      implementation=args.implementation,
      strict=True,
    )
  except (NotImplementedError, TypeError, ValueError) as error:
    if args.refused:
      return str(error)
    raise
  if args.refused:
    raise ValueError("the module is not refused")
  return text


def _regenerate(args: argparse.Namespace) -> str:
  return "\n".join(
    f"wrote {path}" for path in golden.regenerate(main, args.files)
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status (2 for bad arguments)."""
  commands: dict[str, Any] = {
    "emit": dots.emit,
    "refuse": _refuse,
    "optimize": _optimize,
    "rewrite": _rewrite,
    "regenerate": _regenerate,
  }
  args = _parser().parse_args(argv)
  try:
    text = commands[args.command](args)
  except (
    deviceless.DevicelessError,
    golden.GoldenError,
    NotImplementedError,
    TypeError,
    ValueError,
  ) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(text)
  return 0


if __name__ == "__main__":
  sys.exit(main())
