# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`rewrite`: the calls of a module, lowered for a target."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from jaxplugin import quantization
from jaxplugin.cli import arguments
from jaxplugin.cli import files
from jaxplugin.core import targets
from jaxplugin.stablehlo import modules
from jaxplugin.stablehlo import rewriter

_EPILOG: Final = """\
One line a call goes to stderr. A call that cannot be lowered stays as it is,
and its line says why. Without anything to rewrite the module comes out as it
is.

examples:
  python -m jaxplugin rewrite model.mlir --target b200 --cudnn 9.12 -o out.mlir
  python -m jaxplugin rewrite model.mlirbc --target h100 --format text
  python -m jaxplugin rewrite - --target cpu < model.mlir > cpu.mlir
"""


def _add_arguments(command: argparse.ArgumentParser) -> None:
  command.add_argument("file", metavar="FILE", help=arguments.FILE_HELP)
  arguments.add_target(command)
  arguments.add_strict(command)
  command.add_argument(
    "--scale-rounding",
    choices=quantization.SCALE_ROUNDINGS,
    default="up",
    help="of __op$quantize to MX formats, as in jp.quantize; default: up",
  )
  command.add_argument(
    "-o", "--output", metavar="OUT", help="where to write; default: stdout"
  )
  command.add_argument(
    "--format",
    choices=modules.FORMS,
    help="what to write: text, MLIR bytecode, or a StableHLO portable artifact;"
    " default: what FILE is",
  )
  command.add_argument(
    "--force",
    action="store_true",
    help="overwrite OUT where it exists (never FILE)",
  )
  command.add_argument(
    "--elide",
    action="store_true",
    help="for reading only: text with each long backend_config, such as a"
    " compiled Triton kernel, replaced by its length",
  )


def _run(args: argparse.Namespace) -> int:
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
      raise ValueError(f"--elide is for text, got --format {form}")
    source.elide()
    is_changed = True
  if is_changed or form != source.form:
    result = source.serialize(form)
  else:
    result = source.given
  files.write(result, args.file, args.output, args.force)
  if done:
    arguments.print_missing_cudnn(target)
  for item in done:
    print(item, file=sys.stderr)
  print(_summary(source.name, target, done), file=sys.stderr)
  return 0


def _summary(
  name: str, target: targets.Target, done: Sequence[rewriter.Rewritten]
) -> str:
  """How many calls were rewritten, and how many were refused."""
  if not done:
    return f"{name}: no block-scaled call, unchanged"
  changed = sum(bool(item.function) for item in done)
  refused = sum(bool(item.error) for item in done)
  text = f"{name}: {changed} of {len(done)} calls rewritten for {target}"
  return f"{text}, {refused} cannot be lowered" if refused else text


COMMAND: Final = arguments.Command(
  name="rewrite",
  help="lower the block-scaled calls of a StableHLO module for a target",
  description="Lowers each __op$quantize, __op$dequantize,"
  " __op$block_scaled_dot,\n__cudnn$blockScaledDot and xla.scaled_dot of a"
  " module as the target deserves.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
)
