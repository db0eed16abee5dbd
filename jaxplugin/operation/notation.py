# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of dimensions, as in "mk, nk -> mn", and the Shardy rule of them."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxplugin.jaxext import mesh_axes

Names = Sequence[str]
Rule = tuple[str, dict[str, Any]]

OWN: Final = "own"  # name of a dimension that no other array has
WHOLE: Final = "whole"  # the same, but every device needs the whole dimension


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notation:
  """The dimensions of an operation's arrays.

  Attributes:
    operands, results: name of each dimension of each array. The rule treats a
      name that is not in `sizes` as `OWN`.
    sizes: (size, granule) of each named dimension. A shard has a multiple of
      granule values. An array may store a granule in fewer elements: packed
      values, or one scale.
    reductions: names of the dimensions that the operation sums over.
  """

  operands: Sequence[Names]
  results: Sequence[Names]
  sizes: Mapping[str, tuple[Any, int]]
  reductions: Names = ()


def specs(
  names_each: Sequence[Names], axes: Mapping[str, mesh_axes.Axes]
) -> tuple[mesh_axes.Spec, ...]:
  """Returns the mesh axes of each dimension of each array."""
  return tuple(tuple(axes.get(name, ()) for name in n) for n in names_each)


def granule_of(size: Any, *blocks: int) -> int:
  """Returns the granule of a dimension, as in `Notation.sizes`.

  It keeps blocks whole. A dimension whose last block is short is one granule.
  """
  granule = math.lcm(*blocks)
  is_short = isinstance(size, int) and size % granule != 0
  return size if is_short else granule


def sharding_rule(
  notation: Notation,
  operands: Sequence[Any],
  results: Sequence[Any],
  axis_sizes: Sequence[int] = (),
) -> Rule:
  """Returns a Shardy rule, and the sizes and kinds of its factors.

  A dimension with granules is a compound of two factors: the number of
  granules, which all arrays share, and the size of a granule in this array. A
  sharding therefore propagates from values to scales and back, and does not cut
  granules.

  If a mesh axis does not divide the number of granules, Shardy would split that
  axis in two and propagate the halves, also to results that leave `jit`. The
  dimension is then a separate factor in each array. So is a dimension of one
  granule, because Shardy does not support factors of size one in a compound.

  Args:
    operands, results: arrays; only their shapes are used.
    axis_sizes: sizes of the mesh axes that must divide the number of granules.

  Returns:
    The rule, e.g. "m0 (k0 i0), n0 (k0 i1), m0 k0, n0 k0 -> m0 n0", and keyword
    arguments of JAX's function that parses it.
  """
  numbers: collections.Counter[str] = collections.Counter()
  sizes: dict[str, int] = {}

  def new(letter: str) -> str:
    numbers[letter] += 1
    return f"{letter}{numbers[letter] - 1}"

  def factor(name: str, size: int) -> str:
    if name not in notation.sizes:
      return new("w" if name == WHOLE else "x")
    whole, granule = notation.sizes[name]
    count = whole // granule
    if granule > 1 and (count == 1 or any(count % n for n in axis_sizes)):
      return new("x")
    if size == count:
      return name
    inside = new("i")
    sizes[name], sizes[inside] = count, size // count
    return f"({name} {inside})"

  def terms(names_each: Sequence[Names], arrays: Sequence[Any]) -> str:
    return ", ".join(
      " ".join(map(factor, names, x.shape))
      for names, x in zip(names_each, arrays, strict=True)
    )

  rule = terms(notation.operands, operands)
  rule += f" -> {terms(notation.results, results)}"
  # Shardy requires factors of a kind in the order in which the rule has them.
  order = list(dict.fromkeys(re.findall(r"\w+", rule)))
  # Shardy infers the size of a factor that is a whole dimension of an array.
  alone = set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", rule)))
  return rule, {
    **{name: n for name, n in sizes.items() if name not in alone},
    "reduction_factors": tuple(f for f in order if f in notation.reductions),
    "need_replication_factors": tuple(f for f in order if f[0] in "iw"),
  }
