# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the dots of one library, in a separate process.

`processes` starts the process, and sends requests to `answer`. A module with a
library has the constant `LIBRARY`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from jaxplugin.lab.bench import execution
from jaxplugin.lab.bench.peers import verification

BLOCK: Final = 32  # number of weights that share a scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A type of weights that a library multiplies."""

  name: str  # of the variant, without the library's name
  value_bits: int  # of a weight
  scale_bits: float = 0  # of a weight's part of a scale
  forms: tuple[str, ...] = ("",)  # The fastest form counts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A dot of lhs f32[m, k] and rhs f32[n, k], which the library quantizes."""

  lhs: np.ndarray
  rhs: np.ndarray
  copies: int  # of the weights, to rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """A dot that is ready to run."""

  run: Callable[[int], Any]  # multiplies lhs with copy i of the weights
  result: Callable[[], np.ndarray]  # returns [m, n] of copy 0
  weights: np.ndarray  # f32[n, k], dequantized by the library's definition


class Library(Protocol):
  """A library. The class is called with the number of threads."""

  def prepare(self, kind: str, form: str, case: Case) -> Prepared:
    """Quantizes the weights. Raises any error if the library cannot."""


def integers(
  weights: np.ndarray, bits: int, block: int = BLOCK
) -> tuple[np.ndarray, np.ndarray]:
  """Quantizes f32[n, k] to symmetric integers.

  Returns:
    Whole numbers f32[n, k / block, block] and scales f32[n, k / block, 1].
  """
  blocks = weights.reshape(len(weights), -1, block)
  largest = 2 ** (bits - 1) - 1
  amax = np.abs(blocks).max(axis=-1, keepdims=True)
  scale = np.where(amax == 0, 1, amax / largest).astype(np.float32)
  return np.clip(np.rint(blocks / scale), -largest, largest), scale


def packed(codes: np.ndarray) -> np.ndarray:
  """Packs codes of 4 bits, the first in the low half of a byte."""
  codes = codes.astype(np.uint8)
  return codes[..., 0::2] | (codes[..., 1::2] << 4)


def answer(request: dict[str, Any], tell: Callable[[Any], None]) -> Any:
  """Prepares or times a dot. A job of `child_process.serve`."""
  del tell
  return _dots(request["library"], request["threads"]).handle(request)


@functools.cache
def _dots(library: str, threads: int) -> _Dots:
  return _Dots(importlib.import_module(library).LIBRARY(threads))


class _Dots:
  """The dots that are ready to run. All have the same operands."""

  def __init__(self, library: Library):
    self._library = library
    self._operands: Any = None
    self._prepared: dict[tuple[str, str], tuple[Prepared, float]] = {}
    self._position = 0

  def handle(self, request: dict[str, Any]) -> dict[str, Any]:
    key = request["kind"], request["form"]
    if "lhs" in request:
      return {"relative_error": self._prepare(key, request)}
    return {"milliseconds": self._sample(self._prepared[key][0])}

  def _prepare(self, key: tuple[str, str], request: dict[str, Any]) -> float:
    operands = request["lhs"], request["rhs"]
    if operands != self._operands:
      self._prepared.clear()
      self._operands = operands
    if key not in self._prepared:
      lhs, rhs = map(np.load, operands)
      case = Case(lhs=lhs, rhs=rhs, copies=request["copies"])
      dot = self._library.prepare(*key, case)
      dot.run(0)
      error = verification.relative_error(dot.result(), lhs, dot.weights)
      dot = dataclasses.replace(dot, weights=np.empty(0))
      self._prepared[key] = dot, error
    return self._prepared[key][1]

  def _sample(self, dot: Prepared) -> float:
    """Returns the median milliseconds of calls that follow untimed calls."""

    def timed(position: int) -> float:
      start = time.perf_counter()
      dot.run(position)
      return time.perf_counter() - start

    seconds, self._position = execution.settled(dot.run, timed, self._position)
    return seconds * 1e3
