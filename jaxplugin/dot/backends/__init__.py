# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dot's backends, and the choice between them.

`table` returns the `BACKEND` of each module in this folder and the backends of
other packages (`plugins`). A backend's `emit` takes (call, problem, target).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Final

import jax

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import decisions, error_context, targets
from jaxplugin.dot import calls, epilogue, problems, sides, views
from jaxplugin.dot.backends import cpu, cudnn, modelled, triton, xla
from jaxplugin.kernels.gpu import configs
from jaxplugin.operation import choice
from jaxplugin.plugins import registry
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

Backend = decisions.BackendRecord[problems.DotProblem]

BACKENDS: Final[dict[str, Backend]] = decisions.table(
  cudnn.BACKEND, triton.BACKEND, cpu.BACKEND, xla.BACKEND
)
NAMES: Final = (*BACKENDS, *(point.name for point in registry.BUNDLED))
registry.reserve(NAMES)


def table() -> dict[str, Backend]:
  """Returns `BACKENDS` and plugin backends, which the first call loads."""
  return BACKENDS | registry.table(views.INTERFACE)


OPERATION: Final[resolution.MeasuredOperation[problems.DotProblem]] = (
  problems.measured(
    problems.DotProblem,
    "block_scaled_dot",
    lambda: table(),  # tests replace `table`
    what="the dot",
    sizes=("m", "n", "k"),
    words={
      "global_scale": problems.GLOBAL_SCALES,
      "activation": problems.ACTIVATIONS,
    },
    numbers={"batch": 1, "num_contracting": 1, "blocked_k": None},
  )
)


def choose(
  problem: problems.DotProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
  overlay: resolution.Overlay | None = None,
  for_export: bool = False,
  is_of_layer: bool = False,
) -> decisions.Decision:
  """Chooses the backend of a dot, as `choice.choose` does.

  Args:
    problem, target, requested, unportable, overlay: as for `choice.choose`. If
      no tuning table has the problem, the time model (`modelled`) may propose
      a backend.
    for_export: whether other machines load the module (`jp.export`).
    is_of_layer: whether rhs is a layer of stacked weights. With few rows, a
      backend that reads the layer from the stack is preferred, because other
      backends copy the layer first.
  """

  def propose(measured: choice.Proposals) -> choice.Proposals:
    if requested is None:
      measured = (*measured, *_modelled(problem, target))
      if is_of_layer:
        measured = _for_layer(measured, problem, target)
    if for_export:
      measured = tuple(map(_portable, measured))
    return measured

  def notes(decision: decisions.Decision) -> tuple[str, ...]:
    found = _notes_on_order(decision.implementation, problem, target)
    found += _notes_on_cases(decision, problem, target)
    if is_of_layer:
      found = (*found, *_notes_on_layer(decision, problem, target))
    return found

  return choice.choose(
    OPERATION,
    problem,
    target,
    requested,
    unportable=unportable,
    overlay=overlay,
    propose=propose,
    notes=notes,
  )


def choose_for(
  call: calls.DotCall,
  target: targets.Target,
  *,
  unportable: decisions.Unsupported | None = None,
  for_export: bool = False,
) -> decisions.Decision:
  """Chooses the backend of a call. The options are those of `choose`."""
  return choose(
    call.problem(),
    target,
    call.implementation,
    unportable=unportable,
    overlay=call.overlay,
    for_export=for_export,
    is_of_layer=call.is_of_layer,
  )


def _supporting(
  problem: problems.DotProblem, target: targets.Target
) -> Iterator[str]:
  """Yields the backends that support a problem, in the order of their rank."""
  backends = table()
  for name in decisions.order(backends, target):
    if backends[name].supports(problem, target) is None:
      yield name


def _modelled(
  problem: problems.DotProblem, target: targets.Target
) -> tuple[decisions.Measured, ...]:
  """Returns the model's proposal if triton would be chosen without it."""
  if target.platform not in triton.BACKEND.platforms:
    return ()
  proposal = modelled.proposal(problem, target)
  if proposal is None:
    return ()
  first = next(_supporting(problem, target), None)
  return (proposal,) if first == triton.BACKEND.name else ()


def _reads(
  implementation: str,
  layout: str,
  problem: problems.DotProblem,
  target: targets.Target,
) -> bool:
  return table()[implementation].reads(layout, problem, target)


def _for_layer(
  measured: tuple[decisions.Measured, ...],
  problem: problems.DotProblem,
  target: targets.Target,
) -> tuple[decisions.Measured, ...]:
  """Returns the proposals for an rhs that is a layer of a stack.

  Tuning tables measure weights that are not slices of a stack. With few rows
  only backends that read the layer from the stack are proposed.
  """
  if problem.m is None or problem.m > modelled.FEW_ROWS:
    return measured
  found = list(_supporting(problem, target))
  readers = [n for n in found if _reads(n, layouts.LAYER, problem, target)]
  if not readers:
    return measured
  measured = tuple(x for x in measured if x.implementation in readers)
  if measured or found[0] == readers[0]:
    return measured
  why = (
    "modelled, not measured: it reads the layer from the stack, and"
    f" {found[0]} would copy it first"
  )
  return (
    decisions.Measured(
      implementation=readers[0], origin=decisions.MODEL, why=why
    ),
  )


def _notes_on_layer(
  decision: decisions.Decision,
  problem: problems.DotProblem,
  target: targets.Target,
) -> tuple[str, ...]:
  if _reads(decision.implementation, layouts.LAYER, problem, target):
    return ("rhs: a layer of a stack, read from the stack",)
  if table()[decision.implementation].is_portable:
    return ()  # XLA fuses the slice into the dequantization
  if decision.implementation == cpu.BACKEND.name:
    return (
      "rhs: a layer of a stack; linear(layer=) reads it from the stack, and"
      " other calls copy it first",
    )
  return ("rhs: a layer of a stack, copied before every call",)


def _cases(
  decision: decisions.Decision,
  problem: problems.DotProblem,
  target: targets.Target,
) -> Iterator[tuple[problems.DotProblem, decisions.Decision]]:
  """Yields the planned problems of a symbolic m, with a decision on each.

  The backend is that of `decision`, or xla if the model finds it faster.
  """
  for planned in triton.planned(problem):
    proposal = None
    if decision.implementation_from != decisions.ARGUMENT:
      proposal = modelled.proposal(planned, target)
    if proposal is None:
      yield planned, decision
    else:
      yield (
        planned,
        dataclasses.replace(
          decision,
          implementation=proposal.implementation,
          implementation_from=proposal.origin,
          reason=proposal.why,
        ),
      )


def _has_cases(
  decision: decisions.Decision, problem: problems.DotProblem
) -> bool:
  return problem.m is None and decision.implementation == triton.BACKEND.name


def _notes_on_cases(
  decision: decisions.Decision,
  problem: problems.DotProblem,
  target: targets.Target,
) -> tuple[str, ...]:
  """Returns notes on the m for which XLA's operations are modelled faster."""
  if not _has_cases(decision, problem):
    return ()
  return tuple(
    f"m planned as {planned.m}: {found.implementation}, {found.reason}"
    for planned, found in _cases(decision, problem, target)
    if found is not decision
  )


def _portable(measured: decisions.Measured) -> decisions.Measured:
  """Drops the config of a proposal if it fits only this machine."""
  backend = table().get(measured.implementation)
  if not measured.config or backend is None or backend.tunable is None:
    return measured
  if backend.tunable.configs_travel:
    return measured
  words = " ".join(f"{name}={value}" for name, value in measured.config)
  return dataclasses.replace(
    measured,
    config=(),
    why=(
      f"{measured.why}; exported without {words}, which fits only this machine"
    ),
  )


def _notes_on_order(
  implementation: str, problem: problems.DotProblem, target: targets.Target
) -> tuple[str, ...]:
  sides = " and ".join(problem.interleaved_sides)
  if not sides:
    return ()
  if _reads(implementation, interleaving.INTERLEAVED, problem, target):
    return (f"{sides}: prepared for {implementation}, which reads that order",)
  return (
    f"{sides}: prepared for other kernels; every call restores the order of"
    " the values",
  )


def emit(
  decision: decisions.Decision,
  call: calls.DotCall,
  target: targets.Target,
  **options: Any,
) -> jax.Array:
  """Emits a call with the backend of a decision, and the backend's options."""
  call = call.with_sides(sides.Side.with_bytes).joined()
  problem = call.problem()
  reads = functools.partial(_reads, decision.implementation)
  if problem.interleaved_sides and (
    not reads(interleaving.INTERLEAVED, problem, target)
  ):
    call = call.with_sides(sides.Side.in_usual_order)
    problem = call.problem()
  if call.is_of_layer and not reads(layouts.LAYER, problem, target):
    call = call.replace(
      rhs=call.rhs.replace(stack=None, stack_scale=None, layer=None)
    )
  if not reads(layouts.TWO_GLOBAL_SCALES, problem, target):
    call = epilogue.with_product(call)
  if not _has_cases(decision, problem):
    return choice.emit(OPERATION, decision, problem, target, call, **options)
  call = call.replace(lhs=call.lhs.with_linear_scale())
  m = math.prod(call.lhs.shape[d] for d in call.lhs.free)
  cases = [
    functools.partial(
      choice.emit, OPERATION, found, planned, target, call, **options
    )
    for planned, found in _cases(decision, problem, target)
  ]
  return choice.by_size(m, configs.PLANNED_M, cases)


def lower(
  call: calls.DotCall, target: targets.Target, module: lowering.Module
) -> jax.Array:
  """Chooses a backend for a call in a module, and emits the call.

  A partitioned module may have kernels that are not split: XLA gathers their
  operands.
  """
  if module.is_split:
    # A shard of a layer is not a slice of the device's shard of the stack.
    call = call.without_origins_of_sides()
  unportable = None
  if module.is_exported and call.implementation is None:
    # A process that loads the module may lack the kernel libraries, and
    # jax.export refuses custom calls without guaranteed stability.
    unportable = decisions.Unsupported(lowering.PORTABLE)
  for_export = lowering.current_export() is not None
  decision = choose_for(
    call, target, unportable=unportable, for_export=for_export
  )
  return emit(decision, call, target)


def validate_name(requested: str | None) -> None:
  """Raises unless `requested` is an implementation's name or None."""
  if isinstance(requested, str):
    if requested in BACKENDS:
      return  # before `table` loads the backends of other packages
    missing = registry.reason_missing(requested)
    if missing and requested not in table():
      raise ValueError(
        f"{sides.who()}: implementation={error_context.shown(requested)} cannot"
        f" be used: {missing}"
      )
  choice.validate_name(OPERATION, requested)
