# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Ragged dots, and contractions by groups.

How many rows a group has is drawn at random, each row's group alone: some
groups have none. Where results are checked, the last rows are no group's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import problems as dot_problems
from jaxplugin.jaxext import program
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.lab.tuning.trials import exactness
from jaxplugin.lab.tuning.trials import operands
from jaxplugin.ragged import api
from jaxplugin.ragged import backends
from jaxplugin.ragged import problems
from jaxplugin.ragged import traced
from jaxplugin.ragged.contraction import api as contraction_api
from jaxplugin.ragged.contraction import backends as contraction_backends
from jaxplugin.tables import resolution

_GLOBAL_SCALE: Final = 0.5
_LEFT_OVER: Final = 3  # rows that are no group's, where there are enough
_Either = problems.RaggedProblem | problems.ContractionProblem


def _decided(jaxpr: Any) -> tuned.Decided:
  (eqn,) = (
    operation.eqn
    for operation in program.operations(jaxpr)
    if operation.eqn.primitive in traced.PRIMITIVES
  )
  found = traced.decide(eqn, None)
  return tuned.Decided(problem=found.problem, decision=found.decision)


def _flops(problem: _Either) -> int:
  return 2 * (problem.m or 0) * (problem.n or 0) * (problem.k or 0)


def _side_refusal(side: dot_problems.OperandProblem) -> str:
  """Why an operand cannot be made; "" where it can."""
  if side.format is None:
    return ""
  if not side.format.is_known:
    return f"{side.format} is not a format of the package"
  if side.dtype not in side.format.storage_dtypes:
    return f"values of {side.format} are stored as bytes"
  if side.is_interleaved or side.scale_layout != layouts.LINEAR:
    return "an operand was prepared for a kernel"
  return ""


def _size_refusal(problem: _Either) -> str:
  if not problem.sizes_are_static:
    return "sizes are symbolic"
  return "a size is 0" if problem.is_empty else ""


def _sizes(
  rng: np.random.Generator, problem: _Either, is_exact: bool
) -> np.ndarray:
  """i32[groups] rows of each group."""
  assert problem.m is not None and problem.groups is not None
  rows = problem.m
  if is_exact and rows > 2 * _LEFT_OVER:
    rows -= _LEFT_OVER
  shares = np.full(problem.groups, 1 / problem.groups)
  return rng.multinomial(rows, shares).astype(np.int32)


def _operand(
  rng: np.random.Generator,
  side: dot_problems.OperandProblem,
  rows: int,
  k: int,
) -> tuple[Any, np.ndarray]:
  """An operand that ragged dots take, and f32[rows, k] of it."""
  made, exact = operands.operand_of(rng, side, (), rows, k)
  if isinstance(made, tuple):
    assert side.format is not None
    values, scale = made
    made = scaled_array.ScaledArray(values, scale, None, side.format)
  return made, exact


def _check_blocks(side: dot_problems.OperandProblem, k: int | None) -> str:
  if side.format is None or not (k or 0) % side.format.block_size:
    return ""
  return f"{k} is not a multiple of {side.format.block_size}"


# The ragged dot.


def _choose(
  problem: problems.RaggedProblem,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  return backends.choose(problem, target, overlay=overlay)


def _refusal(problem: problems.RaggedProblem) -> str:
  if why := _size_refusal(problem):
    return why
  if problem.activation in problems.GATED:
    return f"{problem.activation} is not checked"
  if problem.has_global_power or problem.global_scale == "row":
    return "both operands have global scales"
  if problem.rhs.format is None or (
    problem.lhs.format is not None and not problem.is_along_blocks
  ):
    return "it is a gradient of unquantized operands"
  return (
    _side_refusal(problem.lhs)
    or _side_refusal(problem.rhs)
    or _check_blocks(problem.rhs, problem.k)
    or _check_blocks(problem.lhs, problem.k)
  )


def _build(
  problem: problems.RaggedProblem, seed: int, is_exact: bool
) -> operands.Made:
  rng = np.random.default_rng(seed)
  groups, m, n, k = problem.groups, problem.m, problem.n, problem.k
  assert groups is not None and m is not None
  assert n is not None and k is not None
  sizes = _sizes(rng, problem, is_exact)
  lhs, rows = _operand(rng, problem.lhs, m, k if problem.is_along_blocks else n)
  # Each group has the first one's rows, moved on by its number: numbers for
  # gigabytes of weights take long to draw.
  assert problem.rhs.format is not None
  first, weight = _operand(rng, problem.rhs, n, k)
  total = None
  if problem.global_scale == "scalar":
    total = np.full((1, 1, 1), _GLOBAL_SCALE, np.float32)
  elif problem.global_scale == "group":
    exponents = np.arange(groups) % 3
    total = np.exp2(exponents).astype(np.float32).reshape(groups, 1, 1)
  rhs = scaled_array.ScaledArray(
    _moved_on(first.values, groups),
    _moved_on(first.scale, groups),
    total,
    problem.rhs.format,
  )
  arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "sizes": sizes}
  columns = n if problem.is_along_blocks else k
  if problem.has_bias:
    bias = operands.small_integers(rng, (groups, columns))
    arrays["bias"] = bias.astype(np.float32)
  expected = None
  if is_exact:
    expected = _expected(problem, arrays, rows, weight, total, columns)
  return operands.Made(
    arrays=jax.tree.map(jnp.asarray, arrays), expected=expected
  )


def _moved_on(x: Any, groups: int) -> np.ndarray:
  """[groups, rows, columns] of [rows, columns]."""
  first = np.asarray(x)
  codes = first.view(np.uint8).reshape(first.shape)
  turned = [np.roll(codes, group, axis=0) for group in range(groups)]
  return np.stack(turned).view(first.dtype)


def _expected(
  problem: problems.RaggedProblem,
  arrays: dict[str, Any],
  rows: np.ndarray,
  weight: np.ndarray,
  total: np.ndarray | None,
  columns: int,
) -> np.ndarray:
  result = np.zeros((rows.shape[0], columns), np.float32)
  start = 0
  for group, size in enumerate(arrays["sizes"]):
    own = np.roll(weight, group, axis=0)
    product = rows[start : start + size] @ (
      own.T if problem.is_along_blocks else own
    )
    if total is not None:
      product = product * total.reshape(-1)[group if total.size > 1 else 0]
    if problem.has_bias:
      product = product + arrays["bias"][group]
    if problem.activation is not None:
      product = operands.ACTIVATIONS[problem.activation](product)
    result[start : start + size] = product
    start += size
  return result.astype(problem.out_dtype)


def _function(
  problem: problems.RaggedProblem,
) -> Callable[[dict[str, Any]], jax.Array]:
  def call(arrays: dict[str, Any]) -> jax.Array:
    given = arrays["lhs"], arrays["rhs"], arrays["sizes"]
    if not problem.is_along_blocks:
      return api.across_blocks(*given, preferred_element_type=problem.out_dtype)
    return api.product(
      *given,
      bias=arrays.get("bias"),
      activation=problem.activation,
      preferred_element_type=problem.out_dtype,
    )

  return call


def _tail(problem: problems.RaggedProblem) -> problems.RaggedProblem:
  assert problem.m is not None and problem.rhs.format is not None
  block = max(
    s.format.block_size
    for s in (problem.lhs, problem.rhs)
    if s.format is not None
  )
  return dataclasses.replace(
    problem,
    groups=min(problem.groups or 1, 5),
    m=min(problem.m, 67),
    n=91,
    k=11 * block,
  )


RAGGED: Final = tuned.Tuned(
  operation=backends.OPERATION,
  choose=_choose,
  decided=_decided,
  refusal=_refusal,
  build=_build,
  function=_function,
  check=exactness.check,
  flops=_flops,
  tail=_tail,
)


# The contraction.


def _choose_contraction(
  problem: problems.ContractionProblem,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  return contraction_backends.choose(problem, target, overlay=overlay)


def _contraction_refusal(problem: problems.ContractionProblem) -> str:
  if why := _size_refusal(problem):
    return why
  if problem.lhs.format is not None or problem.rhs.format is not None:
    return "an operand is quantized along its rows"
  return "it has a global scale" if problem.global_scale != "none" else ""


def _build_contraction(
  problem: problems.ContractionProblem, seed: int, is_exact: bool
) -> operands.Made:
  rng = np.random.default_rng(seed)
  assert problem.m is not None
  assert problem.n is not None and problem.k is not None
  sizes = _sizes(rng, problem, is_exact)
  lhs, left = _operand(rng, problem.lhs, problem.m, problem.n)
  rhs, right = _operand(rng, problem.rhs, problem.m, problem.k)
  expected = None
  if is_exact:
    ends = np.cumsum(sizes)
    expected = np.stack(
      [
        left[end - size : end].T @ right[end - size : end]
        for size, end in zip(sizes, ends, strict=True)
      ]
    ).astype(problem.out_dtype)
  arrays = {"lhs": lhs, "rhs": rhs, "sizes": sizes}
  return operands.Made(
    arrays=jax.tree.map(jnp.asarray, arrays), expected=expected
  )


def _contraction_function(
  problem: problems.ContractionProblem,
) -> Callable[[dict[str, Any]], jax.Array]:
  def call(arrays: dict[str, Any]) -> jax.Array:
    return contraction_api.contract(
      arrays["lhs"],
      arrays["rhs"],
      arrays["sizes"],
      preferred_element_type=problem.out_dtype,
    )

  return call


def _contraction_tail(
  problem: problems.ContractionProblem,
) -> problems.ContractionProblem:
  return dataclasses.replace(
    problem,
    groups=min(problem.groups or 1, 5),
    m=min(problem.m or 1, 67),
    n=91,
    k=55,
  )


CONTRACTION: Final = tuned.Tuned(
  operation=contraction_backends.OPERATION,
  choose=_choose_contraction,
  decided=_decided,
  refusal=_contraction_refusal,
  build=_build_contraction,
  function=_contraction_function,
  check=exactness.check,
  flops=_flops,
  tail=_contraction_tail,
)
