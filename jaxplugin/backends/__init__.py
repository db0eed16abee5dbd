# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Implementations of the dot, and the choice between them.

Each module of this package offers `NAME` and `supports(problem, target)`, and,
where it can serve anything, `REASON`, `plan(problem, target)` (how it serves)
and `emit(operands, config, problem, target)`, which does it.
`supports`, `plan` and `choose` are pure: they read nothing but arguments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib
from jaxplugin.backends import cpu
from jaxplugin.backends import cudnn
from jaxplugin.backends import triton
from jaxplugin.backends import xla

BACKENDS: Final[dict[str, ModuleType]] = {
  backend.NAME: backend for backend in (cudnn, triton, cpu, xla)
}

_BLACKWELL: Final = (10, 0)


def preference_order(target: target_lib.Target) -> tuple[str, ...]:
  """Implementations in the order in which they are tried on a target."""
  if target.platform == "cuda":
    capability = target.compute_capability
    if capability is not None and capability >= _BLACKWELL:
      return (cudnn.NAME, triton.NAME, xla.NAME)
    return (triton.NAME, xla.NAME)
  if target.platform == "rocm":
    return (triton.NAME, xla.NAME)
  if target.platform == "cpu":
    return (cpu.NAME, xla.NAME)
  return (xla.NAME,)


def choose(
  problem: problem_lib.DotProblem,
  target: target_lib.Target,
  requested: str | None = None,
) -> problem_lib.Decision:
  """Chooses the implementation of `problem` on `target`.

  Args:
    problem: what to compute.
    target: where.
    requested: the one implementation to use, or None for the first in
      `preference_order` that serves.

  Returns:
    The decision, with a reason for every implementation not chosen.

  Raises:
    ValueError: `requested` is no implementation's name.
    NotImplementedError: `requested` cannot serve; lists every implementation.
  """
  validate_name(requested)
  order = preference_order(target)
  order += tuple(name for name in BACKENDS if name not in order)
  answers = {name: BACKENDS[name].supports(problem, target) for name in order}
  chosen = requested
  if requested is None:
    chosen = next(name for name in order if answers[name] is None)
    why = f"first of {', '.join(preference_order(target))} that serves"
    instead = f"{chosen} comes before it"
  else:
    why = "asked for"
    instead = f"{chosen} was asked for"
  assert chosen is not None
  if answers[chosen] is not None:
    lines = "".join(
      f"\n  {name}: {'serves' if a is None else a.reason}"
      for name, a in answers.items()
    )
    raise NotImplementedError(
      f"block_scaled_dot: implementation={requested!r} cannot serve {problem}"
      f" on {target}:{lines}\nLeave implementation out to have one chosen, or"
      " use jp.use_target to lower for another device."
    )
  refusals = tuple(
    problem_lib.Refusal(
      implementation=name,
      reason=f"serves, but {instead}" if a is None else a.reason,
    )
    for name, a in answers.items()
    if name != chosen
  )
  plan = BACKENDS[chosen].plan(problem, target)
  return problem_lib.Decision(
    implementation=chosen,
    reason=f"{BACKENDS[chosen].REASON} ({why})",
    global_scale=plan.global_scale,
    padding=plan.padding,
    notes=plan.notes,
    refusals=refusals,
  )


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  if requested is not None and requested not in BACKENDS:
    raise ValueError(
      f"block_scaled_dot: implementation must be None or one of"
      f" {problem_lib.IMPLEMENTATIONS}, got {requested!r}"
    )
