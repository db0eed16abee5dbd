# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one list of operations that are tuned."""

from __future__ import annotations

from typing import Final

from jaxplugin.dot import problems
from jaxplugin.lab.tuning.operations import dots
from jaxplugin.lab.tuning.operations import mixtures
from jaxplugin.lab.tuning.operations import quantizing
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.quantization import problems as quantization
from jaxplugin.ragged import problems as ragged

_BY_PROBLEM: Final[dict[type, tuned.Tuned]] = {
  problems.DotProblem: dots.DOT,
  quantization.QuantizeProblem: quantizing.QUANTIZE,
  quantization.DequantizeProblem: quantizing.DEQUANTIZE,
  ragged.RaggedProblem: mixtures.RAGGED,
  ragged.ContractionProblem: mixtures.CONTRACTION,
}
BY_NAME: Final = {t.operation.name: t for t in _BY_PROBLEM.values()}


def of(problem: tuned.Problem) -> tuned.Tuned:
  """The operation whose problem it is."""
  return _BY_PROBLEM[type(problem)]
