# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice between the backends of an operation.

`resolution.MeasuredOperation` has the operation's name and table of backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxplugin.core import call_options, decisions, error_context, targets
from jaxplugin.operation import logs
from jaxplugin.runtime import cpu_library, triton_library
from jaxplugin.tables import resolution

Proposals = tuple[decisions.Measured, ...]


def choose(
  operation: resolution.MeasuredOperation[decisions.Problem],
  problem: decisions.Problem,
  target: targets.Target,
  requested: str | None = None,
  *,
  unportable: decisions.Unsupported | None = None,
  overlay: resolution.Overlay | None = None,
  propose: Callable[[Proposals], Proposals] | None = None,
  notes: Callable[[decisions.Decision], tuple[str, ...]] | None = None,
) -> decisions.Decision:
  """Chooses the backend for a problem on a target.

  It is a pure function of its arguments and of the loaded tuning tables. A
  config that only `target.options` refuses gets a note.

  Args:
    requested: the backend to use. None chooses the first one that tuning tables
      propose, or else the first one in order of rank.
    unportable: the reason if only portable backends are allowed.
    overlay: tuning tables of the call. The user's tables come after them.
    propose: changes the proposals of the tuning tables.
    notes: returns further notes on a decision.

  Returns:
    The decision, with a reason for every backend not chosen.

  Raises:
    ValueError: If `requested` is not a backend's name.
    NotImplementedError: If `requested` does not support the problem. The
      message lists every backend.
    call_options.FallbackError: If XLA would dequantize the operands, and the
      target's options do not allow it.
  """
  measured, table_notes = resolution.ask(operation, problem, target, overlay)
  if propose is not None:
    measured = propose(measured)
  decision = decisions.choose(
    operation.backends(),
    problem,
    target,
    requested,
    who=error_context.who(operation.name),
    unportable=unportable,
    measured=measured,
  )
  if target.options.on_fallback == "raise" and _is_fallback(
    backend_of(operation, decision), problem, decision
  ):
    reasons = "".join(
      f"\n  {refusal.implementation}: {refusal.reason}"
      for refusal in decision.refusals
    )
    raise call_options.FallbackError(
      f"{error_context.who(operation.name)}: a kernel must support the operands"
      f' with on_fallback="raise", got {problem}{logs.place_text()} on'
      f" {target}:{reasons}\nChange what a reason names, pass"
      ' implementation="xla" to this call, or set on_fallback="warn".'
    )
  more = () if notes is None else notes(decision)
  return dataclasses.replace(
    decision,
    notes=(
      *decision.notes,
      *more,
      *table_notes,
      *_limited(operation, measured, problem, target),
    ),
  )


def _is_fallback(
  backend: decisions.BackendRecord[Any],
  problem: Any,
  decision: decisions.Decision,
) -> bool:
  """Returns whether XLA dequantizes a product, which nobody asked for."""
  sides = (getattr(problem, "lhs", None), getattr(problem, "rhs", None))
  return (
    any(side is not None and side.format is not None for side in sides)
    and not problem.is_empty
    and backend.is_portable
    and decision.implementation_from == decisions.RULE
  )


def _limited(
  operation: resolution.MeasuredOperation[decisions.Problem],
  measured: Proposals,
  problem: decisions.Problem,
  target: targets.Target,
) -> tuple[str, ...]:
  """Returns a note on each proposal that only the target's limits refuse."""
  if target.options.workspace_bytes is None:
    return ()
  unlimited = dataclasses.replace(target, options=call_options.NONE)
  notes = []
  for proposal in measured:
    backend = operation.backends().get(proposal.implementation)
    if backend is None:
      continue
    error, other = (
      backend.config_error(proposal.config, problem, where)
      for where in (target, unlimited)
    )
    if error is not None and other is None:
      notes.append(f"{proposal.origin}: {proposal.implementation}: {error}")
  return tuple(notes)


def require_somewhere(choose: Callable[[targets.Target], Any]) -> None:
  """Raises the error of `choose` unless it succeeds for a local target."""
  refused = None
  for target in targets.local_targets():
    try:
      choose(target)
    except NotImplementedError as error:
      refused = refused or error
    else:
      return
  assert refused is not None
  raise refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidedCall:
  """One equation of a jaxpr, and the decision about it.

  Attributes:
    problem: problem that the equation computes.
    target: target of the decision.
    decision: the decision; None if the requested backend does not support the
      problem on the target.
    error: the reason if decision is None.
  """

  problem: Any
  target: targets.Target
  decision: decisions.Decision | None
  error: str = ""


def decide(
  eqn: Any,
  target: targets.Target | None,
  choose: Callable[..., decisions.Decision],
  *,
  for_export: bool = False,
) -> DecidedCall:
  """Decides about an equation whose primitive takes a call.

  Args:
    target: the target to decide for. None uses the target that the equation was
      traced for, or the local one.
    choose: (call, target) -> decision.
  """
  call = eqn.params["call"].filled(v.aval for v in eqn.invars)
  target = targets.resolved(eqn.params["target"], target, for_export=for_export)
  decision, error = None, ""
  try:
    decision = choose(call, target)
  except NotImplementedError as e:
    error = str(e)
  return DecidedCall(
    problem=call.problem(), target=target, decision=decision, error=error
  )


def backend_of(
  operation: resolution.MeasuredOperation[decisions.Problem],
  decision: decisions.Decision,
) -> decisions.BackendRecord[decisions.Problem]:
  """Returns the chosen backend with the decision's config."""
  backend = operation.backends()[decision.implementation]
  return backend.configured(decision.config)


def emit(
  operation: resolution.MeasuredOperation[decisions.Problem],
  decision: decisions.Decision,
  problem: decisions.Problem,
  target: targets.Target,
  *arrays: Any,
  **options: Any,
) -> Any:
  """Emits a problem with the chosen backend, and logs the decision."""
  backend = backend_of(operation, decision)
  tried = decisions.order(operation.backends(), target)
  chosen = decision.implementation
  before = tried[: tried.index(chosen)] if chosen in tried else tried
  logs.decided(
    operation.name,
    problem,
    target,
    decision,
    before=before,
    is_fallback=_is_fallback(backend, problem, decision),
  )
  with jax.named_scope(logs.scope(problem, chosen)):
    return backend.emit(*arrays, problem, target, **options)


def by_size(
  size: Any, limits: Sequence[int], cases: Sequence[Callable[[], Any]]
) -> Any:
  """Returns the result of the first case whose limit is at least `size`.

  A size above all limits takes the last case. When a symbolic size gets a
  value, XLA drops the other cases.

  Args:
    limits: sizes in rising order.
  """
  exceeded = jnp.asarray(size, jnp.int32) > jnp.asarray(limits[:-1], jnp.int32)
  return jax.lax.switch(jnp.sum(exceeded, dtype=jnp.int32), cases)


def validate_name(
  operation: resolution.MeasuredOperation[Any], requested: str | None
) -> None:
  """Raises TypeError or ValueError unless `requested` is a backend or None."""
  decisions.validate_name(
    operation.backends(), requested, who=error_context.who(operation.name)
  )


# Backends that several operations have.


def cpu_backend(*, summary: str, **fields: Any) -> decisions.BackendRecord[Any]:
  """Returns the backend of C++ kernels; `fields` are others of the record."""
  given: dict[str, Any] = {
    "platforms": ("cpu",),
    "rank": lambda target: 10,
    "tunable": decisions.Tunable(source=cpu_library.source),
  }
  return decisions.BackendRecord(
    name="cpu", summary=summary, **(given | fields)
  )


def triton_backend(
  *, summary: str, folder: str = "", **fields: Any
) -> decisions.BackendRecord[Any]:
  """Returns the backend of Triton kernels.

  Args:
    folder: folder of `kernels/` with kernels that only this operation uses.
  """
  folders = (folder,) if folder else ()
  given: dict[str, Any] = {
    "platforms": triton_library.PLATFORMS,
    "rank": lambda target: 20,
    # Tests replace the function.
    "lowering_refusal": lambda target: triton_library.lowering_refusal(target),
    "launched_by": triton_library.launched_by,
    "tunable": decisions.Tunable(
      source=lambda target: resolution.triton_source(target, *folders)
    ),
  }
  return decisions.BackendRecord(
    name="triton", summary=summary, **(given | fields)
  )


def _plan(problem: Any, target: targets.Target) -> decisions.Plan:
  del target
  scale = getattr(problem, "global_scale", "none")
  return decisions.Plan(global_scale="none" if scale == "none" else "separate")


def xla_backend(
  *,
  summary: str,
  emit: Callable[..., Any],
  notes: Callable[[Any, targets.Target], tuple[str, ...]] | None = None,
) -> decisions.BackendRecord[Any]:
  """Returns the backend of XLA ops, which supports every problem.

  It has a lower priority than every backend that reads the quantized bytes.
  """
  plan = _plan
  if notes is not None:
    plan = lambda problem, target: dataclasses.replace(
      _plan(problem, target), notes=notes(problem, target)
    )
  return decisions.BackendRecord(
    name="xla",
    summary=summary,
    rank=lambda target: 100,
    supports=lambda problem, target: None,
    plan=plan,
    emit=emit,
    is_portable=True,
    tunable=decisions.Tunable(source=resolution.jaxlib_source),
  )
