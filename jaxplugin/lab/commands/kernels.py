# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`kernels`: compiles the Triton kernels of a dot for a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from jaxplugin.cli import arguments
from jaxplugin.cli import dots
from jaxplugin.cli import files
from jaxplugin.core import targets
from jaxplugin.lab.compilation import execution
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.printing import progress
from jaxplugin.runtime import triton_library


def _add_arguments(command: argparse.ArgumentParser) -> None:
  dots.add_arguments(command, required=True, least=1)
  arguments.add_gpu(command, "a GPU", "cuda", "rocm")
  arguments.add_ptxas(command)
  arguments.add_options(
    command,
    "DIRECTORY",
    {
      "--write": "output folder for PTX, SASS and cubin (AMD: AMDGCN and hsaco)"
    },
  )
  arguments.add_switches(
    command,
    {
      "--descriptors": "copy values by TMA descriptors (NVIDIA, sm_90 or"
      " newer); default: no descriptors",
      "--run": "execute the PTX on the CPU with random operands, and print its"
      " error, instructions and bank conflicts (NVIDIA only; choose a small"
      " dot)",
    },
  )
  arguments.add_json(command)


def _run(args: argparse.Namespace) -> int:
  # This command needs only Triton, not jax-triton.
  target = targets.named_target(args.target, ptxas=args.ptxas)
  target = target.with_library(targets.JAX_TRITON)
  if args.descriptors:
    target = triton_library.with_descriptors(target)
  if args.write is not None:
    files.check_folder(args.write)
  explanation = dots.explain(args, target, "triton")
  (dot,) = explanation
  config = () if dot.decision is None else dot.decision.config
  found: triton_dots.CompiledDot | execution.ExecutedDot
  with progress.shown(f"compiling for {target.name}") as line:
    found = compiled = triton_dots.compile_dot(dot.problem, target, config)
    if args.run:
      line.describe("executing PTX")
      found = execution.run_dot(compiled)
  arguments.print_result(found, [str(found)], as_json=args.json)
  if args.write is not None:
    for path in compiled.write(args.write):
      print(path, file=sys.stderr)
  return 0


COMMAND: Final = arguments.Command(
  name="kernels",
  group="compile",
  help="compile the Triton kernels of a dot",
  description="Compiles the Triton kernels of a dot for a GPU that need not be"
  " attached, and prints registers, spills, memory, matrix instructions and"
  " the main loop.",
  epilog="This needs Triton, but neither a GPU nor a CUDA toolkit.",
  examples=(
    "--target h200 --lhs bfloat16 --rhs nvfp4 \\\n"
    "    -m 16 -n 8192 -k 8192 --write kernels",
    "--target h200 --lhs bfloat16 --rhs nvfp4 \\\n"
    "    -m 16 -n 256 -k 1024 --run",
  ),
  add_arguments=_add_arguments,
  run=_run,
)
