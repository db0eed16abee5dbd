# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks results before they are timed, in NumPy and f64.

The checks do not use the measured code. `ml_dtypes` decodes the operands, and
`oracle` quantizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import reference
from jaxplugin.repro import oracle

# Bounds in units of sum(|a * b|). The package documents `OURS_BOUND`. Peers do
# not document bounds, so `PEER_BOUND` only finds wrong results. It allows 256
# roundings of f32; XLA's bf16 dot on a CPU reaches 51.
OURS_BOUND: Final = reference.ERROR_BOUND
PEER_BOUND: Final = 256 * 2.0**-24
UNIT: Final = 2.0**-24

_MAX_ROWS: Final = 32
_MAX_COLUMNS: Final = 512  # of a result whose relative error is computed
_MAX_WEIGHTS: Final = 1 << 24  # number of values of rhs that are checked


class WrongResultError(Exception):
  """A result is wrong. The message has the place and the error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedSample:
  """Some rows and columns of an exact result."""

  rows: np.ndarray  # their indices
  columns: np.ndarray
  exact: np.ndarray  # f64[rows, columns]
  magnitude: np.ndarray  # f64[rows, columns], sum(|a * b|)


def some(size: int, count: int) -> np.ndarray:
  """Returns up to `count` indices below `size`, including first and last."""
  if size <= count:
    return np.arange(size)
  inner = np.random.default_rng(size).choice(
    np.arange(1, size - 1), count - 2, replace=False
  )
  return np.sort(np.concatenate([[0], inner, [size - 1]]))


def expected_dot(lhs: Any, rhs: Any) -> ExpectedSample:
  """Returns a sample of the exact product of lhs (m, k) and rhs (n, k).

  The sample has all columns if rhs has at most 2^24 values.
  """
  (m, k), n = lhs.shape, rhs.shape[0]
  rows = some(m, _MAX_ROWS)
  columns = some(n, max(2, _MAX_WEIGHTS // k))
  a, b = f64(lhs, rows), f64(rhs, columns).T
  return ExpectedSample(
    rows=rows,
    columns=columns,
    exact=a @ b,
    magnitude=_magnitude(lhs, rows, a) @ _magnitude(rhs, columns, b.T).T,
  )


def _magnitude(
  operand: Any, rows: np.ndarray, values: np.ndarray
) -> np.ndarray:
  """Returns f64[rows, k], the unit of errors of `values` from `f64`.

  With zero points or minima it is |stored * scale| + |term| for a value
  `stored * scale + term`.
  """
  if getattr(operand, "offset", None) is None:
    return np.abs(values)
  terms = _terms(operand, rows)
  return np.abs(values - terms) + np.abs(terms)


def _terms(operand: scaled_array.ScaledArray, rows: np.ndarray) -> np.ndarray:
  """Returns f64[rows, k], what zero points or minima add to each value."""
  k = operand.shape[-1]
  scale, offset = (np.asarray(x)[rows] for x in (operand.scale, operand.offset))
  return reference.oracle_terms(scale, offset, operand.format.along(k), k)


def f64(operand: Any, rows: np.ndarray) -> np.ndarray:
  """Returns f64[rows, k], exact rows of floats or of a ScaledArray."""
  if not isinstance(operand, scaled_array.ScaledArray):
    return np.asarray(operand)[rows].astype(np.float64)
  format = operand.format.along(operand.shape[-1])
  values = reference.oracle_dequantize(
    np.asarray(operand.unpack().values)[rows],
    np.asarray(operand.scale)[rows // format.block_rows],
    format,
  )
  if operand.global_scale is not None:
    values = values * np.float64(operand.global_scale)
  if operand.offset is not None:
    values = values + _terms(operand, rows)
  return values


def check_dot(
  result: Any, expected: ExpectedSample, *, bound: float, relative: float = 0
) -> float:
  """Returns the largest error in units of 2^-24 * sum(|a * b|).

  Args:
    result: f32, bf16 or f16[m, n].
    expected: the exact result.
    bound: bound of the error before the cast to the result's dtype, in units of
      sum(|a * b|).
    relative: additional relative error of the result.

  Raises:
    WrongResultError: If an element is not finite, or its error is larger.
  """
  result = np.asarray(result)
  dtype = result.dtype
  result = result.astype(np.float32)
  if not np.isfinite(result).all():
    count = np.count_nonzero(~np.isfinite(result))
    raise WrongResultError(f"{count} of {result.size} elements are not finite")
  exact = expected.exact
  error = np.abs(result[np.ix_(expected.rows, expected.columns)] - exact)
  before_cast = bound * expected.magnitude
  cast_error = reference.rounding_error(dtype)
  limit = before_cast + (np.abs(exact) + before_cast) * (cast_error + relative)
  if not (error <= limit).all():
    r, c = np.unravel_index(np.argmax(error - limit), error.shape)
    at = int(expected.rows[r]), int(expected.columns[c])
    raise WrongResultError(
      f"at {at}: got {result[at]:.8g}, exact {exact[r, c]:.8g}, error"
      f" {error[r, c]:.3g} above the bound {limit[r, c]:.3g}"
    )
  # Subtracts the largest error of the cast to the result's dtype.
  own = np.maximum(error - np.abs(exact) * cast_error, 0)
  magnitude = np.maximum(expected.magnitude, np.finfo(np.float64).tiny)
  return float(np.max(own / magnitude) / UNIT)


def relative_error(result: Any, lhs: Any, rhs: Any) -> float:
  """Returns norm(result - exact) / norm(exact) of some rows and columns.

  `lhs` has unquantized activations [m, k], and `rhs` the weights [n, k] as the
  measured code rounded them.
  """
  rows = some(lhs.shape[0], _MAX_ROWS)
  columns = some(rhs.shape[0], _MAX_COLUMNS)
  exact = f64(lhs, rows) @ f64(rhs, columns).T
  found = np.asarray(result)[np.ix_(rows, columns)].astype(np.float64)
  return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def check_quantized(result: scaled_array.ScaledArray, x: Any) -> None:
  """Raises WrongResultError unless some rows have the bits of `oracle`.

  Args:
    result: `x`, quantized along its last axis with scales rounded up.
    x: f32[m, k] of normal, finite numbers.
  """
  x = np.asarray(x)
  rows = some(len(x), _MAX_ROWS)
  format = result.format
  result = result.unpack()
  global_scale = oracle.global_scale_of(x, format)
  if global_scale is not None:
    given = np.asarray(result.global_scale).item()
    if given != global_scale:
      raise WrongResultError(f"global scale {given}, expected {global_scale}")
  values, scale = oracle.quantize_rows(x[rows], format, global_scale)
  for name, got, expected in (
    ("scale ", result.scale, scale),
    ("values ", result.values, values),
  ):
    got = np.asarray(got)[rows]
    # An E2M1 code is in the low half of its byte. The high half is ignored.
    mask = 15 if got.dtype == formats.E2M1 else 255
    differ = (got.view(np.uint8) ^ expected.view(np.uint8)) & mask != 0
    _check_equal(name, got, expected, rows, differ)


def check_dequantized(result: Any, x: scaled_array.ScaledArray) -> None:
  """Raises WrongResultError unless some rows of f32[m, k] have x's values.

  The values of `x` are normal f32 numbers, or zero.
  """
  rows = some(len(result), _MAX_ROWS)
  exact = reference.oracle_dequantize(
    np.asarray(x.unpack().values)[rows], np.asarray(x.scale)[rows], x.format
  ).astype(np.float32)
  if x.global_scale is not None:
    exact = exact * np.asarray(x.global_scale)
  got = np.asarray(result)[rows]
  _check_equal("", got, exact, rows, got != exact)


def _check_equal(
  name: str,
  got: np.ndarray,
  expected: np.ndarray,
  rows: np.ndarray,
  differ: np.ndarray,
) -> None:
  if differ.any():
    r, c = (int(i) for i in np.argwhere(differ)[0])
    raise WrongResultError(
      f"{name}at {(int(rows[r]), c)}: got {got[r, c]}, expected"
      f" {expected[r, c]}; {np.count_nonzero(differ)} of {differ.size} differ"
    )
