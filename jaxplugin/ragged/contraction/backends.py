# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged contraction's backends, and the choice between them."""

from __future__ import annotations

from typing import Final

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import sides
from jaxplugin.ragged import problems
from jaxplugin.ragged.backends import problem_fields
from jaxplugin.ragged.contraction import calls
from jaxplugin.ragged.contraction import xla
from jaxplugin.tables import fitting
from jaxplugin.tables import resolution

Backend = decisions.Backend[problems.ContractionProblem]

BACKENDS: Final[dict[str, Backend]] = decisions.table(xla.BACKEND)

# The contraction, as tables of measured choices speak of it.
OPERATION: Final[fitting.Operation[problems.ContractionProblem]] = (
  fitting.Operation(
    name="ragged_dot_general",
    bucketed="m",
    fields_of=problem_fields.contraction_fields_of,
    problem_of=problem_fields.contraction_problem_of,
    backends=lambda: BACKENDS,
  )
)


def choose(
  problem: problems.ContractionProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
  overlay: resolution.Overlay | None = None,
) -> decisions.Decision:
  """As `dot.backends.choose`, of a ragged contraction."""
  return resolution.choose(
    OPERATION,
    problem,
    target,
    requested,
    who=sides.who(),
    unportable=unportable,
    overlay=overlay,
  )


def emit(
  implementation: str, call: calls.Contraction, target: targets.Target
) -> jax.Array:
  """A call as the implementation that was chosen for it lowers it."""
  return BACKENDS[implementation].emit(call, call.problem(), target)


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  decisions.validate_name(BACKENDS, requested, who=sides.who())
