# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`info`, `explain` and `repro`: what is supported, chosen, and wrong."""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

import jax

from jaxplugin import repro
from jaxplugin.cli import arguments, dots, files
from jaxplugin.explanation import diagnostics, information
from jaxplugin.repro import replaying

_REFUSED: Final = 1
_WRONG: Final = 1


def _run_info(args: argparse.Namespace) -> int:
  found = information.information()
  return arguments.print_result(found, found.parts(), as_json=args.json)


INFO: Final = arguments.Command(
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
  dots.add_arguments(one, required=False)
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
      f" {args.file} and {', '.join(given)}; leave out one of them"
    )
  if args.file is None and missing:
    raise ValueError(
      "explain needs FILE, or a dot by --lhs, --rhs, -m, -n and -k: missing"
      f" {', '.join(missing)}; see the examples of explain --help"
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


def _add_repro_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument(
    "file",
    metavar="FILE",
    help="a file that jp.repro.save wrote; open only files of people you trust",
  )
  text = "seed of data that the file does not have; default: 0"
  arguments.add_values(
    command, {"--seed N": text}, type=arguments.size(0), seed=0
  )
  arguments.add_json(command)


def _run_repro(args: argparse.Namespace) -> int:
  # Works before JAX starts, and does not change the number of GPUs.
  needed = replaying.num_devices(args.file)
  if needed > 1:
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", needed)
  found = repro.replay(args.file, seed=args.seed)
  arguments.print_result(found, found.lines(), as_json=args.json)
  return 0 if found.first_wrong is None else _WRONG


REPRO: Final = arguments.Command(
  help="find the first wrong call of a saved program",
  description="Computes each block-scaled call of a file by each implementation"
  " that this machine supports. Compares the results with f64, and prints the"
  " first call that is wrong.",
  epilog="jp.repro.save writes such a file. If JAXPLUGIN_REPRO_DIR names a"
  " folder, a file is also written when a kernel fails or a check finds a wrong"
  " result.",
  examples=("wrong.zip", "wrong.zip --seed 1"),
  failure="a call is wrong",
  add_arguments=_add_repro_arguments,
  run=_run_repro,
  uses_devices=True,
)
