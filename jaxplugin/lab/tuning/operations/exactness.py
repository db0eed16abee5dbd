# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares results with the exact ones."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import numpy as np

from jaxplugin.dot import reference

# Implementations of gelu and silu approximate tanh and exp in f32. Their tests
# check a tighter bound. This bound only finds a wrong activation or matmul.
_ACTIVATION_ERROR: Final = 2.0**-16


class InexactResultError(Exception):
  """A candidate's result is wrong. The message has the place."""

  kind = "wrong"


def check(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  """Raises InexactResultError unless a result has the expected numbers.

  0 and -0 are equal. Results of gelu and silu may have an approximation error.

  Args:
    result: the result for exact operands.
    expected: the expected result.
    problem: the computed problem.
  """
  _check_type(result, expected, problem)
  got: Any = np.asarray(result).astype(np.float32)
  exact = expected.astype(np.float32)
  limit = np.zeros_like(exact)
  if getattr(problem, "activation", None) in ("gelu", "silu"):
    rounding = reference.rounding_error(problem.out_dtype)
    limit = (np.abs(exact) + 1) * np.float32(_ACTIVATION_ERROR + rounding)
  # Comparisons with NaN are false, so NaN differs.
  differs = ~((got == exact) | (np.abs(got - exact) <= limit))
  if differs.any():
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    raise InexactResultError(
      f"{problem}: at {at} got {got[at]:.8g}, exact {exact[at]:.8g};"
      f" {np.count_nonzero(differs)} of {differs.size} elements differ"
    )


def check_bits(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  """Raises InexactResultError unless each code equals the expected one.

  Args:
    result: an array of any dtype.
    expected: the codes, of the same shape and dtype.
    problem: the computed problem.
  """
  _check_type(result, expected, problem)
  size = expected.dtype.itemsize
  got, exact = (
    np.ascontiguousarray(np.atleast_1d(x)).view(f"u{size}")
    for x in (np.asarray(result), expected)
  )
  differs = got != exact
  if differs.any():
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    raise InexactResultError(
      f"{problem}: at {at} got {expected.dtype.name} {got[at]:#x}, exact"
      f" {exact[at]:#x}; {np.count_nonzero(differs)} of {differs.size} differ"
    )


def _check_type(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  if result.dtype != expected.dtype or result.shape != expected.shape:
    raise InexactResultError(
      f"{problem}: got {result.dtype.name}{list(result.shape)}, exact"
      f" {expected.dtype.name}{list(expected.shape)}"
    )
