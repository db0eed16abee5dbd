# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Tuned`: an operation whose ways of computing it can be tried and timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.lab.tuning.candidates import spaces
from jaxplugin.lab.tuning.trials import operands
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import problems as ragged
from jaxplugin.tables import fitting
from jaxplugin.tables import resolution

Problem = (
  problems.DotProblem
  | ragged.RaggedProblem
  | ragged.ContractionProblem
  | quantization.QuantizeProblem
  | quantization.DequantizeProblem
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
  """What an equation computes, and how."""

  problem: Problem
  decision: decisions.Decision | None


def _has_none(problem: Any) -> None:
  del problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
  """One operation. Each function takes its problems.

  Attributes:
    operation: as tables have it.
    choose: (problem, target, overlay) -> what is decided about it.
    decided: what is decided about the one equation of a jaxpr.
    refusal: why no operands can be made of a problem; "" where they can.
    build: (problem, seed, is_exact) -> operands of one that is not refused.
    function: what computes it of `operands.Made.arrays`, to be traced.
    check: (result, expected, problem); raises `exactness.WrongResultError`.
    flops: how many there are.
    tail: a small problem of the same kind, of sizes that no tile divides.
    poisoned: the problem with NaN where operands are padded; None where they
      cannot be.
    spaces: by implementation, how it may be configured; others only by their
      rule.
    compiles: whether Triton's kernels of it can be compiled alone.
  """

  operation: fitting.Operation[Any]
  choose: Callable[
    [Any, targets.Target, resolution.Overlay | None], decisions.Decision
  ]
  decided: Callable[[Any], Decided]
  refusal: Callable[[Any], str]
  build: Callable[[Any, int, bool], operands.Made]
  function: Callable[[Any], Callable[[Any], Any]]
  check: Callable[[Any, Any, Any], None]
  flops: Callable[[Any], int]
  tail: Callable[[Any], Any]
  poisoned: Callable[[Any], Any] = _has_none
  spaces: Mapping[
    str, Callable[[Any, targets.Target, spaces.Limits], spaces.Space]
  ] = dataclasses.field(default_factory=dict)
  compiles: bool = False

  def make(self, problem: Any, seed: int, is_exact: bool) -> operands.Made:
    """A problem's operands, and its result where that `is_exact`.

    Raises:
      operands.OperandsError: as `refusal` says.
    """
    if why := self.refusal(problem):
      raise operands.OperandsError(
        f"cannot create operands of {problem}: {why}"
      )
    return self.build(problem, seed, is_exact)
