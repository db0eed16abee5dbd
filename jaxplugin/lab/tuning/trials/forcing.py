# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is computed as one candidate says, and no other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxplugin.core import targets
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.tables import resolution


class ForcingError(Exception):
  """Another way of computing was chosen than the one that is to be tried."""

  kind = "error"


def refusal(problem: tuned.Problem, candidate: listing.Candidate) -> str:
  """Why a candidate cannot compute a problem here; "" where it can."""
  target = targets.current_target()
  backend = known.of(problem).operation.backends()[candidate.implementation]
  refused = backend.supports(problem, target)
  if refused is not None:
    return refused.reason
  return backend.config_error(candidate.config, problem, target) or ""


def forced(
  problem: tuned.Problem, candidate: listing.Candidate
) -> Callable[[Any], Any]:
  """What computes it of `operands.Made.arrays`, to be traced."""
  function = known.of(problem).function(problem)

  def call(arrays: Any) -> Any:
    with resolution.pinned(candidate.implementation, candidate.config):
      return function(arrays)

  return call


def require(
  problem: tuned.Problem,
  candidate: listing.Candidate,
  function: Callable[[Any], Any],
  arrays: Any,
) -> None:
  """Raises ForcingError unless it is the problem, computed as is said."""
  jaxpr = jax.make_jaxpr(function)(arrays).jaxpr
  decided = known.of(problem).decided(jaxpr)
  if decided.problem != problem:
    raise ForcingError(
      f"operands must give the problem {problem!r}, got {decided.problem!r}"
    )
  assert decided.decision is not None
  found = listing.Candidate(
    implementation=decided.decision.implementation,
    config=decided.decision.config,
  )
  if found != candidate:
    raise ForcingError(f"the decision must be {candidate.key}, got {found.key}")
