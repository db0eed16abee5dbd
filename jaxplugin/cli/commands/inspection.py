# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info` and `explain`: what this machine supports, and what is chosen."""

from __future__ import annotations

import argparse
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.cli import dots
from jaxplugin.cli import files
from jaxplugin.explanation import diagnostics
from jaxplugin.explanation import information

_REFUSED: Final = 1


def _run_info(args: argparse.Namespace) -> int:
  found = information.information()
  return arguments.print_result(found, found.parts(), as_json=args.json)


INFO: Final = arguments.Command(
  name="info",
  group="inspect",
  help="print versions, devices and the formats of each backend",
  description="Prints the versions of packages, JAX's devices, tuning tables,"
  " and the formats that each backend supports on this device.",
  examples=("", "--json"),
  add_arguments=arguments.add_json,
  run=_run_info,
  uses_devices=True,
)


def _add_explain_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "file", nargs="?", metavar="FILE", help=arguments.FILE_HELP
  )
  one = command.add_argument_group("one dot, instead of FILE")
  dots.add_arguments(one, required=False, least=0)
  arguments.add_target(command)
  arguments.add_strict(command)
  command.add_argument(
    "-v",
    "--verbose",
    action="store_true",
    help="print why each backend was chosen or refused",
  )
  arguments.add_json(command)


def _run_explain(args: argparse.Namespace) -> int:
  target = arguments.target(args)
  required = {"--lhs": args.lhs, "--rhs": args.rhs}
  required |= {f"-{name}": getattr(args, name) for name in ("m", "n", "k")}
  optional = {
    "--batch": args.batch,
    "--out": args.out,
    "--precision": args.precision,
  }
  given = [n for n, x in (required | optional).items() if x is not None]
  missing = [name for name, x in required.items() if x is None]
  if args.file is not None and given:
    raise ValueError(
      "explain takes FILE, or a dot by its formats and sizes, not both: got"
      f" {args.file} and {', '.join(given)}"
    )
  if args.file is None and missing:
    raise ValueError(
      "explain needs FILE, or a dot by --lhs, --rhs, -m, -n and -k: missing"
      f" {', '.join(missing)}"
    )
  if args.file is not None:
    source = files.read(args.file)
    explanation = diagnostics.explain_module(
      source, target, args.implementation, strict=args.strict
    )
  else:
    explanation = dots.explain(args, target, args.implementation)
  parts = [explanation.details()] if args.verbose else explanation.parts()
  arguments.print_result(explanation, parts, as_json=args.json)
  is_refused = [bool(dot.error) for dot in explanation]
  return _REFUSED if is_refused and all(is_refused) else 0


EXPLAIN: Final = arguments.Command(
  name="explain",
  group="inspect",
  help="print the backend of each dot of a module, or of one dot",
  description="Prints the backend that each dot of a module gets, or one dot"
  " of given formats and sizes.",
  examples=(
    "--lhs mxfp8 --rhs mxfp4 -m 1 -n 4096 -k 4096 --verbose",
    "model.mlir --target b200 --cudnn 9.12",
    "- --target h100 --json < model.mlir",
  ),
  failure="the module has block-scaled calls and none can be lowered",
  add_arguments=_add_explain_arguments,
  run=_run_explain,
)
