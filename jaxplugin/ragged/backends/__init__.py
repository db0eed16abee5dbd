# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged dot's backends, and the choice between them.

As the dot's: each module beside this one ends in its `BACKEND`, and this is the
one list of them. `emit` of a backend takes (call, problem, target).
"""

from __future__ import annotations

from typing import Final

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.ragged import calls
from jaxplugin.ragged import problems
from jaxplugin.ragged.backends import cpu
from jaxplugin.ragged.backends import problem_fields
from jaxplugin.ragged.backends import triton
from jaxplugin.ragged.backends import xla
from jaxplugin.tables import fitting
from jaxplugin.tables import resolution

Backend = decisions.Backend[problems.RaggedProblem]

BACKENDS: Final[dict[str, Backend]] = decisions.table(
  triton.BACKEND, cpu.BACKEND, xla.BACKEND
)

# The ragged dot, as tables of measured choices speak of it.
OPERATION: Final[fitting.Operation[problems.RaggedProblem]] = fitting.Operation(
  name=problems.WHO,
  bucketed="m",
  fields_of=problem_fields.fields_of,
  problem_of=problem_fields.problem_of,
  backends=lambda: BACKENDS,
)


def choose(
  problem: problems.RaggedProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
  overlay: resolution.Overlay | None = None,
) -> decisions.Decision:
  """As `dot.backends.choose`, of a ragged dot."""
  return resolution.choose(
    OPERATION,
    problem,
    target,
    requested,
    who=problems.who(),
    unportable=unportable,
    overlay=overlay,
  )


def emit(
  implementation: str, call: calls.Call, target: targets.Target
) -> jax.Array:
  """A call as the implementation that was chosen for it lowers it."""
  return BACKENDS[implementation].emit(call, call.problem(), target)


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  decisions.validate_name(BACKENDS, requested, who=problems.who())
