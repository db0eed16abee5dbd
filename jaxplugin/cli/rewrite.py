# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`rewrite`: lowers the calls of a module for a target."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

from jaxplugin import quantization
from jaxplugin.cli import arguments, files
from jaxplugin.core import targets
from jaxplugin.printing import console
from jaxplugin.stablehlo import module_parsing, modules, rewriter


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument("file", metavar="FILE", help=arguments.FILE_HELP)
  arguments.add_target(command)
  arguments.add_strict(command)
  command.add_argument(
    "--scale-rounding",
    choices=quantization.SCALE_ROUNDINGS,
    default="up",
    metavar="ROUNDING",
    help="how __op$quantize rounds scale factors of MX formats, as in"
    f" jp.quantize: {', '.join(quantization.SCALE_ROUNDINGS)}; default: up",
  )
  arguments.add_output(command, "output file; default: standard output")
  command.add_argument(
    "--format",
    choices=modules.FORMS,
    help="StableHLO text, MLIR bytecode, or a StableHLO portable artifact;"
    " default: the form of FILE, and text if FILE is HLO",
  )
  arguments.add_switches(
    command,
    {
      "--force": "overwrite OUT if it exists (never FILE)",
      "--elide": "for reading only: text with each long backend_config, such as"
      " a compiled Triton kernel, replaced by its length",
      "--json": "with -o OUT: print the result of each call as JSON",
    },
  )


def _run(args: argparse.Namespace) -> int:
  if args.json and args.output in (None, files.STANDARD):
    raise ValueError("rewrite: --json needs -o OUT, a file")
  target = arguments.target(args) or targets.current_target()
  # Before any work, and again when it is written.
  files.check_output(args.file, args.output, args.force)
  source = files.read(args.file)
  done = rewriter.rewrite_source(
    source,
    target,
    implementation=args.implementation,
    scale_rounding=args.scale_rounding,
    strict=args.strict,
  )
  is_changed = any(item.function for item in done)
  assert source.form is not None  # what is read from a file has one
  form = args.format or (modules.TEXT if args.elide else source.form)
  if args.elide:
    if form != modules.TEXT:
      raise ValueError(f"--elide needs --format text, got --format {form}")
    source.elide()
    is_changed = True
  if is_changed or form != source.form or _is_hlo(source):
    result = source.serialize(form)
  else:
    result = source.given
  files.write(result, args.file, args.output, args.force)
  if done:
    arguments.print_missing_cudnn(target)
  if args.json:
    calls = [_call(item) for item in done]
    print(json.dumps({"target": str(target), "calls": calls}, indent=2))
    return 0
  lines = [*map(str, done), _summary(source.name, target, done)]
  console.show(lines, sys.stderr)
  return 0


def _is_hlo(source: modules.ParsedModule) -> bool:
  given = source.given
  if source.form != modules.TEXT:
    return False
  return module_parsing.is_hlo(
    given if isinstance(given, str) else given.decode()
  )


def _call(item: rewriter.Rewritten) -> dict[str, str | None]:
  """Returns the fields of a call for JSON."""
  decision = None if item.decided is None else item.decided.decision
  return {
    "source": item.source,
    "call": item.call,
    "description": item.description,
    "backend": None if decision is None else decision.implementation,
    "function": item.function,
    "error": item.error,
  }


def _summary(
  name: str, target: targets.Target, done: Sequence[rewriter.Rewritten]
) -> str:
  """Returns how many calls were rewritten, stay, and cannot be lowered."""
  if not done:
    return f"{name}: no block-scaled call, unchanged"
  changed = sum(bool(item.function) for item in done)
  refused = sum(bool(item.error) for item in done)
  stays = len(done) - changed - refused
  text = f"{name}: {changed} of {len(done)} calls rewritten for {target}"
  if stays:
    text += f", {stays} {'needs' if stays == 1 else 'need'} no change"
  return f"{text}, {refused} cannot be lowered" if refused else text


COMMAND: Final = arguments.Command(
  help="lower the block-scaled calls of a StableHLO module for a target",
  description="Lowers each __op$quantize, __op$dequantize,"
  " __op$block_scaled_dot, __cudnn$blockScaledDot and xla.scaled_dot of a"
  " module with the backend that is chosen for the target.",
  epilog="HLO text becomes StableHLO text. A message for each call goes to"
  " standard error. A call that cannot be lowered is not changed, and its"
  " message says why. StableHLO without such calls is written unchanged. A"
  " module that calls kernels for another device is an error.",
  examples=(
    "model.mlir --target b200 --cudnn 9.12 -o out.mlir",
    "model.mlirbc --target h100 --format text",
    "- --target cpu < model.mlir > cpu.mlir",
  ),
  add_arguments=_add_arguments,
  run=_run,
)
