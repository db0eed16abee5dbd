# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A ragged dot's dimensions in Shardy's einsum-like notation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.ragged import calls
from jaxplugin.ragged.sharding import assigning

OWN: Final = "e"
WHOLE: Final = "s"


def sharding_rule(
  call: calls.Call, axis_sizes: Sequence[int] = ()
) -> tuple[str, dict[str, Any]]:
  """The rule of a call, and the sizes and kinds of its factors.

  As `dot.sharding.partitioning.sharding_rule`: what stays together in a
  dimension (a block; the gate and the value of a result) is a factor inside of
  one that all arrays share, and a dimension that some mesh axis cannot divide
  is no array's with another. Groups are summed over, as k is.

  Args:
    call: the call, of arrays of bytes.
    axis_sizes: sizes of the mesh axes.

  Returns:
    The rule, e.g. "m (k k0), g n (k k1), m k, g n k, s2, e3 n -> m n".
  """
  (contracting,) = call.rhs.contracting
  counts = {
    "k": call.rhs.shape[contracting] // assigning.contracting_granule(call),
    "n": call.columns // assigning.column_granule(call),
  }
  letters = {
    name: _letters(name, len(x.shape), contracting)
    for name, x in call.arrays().items()
  }
  return rule_of(call, letters, "mn", "gk", counts, axis_sizes)


def rule_of(
  call: Any,
  letters: Mapping[str, str],
  out: str,
  summed: str,
  counts: Mapping[str, int],
  axis_sizes: Sequence[int],
) -> tuple[str, dict[str, Any]]:
  """A rule of dimensions as letters.

  Args:
    call: of arrays of bytes.
    letters: of the dimensions of each array. `OWN` and `WHOLE` are of no other
      array's; the latter are split by nothing.
    out: of the dimensions of the result.
    summed: those that are summed over.
    counts: of letters of which arrays have more than one number a part: how
      many parts there are.
    axis_sizes: sizes of the mesh axes.
  """
  factors = _Factors(axis_sizes)

  def term(letters: str, shape: Sequence[int]) -> str:
    return " ".join(
      factors.shared(letter, counts[letter], size)
      if letter in counts
      else factors.own(letter, is_replicated=letter == WHOLE)
      if letter in (OWN, WHOLE)
      else letter
      for letter, size in zip(letters, shape, strict=True)
    )

  terms = [term(letters[name], x.shape) for name, x in call.arrays().items()]
  rule = f"{', '.join(terms)} -> {term(out, call.shape)}"
  # Shardy wants each kind of factor in the order of its first appearance.
  order = list(dict.fromkeys(re.findall(r"\w+", rule)))
  kwargs: dict[str, Any] = dict(factors.sizes)
  kwargs["reduction_factors"] = tuple(f for f in order if f in tuple(summed))
  kwargs["need_replication_factors"] = tuple(
    f for f in order if f in factors.replicated
  )
  return rule, kwargs


def _letters(name: str, ndim: int, contracting: int) -> str:
  """The dimensions of an array, those that it shares as in "mk, gnk -> mn".

  Epilogues' groups are none of those: where devices have parts of the sums they
  need them all, and would gather what had been spread to them.
  """
  if name in ("lhs", "lhs_scale"):
    return "mk"
  if name in ("rhs", "rhs_scale"):
    return "gnk" if contracting == 2 else "gkn"
  if name == "group_sizes":
    return WHOLE
  if name == "bias":
    return f"{OWN}n"
  # Global scales: one, one a group, or one a row.
  return ("", OWN, f"m{OWN}")[ndim]


class _Factors:
  """Names of factors, each new one a letter and a number.

  Attributes:
    sizes: of those that are parts of a dimension.
    replicated: those that no mesh axis may split.
  """

  def __init__(self, axis_sizes: Sequence[int]) -> None:
    self._axis_sizes = axis_sizes
    self._count = 0
    self.sizes: dict[str, int] = {}
    self.replicated: set[str] = set()

  def own(self, letter: str, *, is_replicated: bool = False) -> str:
    """A factor of one dimension of one array, or of a part of it."""
    name = f"{letter}{self._count}"
    self._count += 1
    if is_replicated:
      self.replicated.add(name)
    return name

  def shared(self, letter: str, count: int, size: int) -> str:
    """The dimension of `count` parts as an array has it, of `size` numbers.

    An axis that does not divide the parts would be split by Shardy, and spread
    to results that leave `jit`: then the array has the dimension for itself.
    So it has where there is one part, of which Shardy has no compound.
    """
    is_one = count == 1 and size > 1
    if is_one or any(count % axis_size for axis_size in self._axis_sizes):
      return self.own(letter)
    if size == count:
      return letter
    inside = self.own(letter, is_replicated=True)
    self.sizes[inside] = size // count
    return f"({letter} {inside})"
