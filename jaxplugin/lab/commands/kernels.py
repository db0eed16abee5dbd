# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`kernels`: compiles the Triton kernels of a dot for a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.cli import arguments, dots, files
from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import reference
from jaxplugin.dot.backends import triton
from jaxplugin.kernels.gpu import configs
from jaxplugin.lab.compilation import triton_dots
from jaxplugin.lab.inspection.ptx import faults, launching
from jaxplugin.printing import progress
from jaxplugin.repro import oracle
from jaxplugin.runtime import triton_library

_SCALE_EXPONENT: Final = 10  # E8M0 scales are 2^-10 to 2^10
# The first and the second global scale. The second is a power of two.
_GLOBAL_SCALE: Final = (0.0123, 0.25)
_WAVEFRONTS: Final = " wavefronts"
_LEAST: Final = f" least{_WAVEFRONTS}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutedDot:
  """Results of executing a dot's kernels; `str` returns a report.

  Attributes:
    compiled: the kernels.
    error: the largest ratio of an element's error to its allowed error. The
      allowed error is the documented bound plus the result's rounding.
    counts: `launching.Launched.counts` of each launch.
  """

  compiled: triton_dots.CompiledDot
  error: float
  counts: tuple[Mapping[str, int], ...]

  def __str__(self) -> str:
    lines = [
      f"{self.compiled.problem} on {self.compiled.target}",
      f"error: {self.error:.3f} of what the contract allows",
    ]
    launches = self.compiled.launches
    for launch, counts in zip(launches, self.counts, strict=True):
      lines.append(f"{launch.name}, {launch.grid} blocks")
      lines += [f"  {line}" for line in _lines(counts)]
    return "\n".join(lines)

  def to_json(self) -> str:
    """Returns the figures as JSON, with an object for each launch."""
    launches = self.compiled.launches
    return json.dumps(
      {
        "problem": str(self.compiled.problem),
        "target": str(self.compiled.target),
        "error": self.error,
        "kernels": [
          {"name": launch.name, "grid": launch.grid, "counts": dict(counts)}
          for launch, counts in zip(launches, self.counts, strict=True)
        ],
      },
      indent=2,
    )


def _lines(counts: Mapping[str, int]) -> Iterator[str]:
  yield f"instructions of warps: {counts['warp instructions']}"
  names = sorted(
    (name for name in counts if name.startswith("of ")),
    key=lambda name: -counts[name],
  )
  found = (f"{counts[name]} {name.removeprefix('of ')}" for name in names[:8])
  yield f"most frequent: {', '.join(found)}"
  for what in ("loaded", "stored"):
    yield f"global memory: {counts[f'global bytes {what}']} B {what}"
  for name in counts:
    if name.endswith(_WAVEFRONTS) and not name.endswith(_LEAST):
      kind = name.removesuffix(_WAVEFRONTS)
      taken, least = counts[name], counts[f"{kind}{_LEAST}"]
      yield (
        f"shared memory, {kind}: {taken} passes, {taken / least:.2f} times the"
        " number without bank conflicts"
      )


def run_dot(compiled: triton_dots.CompiledDot) -> ExecutedDot:
  """Executes a dot's kernels on random operands.

  Operands contain all finite value codes. NumPy executes each instruction of
  each block, so a large dot takes minutes.

  Args:
    compiled: kernels for an NVIDIA GPU, without TMA descriptors.

  Raises:
    NotImplementedError: If the GPU is not from NVIDIA, the epilogue has a bias
      or residual, a scale is swizzled, an operand is interleaved or not
      k-major, or the PTX has an instruction that is not modelled
      (`docs/developer/ptx_emulator.md`).
    RuntimeError: If a kernel has undefined behavior, such as a race.
  """
  kernels = compiled.kernels
  if not kernels[0].architecture.is_nvidia:
    raise NotImplementedError(
      f"run: the target must be an NVIDIA GPU, got {compiled.target}; choose"
      " an NVIDIA GPU"
    )
  problem = compiled.problem
  shape, _ = triton.launches(problem, compiled.target)
  rng = np.random.default_rng(0)
  lhs, lhs_scale, exact_lhs = _operand(
    rng, shape.lhs, problem.lhs.format, (shape.batch, shape.m, shape.k)
  )
  rhs, rhs_scale, exact_rhs = _operand(
    rng, shape.rhs, problem.rhs.format, (shape.batch, shape.n, shape.k)
  )
  scales = np.array(
    _GLOBAL_SCALE[: 1 + shape.has_two_global_scales], np.float32
  )
  arrays: dict[str, np.ndarray | None] = {
    "lhs": lhs,
    "lhs_scale": lhs_scale,
    "rhs": rhs,
    "rhs_scale": rhs_scale,
    "global_scale": scales[:1],
    "second_global_scale": scales[1:],
  }
  if shape.has_bias or shape.has_residual:
    raise NotImplementedError(
      "run: the epilogue must not have a bias or residual"
    )
  counts = []
  for launch, kernel in zip(compiled.launches, kernels, strict=True):
    try:
      outputs, found = launching.run(kernel, launch, arrays)
    except faults.Fault as fault:
      raise RuntimeError(
        f"run: {launch.name}: {type(fault).__name__}: {fault}"
      ) from fault
    arrays.update(outputs)
    counts.append(found)
  exact = np.einsum("bmk,bnk->bmn", exact_lhs, exact_rhs)
  size = np.einsum("bmk,bnk->bmn", np.abs(exact_lhs), np.abs(exact_rhs))
  if shape.has_global_scale:
    scale = float(np.prod(scales.astype(np.float64)))
    exact, size = exact * scale, size * scale
  expected = oracle.Expected(
    exact=exact, bound=reference.ERROR_BOUND * size, rows=np.arange(shape.m)
  )
  error, _ = expected.check(arrays["out"])
  return ExecutedDot(compiled=compiled, error=error, counts=tuple(counts))


def _operand(
  rng: np.random.Generator,
  kind: configs.OperandKind,
  format: formats.BlockFormat | None,
  shape: tuple[int, int, int],
) -> tuple[np.ndarray, np.ndarray | None, Any]:
  """Returns random values, their scale, and the dequantized operand in f64."""
  if kind.is_swizzled or kind.is_interleaved or not kind.k_is_minor:
    raise NotImplementedError("run: operands must be dense, with linear scales")
  if format is None:
    dtype = np.dtype(configs.NUMPY_DTYPES[kind.format])
    plain = rng.normal(size=shape).astype(dtype)
    return plain, None, plain.astype(np.float64)
  values = reference.finite_codes(rng, shape, format.values_dtype)
  batch, rows, k = shape
  scale_rows = -(-rows // kind.rows_per_scale)
  scale_shape = (batch, scale_rows, -(-k // format.block_size))
  scale = reference.random_scale(
    rng, scale_shape, format.scale_dtype, _SCALE_EXPONENT
  )
  values = values.view(np.uint8)
  exact = reference.oracle_dequantize(
    values.view(format.array_dtype),
    np.repeat(scale, kind.rows_per_scale, axis=1)[:, :rows],
    format,
  )
  if kind.is_packed:
    values = values[..., 0::2] | values[..., 1::2] << np.uint8(4)
  return values, scale, exact


def _add_arguments(command: argparse.ArgumentParser) -> None:
  dots.add_arguments(command, required=True)
  arguments.add_gpu(command, "a GPU", "cuda", "rocm")
  arguments.add_ptxas(command)
  text = "output folder for PTX, SASS and cubin (AMD: AMDGCN and hsaco)"
  arguments.add_values(command, {"--write DIRECTORY": text})
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
  try:
    (dot,) = dots.explain(args, target, "triton")
  except decisions.RefusedError as error:
    raise ValueError(
      f"kernels: triton must support the dot on {target}: {error.reason}."
      " Choose another --target, or other operands"
    ) from None
  config = () if dot.decision is None else dot.decision.config
  found: triton_dots.CompiledDot | ExecutedDot
  with progress.shown(f"compiling for {target.name}") as line:
    found = compiled = triton_dots.compile_dot(dot.problem, target, config)
    if args.run:
      line.describe("executing PTX")
      found = run_dot(compiled)
  arguments.print_result(found, [str(found)], as_json=args.json)
  if args.write is not None:
    for path in compiled.write(args.write):
      print(path, file=sys.stderr)
  return 0


COMMAND: Final = arguments.Command(
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
