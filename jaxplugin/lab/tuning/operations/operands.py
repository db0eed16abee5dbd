# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands with exact results, and the comparison with these results.

Operands have the layouts of a problem. They are small integers with scales of
few bits. Their products and sums are exact in f32 in every order of addition,
so all implementations must return the same bits, except for activations. The
padding of scales is NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import interleaving, layouts, scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import problems, reference
from jaxplugin.repro import oracle
from jaxplugin.tables import row_fields

# Values are at most 3, and scales are at most 2. A product is at most 36 and a
# multiple of 1/4, so a sum of k products is at most 2^24 quarters.
_LARGEST: Final = 3
_MAX_K: Final = 2**24 // (4 * (2 * _LARGEST) ** 2)
# Kernels may quantize blocks of values to int8. The scale of each is then 1.
_INT8_BLOCK: Final = 32
_LARGEST_INT8: Final = 127
_SCALES: Final[tuple[float, ...]] = (0.5, 1.0, 2.0)
_NARROW_SCALES: Final[tuple[float, ...]] = (0.5, 1.0, 1.5, 2.0)  # E4M3, E5M2
_POISON_WIDTHS: Final = (3, 2)  # rows and columns
_ACTIVATION_ERROR: Final = 2.0**-16


class OperandsError(Exception):
  """The tuner cannot create operands. The message has the reason."""

  kind = "error"


def side_refusal(side: problems.SideProblem) -> str:
  """Returns why `operand_of` cannot create an operand; "" if it can."""
  if side.format is None:
    return ""
  if side.format.name not in row_fields.FORMATS:
    return f"{side.format} is not a format of the package"
  if side.dtype == formats.PACKED and not (
    side.format.has_pairs or side.format.is_fp6
  ):
    return f"values of {side.format} are stored as bytes"
  return ""


def size_refusal(problem: Any) -> str:
  """Returns why the sizes of a problem cannot be tuned; "" if they can."""
  if not problem.sizes_are_static:
    return "sizes are symbolic"
  return "a size is 0" if problem.is_empty else ""


def block_sizes(problem: Any) -> list[int]:
  """Returns the block size of each quantized operand of a problem."""
  formats_of = (problem.lhs.format, problem.rhs.format)
  return [format.block_size for format in formats_of if format is not None]


def activated(x: np.ndarray, activation: str | None) -> np.ndarray:
  """Returns f32 `x` after an activation, which is computed in f64."""
  if activation is None:
    return x
  return oracle.ACTIVATIONS[activation](x.astype(np.float64)).astype(np.float32)


def small_integers(
  rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
  return rng.integers(-_LARGEST, _LARGEST + 1, shape, np.int8)


def operand_of(
  rng: np.random.Generator,
  side: problems.SideProblem,
  shape: tuple[int, ...],
  *,
  may_quantize: bool = False,
) -> tuple[Any, np.ndarray]:
  """Returns an operand and its exact value f32[*lead, rows, k].

  The operand is a ScaledArray if it is quantized, but (values, scale) if its
  scale is padded.

  Args:
    rng, side: the source of random values, and the operand to create.
    shape: (*lead, rows, k).
    may_quantize: whether a kernel may quantize unquantized values to int8.
  """
  *lead, rows, k = shape
  integers = small_integers(rng, shape)
  if k > _MAX_K:
    integers = np.sign(integers)
  if may_quantize and side.format is None:
    largest = integers[..., ::_INT8_BLOCK]
    largest[...] = np.where(largest < 0, -_LARGEST_INT8, _LARGEST_INT8)
  exact = integers.astype(np.float32)
  format = side.format
  if format is None:
    return _transposed(exact.astype(side.dtype), side), exact
  known = _SCALES if format.scale_is_power_of_two else _NARROW_SCALES
  blocks = -(-k // format.block_size)
  block_rows = format.block_size if side.has_square_scale else 1
  scale_rows = -(-rows // block_rows)
  scale = rng.choice(np.asarray(known, np.float32), (*lead, scale_rows, blocks))
  of_row = np.repeat(scale, block_rows, axis=-2)[..., :rows, :]
  exact *= np.repeat(of_row, format.block_size, axis=-1)[..., :k]
  exact *= np.float32(2.0**-format.fraction_bits)
  values = integers.astype(format.values_dtype)
  if format.is_fp6:
    values = values.view(np.uint8)
  return _stored(values, scale.astype(format.scale_dtype), side), exact


def _stored(
  values: np.ndarray, scale: np.ndarray, side: problems.SideProblem
) -> Any:
  """Returns values [..., rows, k] and their scale in the problem's layout."""
  format = side.format
  assert format is not None
  stored: Any = jnp.asarray(values)
  if side.dtype in (formats.PACKED, interleaving.WORDS) and format.has_pairs:
    stored = layouts.pack_fp4(stored)
  if side.is_interleaved:
    stored = interleaving.interleave(stored)
  if side.scale_layout == layouts.SWIZZLED:
    scale = _padded(scale, layouts.swizzled_shape(scale.shape)[-2:])
    swizzled = layouts.swizzle_scale(jnp.asarray(scale))
    return scaled_array.ScaledArray(
      stored, swizzled, None, format, scale_layout=layouts.SWIZZLED
    )
  stored = _transposed(stored, side)
  if side.scale_is_padded:
    shape = tuple(np.add(scale.shape[-2:], _POISON_WIDTHS))
    return stored, _transposed(_padded(scale, shape), side)
  scale = _transposed(scale, side)
  if side.has_square_scale:
    format = dataclasses.replace(format, block_rows=format.block_size)
  return scaled_array.ScaledArray(stored, scale, None, format)


def _padded(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Pads the scale [..., rows, columns] with NaN."""
  missing = [
    (0, wanted - size)
    for wanted, size in zip(shape, scale.shape[-2:], strict=True)
  ]
  widths = [*[(0, 0)] * (scale.ndim - 2), *missing]
  wide = scale.astype(np.float32)
  padded = np.pad(wide, widths, constant_values=np.float32(np.nan))
  return padded.astype(scale.dtype)


def _transposed(x: Any, side: problems.SideProblem) -> Any:
  return x if side.contracting_is_minor else np.swapaxes(x, -1, -2)


class InexactResultError(Exception):
  """A candidate's result is wrong. The message has the place."""

  kind = "wrong"


def check(result: jax.Array, expected: np.ndarray, problem: Any) -> None:
  """Raises InexactResultError unless a result has the expected numbers.

  0 and -0 are equal. Results of gelu and silu may have an approximation error.
  """
  if result.dtype != expected.dtype or result.shape != expected.shape:
    raise InexactResultError(
      f"{problem}: got {result.dtype.name}{list(result.shape)}, exact"
      f" {expected.dtype.name}{list(expected.shape)}"
    )
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
