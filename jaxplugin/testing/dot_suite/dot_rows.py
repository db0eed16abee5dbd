# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of the dot that every implementation computes: one table of rows.

The rows have unusual dimensions, blocks, epilogues and formats; the suite's
fuzzed shapes (`dot_cases`) have everything else. A test file of an
implementation adds only its wiring:

  class CpuRowsTest(dot_rows.DotRowsTestCase):
    implementation = "cpu"
    in_leg = ("sides blocked along k2 and k1",)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from typing import Any, Final

import jax
import numpy as np
import pytest

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import dot_cases, epilogue

NUM_MAPPED: Final = 4
FP6: Final = (jp.MXFP6_E2M3, jp.MXFP6_E3M2)
side = contract.operand_case
TWO_K: Final = (((1, 2), (1, 2)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One call of the dot.

  Attributes:
    lhs: the left operand.
    rhs: the right operand.
    numbers: dimension numbers; None is the default contraction.
    block_size: the call's argument.
    dtype: the result's dtype.
    integers: whether values are integers, so that the result is exact; else
      they are any codes, and the result is within the contract's bound.
    global_scale: shape of the global scale; None if the row has none.
    has_bias: whether a bias is added.
    activation: the call's argument.
    residual: dtype of the residual; None if the row has none.
    mapped: the argument of the epilogue over which `jax.vmap` maps.
  """

  lhs: contract.OperandCase
  rhs: contract.OperandCase
  numbers: Any = None
  block_size: int | tuple[int, int] | None = None
  dtype: np.dtype = contract.F32
  integers: bool = True
  global_scale: tuple[int, ...] | None = None
  has_bias: bool = False
  activation: str | None = None
  residual: str | None = None
  mapped: str = ""


def _different_blocks() -> dict[str, Row]:
  """Two contracting dimensions; either one has the blocks, on each side."""
  rows = {}
  for lhs, rhs, axes in itertools.product(
    formats.FORMATS, formats.FORMATS, itertools.product((1, 2), repeat=2)
  ):
    name = f"{lhs.name} blocked along k{axes[0]}, {rhs.name} along k{axes[1]}"
    rows[name] = Row(
      lhs=side(lhs, 3, 32, 64, axis=axes[0]),
      rhs=side(rhs, 32, 64, 5, axis=axes[1] - 1),
      numbers=(((1, 2), (0, 1)), ((), ())),
    )
  return rows


def _short_blocks() -> dict[str, Row]:
  """A last block that is short, next to another contracting dimension."""
  rows = {}
  for format, axis, size in itertools.product(
    formats.FORMATS, (1, 2), (33, 50)
  ):
    shape = (size, 3) if axis == 1 else (3, size)
    stored = {"axis": axis, "storage": "padded", "unpadded": (0, 3 - axis)}
    lhs, rhs = (side(format, rows, *shape, **stored) for rows in (2, 4))
    rows[f"{format.name}, short block of {size} in k{axis}"] = Row(
      lhs=lhs, rhs=rhs, numbers=TWO_K, block_size=format.block_size
    )
  for axes in ((1, 2), (2, 1)):
    rows[f"short blocks in k{axes[0]} and in k{axes[1]}"] = Row(
      lhs=side(jp.MXFP4, 3, 6, 20, axis=axes[0]),
      rhs=side(jp.MXFP8, 5, 6, 20, axis=axes[1]),
      numbers=TWO_K,
      block_size=32,
    )
  return rows


def _vectors() -> dict[str, Row]:
  rows = {}
  everything = {"global_scale": (), "has_bias": True, "activation": "relu"}
  for format, m, residual in itertools.product(
    formats.FORMATS, (1, 2, 5, 40), (None, "float32", "bfloat16")
  ):
    epilogue = {} if residual is None else everything
    rows[f"{format.name}, {m} rows by a vector, residual {residual}"] = Row(
      lhs=side(format, 2, m, 64),
      rhs=side(format, 2, 1, 64),
      residual=residual,
      **epilogue,
    )
  return rows


def _mixed_dimensions() -> dict[str, Row]:
  """lhs (b0, m0, k, b1, m1) and rhs (n, b1, k, b0), every epilogue."""
  made = functools.partial(
    Row,
    lhs=side(jp.MXFP8, 2, 3, 64, 2, 4, axis=2),
    rhs=side(jp.MXFP4, 5, 2, 64, 2, axis=2),
    numbers=(((2,), (2,)), ((0, 3), (3, 1))),
  )
  everything = {"has_bias": True, "activation": "relu", "residual": "float32"}
  return {
    f"mixed dimensions, global scale {shape}": made(
      global_scale=shape, **everything
    )
    for shape in (
      *((1, 1, 1, 1, 1), (2, 2, 3, 4, 5), (2, 1, 1, 1, 1)),
      *((1, 1, 3, 1, 5), (2, 2, 1, 4, 1), (1, 2, 3, 4, 1)),
    )
  }


def _mapped_epilogues() -> dict[str, Row]:
  made = functools.partial(
    Row, lhs=side(jp.MXFP8, 3, 64), rhs=side(jp.MXFP4, 5, 64)
  )
  return {
    "mapped global scale": made(global_scale=(), mapped="global_scale"),
    "mapped bias": made(has_bias=True, mapped="bias"),
    "mapped residual": made(residual="float32", mapped="residual"),
  }


def _fp6() -> dict[str, Row]:
  """Every code of MXFP6: one row, few rows, and tails of every tile."""
  rows = {}
  for format, kind, (m, n, k, batch) in itertools.product(
    FP6,
    (*FP6, jp.MXFP8, jp.MXFP4, contract.F32),
    ((1, 40, 96, 1), (5, 33, 160, 2), (67, 70, 64, 1)),
  ):
    w = side(format, batch, n, k, storage="scaled_array")
    x = side(kind, batch, m, k, storage="scaled_array")
    name = getattr(kind, "name", kind)
    rows[f"{name} by {format.name}, {m} rows"] = Row(
      lhs=x, rhs=w, integers=False
    )
    rows[f"{format.name} by {name}, {m} columns"] = Row(
      lhs=w, rhs=x, integers=False
    )
  return rows


def _checkpoints() -> dict[str, Row]:
  """Formats of checkpoints; k is not a multiple of 128, or it is one block."""
  rows = {}
  for format, (m, k) in itertools.product(
    formats.NAMED[len(formats.KNOWN) :], ((5, 576), (70, 576), (4, None))
  ):
    if not format.scales_codes:
      continue  # kernels do not read it
    n, k = 40, k or format.along(64).block_size
    w = side(format, n, k, storage="scaled_array")
    for kind in (contract.F32, contract.BF16, jp.MXFP8, format):
      rows[f"{getattr(kind, 'name', kind)} by {format.name}, {m} rows"] = Row(
        lhs=side(kind, m, k, storage="scaled_array"), rhs=w, integers=False
      )
  return rows


def _results() -> dict[str, Row]:
  """Roundings of a result, and a block size for each side."""
  sides = {"lhs": side(jp.MXFP8, 9, 96), "rhs": side(jp.MXFP4, 7, 96)}
  padded = {"storage": "padded", "unpadded": ()}
  return {
    "gelu": Row(**sides, global_scale=(), has_bias=True, activation="gelu"),
    "bf16 result of a residual": Row(
      **sides, residual="float32", dtype=contract.BF16
    ),
    "block sizes 32 and 16": Row(
      lhs=side(jp.MXFP8, 9, 96, **padded),
      rhs=side(jp.NVFP4, 7, 96, **padded),
      block_size=(32, 16),
    ),
  }


CHECKPOINTS: Final = _checkpoints()
ROWS: Final[dict[str, Row]] = {
  **_different_blocks(),
  **_short_blocks(),
  **_vectors(),
  **_mixed_dimensions(),
  **_mapped_epilogues(),
  **_fp6(),
  **CHECKPOINTS,
  **_results(),
}


class DotRowsTestCase(dot_cases.DotTestCase):
  """The table by one implementation.

  Attributes:
    in_leg: names of the rows that the leg `test` runs.
    truncates: whether matrix instructions truncate sums. In rows of any codes
      one product may outweigh the others, and then truncations add up.
  """

  in_leg: tuple[str, ...] = ()
  truncates: bool = False

  def test_op(self):
    self.check(*self.in_leg)

  @pytest.mark.full
  def test_op_of_all_rows(self):
    self.check(*ROWS)

  def check(self, *names: str) -> None:
    """Compares results of rows with NumPy's in f64."""
    functions, arguments, made = {}, {}, {}
    for name in names:
      row = ROWS[name]
      rng = np.random.default_rng(zlib.crc32(name.encode()))
      lhs, rhs = (
        contract.make_operand(rng, case, integers=row.integers)
        for case in (row.lhs, row.rhs)
      )
      dot = contract.dot(lhs.exact, rhs.exact, row.numbers)
      arrays = _epilogue(row, dot[0].shape, rng)
      operands = lhs.operand, rhs.operand, lhs.scale, rhs.scale
      functions[name] = functools.partial(self._call, row)
      arguments[name] = operands, arrays
      made[name] = lhs.exact.shape[-1], *dot, arrays
    (results,) = self.results_of(functions, arguments)
    for name, actual in results.items():
      with self.subTest(name):
        self._check(ROWS[name], actual, *made[name])

  def _call(self, row: Row, operands: Any, arrays: dict[str, Any]) -> Any:
    def call(arrays):
      return self.dot(
        *operands,
        dimension_numbers=row.numbers,
        block_size=row.block_size,
        activation=row.activation,
        preferred_element_type=row.dtype,
        **arrays,
      )

    if not row.mapped:
      return call(arrays)
    axes = {key: 0 if key == row.mapped else None for key in arrays}
    return jax.vmap(call, (axes,))(arrays)

  def _check(
    self,
    row: Row,
    actual: Any,
    k: int,
    exact: np.ndarray,
    magnitude: np.ndarray,
    arrays: dict[str, Any],
  ) -> None:
    expected, largest = _finish(row, exact, arrays)
    if row.integers and row.activation in (None, "relu"):
      contract.assert_exact(actual, expected, row.dtype)
      return
    unit = contract.DOT_BOUND
    if self.truncates:
      unit = contract.truncated_bound(k)
    bound = unit * magnitude
    if row.integers:  # the sums are exact
      bound = epilogue.EPILOGUE_BOUND * largest
    contract.assert_within(actual, expected, bound, row.dtype)


def _epilogue(
  row: Row, shape: tuple[int, ...], rng: np.random.Generator
) -> dict[str, Any]:
  """Returns the arrays of a row's epilogue; a mapped one is stacked."""
  more = lambda name: (NUM_MAPPED,) if row.mapped == name else ()
  made = {}
  if row.global_scale is not None:
    powers = rng.integers(-3, 4, more("global_scale") + row.global_scale)
    made["global_scale"] = np.exp2(powers).astype(np.float32)
  if row.has_bias:
    bias = rng.integers(-9, 10, more("bias") + shape[-1:])
    made["bias"] = bias.astype(np.float32)
  if row.residual is not None:
    residual = rng.integers(-9, 10, more("residual") + shape)
    made["residual"] = residual.astype(row.residual)
  return jax.device_put(made)


def _finish(
  row: Row, exact: np.ndarray, given: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the epilogue's formula in f64, and its argument's magnitude."""
  arrays = {name: np.asarray(a, np.float64) for name, a in given.items()}
  if row.mapped:
    dimensions = (1,) * (exact.ndim + 1 - arrays[row.mapped].ndim)
    shape = arrays[row.mapped].shape
    arrays[row.mapped] = arrays[row.mapped].reshape(
      shape[:1] + dimensions + shape[1:]
    )
  result = exact * arrays.get("global_scale", 1) + arrays.get("bias", 0)
  activated = epilogue.activate(result, row.activation)
  return activated + arrays.get("residual", 0), np.abs(result)
