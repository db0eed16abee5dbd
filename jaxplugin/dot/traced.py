# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The block-scaled dots of a jaxpr, and what is decided about each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import primitive
from jaxplugin.dot import problems
from jaxplugin.jaxext import program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
  """One dot and what was decided about it.

  Attributes:
    problem: what it computes.
    target: where it was decided for.
    decision: what was chosen; None when the implementation that the dot asks
      for cannot serve there.
    error: why, when decision is None.
  """

  problem: problems.DotProblem
  target: targets.Target
  decision: decisions.Decision | None
  error: str = ""


def dots(jaxpr: Any) -> Iterator[Any]:
  """Every equation of the primitive, in sub-jaxprs too."""
  for operation in program.operations(jaxpr):
    if operation.eqn.primitive is primitive.block_scaled_dot_p:
      yield operation.eqn


def decide(
  eqn: Any, target: targets.Target | None, *, for_export: bool = False
) -> Decided:
  """What is decided about one of `dots`.

  Args:
    eqn: the equation.
    target: where to decide for; None is the target that the equation was
      traced for, or the local one.
    for_export: whether it is decided as `jp.export` does.
  """
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  problem = call.problem()
  detect = targets.detect_for_export if for_export else targets.detect_target
  target = target or eqn.params["target"] or detect()
  decision, error = None, ""
  try:
    decision = backends.choose(
      problem,
      target,
      call.implementation,
      overlay=call.overlay,
      for_export=for_export,
      is_of_layer=call.is_of_layer,
    )
  except NotImplementedError as e:
    error = str(e)
  return Decided(problem=problem, target=target, decision=decision, error=error)
