# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of operations that the tuner supports."""

from __future__ import annotations

from typing import Final

from jaxplugin.dot import problems
from jaxplugin.lab.tuning.operations import (
  dots,
  operation,
  quantization,
  ragged,
)
from jaxplugin.quantization import problems as quantization_problems
from jaxplugin.ragged import calls

_BY_PROBLEM: Final[dict[type, operation.TunedOperation]] = {
  problems.DotProblem: dots.DOT,
  quantization_problems.QuantizationProblem: quantization.QUANTIZE,
  quantization_problems.DequantizationProblem: quantization.DEQUANTIZE,
  calls.RaggedDotProblem: ragged.RAGGED,
  calls.ContractionProblem: ragged.CONTRACTION,
}
BY_NAME: Final = {found.operation.name: found for found in _BY_PROBLEM.values()}


def of(problem: operation.Problem) -> operation.TunedOperation:
  """Returns the record of a problem's operation."""
  return _BY_PROBLEM[type(problem)]


def name_of(problem: operation.Problem) -> str:
  """Returns the name of a problem's operation."""
  return of(problem).operation.name
