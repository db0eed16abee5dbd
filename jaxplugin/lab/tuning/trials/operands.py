# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of a `DotProblem`, and the dot that they are for.

Exact ones are small integers with scales of few bits, whose products and sums
f32 holds in whatever order they are added: each implementation must give the
same bits. What an operand has beyond its rows and columns is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import dot
from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import problems

# A value of at most 3 with a scale of at most 2, on both sides: k products of
# 36 at most, multiples of 1/4, stay below 2^24 quarters.
_LARGEST: Final = 3
_MAX_K: Final = 2**24 // (4 * (2 * _LARGEST) ** 2)
_SCALES: Final[tuple[float, ...]] = (0.5, 1.0, 2.0)
_NARROW_SCALES: Final[tuple[float, ...]] = (0.5, 1.0, 1.5, 2.0)  # E4M3, E5M2
_GLOBAL_SCALES: Final = (2.0, 0.25)
_NAN_CODE: Final = 0xFF  # of E8M0 and of E4M3
_POISON_WIDTHS: Final = (3, 2)  # rows and columns
_EXTRAS: Final = ("bias", "residual", "global_scale")


class OperandsError(Exception):
  """No operands can be made of a problem; the text says why."""

  kind = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
  """Operands of one call.

  Attributes:
    arrays: by name, what `function` takes.
    expected: of the result's dtype and shape, exact but for its last rounding
      and an activation's; None of operands that are not exact.
  """

  arrays: dict[str, Any]
  expected: Any


def refusal(problem: problems.DotProblem) -> str:
  """Why no operands can be made of a problem; "" where they can."""
  if not problem.sizes_are_static:
    return "sizes are symbolic"
  if problem.is_empty:
    return "a size is 0"
  if problem.num_contracting != 1 or not problem.blocks_pair_up:
    return "several dimensions are contracted"
  if problem.global_scale == "array":
    return "the global scale is an array"
  for side in (problem.lhs, problem.rhs):
    if side.format is None:
      continue
    if not side.format.is_known:
      return f"{side.format} is not a format of the package"
    is_bytes = side.dtype == formats.PACKED and not (
      side.format.is_fp4 or side.format.is_fp6
    )
    if is_bytes:
      return f"values of {side.format} are stored as bytes"
    if side.is_interleaved and side.scale_layout != layouts.LINEAR:
      return "values are interleaved and scales swizzled"
  return ""


def make(
  problem: problems.DotProblem, seed: int, *, is_exact: bool = True
) -> Made:
  """Operands of a problem.

  Args:
    problem: what they are for.
    seed: of their numbers.
    is_exact: whether the expected result is made too, which needs integers.

  Raises:
    OperandsError: as `refusal` says.
  """
  why = refusal(problem)
  if why:
    raise OperandsError(f"cannot create operands of {problem}: {why}")
  rng = np.random.default_rng(seed)
  sizes = problem.batch, problem.m, problem.n, problem.k
  batch, m, n, k = (size for size in sizes if size is not None)
  lead = () if batch == 1 else (batch,)
  lhs, lhs_exact = operand_of(rng, problem.lhs, lead, m, k)
  rhs, rhs_exact = operand_of(rng, problem.rhs, lead, n, k)
  arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs}
  total = np.float32(1)
  if problem.global_scale == "scalar":
    total = _add_global_scale(arrays, problem)
  if problem.has_bias:
    arrays["bias"] = small_integers(rng, (n,)).astype(np.float32)
  if problem.has_residual:
    arrays["residual"] = small_integers(rng, (*lead, m, n)).astype(np.float32)
  expected = None
  if is_exact:
    sums = lhs_exact @ np.swapaxes(rhs_exact, -1, -2)
    expected = with_epilogue(sums * total, arrays, problem)
  made = jax.tree.map(jnp.asarray, arrays)
  return Made(arrays=made, expected=expected)


def function(
  problem: problems.DotProblem, implementation: str | None = None
) -> Callable[[dict[str, Any]], jax.Array]:
  """The dot of `Made.arrays`, to be traced."""
  sides = (problem.lhs, problem.rhs)
  lead = 0 if problem.batch == 1 else 1
  contracting = [
    (lead + 1 if side.contracting_is_minor else lead,) for side in sides
  ]
  numbers = tuple(contracting), ((*range(lead),),) * 2
  blocks = [s.format.block_size for s in sides if s.format is not None]
  block_size: int | tuple[int, int] | None = None
  if any(side.scale_is_padded for side in sides):
    block_size = blocks[0] if len({*blocks}) == 1 else (blocks[0], blocks[1])

  def call(arrays: dict[str, Any]) -> jax.Array:
    lhs, lhs_scale = parts(arrays["lhs"])
    rhs, rhs_scale = parts(arrays["rhs"])
    return dot.block_scaled_dot(
      lhs,
      rhs,
      lhs_scale,
      rhs_scale,
      dimension_numbers=numbers,
      preferred_element_type=problem.out_dtype,
      precision="highest" if problem.highest_precision else None,
      block_size=block_size,
      activation=problem.activation,
      implementation=implementation,
      **{name: arrays.get(name) for name in _EXTRAS},
    )

  return call


def tail(problem: problems.DotProblem) -> problems.DotProblem:
  """A small problem of the same kind, whose sizes are multiples of no tile."""
  sides = (problem.lhs, problem.rhs)
  blocks = [s.format.block_size for s in sides if s.format is not None]
  assert problem.m is not None
  # Odd, and not above m: a config may be for few rows alone.
  m = min(problem.m, 67)
  return dataclasses.replace(
    problem,
    batch=min(problem.batch or 1, 2),
    m=m if m % 2 or m < 4 else m - 1,
    n=293,
    k=11 * max(blocks),
  )


def poisoned(problem: problems.DotProblem) -> problems.DotProblem | None:
  """The problem with scales that are padded, by NaN; None where none can be."""

  def padded(side: problems.OperandProblem) -> problems.OperandProblem:
    can_be = (
      side.format is not None
      and not side.format.is_fp6
      and not side.is_interleaved
      and side.scale_layout == layouts.LINEAR
    )
    return dataclasses.replace(side, scale_is_padded=can_be)

  found = dataclasses.replace(
    problem, lhs=padded(problem.lhs), rhs=padded(problem.rhs)
  )
  sides = (found.lhs, found.rhs)
  # One call takes padded scales for both of its sides, as raw arrays.
  can_be = all(s.scale_is_padded for s in sides if s.format is not None)
  return found if can_be else None


def parts(operand: Any) -> tuple[Any, Any]:
  return operand if isinstance(operand, tuple) else (operand, None)


def small_integers(
  rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
  return rng.integers(-_LARGEST, _LARGEST + 1, shape, np.int8)


def operand_of(
  rng: np.random.Generator,
  side: problems.OperandProblem,
  lead: tuple[int, ...],
  rows: int,
  k: int,
) -> tuple[Any, np.ndarray]:
  """An operand, and f32[*lead, rows, k] that it stands for."""
  integers = small_integers(rng, (*lead, rows, k))
  if k > _MAX_K:
    integers = np.sign(integers)
  exact = integers.astype(np.float32)
  format = side.format
  if format is None:
    return _turned(exact.astype(side.dtype), side), exact
  known = _NARROW_SCALES
  if format.scale_is_power_of_two:
    known = _SCALES
  blocks = -(-k // format.block_size)
  scale = rng.choice(np.asarray(known, np.float32), (*lead, rows, blocks))
  exact *= np.repeat(scale, format.block_size, axis=-1)[..., :k]
  values = integers.astype(format.values_dtype)
  if format.is_fp6:
    values = values.view(np.uint8)
  return _stored(values, scale.astype(format.scale_dtype), side), exact


def _stored(
  values: np.ndarray, scale: np.ndarray, side: problems.OperandProblem
) -> Any:
  """Values [..., rows, k] and their scale, stored as a problem says."""
  format = side.format
  assert format is not None
  stored: Any = jnp.asarray(values)
  if side.dtype in (formats.PACKED, interleaving.WORDS) and format.is_fp4:
    stored = layouts.pack_fp4(stored)
  if side.is_interleaved:
    stored = interleaving.interleave(stored)
  if side.scale_layout == layouts.SWIZZLED:
    padded = layouts.swizzled_shape(scale.shape)
    scale = _padded(scale, padded[-2:])
    swizzled = layouts.swizzle_scale(jnp.asarray(scale))
    return scaled_array.ScaledArray(
      stored, swizzled, None, format, scale_layout=layouts.SWIZZLED
    )
  if side.scale_is_padded:
    rows, columns = scale.shape[-2:]
    more_rows, more_columns = _POISON_WIDTHS
    scale = _padded(scale, (rows + more_rows, columns + more_columns))
  stored, scale = _turned(stored, side), _turned(scale, side)
  if format.is_fp6 or side.is_interleaved:  # which dtypes alone do not say
    return scaled_array.ScaledArray(stored, scale, None, format)
  return stored, scale


def _padded(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """The scale [..., rows, columns], with NaN up to another shape."""
  missing = [
    (0, wanted - size)
    for wanted, size in zip(shape, scale.shape[-2:], strict=True)
  ]
  widths = [*[(0, 0)] * (scale.ndim - 2), *missing]
  codes = np.pad(scale.view(np.uint8), widths, constant_values=_NAN_CODE)
  return codes.view(scale.dtype)


def _turned(x: Any, side: problems.OperandProblem) -> Any:
  return x if side.contracting_is_minor else np.swapaxes(x, -1, -2)


def _add_global_scale(
  arrays: dict[str, Any], problem: problems.DotProblem
) -> np.float32:
  """Adds scalars that make the problem's global scale; returns their product.

  Two scales of operands, or one and an argument, come as two factors.
  """
  first, second = _GLOBAL_SCALES
  arrays["global_scale"] = np.float32(first)
  if not problem.has_global_power:
    return np.float32(first)
  for name, side in (("rhs", problem.rhs), ("lhs", problem.lhs)):
    operand = arrays[name]
    if side.format is None or side.scale_is_padded:
      continue
    if isinstance(operand, tuple):
      values, scale = operand
      layout: layouts.ScaleLayout = layouts.LINEAR
    else:
      values, scale = operand.values, operand.scale
      layout = operand.scale_layout
    arrays[name] = scaled_array.ScaledArray(
      values, scale, second, side.format, scale_layout=layout
    )
    return np.float32(first * second)
  return np.float32(first)


def with_epilogue(
  sums: np.ndarray, arrays: dict[str, Any], problem: problems.DotProblem
) -> np.ndarray:
  result = sums
  if problem.has_bias:
    result = result + arrays["bias"]
  if problem.activation is not None:
    result = ACTIVATIONS[problem.activation](result)
  if problem.has_residual:
    result = result + arrays["residual"]
  return result.astype(problem.out_dtype)


def _gelu(x: np.ndarray) -> np.ndarray:
  """By tanh, in f64: Hendrycks and Gimpel, arXiv:1606.08415."""
  wide = x.astype(np.float64)
  inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
  return (wide / 2 * (1 + np.tanh(inner))).astype(np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
  wide = x.astype(np.float64)
  return (wide / (1 + np.exp(-wide))).astype(np.float32)


ACTIVATIONS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
  "relu": lambda x: np.maximum(x, np.float32(0)),
  "gelu": _gelu,
  "silu": _silu,
}
