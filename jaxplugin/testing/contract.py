# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands with known exact values, and the tolerances of the contract.

For the numerical tests of every implementation (`suite`). Nothing here
computes with the code under test: what an operand means is found in NumPy f64
from its codes by `ml_dtypes`, and its storage (packing, swizzling, padding) is
written a second time, in NumPy.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np

from jaxplugin.arrays import layouts, preparation, scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import reference

F32: Final = np.dtype(np.float32)
F16: Final = np.dtype(np.float16)
BF16: Final = np.dtype(ml_dtypes.bfloat16)
RESULT_DTYPES: Final = (F32, BF16, F16)

# The bound of docs/concepts/numerics.md, in units of sum(|a * b|), before the
# final cast: 16 roundings of f32, each of at most 2^-24 of the largest sum.
DOT_BOUND: Final = 16 * 2.0**-24
# The bound of precision="fastest", in the same units. An instruction cuts 32
# products and a sum to 13 bits after the leading bit of the largest, which is
# at most the sum of magnitudes. Four instructions sum the 128 of a step.
FP8_SUM_BOUND: Final = 4 * 33 * 2.0**-13
# A matrix instruction truncates the accumulator by less than one ulp, which is
# at most 2^-23 of its magnitude.
_TRUNCATION: Final = 2.0**-23
_INSTRUCTION_K: Final = 16  # the smallest k of a matrix instruction
# One rounding to a dtype of p significant bits is off by at most half a unit
# in the last place: 2^-p of the value, or half the smallest subnormal.
ROUNDING: Final = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
HALF_SUBNORMAL: Final = {F32: 2.0**-150, BF16: 2.0**-134, F16: 2.0**-25}

# Integer data: |value| <= 8 and scales 2^-2 to 2^2, so every product is a
# multiple of 2^-4 and at most 2^10. A sum of MAX_EXACT_K of them is below 2^20
# and a multiple of 2^-4, which f32 holds, so any order of adding is exact.
MAX_EXACT_K: Final = 1024
_INTEGERS: Final = {
  formats.E4M3: tuple(range(-8, 9)),
  formats.E5M2: tuple(range(-8, 9)),
  formats.E2M1: (-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6),
  formats.E2M3: tuple(range(-7, 8)),
  formats.E3M2: tuple(range(-8, 9)),
  formats.INT8: tuple(range(-8, 9)),
  formats.INT4: tuple(range(-8, 8)),
}
_EXACT_SCALE_EXPONENTS: Final = (-2, -1, 0, 1, 2)
_SCALE_EXPONENT: Final = 30  # E8M0 scales of random data: 2^-30 to 2^30

# Ways to pass an operand; FP4 ones may have "packed_" before them.
STORAGES: Final = ("raw", "padded", "scaled_array", "swizzled")


def block_format(
  name: str, values: Any, scale: Any, block_size: int, **fields: Any
) -> formats.BlockFormat:
  """Returns a format of dtypes; `fields` are further ones of the record."""
  return formats.BlockFormat(
    name=name,
    values_dtype=values,
    scale_dtype=scale,
    block_size=block_size,
    **fields,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandCase:
  """One operand to be made.

  Attributes:
    format: its block format; None for plain floats.
    dtype: dtype of the values; of a format, `format.values_dtype`.
    shape: logical shape.
    axis: the blocked dimension; the (last) contracting one of plain floats.
    storage: how it is passed: one of `STORAGES`, perhaps with "packed_" before
      it; "raw" if plain.
    unpadded: dimensions in which a padded scale has no padding.
  """

  format: formats.BlockFormat | None
  dtype: np.dtype
  shape: tuple[int, ...]
  axis: int
  storage: str = "raw"
  unpadded: tuple[int, ...] = ()


def operand_case(
  kind: formats.BlockFormat | np.dtype,
  *shape: int,
  axis: int | None = None,
  storage: str = "raw",
  unpadded: tuple[int, ...] = (),
) -> OperandCase:
  """Returns an operand that is blocked along `axis`, by default the last."""
  is_format = isinstance(kind, formats.BlockFormat)
  return OperandCase(
    format=kind if is_format else None,
    dtype=kind.values_dtype if is_format else np.dtype(kind),
    shape=shape,
    axis=len(shape) - 1 if axis is None else axis % len(shape),
    storage=storage if is_format else "raw",
    unpadded=unpadded,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """An operand as it is passed, and what it means.

  Attributes:
    operand: an array or a `ScaledArray`.
    scale: the array to pass as its scale; None for a `ScaledArray`.
    exact: f64, the logical array, without any global scale.
  """

  operand: Any
  scale: Any
  exact: np.ndarray


def make_operand(
  rng: np.random.Generator, case: OperandCase, *, integers: bool
) -> Operand:
  """Makes an operand of random values.

  Args:
    rng: where they come from.
    case: what to make.
    integers: small integers under scales that are powers of two, exact in any
      order of summation; otherwise all finite codes, under E8M0 scales between
      2^-30 and 2^30, other scales of one byte that are not negative, or larger
      floats between 2^-8 and 2^8.
  """
  if case.format is None:
    if integers:
      values = rng.integers(-8, 9, case.shape).astype(case.dtype)
    else:
      values = rng.normal(size=case.shape).astype(case.dtype)
    return Operand(
      operand=jax.device_put(values),
      scale=None,
      exact=values.astype(np.float64),
    )
  format, axis = case.format, case.axis
  scale_shape = layouts.linear_scale_shape(format, case.shape, axis)
  if integers:
    choices = np.array(_INTEGERS[format.values_dtype], np.float64)
    values = rng.choice(choices, case.shape).astype(format.values_dtype)
    exponents = rng.choice(_EXACT_SCALE_EXPONENTS, scale_shape)
    scale = np.exp2(exponents.astype(np.float64)).astype(format.scale_dtype)
  else:
    values = reference.finite_codes(rng, case.shape, format.values_dtype)
    scale = reference.random_scale(
      rng, scale_shape, format.scale_dtype, _SCALE_EXPONENT
    )
  return store(rng, case, values, scale)


def operand(
  rng: np.random.Generator,
  kind: formats.BlockFormat | np.dtype,
  shape: Sequence[int],
  axis: int = -1,
  *,
  integers: bool = True,
  storage: str = "scaled_array",
) -> Operand:
  """Makes an operand of a block format, or of plain floats of a dtype.

  `axis` is the blocked dimension. `make_operand` describes `integers`, and
  `OperandCase` the `storage` of a block format.
  """
  case = operand_case(kind, *shape, axis=axis, storage=storage)
  return make_operand(rng, case, integers=integers)


def quantized(
  x: np.ndarray, format: formats.BlockFormat | str, axis: int = -1
) -> scaled_array.ScaledArray:
  """Returns an array near `x`, stored as `jp.quantize` stores it, by NumPy.

  `jp.quantize` compiles a program for each shape. A format with global scales
  has 0.5. Codebooks and offsets are not supported.
  """
  format, axis = formats.resolve("quantized", format), axis % x.ndim
  block_size = format.along(x.shape[axis]).block_size
  sizes = {axis: block_size}
  if format.is_square:
    sizes = dict.fromkeys((x.ndim - 2, x.ndim - 1), block_size)
  amax = np.abs(x.astype(np.float64))
  for d, size in sizes.items():
    amax = np.maximum.reduceat(amax, np.arange(0, x.shape[d], size), d)
  info = (ml_dtypes.iinfo if format.is_integer else ml_dtypes.finfo)(
    format.values_dtype
  )
  unit = 2.0**-format.fraction_bits * (0.5 if format.has_global_scale else 1)
  scale = np.where(amax == 0, 1, amax / (float(info.max) * unit))
  if format.scale_is_power_of_two:
    scale = np.exp2(np.ceil(np.log2(scale)))
  scale = scale.astype(format.scale_dtype)
  step = scale.astype(np.float64) * unit
  for d, size in sizes.items():
    step = np.take(np.repeat(step, size, d), np.arange(x.shape[d]), d)
  values = np.clip(x / step, float(info.min), float(info.max))
  values = np.rint(values) if format.is_integer else values
  is_packed = format.has_pairs and x.shape[axis] % 2 == 0
  case = operand_case(
    *(format, *x.shape),
    axis=axis,
    storage="packed_scaled_array" if is_packed else "scaled_array",
  )
  rng = np.random.default_rng(0)  # only padded storage draws from it
  array = store(rng, case, values.astype(format.values_dtype), scale).operand
  if not format.has_global_scale:
    return array
  factor = jax.device_put(np.full((1,) * x.ndim, 0.5, np.float32))
  return scaled_array.replace(array, global_scale=factor)


def store(
  rng: np.random.Generator,
  case: OperandCase,
  values: np.ndarray,
  scale: np.ndarray,
) -> Operand:
  """Brings values and an exact, linear scale into the case's storage."""
  assert case.format is not None
  of_rows = scale
  if case.format.is_square:
    rows = values.ndim - (1 if case.axis == values.ndim - 2 else 2)
    of_rows = np.repeat(scale, case.format.block_rows, rows)
    of_rows = np.take(of_rows, np.arange(values.shape[rows]), rows)
  exact = reference.oracle_dequantize(
    values, of_rows, case.format, axis=case.axis
  )
  storage = case.storage.removeprefix("packed_")
  assert storage in STORAGES, storage
  stored = values if storage == case.storage else pack(values, case.axis)
  if case.format.is_fp6:
    stored = values.view(np.uint8)  # JAX has no arrays of them
  if storage == "padded":
    grows = [d not in case.unpadded for d in range(scale.ndim)]
    scale = poison(rng, scale, grows)
  if storage == "swizzled":
    scale = swizzle(scale)
  # Unlike jnp.asarray, device_put compiles nothing for a new shape.
  stored, passed = jax.device_put((stored, scale))
  if storage in ("raw", "padded"):
    return Operand(operand=stored, scale=passed, exact=exact)
  layout = layouts.LINEAR
  if storage == "swizzled":
    layout = layouts.SWIZZLED
  array = scaled_array.ScaledArray(
    stored, passed, None, case.format, scale_layout=layout
  )
  return Operand(operand=array, scale=None, exact=exact)


def pack(values: np.ndarray, axis: int) -> np.ndarray:
  """uint8, two FP4 codes a byte along `axis`, the first in the low nibble."""
  codes = np.moveaxis(values.view(np.uint8), axis, -1) & 15
  packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
  return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def poison(
  rng: np.random.Generator, scale: np.ndarray, may_grow: Sequence[bool]
) -> np.ndarray:
  """Pads a scale in some dimensions, with garbage: NaNs and large codes.

  The padding depends on the sizes alone, so one program takes any numbers.
  """
  garbage = np.array([0x7F, 0xFF, 0x7E, 0x00], np.uint8)
  shape = [
    size + (1 + size % 3) * grows
    for size, grows in zip(scale.shape, may_grow, strict=True)
  ]
  padded = garbage[rng.integers(0, len(garbage), shape)]
  padded[tuple(slice(0, size) for size in scale.shape)] = scale.view(np.uint8)
  return padded.view(scale.dtype)


def swizzle(scale: np.ndarray) -> np.ndarray:
  """The 128x4 layout: byte (r, c) of a tile at (r % 32) * 16 + r // 32 * 4 + c.

  Padding is NaN here, which must change nothing.
  """
  *batch, rows, columns = scale.shape
  row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
  out = np.full((*batch, row_tiles * column_tiles * 512), 0xFF, np.uint8)
  r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
  tile = r // 128 * column_tiles + c // 4
  offset = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
  out[..., offset.reshape(-1)] = scale.view(np.uint8).reshape(
    *batch, rows * columns
  )
  out = out.reshape(*batch, row_tiles * 128, column_tiles * 4)
  return out.view(scale.dtype)


def dequantized(array: scaled_array.ScaledArray) -> np.ndarray:
  """Returns the f32 numbers of an array by NumPy, rounded once."""
  return exact(array).astype(np.float32)


def exact(array: scaled_array.ScaledArray) -> np.ndarray:
  """Returns the exact numbers of an array in f64, by NumPy."""
  if array.is_interleaved or array.scale_layout != layouts.LINEAR:
    array = preparation.unprepare_weights(array)
  format = array.format
  values, scale = np.asarray(array.values), np.asarray(array.scale)
  if array.is_bytes:
    scale = scale.view(format.scale_dtype)
    if not format.has_pairs:
      values = values.view(format.values_dtype)
  if format.is_square:
    scale = np.repeat(scale, format.block_rows, -2)
    scale = scale[..., : array.shape[-2], :]
  numbers = reference.oracle_dequantize(values, scale, format, axis=array.axis)
  if array.global_scale is not None:
    factor = np.asarray(array.global_scale)
    shape = factor.shape + (1,) * (array.ndim - factor.ndim)
    numbers = numbers * factor.reshape(shape)
  return numbers


def codes(array: scaled_array.ScaledArray) -> np.ndarray:
  """Returns the uint8 codes of an array's values, unpacked by NumPy."""
  values = np.asarray(array.values).view(np.uint8)
  if not array.is_packed:
    return values
  pairs = np.moveaxis(values, array.axis, -1)
  pairs = np.stack([pairs & 15, pairs >> 4], -1)
  return np.moveaxis(pairs.reshape(*pairs.shape[:-2], -1), -1, array.axis)


def truncated_bound(k: int) -> float:
  """Returns the bound of a dot whose instructions truncate, per sum|a b|."""
  return DOT_BOUND + _TRUNCATION * -(-k // _INSTRUCTION_K)


def dot(
  lhs: np.ndarray, rhs: np.ndarray, dimension_numbers: Any = None
) -> tuple[np.ndarray, np.ndarray]:
  """f64 `lax.dot_general` by NumPy's matmul, and the same of the magnitudes.

  Returns:
    (dot, magnitude): `magnitude` is sum(|a * b|), the unit of `DOT_BOUND`.
  """
  if dimension_numbers is None:
    batch, last = tuple(range(lhs.ndim - 2)), (lhs.ndim - 1,)
    dimension_numbers = ((last, last), (batch, batch))
  (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers

  def to_3d(
    x: np.ndarray, contracting: Sequence[int], batch: Sequence[int]
  ) -> tuple[np.ndarray, list[list[int]]]:
    free = [d for d in range(x.ndim) if d not in (*contracting, *batch)]
    sizes = [[x.shape[d] for d in dims] for dims in (batch, free, contracting)]
    x = x.transpose(*batch, *free, *contracting)
    return x.reshape([math.prod(kind) for kind in sizes]), sizes

  lhs, (batch_sizes, rows, _) = to_3d(lhs, lhs_k, lhs_batch)
  rhs, (_, columns, _) = to_3d(rhs, rhs_k, rhs_batch)
  rhs = rhs.transpose(0, 2, 1)
  shape = (*batch_sizes, *rows, *columns)
  with np.errstate(invalid="ignore"):
    results = lhs @ rhs, np.abs(lhs) @ np.abs(rhs)
  return results[0].reshape(shape), results[1].reshape(shape)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Rounds f64 numbers that f32 holds exactly (or Inf, NaN) to `dtype`."""
  single = x.astype(np.float32)
  np.testing.assert_array_equal(single.astype(np.float64), x)
  with np.errstate(over="ignore"):
    return single.astype(dtype)


def assert_exact(actual: Any, exact: np.ndarray, dtype: np.dtype) -> None:
  """Asserts equality with `exact` rounded once; NaN equals NaN, -0 equals 0.

  The sign of a zero sum depends on the order of adding.
  """
  actual = np.asarray(actual)
  if actual.dtype != dtype:
    raise AssertionError(f"result has dtype {actual.dtype}, expected {dtype}")
  expected = cast(exact, dtype)
  np.testing.assert_array_equal(
    actual.astype(np.float64), expected.astype(np.float64), strict=True
  )


def assert_within(
  actual: Any, exact: np.ndarray, bound: np.ndarray, dtype: np.dtype
) -> None:
  """Asserts |actual - exact| <= bound + one rounding to `dtype`.

  Args:
    actual: the result, of `dtype`.
    exact: f64.
    bound: the largest error before the cast, absolute, of `exact`'s shape.
    dtype: the result's dtype; its range must not be exceeded.
  """
  actual = np.asarray(actual)
  if actual.dtype != dtype:
    raise AssertionError(f"result has dtype {actual.dtype}, expected {dtype}")
  if actual.shape != exact.shape:
    raise AssertionError(f"shape {actual.shape}, expected {exact.shape}")
  limit = bound + (np.abs(exact) + bound) * ROUNDING[dtype]
  limit = limit + HALF_SUBNORMAL[dtype]
  error = np.abs(actual.astype(np.float64) - exact)
  if not (error <= limit).all():  # also when a NaN is among them
    where = tuple(int(i) for i in np.argwhere(~(error <= limit))[0])
    raise AssertionError(
      f"at {where}: got {actual[where]}, exact {exact[where]}, error"
      f" {error[where]:.3e} above the bound {limit[where]:.3e};"
      f" {np.count_nonzero(~(error <= limit))} of {error.size} are"
    )


def assert_dot(
  actual: Any,
  exact: np.ndarray,
  magnitude: np.ndarray,
  dtype: np.dtype = F32,
  *,
  integers: bool = False,
) -> None:
  """Checks a result against `dot`: exact on integers, else within the bound."""
  if integers:
    assert_exact(actual, exact, dtype)
  else:
    assert_within(actual, exact, DOT_BOUND * magnitude, dtype)


def assert_same_bits(actual: Any, expected: Any) -> None:
  """Asserts that two trees have one structure, and equal dtypes and bits."""
  structure = jax.tree.structure(actual)
  if structure != jax.tree.structure(expected):
    raise AssertionError(f"{structure}, not {jax.tree.structure(expected)}")
  leaves = [map(np.asarray, jax.tree.leaves(x)) for x in (actual, expected)]
  for x, y in zip(*leaves, strict=True):
    if (x.dtype, x.shape) != (y.dtype, y.shape):
      raise AssertionError(f"{x.dtype}{x.shape}, not {y.dtype}{y.shape}")
    if x.tobytes() != y.tobytes():
      np.testing.assert_array_equal(x, y)
      raise AssertionError(f"the signs of zeros or the NaNs differ in {x}")


def run_program(
  program: str, *args: object
) -> subprocess.CompletedProcess[str]:
  """Runs a program in a fresh process, which imports what this one does."""
  path = os.pathsep.join(filter(None, sys.path))
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    check=False,
  )
