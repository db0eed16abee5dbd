# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The products of a program: what each moves, and those not block-scaled."""

from __future__ import annotations

import math
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import traced
from jaxplugin.explanation import estimates
from jaxplugin.explanation import report
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import program
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.ragged import problems as ragged_problems
from jaxplugin.ragged import traced as ragged

# Products by their names in JAX, and why they are not block-scaled.
_REASONS: Final = {
  "dot_general": "a plain product; jp.dot_general would quantize its sides",
  "ragged_dot_general": (
    "a plain ragged product; jp.ragged_dot has block-scaled weights"
  ),
  "conv_general_dilated": "a convolution, which has no block-scaled kernel",
}
_OWN_BACKWARD: Final = (
  "jp.dot_general leaves this product of the backward pass in high precision"
)
_SCALED: Final = (
  "JAX's own scaled dot, which JAX lowers; wrap the function in jp.accelerate"
)
_HALF: Final = (formats.BF16, np.dtype(np.float16))


def place(operation: program.Operation) -> dict[str, Any]:
  """The fields of a `report.Place`."""
  return {
    "source": operation.source,
    "layer": operation.layer,
    "phase": operation.phase,
    "trips": operation.trips,
    "is_conditional": operation.is_conditional,
  }


def describe(aval: Any) -> str:
  return f"{aval.dtype.name}[{', '.join(map(str, aval.shape))}]"


def estimate_dot(
  eqn: Any, decided: traced.Decided
) -> estimates.Estimate | None:
  """Of a block-scaled dot; None where a size is symbolic."""
  problem, decision = decided.problem, decided.decision
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  # Of a stack one layer is read.
  read = call.without_origins().flatten()
  written = [v.aval for v in eqn.outvars]
  num_bytes = estimates.bytes_of([*read, *written])
  if num_bytes is None or decision is None:
    return None
  assert problem.batch is not None and problem.m is not None
  assert problem.n is not None and problem.k is not None
  flops = 2 * problem.batch * problem.m * problem.n * problem.k
  backend = backends.table()[decision.implementation]
  plan = backend.plan(problem, decided.target)
  precision = estimates.precision_of(
    problem.lhs, problem.rhs, is_native=plan.is_native
  )
  return estimates.estimate(num_bytes, flops, precision, decided.target)


def estimate_ragged(
  eqn: Any, decided: ragged.Decided
) -> estimates.Estimate | None:
  """Of a ragged dot, as if each row had a group of its own, up to all groups.

  A contraction reads all rows and writes all groups. None where a size is
  symbolic.
  """
  problem = decided.problem
  if not problem.sizes_are_static or decided.decision is None:
    return None
  assert problem.m is not None and problem.groups is not None
  assert problem.n is not None and problem.k is not None
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  is_contraction = isinstance(problem, ragged_problems.ContractionProblem)
  weights = set() if is_contraction else {"rhs", "rhs_scale"}
  all_weights = estimates.bytes_of(
    x for name, x in call.arrays().items() if name in weights
  )
  others = estimates.bytes_of(
    [
      *(x for name, x in call.arrays().items() if name not in weights),
      *(v.aval for v in eqn.outvars),
    ]
  )
  assert all_weights is not None and others is not None
  used = min(problem.m, problem.groups) / max(problem.groups, 1)
  flops = 2 * problem.m * problem.n * problem.k
  is_native = False
  if isinstance(problem, ragged_problems.RaggedProblem):
    backend = ragged_backends.BACKENDS[decided.decision.implementation]
    is_native = backend.plan(problem, decided.target).is_native
  precision = estimates.precision_of(
    problem.lhs, problem.rhs, is_native=is_native
  )
  return estimates.estimate(
    all_weights * used + others, flops, precision, decided.target
  )


def explain(
  operation: program.Operation, target: targets.Target | None
) -> report.NotBlockScaled | None:
  """A product that is not block-scaled; None of any other operation."""
  eqn = operation.eqn
  matmuls, dots = jax_private.scaled_primitives()
  if eqn.primitive in matmuls or eqn.primitive in dots:
    reason = _SCALED
  elif eqn.primitive.name in _REASONS:
    reason = _REASONS[eqn.primitive.name]
    if operation.phase in ("dgrad", "wgrad"):
      reason = _OWN_BACKWARD
  else:
    return None
  avals = [v.aval for v in eqn.invars]
  return report.NotBlockScaled(
    **place(operation),
    operation=_name(eqn.primitive),
    description=(
      f"{describe(avals[0])} x {describe(avals[1])} ->"
      f" {describe(eqn.outvars[0].aval)}"
    ),
    reason=reason,
    estimate=_estimate(eqn, target or targets.current_target()),
  )


def _name(primitive: Any) -> str:
  matmuls, dots = jax_private.scaled_primitives()
  if primitive in matmuls:
    return "jax.nn.scaled_matmul"
  return "jax.lax.scaled_dot" if primitive in dots else f"lax.{primitive.name}"


def _estimate(eqn: Any, target: targets.Target) -> estimates.Estimate | None:
  """Of a `dot_general`; None of another, and where a size is symbolic."""
  if eqn.primitive.name != "dot_general":
    return None
  lhs, rhs = (v.aval for v in eqn.invars)
  num_bytes = estimates.bytes_of(v.aval for v in (*eqn.invars, *eqn.outvars))
  if num_bytes is None:
    return None
  (contracting, _), _ = eqn.params["dimension_numbers"]
  k = math.prod(lhs.shape[d] for d in contracting)
  flops = 2 * math.prod(eqn.outvars[0].aval.shape) * k
  is_half = lhs.dtype in _HALF and rhs.dtype in _HALF
  return estimates.estimate(
    num_bytes, flops, "bf16" if is_half else None, target
  )
