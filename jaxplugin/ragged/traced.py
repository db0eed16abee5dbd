# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is decided about a ragged dot of a jaxpr."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.ragged import backends
from jaxplugin.ragged import problems
from jaxplugin.runtime import lowering


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
  """One ragged dot and what was decided about it.

  Attributes:
    problem: what it computes.
    target: where it was decided for.
    decision: what was chosen; None when the implementation that it asks for
      cannot serve there.
    error: why, when decision is None.
  """

  problem: problems.RaggedProblem
  target: targets.Target
  decision: decisions.Decision | None
  error: str = ""


def decide(
  eqn: Any, target: targets.Target | None, num_devices: int = 1
) -> Decided:
  """What is decided about an equation of the primitive.

  Args:
    eqn: the equation.
    target: where to decide for; None is the target that the equation was
      traced for, or the local one.
    num_devices: over which XLA partitions it.
  """
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  problem = call.problem()
  target = target or eqn.params["target"] or targets.detect_target()
  module = lowering.Module(
    platforms=(target.platform,), is_partitioned=num_devices > 1
  )
  decision, error = None, ""
  try:
    decision = backends.choose(
      problem,
      target,
      call.implementation,
      unportable=module.kernels_refusal(),
    )
  except NotImplementedError as e:
    error = str(e)
  return Decided(problem=problem, target=target, decision=decision, error=error)
