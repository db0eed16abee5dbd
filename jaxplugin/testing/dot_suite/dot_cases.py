# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls and the base test case of the dot's suite (`suite`).

The calls have random shapes, formats and storage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract

FORMATS: Final = formats.FORMATS
PAIRS: Final = tuple(itertools.product(FORMATS, FORMATS))
# Every pair of operands: formats by formats, and one side plain.
KINDS: Final = (
  *PAIRS,
  *itertools.product(FORMATS, contract.RESULT_DTYPES),
  *itertools.product(contract.RESULT_DTYPES, FORMATS),
)
NUM_FUZZ_TESTS: Final = 20
MAX_ROWS: Final = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotCase:
  """A call to be made; `dimension_numbers` None is the default contraction."""

  lhs: contract.OperandCase
  rhs: contract.OperandCase
  dimension_numbers: Any
  block_size: int | None
  dtype: np.dtype


def random_case(
  index: int, all_kinds: Sequence[tuple[Any, Any]] = KINDS
) -> DotCase:
  """Case `index` of an endless sweep; `len(all_kinds)` in a row hold all."""
  rng = np.random.default_rng([20261121, index])
  kinds = all_kinds[index % len(all_kinds)]
  formats_ = [k if isinstance(k, formats.BlockFormat) else None for k in kinds]
  blocks = {f.block_size for f in formats_ if f is not None}
  block = max(blocks)

  is_default = rng.random() < 0.25
  num_batch = int(rng.integers(0, 4))
  num_free = [1, 1] if is_default else list(rng.choice(3, 2, p=[0.1, 0.7, 0.2]))
  num_k = 1 if is_default else int(rng.choice([1, 2, 3], p=[0.75, 0.2, 0.05]))
  batch_sizes = rng.integers(1, 4, num_batch).tolist()
  k_sizes = rng.integers(1, 4, num_k).tolist()
  blocked = int(rng.integers(num_k))
  k_sizes[blocked] = block * int(rng.integers(1, 4))

  block_size = None
  if len(blocks) == 1 and rng.random() < 0.4:
    block_size = block
    if (
      num_k == 1 and rng.random() < 0.6
    ):  # ragged; even, so that FP4 can be packed
      k_sizes[blocked] -= 2 * int(rng.integers(1, block // 2))

  operands, dims = [], []
  for side in (0, 1):
    free_sizes = _row_sizes(rng, int(num_free[side]))
    sizes = batch_sizes + free_sizes + k_sizes
    order = np.arange(len(sizes))
    if not is_default:
      order = rng.permutation(len(sizes))
    position = np.argsort(order)  # where each of `sizes` is
    shape = tuple(sizes[d] for d in order)
    batch = tuple(int(d) for d in position[:num_batch])
    contracting = tuple(int(d) for d in position[len(sizes) - num_k :])
    dims.append((batch, contracting))
    format = formats_[side]
    dtype = kinds[side] if format is None else format.values_dtype
    operands.append(
      contract.OperandCase(
        format=format,
        dtype=np.dtype(dtype),
        shape=shape,
        axis=contracting[blocked],
        storage=_storage(rng, format, shape, contracting[blocked], block_size),
        # With several contracting dimensions only the blocked one may be
        # padded. Otherwise the rules could not find it.
        unpadded=batch + contracting[:blocked] + contracting[blocked + 1 :],
      )
    )
  numbers = None
  if not is_default:
    (lhs_batch, lhs_k), (rhs_batch, rhs_k) = dims
    numbers = ((lhs_k, rhs_k), (lhs_batch, rhs_batch))
  return DotCase(
    lhs=operands[0],
    rhs=operands[1],
    dimension_numbers=numbers,
    block_size=block_size,
    dtype=contract.RESULT_DTYPES[int(rng.choice(3, p=[0.5, 0.35, 0.15]))],
  )


def _row_sizes(rng: np.random.Generator, num: int) -> list[int]:
  """Sizes of m or n, a third of them 1."""
  return [
    1 if rng.random() < 0.33 else int(rng.integers(2, MAX_ROWS + 1))
    for _ in range(num)
  ]


def _storage(
  rng: np.random.Generator,
  format: formats.BlockFormat | None,
  shape: tuple[int, ...],
  axis: int,
  block_size: int | None,
) -> str:
  """One of the ways to pass this operand."""
  if format is None:
    return "raw"
  options = ["raw"]
  if block_size is not None:
    options.append("padded")
  if shape[axis] % format.block_size == 0:
    options.append("scaled_array")
  if format.is_fp4:
    options += ["packed_" + option for option in options]
  if axis == len(shape) - 1 and len(shape) > 1:
    options += ["swizzled", "packed_swizzled" if format.is_fp4 else "swizzled"]
  return options[int(rng.integers(len(options)))]


class DotTestCase(parameterized.TestCase):
  """The call under test, and operands for it.

  Attributes:
    implementation: the one to force; None tests the choice.
    kinds: pairs of operands of the fuzzed shapes.
    cases_per_test: fuzzed shapes in each of `NUM_FUZZ_TESTS` tests.
    exact_beyond_f32: whether a dequantized value outside f32's normal range
      still counts exactly; else it may be flushed, or be Inf.
    subnormal_spacing: what dequantized values below 2^-126 are rounded to
      multiples of, where they are not flushed.
    keeps_global_scale_f32: whether the global scale stays f32 for a 16-bit
      result even without precision="highest".
  """

  implementation: str | None = None
  kinds: Sequence[tuple[Any, Any]] = KINDS
  cases_per_test: int = 25
  exact_beyond_f32: bool = False
  subnormal_spacing: float = 0.0
  keeps_global_scale_f32: bool = True

  def dot(self, *args: Any, **kwargs: Any) -> Any:
    """The call under test. Override it to run elsewhere, or to skip."""
    return jp.block_scaled_dot(
      *args, implementation=self.implementation, **kwargs
    )

  def operand(
    self,
    rng: np.random.Generator,
    format: formats.BlockFormat | np.dtype,
    shape: tuple[int, ...],
    *,
    integers: bool = True,
    storage: str = "raw",
  ) -> contract.Operand:
    """An operand blocked along its last dimension."""
    unpadded = tuple(range(len(shape) - 2))
    case = contract.operand_case(
      format, *shape, storage=storage, unpadded=unpadded
    )
    return contract.make_operand(rng, case, integers=integers)

  def call(self, lhs: contract.Operand, rhs: contract.Operand, **kwargs: Any):
    return self.dot(lhs.operand, rhs.operand, lhs.scale, rhs.scale, **kwargs)

  def results_of(
    self, functions: dict[str, Callable[..., Any]], *arguments: dict[str, Any]
  ) -> list[dict[str, Any]]:
    """Returns the results of calls, by name, of one program.

    XLA compiles a program of many calls in less time than a program for each.
    A call that raises an error is a failed subtest, and has no result. The
    public suite skips refused calls in `result_of`.

    Args:
      functions: those that are called, by name.
      *arguments: what the functions are called with, by name. The program runs
        with each.
    """

    def each(arguments: Any) -> Any:
      results = {}
      for name, function in functions.items():
        with self.subTest(name):
          result = self.result_of(function, *arguments[name])
          if result is not None:
            results[name] = result
      return results

    return list(map(jax.jit(each), arguments))

  def result_of(self, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of one call of `results_of`; None leaves it out."""
    return function(*args)

  def check_dot(
    self,
    lhs: contract.Operand,
    rhs: contract.Operand,
    *,
    dimension_numbers: Any = None,
    integers: bool = True,
    **kwargs: Any,
  ) -> None:
    """Checks a call with an f32 result: exact on integers, else bounded."""
    actual = self.call(lhs, rhs, dimension_numbers=dimension_numbers, **kwargs)
    expected = contract.dot(lhs.exact, rhs.exact, dimension_numbers)
    contract.assert_dot(actual, *expected, integers=integers)
