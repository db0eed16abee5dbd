# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether results are what they must be, to the last bit."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import numpy as np

from jaxplugin.dot import reference

# gelu and silu are no sums: implementations approximate tanh and exp in f32.
# Their own tests hold them to their bound; this tells one activation from
# another, and a wrong product.
_ACTIVATION_ERROR: Final = 2.0**-16


class WrongResultError(Exception):
  """A result is wrong; the text says where."""

  kind = "wrong"


def check(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  """Raises WrongResultError unless a result has the expected numbers.

  Zeros of either sign are one. After gelu and silu the numbers may err by the
  approximation of these.

  Args:
    result: of exact operands.
    expected: as of `operands.Made`.
    problem: what was computed.
  """
  _check_type(result, expected, problem)
  got: Any = np.asarray(result).astype(np.float32)
  exact = expected.astype(np.float32)
  limit = np.zeros_like(exact)
  if getattr(problem, "activation", None) in ("gelu", "silu"):
    rounding = reference.rounding_error(problem.out_dtype)
    limit = (np.abs(exact) + 1) * np.float32(_ACTIVATION_ERROR + rounding)
  # NaN is within no limit.
  differs = ~((got == exact) | (np.abs(got - exact) <= limit))
  if differs.any():
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    raise WrongResultError(
      f"{problem}: at {at} got {got[at]:.8g}, exact {exact[at]:.8g};"
      f" {np.count_nonzero(differs)} of {differs.size} elements differ"
    )


def check_bits(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  """Raises WrongResultError unless each code is the expected one.

  Args:
    result: of whatever dtype.
    expected: of the same shape and dtype.
    problem: what was computed.
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
    raise WrongResultError(
      f"{problem}: at {at} got {expected.dtype.name} {got[at]:#x}, exact"
      f" {exact[at]:#x}; {np.count_nonzero(differs)} of {differs.size} differ"
    )


def _check_type(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  if result.dtype != expected.dtype or result.shape != expected.shape:
    raise WrongResultError(
      f"{problem}: got {result.dtype.name}{list(result.shape)}, exact"
      f" {expected.dtype.name}{list(expected.shape)}"
    )
