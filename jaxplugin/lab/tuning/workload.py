# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems to tune, from named shapes, a module or a function."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import dot, quantization
from jaxplugin.core import formats, targets
from jaxplugin.explanation import diagnostics, report
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.tuning.operations import operation, registry
from jaxplugin.ragged import api as ragged_api
from jaxplugin.tables import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """One problem to tune."""

  problem: operation.Problem
  source: str = ""  # the layer, or the line of the program, that has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Problems to tune, without duplicates."""

  items: tuple[Item, ...]
  left_out: tuple[str, ...] = ()  # what is not tuned, each with its reason


def of_shapes(
  rows: Sequence[workloads.BenchRow],
  pairs: Sequence[workloads.Pair] | None,
  out_dtype: np.dtype,
  target: targets.Target,
) -> Workload:
  """Returns the problems of rows of the benchmark.

  Args:
    rows: the rows. Those of several operations are left out.
    pairs: formats; None is the formats of each row.
    out_dtype: dtype of results, and of arrays to quantize.
    target: the device.

  Raises:
    ValueError: If a row does not support its formats (`workloads.check`).
  """
  items, left_out = [], []
  for row in rows:
    if row.kind not in _PROBLEMS:
      left_out.append(
        f"{row}: not one operation; pass MxNxK, experts:, quantize:,"
        " dequantize: or sets of these"
      )
      continue
    for pair in pairs or workloads.parse_pairs(row.formats):
      if not row.is_product and pair.lhs != pair.rhs:
        left_out.append(f"{row}: needs one format, got {pair}")
        continue
      workloads.check(row, pair)
      with targets.use_target(target):
        problem = _PROBLEMS[row.kind](row, pair, out_dtype, target)
      items.append(Item(problem=problem, source=row.layer))
  return _unique(items, left_out)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _matmul(
  row: workloads.BenchRow,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> operation.Problem:
  def side(x: jax.Array, format: formats.BlockFormat | None) -> Any:
    if format is None:
      return x.astype(pair.plain)
    return quantization.quantize(x, format)

  multiply: Any = dot.block_scaled_dot
  shapes = [_shape(row.m, row.k), _shape(row.n, row.k)]
  if row.kind == "experts":
    multiply = ragged_api.ragged_dot
    shapes = [
      _shape(row.m * row.top, row.k),
      _shape(row.experts, row.n, row.k),
      jax.ShapeDtypeStruct((row.experts,), jnp.int32),
    ]

  def call(lhs: jax.Array, rhs: jax.Array, *sizes: jax.Array) -> jax.Array:
    lhs, rhs = side(lhs, pair.lhs), side(rhs, pair.rhs)
    return multiply(lhs, rhs, *sizes, preferred_element_type=out_dtype)

  (found,) = diagnostics.explain(call, *shapes, target=target)
  return found.problem


def _codec(
  row: workloads.BenchRow,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> operation.Problem:
  assert pair.rhs is not None
  function: Any = functools.partial(quantization.quantize, format=pair.rhs)
  x: Any = jax.ShapeDtypeStruct((row.m, row.k), out_dtype)
  if row.kind == "dequantize":
    x = jax.eval_shape(function, _shape(row.m, row.k))
    function = functools.partial(quantization.dequantize, dtype=out_dtype)
  (found,) = diagnostics.explain(function, x, target=target).quantizations
  (problem,) = found.problems
  return problem


_PROBLEMS: Final = {
  "dot": _matmul,
  "experts": _matmul,
  "quantize": _codec,
  "dequantize": _codec,
}


def of_explained(explanation: report.Explanation) -> Workload:
  """Returns the problems of a function or a module."""
  items, left_out = [], []
  for explained in explanation:
    place = explained.layer or explained.source
    if explained.problem is not None:
      items.append(Item(problem=explained.problem, source=place))
    elif explained.error:
      left_out.append(f"{place}: {explained.error}")
  for quantized in explanation.quantizations:
    place = quantized.layer or quantized.source
    items += (Item(problem=p, source=place) for p in quantized.problems)
  return _unique(items, left_out)


def of_operations(work: Workload, names: Sequence[str]) -> Workload:
  """Returns the workload with only the operations `names`."""
  items = [i for i in work.items if registry.name_of(i.problem) in names]
  left_out = [
    f"{item.problem}: not among --operations {','.join(names)}"
    for item in work.items
    if item not in items
  ]
  return Workload(items=tuple(items), left_out=(*work.left_out, *left_out))


def one_a_bucket(work: Workload) -> Workload:
  """Returns the workload with only the largest problem of each bucket."""
  found: dict[object, list[tuple[int, Item]]] = collections.defaultdict(list)
  for number, item in enumerate(work.items):
    described = registry.of(item.problem).operation
    fields = described.fields_of(item.problem)
    if fields is None:
      found[number].append((0, item))
      continue
    size = dict(fields)[records.BUCKETED]
    assert isinstance(size, int)
    key = described.name, records.key_of(fields)
    found[key].append((size, item))
  items, left_out = [], list(work.left_out)
  for group in found.values():
    size, largest = max(group, key=lambda pair: pair[0])
    items.append(largest)
    left_out += (
      f"{item.problem}: m={size} stands for its bucket"
      for _, item in group
      if item is not largest
    )
  return Workload(items=tuple(items), left_out=tuple(left_out))


def _unique(items: Sequence[Item], left_out: Sequence[str]) -> Workload:
  """Returns a workload without duplicates. The first source is kept."""
  found: dict[operation.Problem, Item] = {}
  for item in items:
    found.setdefault(item.problem, item)
  return Workload(items=tuple(found.values()), left_out=tuple(left_out))
