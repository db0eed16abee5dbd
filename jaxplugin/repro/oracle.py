# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of calls in NumPy and f64, with bounds on the error of kernels.

Only byte layouts (packed, interleaved, swizzled) are undone by the code of the
package. The bound is the one of docs/concepts/numerics.md for any data:

  32 roundings of f32, and for each 16 products a truncation of 2 roundings

in units of sum(|a * b|), then the roundings of the epilogue and of the cast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import arguments, calls, reference, sides
from jaxplugin.quantization import problems
from jaxplugin.ragged import calls as ragged
from jaxplugin.ragged import epilogue

_ROUNDING: Final = 2.0**-24
_MIN_NORMAL: Final = 2.0**-126  # smaller f32 numbers may be flushed to 0
_EPILOGUE_ROUNDINGS: Final = 16
_MAX_SLOPE: Final = 1.13  # of gelu and silu
# precision="fastest": int8 rows, or 4 sums of 33 numbers with 13 bits.
_FASTEST: Final = 1 / 127 + 4 * 33 * 2.0**-13
_AMAX_ERROR: Final = 2.0**-16  # of a prologue's result, relative
_LEAST: Final = 2.0**-96  # quantizing smaller numbers may flush some
_MAX_WORK: Final = 1 << 35  # multiplications of one dot; some rows beyond

# Largest error divided by its bound, where more than 1 is wrong; and a text
# with the place and the numbers of the largest error.
Difference = tuple[float, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
  """An exact result, or some rows of it.

  Attributes:
    exact: f64[batch, rows, columns], before the cast.
    bound: largest error before the cast, of the same shape.
    rows: the rows of the result, as [batch, rows, columns].
  """

  exact: np.ndarray
  bound: np.ndarray
  rows: np.ndarray

  def check(self, result: Any, relative_error: float = 0.0) -> Difference:
    """Compares a result of a kernel.

    A NaN must be NaN. An element may be anything if its bound exceeds the range
    of the result.

    Args:
      result: the result of the call.
      relative_error: see `decisions.Plan`.
    """
    result = np.asarray(result)
    info = jnp.finfo(result.dtype)
    shape = (self.exact.shape[0], -1, self.exact.shape[2])
    got = result.reshape(shape)[:, self.rows].astype(np.float64)
    rounding = reference.rounding_error(result.dtype) + relative_error
    tiny = max(_MIN_NORMAL, float(info.smallest_subnormal))
    with np.errstate(invalid="ignore", over="ignore"):
      size = np.abs(self.exact) + self.bound
      limit = self.bound + size * rounding + tiny
      ratio = np.abs(got - self.exact) / limit
    ratio = np.where(np.isfinite(got), ratio, np.inf)
    ratio = np.where(size < float(info.max), ratio, 0.0)
    is_nan = np.isnan(self.exact)
    ratio = np.where(is_nan, np.where(np.isnan(got), 0.0, np.inf), ratio)
    if not ratio.size:
      return 0.0, ""
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    batch, row, column = map(int, at)
    rows = result.size // (shape[0] * shape[2])
    flat = (batch * rows + int(self.rows[row])) * shape[2] + column
    where = list(map(int, np.unravel_index(flat, result.shape)))
    return float(ratio[at]), (
      f"at {where}: got {got[at]:.8g}, exact {self.exact[at]:.8g},"
      f" bound {limit[at]:.3g}; {np.count_nonzero(ratio > 1)} of {ratio.size}"
      " are beyond their bounds"
    )


def _values(side: sides.Side) -> np.ndarray:
  """Returns an operand in f64, without its global scale."""
  if side.format is None:
    return np.asarray(side.values).astype(np.float64)
  side = side.as_elements().in_usual_order().with_linear_scale()
  assert side.format is not None and side.axis is not None
  return reference.oracle_dequantize(
    np.asarray(side.values), np.asarray(side.scale), side.format, axis=side.axis
  )


def _terms(side: sides.Side, offset: arguments.Offset) -> np.ndarray:
  """Returns in f64 what zero points or minima add to an operand."""
  axis = side.axis
  assert axis is not None
  scale, size = side.as_elements().linear_scale(), side.shape[axis]
  return reference.oracle_terms(
    np.asarray(scale), offset.array, offset.format, size, axis=axis
  )


def _f64(x: Any, shape: Sequence[int] = ()) -> np.ndarray:
  return np.broadcast_to(np.asarray(x).astype(np.float64), shape or np.shape(x))


def _product(
  lhs: np.ndarray,
  rhs: np.ndarray,
  terms: np.ndarray | None = None,
  *,
  is_fastest: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns [..., m, k] x [..., n, k] and the bound of its sums in f32.

  `terms` are added to rhs. A kernel adds their products separately.
  """
  if terms is not None:
    both = [_product(lhs, x, is_fastest=is_fastest) for x in (rhs, terms)]
    (exact, bound), (more, more_bound) = both
    return exact + more, bound + more_bound + _ROUNDING * np.abs(exact + more)
  rhs = np.swapaxes(rhs, -1, -2)
  k = lhs.shape[-1]
  with np.errstate(invalid="ignore", over="ignore"):
    exact = lhs @ rhs
    magnitude = np.abs(lhs) @ np.abs(rhs)
    bound = (32 + math.ceil(k / 16) * 2) * _ROUNDING * magnitude
    if is_fastest:
      (lhs_sum, lhs_max), (rhs_sum, rhs_max) = (
        (
          size.sum(axis, keepdims=True),
          size.max(axis, keepdims=True, initial=0),
        )
        for size, axis in ((np.abs(lhs), -1), (np.abs(rhs), -2))
      )
      bound = bound + _FASTEST * (lhs_max * rhs_sum + lhs_sum * rhs_max)
    # A dequantized value below the range of f32 may be flushed to 0.
    flushed = [np.where(np.abs(x) < _MIN_NORMAL, 0, x) for x in (lhs, rhs)]
    if any((a != b).any() for a, b in zip(flushed, (lhs, rhs), strict=True)):
      bound = bound + magnitude - np.abs(flushed[0]) @ np.abs(flushed[1])
  return exact, bound


def dot(
  call: calls.DotCall, offset: arguments.Offset | None = None
) -> Expected:
  """Returns the exact result of a dot, of some rows if it is large.

  The offset, if there is one, belongs to rhs.
  """
  lhs, rhs = (_merged(side, _values(side)) for side in (call.lhs, call.rhs))
  terms = None
  if offset is not None:
    terms = _merged(call.rhs, _terms(call.rhs, offset))
  batch, m, k = lhs.shape
  n = rhs.shape[1]
  most = max(1, _MAX_WORK // max(batch * n * k, 1))
  rows = np.unique(np.linspace(0, m - 1, min(m, most)).astype(np.int64))
  exact, bound = _product(
    lhs[:, rows], rhs, terms, is_fastest=call.fastest_precision
  )

  def of_rows(x: Any) -> Any:
    return _f64(x, call.shape).reshape(batch, m, n)[:, rows]

  scales = [call.global_scale, call.global_power]
  if call.global_scale is None:  # else the others are its factors
    scales = [call.first_global_scale, call.second_global_scale]
  for scale in scales:
    if scale is not None:
      exact, bound = exact * of_rows(scale), bound * np.abs(of_rows(scale))
  exact, bound = _activated(
    exact,
    bound,
    None if call.bias is None else of_rows(call.bias),
    call.activation,
  )
  if call.residual is not None:
    residual = of_rows(call.residual)
    bound = bound + _EPILOGUE_ROUNDINGS * _ROUNDING * np.abs(residual)
    exact = exact + residual
  return Expected(exact=exact, bound=bound, rows=rows)


def _merged(side: sides.Side, x: np.ndarray) -> np.ndarray:
  """Returns an array of the operand's shape as [batch, rows, k]."""
  kinds = (side.batch, side.free, side.contracting)
  sizes = [math.prod(x.shape[d] for d in dims) for dims in kinds]
  return x.transpose([d for dims in kinds for d in dims]).reshape(sizes)


# Activations in f64.
ACTIVATIONS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
  "relu": lambda x: np.maximum(x, 0),
  # by tanh: Hendrycks and Gimpel, arXiv:1606.08415
  "gelu": lambda x: (
    x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  ),
  "silu": lambda x: x * _sigmoid(x),
}


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return (1 + np.tanh(x / 2)) / 2


def _activated(
  exact: np.ndarray,
  bound: np.ndarray,
  bias: np.ndarray | None,
  activation: str | None,
) -> tuple[np.ndarray, np.ndarray]:
  """Applies bias and activation; returns the result and its bound."""
  roundings = _EPILOGUE_ROUNDINGS * _ROUNDING
  with np.errstate(invalid="ignore", over="ignore"):
    bound = bound + roundings * np.abs(exact)
    if bias is not None:
      exact, bound = exact + bias, bound + roundings * np.abs(bias)
    if activation is None:
      return exact, bound
    if activation in ACTIVATIONS:
      exact = ACTIVATIONS[activation](exact)
      return exact, _MAX_SLOPE * bound + roundings * np.abs(exact)
    if activation == "swiglu":
      gate, up = np.split(exact, 2, axis=-1)
      gate_bound, up_bound = np.split(bound, 2, axis=-1)
      gate = ACTIVATIONS["silu"](gate)
    else:  # "swigluoai", see ragged/epilogue.py
      limit = epilogue.OAI_LIMIT
      gate = np.minimum(exact[..., 0::2], limit)
      gate = gate * _sigmoid(epilogue.OAI_ALPHA * gate)
      up = np.clip(exact[..., 1::2], -limit, limit) + 1
      gate_bound, up_bound = bound[..., 0::2], bound[..., 1::2]
    gate_bound = _MAX_SLOPE * gate_bound + roundings * np.abs(gate)
    exact = gate * up
    bound = gate_bound * (np.abs(up) + up_bound) + np.abs(gate) * up_bound
    return exact, bound + roundings * np.abs(exact)


def ragged_dot(
  call: ragged.RaggedDotCall, offset: arguments.Offset | None = None
) -> Expected:
  """Returns the exact result of a ragged dot. Rows without a group are 0.

  The offset, if there is one, belongs to rhs.
  """
  lhs = _values(call.lhs)
  shape = (call.num_rows, call.columns)
  exact, bound = np.zeros(shape), np.zeros(shape)
  bias = None if call.bias is None else np.zeros(shape)
  for g, rows in enumerate(_groups(call)):
    if rows.start == rows.stop:  # a stack of layers may have many of these
      continue
    group = slice(g, g + 1)
    side = call.rhs
    scale = None if side.scale is None else side.scale[group]
    side = side.replace(values=side.values[group], scale=scale)
    terms = None
    if offset is not None:
      array = offset.array[group]
      terms = _terms(side, dataclasses.replace(offset, array=array))[0]
    rhs = np.moveaxis(_values(side), side.contracting[0], 2)[0]
    exact[rows], bound[rows] = _product(
      lhs[rows], rhs, terms, is_fastest=call.fastest_precision
    )
    for scale in (call.global_scale, call.global_power):
      if scale is not None:
        factor = _f64(scale)
        factor = factor[g] if factor.ndim == 1 else factor
        factor = factor[rows] if factor.ndim == 2 else factor
        exact[rows] *= factor
        bound[rows] *= np.abs(factor)
    if bias is not None:
      bias[rows] = _f64(call.bias)[g]
  exact, bound = _activated(exact, bound, bias, call.activation)
  every = np.arange(call.num_rows)
  return Expected(exact=exact[None], bound=bound[None], rows=every)


def contraction(call: ragged.RaggedContraction) -> Expected:
  """Returns the exact result of a ragged contraction."""
  lhs, rhs = _values(call.lhs), _values(call.rhs)
  sums = [_product(lhs[rows].T, rhs[rows].T) for rows in _groups(call)]
  exact, bound = (
    np.stack(x).reshape(call.shape) for x in zip(*sums, strict=True)
  )
  for scale in (call.global_scale, call.global_power):
    if scale is not None:
      exact, bound = exact * _f64(scale), bound * np.abs(_f64(scale))
  bound = bound + _EPILOGUE_ROUNDINGS * _ROUNDING * np.abs(exact)
  return Expected(exact=exact, bound=bound, rows=np.arange(call.shape[1]))


def _groups(call: ragged.Call) -> list[slice]:
  """Returns the rows of each group."""
  sizes = np.asarray(call.group_sizes).astype(np.int64)
  ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), call.num_rows)
  return [
    slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)
  ]


def dequantized(
  problem: problems.DequantizationProblem,
  arrays: Sequence[Any],
) -> Expected:
  """Returns the exact result of dequantizing."""
  stored, scale = map(np.asarray, arrays[:2])
  exact = reference.oracle_dequantize(
    stored, scale, problem.format, axis=problem.axis
  )
  if len(arrays) > 2:
    exact = exact * _f64(arrays[2])
  exact = exact.reshape(1, 1, -1)
  with np.errstate(invalid="ignore"):
    bound = 2 * _ROUNDING * np.abs(exact)
    # The values times the block scales may be flushed first.
    bound = np.where(np.abs(exact) < _MIN_NORMAL, np.abs(exact), bound)
  return Expected(exact=exact, bound=bound, rows=np.arange(1))


def same_bits(got: Sequence[Any], expected: Sequence[Any]) -> Difference:
  """Compares codes and scales, which all implementations compute alike."""
  for i, (a, b) in enumerate(zip(got, expected, strict=True)):
    a, b = np.asarray(a), np.asarray(b)
    codes = [x.reshape(-1).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    # The high half of the byte of a 4-bit float is not part of it.
    mask = 15 if a.dtype == jnp.float4_e2m1fn else ~codes[0].dtype.type(0)
    differ = (codes[0] ^ codes[1]) & mask != 0
    if differ.any():
      at = int(np.argmax(differ))
      where = tuple(map(int, np.unravel_index(at, a.shape)))
      return math.inf, (
        f"result {i} at {list(where)}: got {codes[0][at]:#x}, expected"
        f" {codes[1][at]:#x}; {np.count_nonzero(differ)} of {differ.size}"
        " differ"
      )
  return 0.0, ""


def near(
  got: Sequence[Any],
  expected: Sequence[Any],
  problem: problems.QuantizationProblem,
) -> Difference:
  """Compares codes of a prologue's results, which may differ by some ulp.

  Values then differ by at most one step of the format, in the larger of two
  scales. A step is at most twice the relative spacing of the block's amax.
  """
  size, format = problem.results_each, problem.format
  spacing = (
    1 / ml_dtypes.iinfo(format.values_dtype).max
    if format.is_integer
    else float(ml_dtypes.finfo(format.values_dtype).eps)
  )

  def blocks(results: Sequence[Any], i: int, axis: int) -> np.ndarray:
    values, scale = results[i * size :][:2]
    x = reference.oracle_dequantize(values, scale, format, axis=axis)
    x = np.moveaxis(x, axis, -1)
    return x.reshape(*x.shape[:-1], -1, format.block_size)

  worst: Difference = (0.0, "")
  for i, single in enumerate(problem.each()):
    axis = single.blockings[0].axis()
    a, b = (blocks(results, i, axis) for results in (got, expected))
    with np.errstate(invalid="ignore", divide="ignore"):
      amax = np.maximum(np.abs(a), np.abs(b)).max(-1, keepdims=True)
      step = 2 * spacing * amax
      ratio = np.where(a == b, 0, np.abs(a - b) / step)
    ratio = np.where(np.isnan(a) & np.isnan(b), 0, ratio)
    ratio = np.where(np.isnan(ratio), math.inf, ratio)
    if ratio.size and ratio.max() > worst[0]:
      at = np.unravel_index(np.argmax(ratio), a.shape)
      text = f"result {i}, block {list(map(int, at[:-1]))}"
      worst = float(ratio.max()), f"{text}: got {a[at]}, expected {b[at]}"
  first = len(problem.blockings) * size  # the amax and the sums, if any, follow
  if problem.returns_amax:
    one, two = (float(results[first]) for results in (got, expected))
    if one != two:
      error = abs(one - two) / max(_AMAX_ERROR * two, math.ulp(0.0))
      worst = max(worst, (error, f"amax: got {one}, expected {two}"))
    first += 1
  axis = problem.each()[0].blockings[0].axis()
  largest = float(np.nanmax(np.abs(blocks(expected, 0, axis)), initial=0))
  if problem.column_sums is not None:
    rows = math.prod(problem.shape[problem.column_sums : -1])
    sums = [np.asarray(results[first]) for results in (got, expected)]
    bound = max(rows * _AMAX_ERROR * largest, math.ulp(0.0))
    error = float(np.nanmax(np.abs(sums[0] - sums[1]), initial=0)) / bound
    text = f"sums of columns: got {sums[0]}, expected {sums[1]}"
    worst = max(worst, (error, text))
    first += 1
  if problem.prologue is not None and problem.prologue.is_norm_gradient:
    totals = [results[first].astype(np.float32) for results in (got, expected)]
    rounding = float(ml_dtypes.finfo(problem.dtype).eps)
    bound = (rounding + _AMAX_ERROR) * largest
    error = float(np.nanmax(np.abs(totals[0] - totals[1]), initial=0)) / bound
    worst = max(worst, (error, f"{problem.prologue}, in floats"))
    first += 1
  exact = same_bits(got[first:], expected[first:])
  return max(worst, exact, key=lambda found: found[0])


def quantized(
  problem: problems.QuantizationProblem, arrays: Sequence[Any]
) -> list[np.ndarray] | None:
  """Returns the expected codes; None for the options of training recipes.

  Also None for numbers near the limits of f32, where platforms differ.
  """
  x = np.asarray(arrays[0]).astype(np.float32)
  format = problem.format
  given = [np.asarray(scale).astype(np.float32) for scale in arrays[1:]]
  sizes = np.concatenate([np.abs(x[x != 0]), *map(np.ravel, given)])
  is_plain = (
    set(problem.options) == {problems.NO_OPTIONS}
    and problem.scale_rounding == "up"
    and problem.scale_layout == layouts.LINEAR
    and problem.num_maxima is None
    and problem.prologue is None
    and not (format.is_square or format.is_integer)
    and all(len(b.dims) == 1 for b in problem.blockings)
    and bool(((sizes > _LEAST) & (sizes < 1 / _LEAST)).all())
  )
  if not is_plain:
    return None
  found = []
  for i, b in enumerate(problem.blockings):
    scale: Any = None
    if problem.computes_global_scale:
      scale = global_scale_of(x, format)
    elif given:
      scale = given[0][i] if given[0].ndim else given[0][()]
    last = np.moveaxis(x, b.axis(), -1)
    padding = -last.shape[-1] % b.multiple
    last = np.pad(last, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    codes, scales = quantize_rows(
      last.reshape(-1, last.shape[-1]), format, scale
    )
    stored = codes.view(np.uint8) if format.is_fp6 else codes
    if problem.packed:
      nibbles = codes.view(np.uint8) & 15
      stored = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    for result in (stored, scales):
      result = result.reshape(*last.shape[:-1], -1)
      found.append(np.moveaxis(result, -1, b.axis()))
    if problem.computes_global_scale:
      found.append(np.asarray(scale))
  return found


# A second implementation of quantization, in NumPy.


def global_scale_of(
  x: np.ndarray, format: formats.BlockFormat
) -> np.float32 | None:
  """Returns the global scale of nonzero `x`; None if the format has none."""
  if not format.has_global_scale:
    return None
  largest = format.scale_encoding.max * format.values_encoding.max
  return np.float32(np.abs(x).max() / np.float32(largest))


def quantize_rows(
  x: np.ndarray, format: formats.BlockFormat, global_scale: np.float32 | None
) -> tuple[np.ndarray, np.ndarray]:
  """Quantizes finite f32[rows, k] as `quantization.quantize` does.

  Returns:
    Values and scale in the format's dtypes.
  """
  blocks = x.reshape(len(x), -1, format.block_size)
  amax = np.abs(blocks).max(axis=-1, keepdims=True)
  largest = format.values_encoding.max
  if format.scale_is_power_of_two:
    exponent = np.frexp(amax)[1] - 1 - format.values_encoding.max_exponent
    exceeds = amax.astype(np.float64) > np.ldexp(largest, exponent)
    exponent = np.where(amax == 0, -formats.E8M0_BIAS, exponent + exceeds)
    exponent = np.clip(exponent, -formats.E8M0_BIAS, formats.E8M0_BIAS)
    scale = (exponent + formats.E8M0_BIAS).astype(np.uint8).view(formats.E8M0)
    quotient = np.ldexp(blocks.astype(np.float64), -exponent)
  else:
    number = np.float32(1) if global_scale is None else global_scale
    limits = ml_dtypes.finfo(format.scale_dtype)
    least, most = map(np.float32, (limits.smallest_subnormal, limits.max))
    scale = np.clip(amax / np.float32(largest) / number, least, most)
    scale = np.where(amax == 0, 0, scale).astype(format.scale_dtype)
    step = scale.astype(np.float32) * number
    quotient = blocks / np.where(step == 0, np.float32(np.inf), step)
  values = np.clip(quotient, -largest, largest).astype(np.float32)
  values = values.astype(format.values_dtype).reshape(x.shape)
  return values, scale[..., 0]
