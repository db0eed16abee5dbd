# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots and ragged contractions.

Each row belongs to a random group, so some groups may be empty. The last rows
of exact operands belong to no group.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from jaxplugin.arrays import layouts, scaled_array
from jaxplugin.dot import problems as dot_problems
from jaxplugin.dot.backends import cpu
from jaxplugin.lab.tuning.operations import operands, operation
from jaxplugin.ragged import api, backends, calls, general

_GLOBAL_SCALE: Final = 0.5
_ROWS_WITHOUT_GROUP: Final = 3
_Either = calls.RaggedDotProblem | calls.ContractionProblem


def _side_refusal(side: dot_problems.SideProblem, k: int | None) -> str:
  if side.format is None:
    return ""
  if why := operands.side_refusal(side):
    return why
  if side.is_interleaved or side.scale_layout != layouts.LINEAR:
    return "an operand was prepared for a kernel"
  if (k or 0) % side.format.block_size:
    return f"{k} is not a multiple of {side.format.block_size}"
  return ""


def _group_sizes(
  rng: np.random.Generator, problem: _Either, is_exact: bool
) -> np.ndarray:
  """Returns i32[groups], the number of rows of each group."""
  assert problem.m is not None and problem.groups is not None
  rows = problem.m
  if is_exact and rows > 2 * _ROWS_WITHOUT_GROUP:
    rows -= _ROWS_WITHOUT_GROUP
  shares = np.full(problem.groups, 1 / problem.groups)
  return rng.multinomial(rows, shares).astype(np.int32)


def _tail(problem: Any) -> Any:
  return dataclasses.replace(
    problem,
    groups=min(problem.groups, 5),
    m=min(problem.m, 67),
    n=91,
    k=11 * max(operands.block_sizes(problem), default=5),
  )


def _flops(problem: _Either) -> int:
  return 2 * (problem.m or 0) * (problem.n or 0) * (problem.k or 0)


def _refusal(problem: calls.RaggedDotProblem) -> str:
  if why := operands.size_refusal(problem):
    return why
  if problem.activation in calls.GATED:
    return f"{problem.activation} is not checked"
  if problem.has_global_power or problem.global_scale == "row":
    return "both operands have global scales"
  if problem.rhs.format is None or (
    problem.lhs.format is not None and not problem.is_along_blocks
  ):
    return "it is a gradient of unquantized operands"
  return _side_refusal(problem.lhs, problem.k) or _side_refusal(
    problem.rhs, problem.k
  )


def _build(
  problem: calls.RaggedDotProblem, rng: np.random.Generator, is_exact: bool
) -> tuple[dict[str, Any], Any]:
  groups, m, n, k = problem.groups, problem.m, problem.n, problem.k
  assert groups is not None and m is not None
  assert n is not None and k is not None
  contracted, columns = (k, n) if problem.is_along_blocks else (n, k)
  sizes = _group_sizes(rng, problem, is_exact)
  lhs, rows = operands.operand_of(
    rng,
    problem.lhs,
    (m, contracted),
    may_quantize=cpu.may_quantize_rows(problem),
  )
  # Generating gigabytes of random weights takes long. Group i therefore has the
  # rows of the first group's weight, rolled by i.
  assert problem.rhs.format is not None
  first, weight = operands.operand_of(rng, problem.rhs, (n, k))
  global_scale = None
  if problem.global_scale == "scalar":
    global_scale = np.full((1, 1, 1), _GLOBAL_SCALE, np.float32)
  elif problem.global_scale == "group":
    exponents = np.arange(groups).reshape(groups, 1, 1) % 3
    global_scale = np.exp2(exponents).astype(np.float32)
  arrays: dict[str, Any] = {"lhs": lhs, "sizes": sizes}
  arrays["rhs"] = scaled_array.ScaledArray(
    _rolled(first.values, groups),
    _rolled(first.scale, groups),
    global_scale,
    problem.rhs.format,
  )
  if problem.has_bias:
    bias = operands.small_integers(rng, (groups, columns))
    arrays["bias"] = bias.astype(np.float32)
  if not is_exact:
    return arrays, None
  result = np.zeros((m, columns), np.float32)
  for group, of_group in enumerate(_slices(sizes)):
    own = np.roll(weight, group, axis=0)
    product = rows[of_group] @ (own.T if problem.is_along_blocks else own)
    if global_scale is not None:
      product = product * global_scale[group % len(global_scale), 0, 0]
    if problem.has_bias:
      product = product + arrays["bias"][group]
    result[of_group] = operands.activated(product, problem.activation)
  return arrays, result.astype(problem.out_dtype)


def _slices(sizes: np.ndarray) -> list[slice]:
  """Returns the rows of each group."""
  ends = np.cumsum(sizes)
  return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _rolled(x: Any, groups: int) -> np.ndarray:
  """Returns [groups, rows, columns]. Group i has the rows rolled by i."""
  first = np.asarray(x)
  codes = first.view(np.uint8).reshape(first.shape)
  stack = [np.roll(codes, group, axis=0) for group in range(groups)]
  return np.stack(stack).view(first.dtype)


def _compute(
  problem: calls.RaggedDotProblem, arrays: dict[str, Any]
) -> jax.Array:
  given = arrays["lhs"], arrays["rhs"], arrays["sizes"]
  if not problem.is_along_blocks:
    return api.across_blocks(*given, preferred_element_type=problem.out_dtype)
  return api.product(
    *given,
    bias=arrays.get("bias"),
    activation=problem.activation,
    preferred_element_type=problem.out_dtype,
    precision="fastest" if problem.fastest_precision else None,
  )


RAGGED: Final = operation.TunedOperation(
  operation=backends.OPERATION,
  choose=backends.choose,
  refusal=_refusal,
  build=_build,
  compute=_compute,
  flops=_flops,
  tail=_tail,
)


def _contraction_refusal(problem: calls.ContractionProblem) -> str:
  if why := operands.size_refusal(problem):
    return why
  if problem.lhs.format is not None or problem.rhs.format is not None:
    return "an operand is quantized along its rows"
  return "it has a global scale" if problem.global_scale != "none" else ""


def _build_contraction(
  problem: calls.ContractionProblem,
  rng: np.random.Generator,
  is_exact: bool,
) -> tuple[dict[str, Any], Any]:
  m, n, k = problem.m, problem.n, problem.k
  assert m is not None and n is not None and k is not None
  sizes = _group_sizes(rng, problem, is_exact)
  lhs, left = operands.operand_of(rng, problem.lhs, (m, n))
  rhs, right = operands.operand_of(rng, problem.rhs, (m, k))
  arrays = {"lhs": lhs, "rhs": rhs, "sizes": sizes}
  if not is_exact:
    return arrays, None
  products = [left[rows].T @ right[rows] for rows in _slices(sizes)]
  expected = np.stack(products)
  return arrays, expected.astype(problem.out_dtype)


CONTRACTION: Final = operation.TunedOperation(
  operation=backends.CONTRACTION,
  choose=backends.choose,
  refusal=_contraction_refusal,
  build=_build_contraction,
  compute=lambda problem, arrays: general.contract(
    arrays["lhs"],
    arrays["rhs"],
    arrays["sizes"],
    preferred_element_type=problem.out_dtype,
  ),
  flops=_flops,
  tail=_tail,
)
