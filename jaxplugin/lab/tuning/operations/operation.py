# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""An operation whose backends the tuner checks and times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import decisions, targets
from jaxplugin.dot import problems
from jaxplugin.lab.tuning.operations import operands
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import calls
from jaxplugin.tables import records, resolution

Problem = (
  problems.DotProblem
  | calls.RaggedDotProblem
  | calls.ContractionProblem
  | quantization.QuantizationProblem
  | quantization.DequantizationProblem
)

_NO_TABLES: Final = resolution.Overlay(is_alone=True)


# A tile is pruned if its estimate is more than this many times the larger of
# the least estimate and the time of a launch.
MARGIN: Final = 2.0


def words(config: Iterable[tuple[str, records.Scalar]]) -> str:
  """Returns the fields of a config: "block_m=16 swap=true"."""
  return " ".join(
    f"{name}={str(value).lower() if isinstance(value, bool) else value}"
    for name, value in config
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pruned:
  """Configs that are not measured for the same reason, with an example."""

  rule: str  # one of `listing.RULES`
  reason: str
  implementation: str
  count: int = 1
  example: records.Fields = ()

  def __str__(self) -> str:
    number = "configs"
    if self.count == 1:
      number = f"config ({words(self.example)})".removesuffix(" ()")
    return (
      f"{self.rule}: {self.count} {self.implementation} {number}: {self.reason}"
    )

  def to_json(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "example": dict(self.example)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
  """The configs of one backend for a problem."""

  # Those to measure. The first is (), the backend's default.
  configs: tuple[records.Fields, ...]
  pruned: tuple[Pruned, ...] = ()  # the other configs
  notes: tuple[str, ...] = ()  # sentences about the model


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
    spaces: by backend, (problem, target, margin) -> its configs. Other backends
      list their configs themselves.
    compiles: whether `triton_dots` compiles its Triton kernels.
  """

  operation: resolution.MeasuredOperation[Any]
  choose: Callable[..., decisions.Decision]
  refusal: Callable[[Any], str]
  build: Callable[[Any, np.random.Generator, bool], tuple[dict[str, Any], Any]]
  compute: Callable[[Any, dict[str, Any]], Any]
  flops: Callable[[Any], int]
  tail: Callable[[Any], Any]
  check: Callable[[Any, Any, Any], None] = operands.check
  poisoned: Callable[[Any], Any] = lambda problem: None
  spaces: Mapping[str, Callable[[Any, targets.Target, float], Space]] = (
    dataclasses.field(default_factory=dict)
  )
  compiles: bool = False

  def default(self, problem: Any, target: targets.Target) -> decisions.Decision:
    """Returns the decision without tuning tables."""
    return self.choose(problem, target, overlay=_NO_TABLES)

  def make(
    self, problem: Any, seed: int, is_exact: bool = True
  ) -> tuple[dict[str, jax.Array], Any]:
    """Returns a problem's operands by name, and the expected result.

    The result is None unless `is_exact`. Only its last rounding and its
    activation have errors.

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
