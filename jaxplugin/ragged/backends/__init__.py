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
from jaxplugin.dot import sides
from jaxplugin.ragged import calls
from jaxplugin.ragged import problems
from jaxplugin.ragged.backends import cpu
from jaxplugin.ragged.backends import xla

Backend = decisions.Backend[problems.RaggedProblem]

BACKENDS: Final[dict[str, Backend]] = decisions.table(cpu.BACKEND, xla.BACKEND)


def choose(
  problem: problems.RaggedProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
) -> decisions.Decision:
  """As `dot.backends.choose`, of a ragged dot."""
  return decisions.choose(
    BACKENDS,
    problem,
    target,
    requested,
    who=sides.who(),
    unportable=unportable,
  )


def emit(
  implementation: str, call: calls.Call, target: targets.Target
) -> jax.Array:
  """A call as the implementation that was chosen for it lowers it."""
  return BACKENDS[implementation].emit(call, call.problem(), target)


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  decisions.validate_name(BACKENDS, requested, who=sides.who())
