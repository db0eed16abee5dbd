# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`kernels`: what the Triton kernels of a dot become on a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.cli import dots
from jaxplugin.core import targets
from jaxplugin.explanation import compilation
from jaxplugin.explanation import execution
from jaxplugin.runtime import triton_library

_EPILOG: Final = """\
Neither a GPU nor a toolkit is needed.

example:
  python -m jaxplugin kernels --target h200 --lhs bfloat16 --rhs nvfp4 \\
    -m 16 -n 8192 -k 8192 --write kernels
  python -m jaxplugin kernels --target h200 --lhs bfloat16 --rhs nvfp4 \\
    -m 16 -n 256 -k 1024 --run
"""


def _add_arguments(command: argparse.ArgumentParser) -> None:
  dots.add_arguments(command, required=True, least=1)
  gpus = arguments.gpu_names("cuda", "rocm")
  command.add_argument(
    "--target",
    metavar="NAME",
    required=True,
    help=f"a GPU by name ({', '.join(gpus)})",
  )
  arguments.add_ptxas(command)
  command.add_argument(
    "--write",
    metavar="DIRECTORY",
    help="where to write PTX, SASS and cubin (AMDGCN and hsaco)",
  )
  command.add_argument(
    "--descriptors",
    action="store_true",
    help="copy values by TMA descriptors (NVIDIA, from sm_90 on), which no"
    " default does",
  )
  command.add_argument(
    "--run",
    action="store_true",
    help="execute the PTX on this machine's CPU, with random operands, and tell"
    " its error, instructions and conflicts of banks (NVIDIA; small products)",
  )
  command.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
  # Whether jax-triton could lower for it does not matter here.
  target = targets.named_target(args.target, ptxas=args.ptxas)
  target = target.with_library(targets.JAX_TRITON)
  if args.descriptors:
    target = triton_library.with_descriptors(target)
  explanation = dots.explain(args, target, "triton")
  (dot,) = explanation
  config = () if dot.decision is None else dot.decision.config
  compiled = compilation.compile_dot(dot.problem, target, config)
  told = execution.run_dot(compiled) if args.run else compiled
  print(told.to_json() if args.json else told)
  if args.write is not None:
    for path in compiled.write(args.write):
      print(path, file=sys.stderr)
  return 0


COMMAND: Final = arguments.Command(
  name="kernels",
  help="what the Triton kernels of a dot become on a GPU",
  description="Compiles the Triton kernels of a dot for a GPU and tells"
  " registers, spills,\nmemory, the matrix instructions and the main loop.",
  epilog=_EPILOG,
  add_arguments=_add_arguments,
  run=_run,
)
