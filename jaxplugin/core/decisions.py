# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of an operation, and the choice between them.

An operation has a table of `Backend`s and a record of its own, the problem,
which says what a call of it asks for. `Backend.supports`, `Backend.plan` and
`choose` are pure functions of a problem and a target, used alike by lowerings,
`explain` and the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Final
from typing import Generic
from typing import Literal
from typing import TypeVar

from jaxplugin.core import targets

# What `Backend` asks of a backend; one that was written for another number is
# refused.
API_VERSION: Final = 1

Application = Literal["fused", "separate", "none"]
Problem = TypeVar("Problem")


@dataclasses.dataclass(frozen=True)
class Unsupported:
  """Why a backend is not used.

  Attributes:
    reason: why it cannot serve; in a `Decision` also why another one comes
      first.
    implementation: the backend's name, in a `Decision`.
  """

  reason: str
  implementation: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What a backend does with a problem that it serves.

  Attributes:
    global_scale: "fused" into the kernel, "separate" multiply after it, or
      "none" where the call has none.
    padding: what is padded, in words; empty when nothing is.
    notes: what else one should know, one sentence each.
    relative_error: how much of the result it may err by, beyond the contract's
      bound and the cast to the result's dtype.
    is_native: whether matrix instructions take quantized operands as they are.
  """

  global_scale: Application = "none"
  padding: str = ""
  notes: tuple[str, ...] = ()
  relative_error: float = 0.0
  is_native: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """The backend chosen for a problem on a target.

  Attributes:
    implementation: its name.
    reason: why this one.
    global_scale, padding, notes: as in `Plan`.
    refusals: every other backend with its reason, in order.
  """

  implementation: str
  reason: str
  global_scale: Application = "none"
  padding: str = ""
  notes: tuple[str, ...] = ()
  refusals: tuple[Unsupported, ...] = ()

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def _reads_no_other(layout: str, problem: Any, target: targets.Target) -> bool:
  del layout, problem, target
  return False


def _lowers_anywhere(target: targets.Target) -> None:
  del target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Generic[Problem]):
  """One implementation of an operation.

  Attributes:
    name: what users force it by, and what decisions call it.
    summary: what it is, in words, for a decision's reason.
    rank: its place among those that are tried on a target, smaller first; None
      where it is used only when asked for.
    supports: why it cannot serve a problem on a target; None where it can.
    plan: how it serves a problem that it supports.
    emit: the operation itself, in JAX operations. Its arguments are the
      operation's own.
    reads: (layout, problem, target) -> whether it reads operands that were
      prepared in a layout ("interleaved", "swizzled_128x4") as they are.
    lowering_refusal: why this process cannot lower it for a target, however
      well the target is served; None where it can. Not pure.
    is_portable: whether what it emits is XLA's operations alone, so that other
      processes, other platforms and any partitioner can take it.
    experiments: (word, function from a target to another) of ways in which it
      serves only targets that ask for them; the benchmark measures them too.
    api_version: the `API_VERSION` that it was written for.
  """

  name: str
  summary: str
  rank: Callable[[targets.Target], int | None]
  supports: Callable[[Problem, targets.Target], Unsupported | None]
  plan: Callable[[Problem, targets.Target], Plan]
  emit: Callable[..., Any]
  reads: Callable[[str, Problem, targets.Target], bool] = _reads_no_other
  lowering_refusal: Callable[[targets.Target], Unsupported | None] = (
    _lowers_anywhere
  )
  is_portable: bool = False
  experiments: tuple[
    tuple[str, Callable[[targets.Target], targets.Target]], ...
  ] = ()
  api_version: int = API_VERSION


def table(*backends: Backend[Problem]) -> dict[str, Backend[Problem]]:
  """The backends of an operation by name.

  Raises:
    ValueError: a name comes twice, or a backend is of another `API_VERSION`.
  """
  result: dict[str, Backend[Problem]] = {}
  for backend in backends:
    if backend.name in result:
      raise ValueError(f"backend {backend.name!r} is there already")
    if backend.api_version != API_VERSION:
      raise ValueError(
        f"backend {backend.name!r} is written for version"
        f" {backend.api_version} of jaxplugin's backends, and this is version"
        f" {API_VERSION}; install a matching release"
      )
    result[backend.name] = backend
  return result


def order(
  backends: Mapping[str, Backend[Problem]], target: targets.Target
) -> tuple[str, ...]:
  """Names of the backends that are tried on a target, the first one first."""
  ranks = {name: backend.rank(target) for name, backend in backends.items()}
  tried = [(rank, name) for name, rank in ranks.items() if rank is not None]
  # Stable: those of one rank as the table has them.
  return tuple(name for _, name in sorted(tried, key=lambda item: item[0]))


def choose(
  backends: Mapping[str, Backend[Problem]],
  problem: Problem,
  target: targets.Target,
  requested: str | None = None,
  *,
  who: str,
  unportable: Unsupported | None = None,
  measured: tuple[str, str] | None = None,
) -> Decision:
  """Chooses the backend for `problem` on `target`.

  Args:
    backends: the operation's `table`. One of them must serve every problem on
      every target.
    problem: what to compute.
    target: where.
    requested: the one backend to use, or None for the first in `order` that
      serves.
    who: the operation, for errors.
    unportable: why backends that are not portable cannot serve where the
      operation is; None where they can.
    measured: (name, why) of the backend that a measurement puts first.

  Returns:
    The decision, with a reason for every backend not chosen.

  Raises:
    ValueError: `requested` is no backend's name.
    NotImplementedError: `requested` cannot serve; lists every backend.
  """
  validate_name(backends, requested, who=who)
  tried = order(backends, target)
  names = tried + tuple(name for name in backends if name not in tried)
  answers = {}
  for name in names:
    answers[name] = backends[name].supports(problem, target)
    if answers[name] is None and not backends[name].is_portable:
      answers[name] = unportable
  chosen = requested
  if requested is not None:
    why = "asked for"
    instead = f"{chosen} was asked for"
  elif measured is not None and answers[measured[0]] is None:
    chosen, instead = measured
    why = "measured"
  else:
    chosen = next(name for name in names if answers[name] is None)
    why = f"first of {', '.join(tried)} that serves"
    instead = f"{chosen} comes before it"
  assert chosen is not None
  if answers[chosen] is not None:
    lines = "".join(
      f"\n  {name}: {'serves' if a is None else a.reason}"
      for name, a in answers.items()
    )
    raise NotImplementedError(
      f"{who}: implementation={requested!r} cannot serve {problem} on {target}:"
      f"{lines}\nLeave implementation out to have one chosen, or use"
      " jp.use_target to lower for another device."
    )
  plan = backends[chosen].plan(problem, target)
  return Decision(
    implementation=chosen,
    reason=f"{backends[chosen].summary} ({why})",
    global_scale=plan.global_scale,
    padding=plan.padding,
    notes=plan.notes,
    refusals=tuple(
      Unsupported(
        f"serves, but {instead}" if a is None else a.reason, implementation=name
      )
      for name, a in answers.items()
      if name != chosen
    ),
  )


def validate_name(
  backends: Mapping[str, Any], requested: str | None, *, who: str
) -> None:
  """Raises ValueError unless `requested` is a backend's name or None."""
  if requested is not None and requested not in backends:
    raise ValueError(
      f"{who}: implementation must be None or one of {tuple(backends)}, got"
      f" {requested!r}"
    )
