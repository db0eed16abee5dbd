# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of the ragged dot and the contraction, and the choice between them.

A backend's `emit` takes (call, problem, target).
"""

from __future__ import annotations

from typing import Any
from typing import Final

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.operation import choice
from jaxplugin.plugins import adapters
from jaxplugin.ragged import calls
from jaxplugin.ragged import problems
from jaxplugin.ragged import views
from jaxplugin.ragged.backends import cpu
from jaxplugin.ragged.backends import problem_fields
from jaxplugin.ragged.backends import triton
from jaxplugin.ragged.backends import xla
from jaxplugin.tables import matching

BACKENDS: Final = decisions.table(triton.BACKEND, cpu.BACKEND, xla.BACKEND)
CONTRACTION_BACKENDS: Final = decisions.table(xla.CONTRACTION)

OPERATION: Final[matching.MeasuredOperation[problems.RaggedDotProblem]] = (
  matching.MeasuredOperation(
    name=problems.WHO,
    bucketed="m",
    fields_of=problem_fields.fields_of,
    problem_of=problem_fields.problem_of,
    backends=lambda: BACKENDS | adapters.table(views.INTERFACE),
  )
)
CONTRACTION: Final[matching.MeasuredOperation[problems.ContractionProblem]] = (
  matching.MeasuredOperation(
    name=problems.CONTRACTION_WHO,
    bucketed="m",
    fields_of=problem_fields.contraction_fields_of,
    problem_of=problem_fields.contraction_problem_of,
    backends=lambda: CONTRACTION_BACKENDS,
  )
)


def operation_of(problem: problems.Problem) -> matching.MeasuredOperation[Any]:
  is_contraction = isinstance(problem, problems.ContractionProblem)
  return CONTRACTION if is_contraction else OPERATION


def choose(
  problem: problems.Problem,
  target: targets.Target,
  requested: str | None = None,
  **options: Any,
) -> decisions.Decision:
  """Chooses a backend; the options are those of `choice.choose`."""
  return choice.choose(
    operation_of(problem), problem, target, requested, **options
  )


def emit(
  decision: decisions.Decision,
  call: calls.RaggedDotCall | calls.RaggedContraction,
  target: targets.Target,
) -> jax.Array:
  """Emits a call with the backend of a decision."""
  problem = call.problem()
  backend = choice.backend_of(operation_of(problem), decision)
  return backend.emit(call, problem, target)
