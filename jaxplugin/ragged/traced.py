# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decisions about the ragged dots and contractions of a jaxpr."""

from __future__ import annotations

from typing import Any
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.operation import choice
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import problems
from jaxplugin.ragged.sharding import assignment
from jaxplugin.runtime import lowering

PRIMITIVES: Final = (calls.ragged_dot_p, calls.ragged_contraction_p)


Decided = choice.Decided[problems.Problem]


def decide(
  eqn: Any,
  target: targets.Target | None,
  num_devices: int = 1,
  *,
  for_export: bool = False,
) -> Decided:
  """Returns `choice.decide` of an equation of one of `PRIMITIVES`.

  Args:
    eqn, target, for_export: as for `choice.decide`.
    num_devices: number of devices that XLA partitions the equation over.
  """

  def choose(
    call: Any, problem: problems.Problem, target: targets.Target
  ) -> decisions.Decision:
    # If the call is split, each device chooses a backend for its shard.
    is_partitioned = num_devices > 1 and not assignment.can_partition(call)
    module = lowering.Module(
      platforms=(target.platform,), is_partitioned=is_partitioned
    )
    return backends.choose(
      problem,
      target,
      call.implementation,
      unportable=module.kernels_refusal(),
      overlay=call.overlay,
    )

  return choice.decide(eqn, target, choose, for_export=for_export)
