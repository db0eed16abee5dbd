# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`TunedOperation`: an operation whose backends the tuner checks and times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.lab.tuning.candidates import spaces
from jaxplugin.lab.tuning.operations import operands
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import problems as ragged
from jaxplugin.tables import matching
from jaxplugin.tables import resolution

Problem = (
  problems.DotProblem
  | ragged.RaggedDotProblem
  | ragged.ContractionProblem
  | quantization.QuantizationProblem
  | quantization.DequantizationProblem
)

_NO_TABLES: Final = resolution.Overlay(is_alone=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedOperation:
  """One operation. Its functions are passed a problem of the operation.

  Attributes:
    operation: the description that tuning tables use.
    choose: (problem, target, overlay) -> the decision.
    refusal: why `build` cannot create operands; "" if it can.
    build: (problem, rng, is_exact) -> operands by name, and the expected result
      if `is_exact`.
    compute: (problem, operands by name) -> the result.
    flops: number of floating-point operations.
    tail: returns a small problem of the same kind. Tiles do not divide its
      sizes.
    check: (result, expected, problem); raises `operands.InexactResultError`.
    poisoned: returns the problem with NaN in the padding of scales; None if
      scales cannot be padded.
    spaces: functions that return a backend's configs, by backend. Other
      backends list their configs themselves.
    compiles: whether `triton_dots` compiles its Triton kernels.
  """

  operation: matching.MeasuredOperation[Any]
  choose: Callable[..., decisions.Decision]
  refusal: Callable[[Any], str]
  build: Callable[[Any, np.random.Generator, bool], tuple[dict[str, Any], Any]]
  compute: Callable[[Any, dict[str, Any]], Any]
  flops: Callable[[Any], int]
  tail: Callable[[Any], Any]
  check: Callable[[Any, Any, Any], None] = operands.check
  poisoned: Callable[[Any], Any] = lambda problem: None
  spaces: Mapping[
    str, Callable[[Any, targets.Target, spaces.SearchLimits], spaces.Space]
  ] = dataclasses.field(default_factory=dict)
  compiles: bool = False

  def default(self, problem: Any, target: targets.Target) -> decisions.Decision:
    """Returns the decision without tuning tables."""
    return self.choose(problem, target, overlay=_NO_TABLES)

  def make(
    self, problem: Any, seed: int, is_exact: bool = True
  ) -> tuple[dict[str, jax.Array], Any]:
    """Returns a problem's operands by name, and the expected result.

    The result is exact except for the final rounding and the error of an
    activation. It is None unless `is_exact`.

    Raises:
      operands.OperandsError: If `refusal` has a reason.
    """
    if why := self.refusal(problem):
      raise operands.OperandsError(
        f"cannot create operands of {problem}: {why}"
      )
    rng = np.random.default_rng(seed)
    arrays, expected = self.build(problem, rng, is_exact)
    return jax.tree.map(jnp.asarray, arrays), expected
