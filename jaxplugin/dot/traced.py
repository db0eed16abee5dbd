# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the block-scaled dots of a jaxpr and the decision for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import primitive
from jaxplugin.dot import problems
from jaxplugin.jaxext import program
from jaxplugin.operation import choice

Decided = choice.Decided[problems.DotProblem]


def dots(jaxpr: Any) -> Iterator[Any]:
  """Yields every `block_scaled_dot_p` equation, also those in sub-jaxprs."""
  for operation in program.operations(jaxpr):
    if operation.eqn.primitive is primitive.block_scaled_dot_p:
      yield operation.eqn


def decide(
  eqn: Any, target: targets.Target | None, *, for_export: bool = False
) -> Decided:
  """Returns `choice.decide` of an equation from `dots`."""

  def choose(
    call: Any, problem: problems.DotProblem, target: targets.Target
  ) -> decisions.Decision:
    return backends.choose(
      problem,
      target,
      call.implementation,
      overlay=call.overlay,
      for_export=for_export,
      is_of_layer=call.is_of_layer,
    )

  return choice.decide(eqn, target, choose, for_export=for_export)
