# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dense dot."""

from __future__ import annotations

import math
from typing import Any
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import problems
from jaxplugin.dot import traced
from jaxplugin.dot.backends import cutile
from jaxplugin.lab.tuning.candidates import cpu_space
from jaxplugin.lab.tuning.candidates import spaces
from jaxplugin.lab.tuning.candidates import triton_space
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.lab.tuning.trials import exactness
from jaxplugin.lab.tuning.trials import operands
from jaxplugin.tables import resolution


def _choose(
  problem: problems.DotProblem,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  return backends.choose(problem, target, overlay=overlay)


def _decided(jaxpr: Any) -> tuned.Decided:
  (eqn,) = traced.dots(jaxpr)
  found = traced.decide(eqn, None)
  return tuned.Decided(problem=found.problem, decision=found.decision)


def _build(
  problem: problems.DotProblem, seed: int, is_exact: bool
) -> operands.Made:
  return operands.make(problem, seed, is_exact=is_exact)


def _flops(problem: problems.DotProblem) -> int:
  sizes = (problem.batch, problem.m, problem.n, problem.k)
  return 2 * math.prod(size or 0 for size in sizes)


def _cutile_space(
  problem: problems.DotProblem, target: targets.Target, limits: spaces.Limits
) -> spaces.Space:
  """All that hold: they are few, and nothing is known of their times."""
  del limits
  others = cutile.candidates(problem, target)[1:]
  return spaces.Space(configs=((), *map(cutile.fields_of, others)))


DOT: Final = tuned.Tuned(
  operation=backends.OPERATION,
  choose=_choose,
  decided=_decided,
  refusal=operands.refusal,
  build=_build,
  function=operands.function,
  check=exactness.check,
  flops=_flops,
  tail=operands.tail,
  poisoned=operands.poisoned,
  spaces={
    "triton": triton_space.space,
    "cpu": cpu_space.space,
    "cutile": _cutile_space,
  },
  compiles=True,
)
