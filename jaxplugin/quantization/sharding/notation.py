# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is quantized, and its results, in Shardy's einsum-like notation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import assigning

Rule = tuple[str, dict[str, Any]]


def quantize_rule(
  problem: problems.QuantizeProblem,
  shapes: Sequence[Sequence[int]],
) -> Rule:
  """The rule of quantizing, and the sizes and kinds of its factors.

  Args:
    problem: of the whole array.
    shapes: of operands and results, which are bytes.

  Returns:
    The rule, e.g. "m (k i0) -> m (k i1), m k".
  """
  factors = _Factors(problem.shape, assigning.quantize_granules(problem))
  dims = list(range(len(problem.shape)))
  num_results = len(problem.blockings) * problem.results_each
  x, *given = shapes[: len(shapes) - num_results]
  operands = [factors.term(dims, x)]
  operands += [factors.term([None] * len(shape), shape) for shape in given]
  results, left = [], list(shapes[len(shapes) - num_results :])
  for b in problem.blockings:
    of_result: list[int | None] = list(dims)
    if len(b.dims) != 1:
      of_result = [*(b.lead if b.dims else dims), *(b.dims[:1] or [None])]
    values, scale, *rest = left[: problem.results_each]
    left = left[problem.results_each :]
    results += [factors.term(of_result, shape) for shape in (values, scale)]
    results += ["" for _ in rest]
  return factors.rule(operands, results)


def dequantize_rule(
  problem: problems.DequantizeProblem,
  shapes: Sequence[Sequence[int]],
) -> Rule:
  """The same of dequantizing, e.g. "m (k i0), m k, -> m (k i1)"."""
  factors = _Factors(
    problem.logical_shape, assigning.dequantize_granules(problem)
  )
  dims = list(range(len(problem.shape)))
  values, scale, *given = shapes[:-1]
  operands = [factors.term(dims, shape) for shape in (values, scale)]
  for shape in given:  # of a global scale, perhaps one number for all
    own = [None if size == 1 else dim for dim, size in enumerate(shape)]
    operands.append(factors.term(own, shape))
  return factors.rule(operands, [factors.term(dims, shapes[-1])])


class _Factors:
  """Names of the factors of a rule.

  A dimension whose parts stay together is a factor of such parts, shared by all
  arrays, and in each of them one more for what is inside of a part. A mesh axis
  that does not divide the parts Shardy splits in two, and `assigning` finds the
  rest another dimension.

  Args:
    shape: of the logical array.
    granules: of its dimensions, as of `assigning`.
  """

  def __init__(
    self,
    shape: Sequence[int],
    granules: Sequence[int | None],
  ) -> None:
    self._counts = {
      dim: size // granule
      for dim, (size, granule) in enumerate(zip(shape, granules, strict=True))
      if granule is not None and size > granule
    }
    self._sizes: dict[str, int] = {}
    self._number = 0

  def _own(self, letter: str) -> str:
    self._number += 1
    return f"{letter}{self._number}"

  def term(self, dims: Sequence[int | None], shape: Sequence[int]) -> str:
    """An array: which dimension of the logical one each of its own is."""
    return " ".join(map(self._factor, dims, shape))

  def _factor(self, dim: int | None, size: int) -> str:
    count = None if dim is None else self._counts.get(dim)
    if count is None:
      return self._own("x")
    if size == count:
      return f"d{dim}"
    inside = self._own("i")
    self._sizes[inside] = size // count
    return f"(d{dim} {inside})"

  def rule(self, operands: Sequence[str], results: Sequence[str]) -> Rule:
    rule = f"{', '.join(operands)} -> {', '.join(results)}"
    # Shardy wants them in the order of their first appearance.
    order = list(dict.fromkeys(re.findall(r"\w+", rule)))
    inside = tuple(f for f in order if f.startswith(("i", "x")))
    # A size is given where no dimension of an array says it.
    alone = set(re.sub(r"\([^)]*\)", "", rule).replace(",", " ").split())
    sizes = self._sizes | {f"d{dim}": n for dim, n in self._counts.items()}
    sizes = {f: n for f, n in sizes.items() if f in order and f not in alone}
    return rule, {**sizes, "need_replication_factors": inside}
