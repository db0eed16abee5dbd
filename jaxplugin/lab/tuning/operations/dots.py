# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dense dot."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import numpy as np

from jaxplugin import dot
from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.core import targets
from jaxplugin.dot import backends, problems
from jaxplugin.dot.backends import cpu
from jaxplugin.lab.tuning import triton_space
from jaxplugin.lab.tuning.operations import operands, operation

_GLOBAL_SCALES: Final = (2.0, 0.25)
_EXTRAS: Final = ("bias", "residual", "global_scale")


def _refusal(problem: problems.DotProblem) -> str:
  if why := operands.size_refusal(problem):
    return why
  if problem.num_contracting != 1 or not problem.blocks_pair_up:
    return "several dimensions are contracted"
  if problem.global_scale == "array":
    return "the global scale is an array"
  if problem.has_array_bias:
    return "the bias is an array"
  for side in (problem.lhs, problem.rhs):
    if why := operands.side_refusal(side):
      return why
    if side.is_interleaved and side.scale_layout != layouts.LINEAR:
      return "values are interleaved and scales swizzled"
  return ""


def _build(
  problem: problems.DotProblem, rng: np.random.Generator, is_exact: bool
) -> tuple[dict[str, Any], Any]:
  sizes = problem.batch, problem.m, problem.n, problem.k
  batch, m, n, k = (size for size in sizes if size is not None)
  lead = () if batch == 1 else (batch,)
  may_quantize = cpu.may_quantize_rows(problem)
  (lhs, lhs_exact), (rhs, rhs_exact) = (
    operands.operand_of(rng, side, (*lead, rows, k), may_quantize=may_quantize)
    for side, rows in ((problem.lhs, m), (problem.rhs, n))
  )
  arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs}
  global_scale = np.float32(1)
  if problem.global_scale == "scalar":
    global_scale = _add_global_scale(arrays, problem)
  for name, is_given, shape in (
    ("bias", problem.has_bias, (n,)),
    ("residual", problem.has_residual, (*lead, m, n)),
  ):
    if is_given:
      integers = operands.small_integers(rng, shape)
      arrays[name] = integers.astype(np.float32)
  if not is_exact:
    return arrays, None
  result = lhs_exact @ np.swapaxes(rhs_exact, -1, -2) * global_scale
  if problem.has_bias:
    result = result + arrays["bias"]
  result = operands.activated(result, problem.activation)
  if problem.has_residual:
    result = result + arrays["residual"]
  return arrays, result.astype(problem.out_dtype)


def _add_global_scale(
  arrays: dict[str, Any], problem: problems.DotProblem
) -> np.float32:
  """Adds the problem's global scale to `arrays`, and returns its value.

  If the global scale is a product of two factors, an operand has one factor.
  """
  first, second = _GLOBAL_SCALES
  arrays["global_scale"] = np.float32(first)
  for name in ("rhs", "lhs") if problem.has_global_power else ():
    operand = arrays[name]
    if isinstance(operand, scaled_array.ScaledArray):
      arrays[name] = scaled_array.ScaledArray(
        operand.values,
        operand.scale,
        second,
        operand.format,
        scale_layout=operand.scale_layout,
      )
      return np.float32(first * second)
  return np.float32(first)


def compute(
  problem: problems.DotProblem,
  arrays: dict[str, Any],
  implementation: str | None = None,
) -> jax.Array:
  sides = (problem.lhs, problem.rhs)
  lead = 0 if problem.batch == 1 else 1
  contracting = [
    (lead + 1 if side.contracting_is_minor else lead,) for side in sides
  ]
  numbers = tuple(contracting), ((*range(lead),),) * 2
  blocks = operands.block_sizes(problem)
  block_size: int | tuple[int, int] | None = None
  if any(side.scale_is_padded for side in sides):
    block_size = blocks[0] if len({*blocks}) == 1 else (blocks[0], blocks[1])
  (lhs, lhs_scale), (rhs, rhs_scale) = (
    operand if isinstance(operand, tuple) else (operand, None)
    for operand in (arrays["lhs"], arrays["rhs"])
  )
  return dot.block_scaled_dot(
    lhs,
    rhs,
    lhs_scale,
    rhs_scale,
    dimension_numbers=numbers,
    preferred_element_type=problem.out_dtype,
    precision="highest"
    if problem.highest_precision
    else "fastest"
    if problem.fastest_precision
    else None,
    block_size=block_size,
    activation=problem.activation,
    implementation=implementation,
    **{name: arrays.get(name) for name in _EXTRAS},
  )


def _flops(problem: problems.DotProblem) -> int:
  sizes = (problem.batch, problem.m, problem.n, problem.k)
  return 2 * math.prod(size or 0 for size in sizes)


def _tail(problem: problems.DotProblem) -> problems.DotProblem:
  assert problem.m is not None
  # Odd if possible. At most m, because some configs support only few rows.
  m = min(problem.m, 67)
  return dataclasses.replace(
    problem,
    batch=min(problem.batch or 1, 2),
    m=m if m % 2 or m < 4 else m - 1,
    n=293,
    k=11 * max(operands.block_sizes(problem)),
  )


def _poisoned(problem: problems.DotProblem) -> problems.DotProblem | None:
  def padded(side: problems.SideProblem) -> problems.SideProblem:
    can_be = (
      side.format is not None
      and side.format.is_standard
      and not side.is_interleaved
      and side.scale_layout == layouts.LINEAR
    )
    return dataclasses.replace(side, scale_is_padded=can_be)

  found = dataclasses.replace(
    problem, lhs=padded(problem.lhs), rhs=padded(problem.rhs)
  )
  sides = (found.lhs, found.rhs)
  # Padded scales are passed as arrays, so both sides must have padding.
  can_be = all(s.scale_is_padded for s in sides if s.format is not None)
  return found if can_be else None


def _cpu_space(
  problem: problems.DotProblem,
  target: targets.Target,
  margin: float,
) -> operation.Space:
  """Returns all configs of the C++ kernels, because they are few."""
  del margin
  kept = cpu.candidates(problem, target)
  pruned = []
  for engine in cpu.ENGINES:
    config = cpu.CpuConfig(engine=engine)
    error = cpu.config_error(problem, target, config)
    if error is None and config in kept:
      continue
    pruned.append(
      operation.Pruned(
        rule="dominated" if error is None else "resources",
        reason=error or "it is what the rule chooses",
        implementation="cpu",
        example=cpu.fields_of(config),
      )
    )
  return operation.Space(
    configs=tuple(map(cpu.fields_of, kept)), pruned=tuple(pruned)
  )


DOT: Final = operation.TunedOperation(
  operation=backends.OPERATION,
  choose=backends.choose,
  refusal=_refusal,
  build=_build,
  compute=compute,
  flops=_flops,
  tail=_tail,
  poisoned=_poisoned,
  spaces={
    "triton": triton_space.space,
    "cpu": _cpu_space,
  },
  compiles=True,
)
