# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is decided about a ragged dot, or contraction, of a jaxpr."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import problems
from jaxplugin.ragged.sharding import assignment
from jaxplugin.runtime import lowering

PRIMITIVES: Final = (calls.ragged_dot_p, calls.ragged_contraction_p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
  """One ragged dot, or contraction, and what was decided about it.

  Attributes:
    problem: what it computes.
    target: where it was decided for.
    decision: what was chosen; None when the implementation that it asks for
      cannot serve there.
    error: why, when decision is None.
  """

  problem: problems.Problem
  target: targets.Target
  decision: decisions.Decision | None
  error: str = ""


def decide(
  eqn: Any,
  target: targets.Target | None,
  num_devices: int = 1,
  *,
  for_export: bool = False,
) -> Decided:
  """What is decided about an equation of the primitive.

  Args:
    eqn: the equation.
    target: where to decide for; None is the target that the equation was
      traced for, or the local one.
    num_devices: over which XLA partitions it.
    for_export: whether it is decided as `jp.export` does.
  """
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  problem = call.problem()
  detect = targets.detect_for_export if for_export else targets.detect_target
  target = target or eqn.params["target"] or detect()
  # Of what is split, each device decides again, for its share.
  is_split = isinstance(call, calls.Call) and assignment.can_partition(call)
  is_partitioned = num_devices > 1 and not is_split
  module = lowering.Module(
    platforms=(target.platform,), is_partitioned=is_partitioned
  )
  decision, error = None, ""
  try:
    decision = backends.choose(
      problem,
      target,
      call.implementation,
      unportable=module.kernels_refusal(),
      overlay=call.overlay,
    )
  except NotImplementedError as e:
    error = str(e)
  return Decided(problem=problem, target=target, decision=decision, error=error)
