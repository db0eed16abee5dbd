# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`compile`: compiles a module or a function by XLA's GPU compiler."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.cli import files
from jaxplugin.cli import functions
from jaxplugin.core import targets
from jaxplugin.lab.compilation import deviceless
from jaxplugin.lab.compilation import optimized
from jaxplugin.printing import console
from jaxplugin.printing import progress
from jaxplugin.stablehlo import rewriter


def _add_arguments(command: argparse.ArgumentParser) -> None:
  arguments.add_options(
    command,
    "MODULE_OR_FUNCTION",
    {"source": "package.module:function, or " + arguments.FILE_HELP},
  )
  arguments.add_gpu(command, "an NVIDIA GPU", "cuda")
  arguments.add_options(
    command,
    "VERSION",
    {"--cudnn": "the cuDNN version to assume, e.g. 9.13; default: no cuDNN"},
  )
  arguments.add_options(
    command,
    "ARRAY",
    {
      "--arg": "an argument of the function, one option each:"
      " bfloat16[16,4096], or a ScaledArray by its format and logical shape,"
      " nvfp4[14336,4096]"
    },
    action="append",
    default=[],
    type=functions.argument,
  )
  arguments.add_switches(
    command,
    {
      "--rewrite": "lower the calls of a module for the target first, as"
      " rewrite does"
    },
  )
  arguments.add_strict(command)
  arguments.add_output(
    command,
    "output file for the optimized HLO; for - it goes to standard output, and"
    " the figures to standard error; default: none",
  )
  arguments.add_switches(
    command,
    {
      "--elide": "write no backend_config",
      "--force": "overwrite OUT if it exists",
      "--json": "print the figures as JSON",
    },
  )


def _run(args: argparse.Namespace) -> int:
  target = targets.named_target(args.target, cudnn=args.cudnn)
  is_function = functions.is_function(args.source)
  if is_function and args.rewrite:
    raise ValueError("--rewrite needs a module, got a function")
  if args.strict and not args.rewrite:
    raise ValueError(
      "--strict needs --rewrite, which lowers the calls of a module"
    )
  if not is_function and args.arg:
    raise ValueError("--arg needs a function, got a module")
  if is_function or args.rewrite:
    arguments.print_missing_cudnn(target)
  path = "" if is_function else args.source
  files.check_output(path, args.output, args.force)
  with progress.shown(f"compiling for {target.name}"):
    if is_function:
      function = functions.function(args.source)
      compiled = deviceless.compile(function, *args.arg, target=target)
      found = optimized.of_executable(
        args.source, target, compiled.runtime_executable()
      )
    else:
      source = files.read(args.source)
      if args.rewrite:
        for item in rewriter.rewrite_source(source, target, strict=args.strict):
          if item.error:
            console.show([str(item)], sys.stderr)
      found = optimized.of_module(source, target)
  if args.output is not None:
    hlo = found.hlo(elide=args.elide)
    files.write(hlo, path, args.output, args.force)
  is_stdout = args.output == files.STANDARD
  stream = sys.stderr if is_stdout else sys.stdout
  return arguments.print_result(
    found, [str(found)], as_json=args.json, stream=stream
  )


COMMAND: Final = arguments.Command(
  name="compile",
  group="compile",
  help="compile a module or a function by XLA's GPU compiler",
  description="Compiles a module or a function by XLA's GPU compiler, for an"
  " NVIDIA GPU that need not be attached, and prints its custom calls, fusions,"
  " kernels and memory.",
  epilog="This needs jaxplugin[deviceless], but neither a GPU nor cuDNN. A"
  " function is imported, from the current directory first. It is called with"
  " abstract arrays, and its block-scaled dots are decided for the target. XLA"
  " lowers the calls of a module, except with --rewrite.",
  examples=(
    "model.mlir --target b200 --cudnn 9.13",
    "my.model:mlp --target b200 --cudnn 9.13 \\\n"
    "    --arg 'bfloat16[16,4096]' --arg 'nvfp4[14336,4096]' -o mlp.hlo",
  ),
  add_arguments=_add_arguments,
  run=_run,
)
