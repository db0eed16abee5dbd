# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of a dot for a GPU that is not attached."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxplugin.core import decisions, targets
from jaxplugin.dot import problems
from jaxplugin.dot.backends import triton
from jaxplugin.kernels import launching
from jaxplugin.runtime import triton_library


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledDot:
  """The compiled kernels of one dot; `str` returns a report."""

  problem: problems.DotProblem
  target: targets.Target
  launches: tuple[launching.Launch, ...]
  # `lab.inspection.compile.CompiledKernel` of each launch.
  kernels: tuple[Any, ...]

  def __str__(self) -> str:
    lines = [f"{self.problem} on {self.target}"]
    for launch, kernel in zip(self.launches, self.kernels, strict=True):
      lines.append(launch.name)
      lines += [f"  {line}" for line in _lines(launch, kernel)]
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the figures as JSON, with an object for each launch."""
    return json.dumps(
      {
        "problem": str(self.problem),
        "target": str(self.target),
        "kernels": [
          _figures(launch, kernel)
          for launch, kernel in zip(self.launches, self.kernels, strict=True)
        ],
      },
      indent=2,
    )

  def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
    """Writes PTX, SASS and cubin, or AMDGCN and hsaco; returns the paths."""
    return [
      path
      for launch, kernel in zip(self.launches, self.kernels, strict=True)
      for path in dataclasses.replace(kernel, name=launch.name).write(directory)
    ]


def _figures(launch: launching.Launch, kernel: Any) -> dict[str, Any]:
  loop = kernel.main_loop
  return {
    "name": launch.name,
    "grid": launch.grid,
    "warps": kernel.num_warps,
    "stages": launch.num_stages,
    "registers": kernel.registers,
    "spill_bytes": kernel.spill_bytes,
    "shared_memory_bytes": kernel.shared_memory_bytes,
    "tensor_memory_columns": kernel.tensor_memory_columns,
    "matrix_instructions": dict(kernel.matrix_instructions),
    "main_loop_instructions": loop.instructions if loop else None,
    "main_loop_matrix_instructions": (
      dict(loop.matrix_instructions) if loop else {}
    ),
    "global_loads_by_bits": {
      str(bits): count for bits, count in kernel.global_load_bits.items()
    },
    "tensor_copies": kernel.tensor_copies,
    "resident_blocks": kernel.resident_blocks,
    "simulated_cycles_a_step": _simulated_cycles(launch, kernel),
  }


def _lines(launch: launching.Launch, kernel: Any) -> Iterator[str]:
  limit = kernel.architecture
  yield (
    f"grid: {launch.grid} blocks of {kernel.num_warps} warps,"
    f" {launch.num_stages} stages"
  )
  yield (
    f"registers: {kernel.registers} a thread, {kernel.spill_bytes} B spilled"
  )
  yield (
    f"shared memory: {kernel.shared_memory_bytes} of"
    f" {limit.shared_memory_bytes} B"
  )
  if limit.tensor_memory_columns:
    yield (
      f"tensor memory: {kernel.tensor_memory_columns} of"
      f" {limit.tensor_memory_columns} columns"
    )
  for name, count in kernel.matrix_instructions.items():
    yield f"matrix instructions: {count} of {name}"
  if kernel.main_loop is not None:
    loop = kernel.main_loop
    yield (
      f"main loop: {loop.instructions} instructions, {loop.matrix_count} of"
      f" them {', '.join(loop.matrix_instructions)}"
    )
  loads = [f"{n} of {bits} bits" for bits, n in kernel.global_load_bits.items()]
  if kernel.tensor_copies:
    loads.append(f"{kernel.tensor_copies} of tiles by TMA")
  yield f"global loads: {', '.join(loads)}"
  yield f"at once: {kernel.resident_blocks} blocks a core"
  cycles = _simulated_cycles(launch, kernel)
  if cycles is not None:
    yield (
      f"modelled, not measured: {cycles} cycles of a core for a step of each"
      f" block, {kernel.simulated.instructions_per_cycle:.2f} instructions a"
      " cycle and scheduler, matrix units busy"
      f" {kernel.simulated.matrix_share:.0%}"
    )


def _simulated_cycles(launch: launching.Launch, kernel: Any) -> int | None:
  """Returns a core's cycles for a block's k step; None without a model."""
  if kernel.simulated is None:
    return None
  tiling = dict(launch.constexprs)["TILING"]
  return round(kernel.simulated.cycles_of(tiling.products_of_step))


def compile_dot(
  problem: problems.DotProblem,
  target: targets.Target,
  config: decisions.Fields = (),
) -> CompiledDot:
  """Compiles the kernels that the triton backend launches for a dot.

  This needs neither a GPU nor a CUDA toolkit: Triton includes its compilers.

  Args:
    problem: the problem of the dot.
    target: an NVIDIA or AMD GPU. Pass `triton_library.with_descriptors(target)`
      for kernels that use TMA descriptors.
    config: the config of a `Decision`; () is the default config.

  Raises:
    NotImplementedError: If the triton backend does not support the problem on
      the target, or Triton is not installed.
    RuntimeError: If a kernel does not compile, or exceeds a limit of the GPU.
  """
  # Compiling needs Triton but not jax-triton, so add it to the target.
  target = target.with_library(targets.JAX_TRITON)
  refusal = triton.supports(problem, target)
  if refusal is not None:
    raise NotImplementedError(
      f"compile: triton does not support {problem} on {target}:"
      f" {refusal.reason}"
    )
  if problem.m is None:  # an exported module has kernels for several ranges
    raise NotImplementedError(
      f"compile: needs static sizes, got a symbolic m in {problem}. Pass m."
    )
  try:
    compile_lib = importlib.import_module("jaxplugin.lab.inspection.compile")
  except ImportError as error:
    raise NotImplementedError(
      f"compile: needs triton, which cannot be imported ({error}); pip install"
      " triton"
    ) from error
  architecture = triton_library.supported_architecture(target)
  shape, launches = triton.launches(problem, target, config)
  kernels = []
  for launch in launches:
    try:
      kernel = compile_lib.compile_matmul(launch, shape, architecture)
    except compile_lib.CompileError as error:
      raise RuntimeError(f"compile: {error}") from error
    if kernel.limit_error is not None:
      raise RuntimeError(f"compile: {kernel.limit_error}")
    kernels.append(kernel)
  return CompiledDot(
    problem=problem, target=target, launches=launches, kernels=tuple(kernels)
  )
