# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dot's backends, and the choice between them.

Each module beside this one ends in its `BACKEND`, and this is the one list of
them. `emit` of a backend takes (call, problem, target).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax

from jaxplugin.arrays import interleaving
from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import calls
from jaxplugin.dot import problems
from jaxplugin.dot import sides
from jaxplugin.dot.backends import cpu
from jaxplugin.dot.backends import cudnn
from jaxplugin.dot.backends import size_rules
from jaxplugin.dot.backends import triton
from jaxplugin.dot.backends import xla

Backend = decisions.Backend[problems.DotProblem]

BACKENDS: Final[dict[str, Backend]] = decisions.table(
  cudnn.BACKEND, triton.BACKEND, cpu.BACKEND, xla.BACKEND
)
NAMES: Final = tuple(BACKENDS)


def choose(
  problem: problems.DotProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
  rules: Sequence[size_rules.SizeRule] = size_rules.MEASURED,
) -> decisions.Decision:
  """Chooses the implementation of `problem` on `target`.

  Args:
    problem: what to compute.
    target: where.
    requested: the one implementation to use, or None for the first of those
      tried on the target that serves, or the one that a rule puts first.
    unportable: why only portable implementations serve, if so.
    rules: where a measurement overrides the order.

  Returns:
    The decision, with a reason for every implementation not chosen.

  Raises:
    ValueError: `requested` is no implementation's name.
    NotImplementedError: `requested` cannot serve; lists every implementation.
  """
  rule = size_rules.applicable(problem, target, rules)
  decision = decisions.choose(
    BACKENDS,
    problem,
    target,
    requested,
    who=sides.who(),
    unportable=unportable,
    measured=None if rule is None else (rule.implementation, str(rule)),
  )
  notes = _notes_on_order(decision.implementation, problem, target)
  return dataclasses.replace(decision, notes=(*decision.notes, *notes))


def _reads_interleaved(
  implementation: str,
  problem: problems.DotProblem,
  target: targets.Target,
) -> bool:
  backend = BACKENDS[implementation]
  return backend.reads(interleaving.INTERLEAVED, problem, target)


def _notes_on_order(
  implementation: str,
  problem: problems.DotProblem,
  target: targets.Target,
) -> tuple[str, ...]:
  sides = " and ".join(problem.interleaved_sides)
  if not sides:
    return ()
  if _reads_interleaved(implementation, problem, target):
    return (f"{sides}: prepared for {implementation}, which reads it so",)
  return (
    f"{sides}: prepared for other kernels; every call puts the values back in"
    " order",
  )


def emit(
  implementation: str, call: calls.Call, target: targets.Target
) -> jax.Array:
  """A call as the implementation that was chosen for it lowers it."""
  call = call.with_bytes()
  problem = call.problem()
  if problem.interleaved_sides and (
    not _reads_interleaved(implementation, problem, target)
  ):
    call = call.in_usual_order()
    problem = call.problem()
  return BACKENDS[implementation].emit(call, problem, target)


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  decisions.validate_name(BACKENDS, requested, who=sides.who())
