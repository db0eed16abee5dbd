# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Implementations of the dot, and the choice between them.

Each module of this package offers `NAME` and `supports(problem, target)`, and,
where it can serve anything, `REASON`, `plan(problem, target)` (how it serves)
and `emit(operands, config, problem, target)`, which does it.
`supports`, `plan` and `choose` are pure: they read nothing but arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import call
from jaxplugin.dot import canonical
from jaxplugin.dot.backends import cpu
from jaxplugin.dot.backends import cudnn
from jaxplugin.dot.backends import size_rules as size_rules_lib
from jaxplugin.dot.backends import triton
from jaxplugin.dot.backends import xla

BACKENDS: Final[dict[str, ModuleType]] = {
  backend.NAME: backend for backend in (cudnn, triton, cpu, xla)
}

_BLACKWELL: Final = (10, 0)


def preference_order(target: targets.Target) -> tuple[str, ...]:
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
  problem: decisions.DotProblem,
  target: targets.Target,
  requested: str | None = None,
  *,
  size_rules: Sequence[size_rules_lib.SizeRule] = size_rules_lib.MEASURED,
) -> decisions.Decision:
  """Chooses the implementation of `problem` on `target`.

  Args:
    problem: what to compute.
    target: where.
    requested: the one implementation to use, or None for the first in
      `preference_order` that serves, or the one that a size rule puts first.
    size_rules: where a measurement overrides the order.

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
  rule = size_rules_lib.applicable(problem, target, size_rules)
  if requested is not None:
    why = "asked for"
    instead = f"{chosen} was asked for"
  elif rule is not None and answers[rule.implementation] is None:
    chosen = rule.implementation
    why = "measured"
    instead = str(rule)
  else:
    chosen = next(name for name in order if answers[name] is None)
    why = f"first of {', '.join(preference_order(target))} that serves"
    instead = f"{chosen} comes before it"
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
    decisions.Refusal(
      implementation=name,
      reason=f"serves, but {instead}" if a is None else a.reason,
    )
    for name, a in answers.items()
    if name != chosen
  )
  plan = BACKENDS[chosen].plan(problem, target)
  return decisions.Decision(
    implementation=chosen,
    reason=f"{BACKENDS[chosen].REASON} ({why})",
    global_scale=plan.global_scale,
    padding=plan.padding,
    notes=(*plan.notes, *_notes_on_order(chosen, problem, target)),
    refusals=refusals,
  )


def _reads_interleaved(
  implementation: str,
  problem: decisions.DotProblem,
  target: targets.Target,
) -> bool:
  """Whether an implementation reads interleaved values as they are."""
  if implementation != triton.NAME:
    return False
  return triton.reads_interleaved(problem, target)


def _notes_on_order(
  implementation: str,
  problem: decisions.DotProblem,
  target: targets.Target,
) -> tuple[str, ...]:
  sides = " and ".join(problem.interleaved_sides)
  if not sides:
    return ()
  if _reads_interleaved(implementation, problem, target):
    return (f"{sides}: prepared for {implementation}, which reads it so",)
  return (
    f"{sides}: prepared for other kernels; every call puts the values back in"
    " order",
  )


def emit(
  implementation: str,
  operands: call.Operands,
  config: call.DotConfig,
  target: targets.Target,
) -> jax.Array:
  """A call as the implementation that was chosen for it lowers it."""
  operands, config = canonical.with_bytes(operands, config)
  problem = call.problem_of(config, operands)
  if problem.interleaved_sides and (
    not _reads_interleaved(implementation, problem, target)
  ):
    operands, config = canonical.in_usual_order(operands, config)
    problem = call.problem_of(config, operands)
  return BACKENDS[implementation].emit(operands, config, problem, target)


def validate_name(requested: str | None) -> None:
  """Raises ValueError unless `requested` is an implementation or None."""
  if requested is not None and requested not in BACKENDS:
    raise ValueError(
      f"block_scaled_dot: implementation must be None or one of"
      f" {decisions.IMPLEMENTATIONS}, got {requested!r}"
    )
