# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of the ragged dot and the contraction, and the choice between them.

A backend's `emit` takes (call, problem, target).
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.core import decisions, targets
from jaxplugin.dot import problems as dot_problems
from jaxplugin.operation import choice
from jaxplugin.plugins import registry
from jaxplugin.ragged import calls, epilogue, views
from jaxplugin.ragged.backends import cpu, triton, xla
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

BACKENDS: Final = decisions.table(triton.BACKEND, cpu.BACKEND, xla.BACKEND)
CONTRACTION_BACKENDS: Final = decisions.table(xla.CONTRACTION)


_SIZES: Final = ("groups", "m", "n", "k")
# Group sizes are not part of a problem: a row applies to all group sizes.
OPERATION: Final = dot_problems.measured(
  calls.RaggedDotProblem,
  calls.WHO,
  lambda: BACKENDS | registry.table(views.INTERFACE),
  what="the ragged dot",
  sizes=_SIZES,
  words={
    "global_scale": calls.GLOBAL_SCALES,
    "activation": calls.ACTIVATIONS,
  },
)
CONTRACTION: Final = dot_problems.measured(
  calls.ContractionProblem,
  calls.CONTRACTION_WHO,
  lambda: CONTRACTION_BACKENDS,
  what="the ragged contraction",
  sizes=_SIZES,
  words={"global_scale": dot_problems.GLOBAL_SCALES},
)


def operation_of(
  problem: calls.Problem,
) -> resolution.MeasuredOperation[Any]:
  is_contraction = isinstance(problem, calls.ContractionProblem)
  return CONTRACTION if is_contraction else OPERATION


def choose(
  problem: calls.Problem,
  target: targets.Target,
  requested: str | None = None,
  **options: Any,
) -> decisions.Decision:
  """Chooses a backend; the options are those of `choice.choose`."""
  return choice.choose(
    operation_of(problem), problem, target, requested, **options
  )


def choose_in(
  module: lowering.Module, call: calls.Call, target: targets.Target
) -> decisions.Decision:
  """Chooses a backend for a call that is lowered into a module."""
  unportable = module.kernels_refusal()
  if call.implementation is not None and module.is_exported:
    unportable = None
  return choose_for(call, target, unportable=unportable)


def choose_for(
  call: calls.Call, target: targets.Target, **options: Any
) -> decisions.Decision:
  """Chooses a backend for a call; the options are those of `choice.choose`."""
  return choose(
    call.problem(),
    target,
    call.implementation,
    overlay=call.overlay,
    **options,
  )


def emit(
  decision: decisions.Decision,
  call: calls.Call,
  target: targets.Target,
  **options: Any,
) -> jax.Array:
  """Emits a call with the backend of a decision; zeros if the call is empty.

  The options are those of the backend.
  """
  problem = call.problem()
  if not problem.is_empty:
    operation = operation_of(problem)
    return choice.emit(operation, decision, problem, target, call, **options)
  if isinstance(call, calls.RaggedContraction):
    return jnp.zeros(call.shape, call.preferred_element_type)
  sums = jnp.zeros((call.num_rows, call.columns), jnp.float32)
  return epilogue.apply(sums, call)


def lower(
  call: calls.Call, target: targets.Target, module: lowering.Module
) -> jax.Array:
  """Chooses a backend for a call in a module, and emits the call."""
  return emit(choose_in(module, call, target), call, target)
