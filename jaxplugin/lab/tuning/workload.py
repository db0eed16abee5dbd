# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is tuned: named shapes, or what a module or a function computes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import dot
from jaxplugin import quantization
from jaxplugin.core import targets
from jaxplugin.explanation import diagnostics
from jaxplugin.explanation import report
from jaxplugin.lab.bench import workloads
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.ragged import api as ragged_api
from jaxplugin.stablehlo import modules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """One problem to tune.

  Attributes:
    problem: what is computed.
    source: where it is from, in words: a layer, a line.
  """

  problem: tuned.Problem
  source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Problems, each once, and what of the source is none.

  Attributes:
    items: what to tune.
    left_out: what is not tuned, with its reason.
  """

  items: tuple[Item, ...]
  left_out: tuple[str, ...] = ()


def of_shapes(
  rows: Sequence[workloads.Row],
  pairs: Sequence[workloads.Pair] | None,
  out_dtype: np.dtype,
  target: targets.Target,
) -> Workload:
  """What rows as the benchmark names them compute.

  Args:
    rows: products of (m, k) and (n, k), those of experts, and arrays to
      quantize or dequantize; other kinds are left out.
    pairs: formats; None is what each row says.
    out_dtype: of products, and of arrays that are no operands of these.
    target: what they are quantized for.

  Raises:
    ValueError: k is no multiple of a block.
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


def _side(x: jax.Array, pair: workloads.Pair, is_lhs: bool) -> Any:
  format = pair.lhs if is_lhs else pair.rhs
  if format is None:
    return x.astype(pair.plain)
  return quantization.quantize(x, format)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _dot(
  row: workloads.Row,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> tuned.Problem:
  def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return dot.block_scaled_dot(
      _side(lhs, pair, True),
      _side(rhs, pair, False),
      preferred_element_type=out_dtype,
    )

  shapes = _shape(row.m, row.k), _shape(row.n, row.k)
  (found,) = diagnostics.explain(call, *shapes, target=target)
  return found.problem


def _experts(
  row: workloads.Row,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> tuned.Problem:
  def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return ragged_api.ragged_dot(
      _side(lhs, pair, True),
      _side(rhs, pair, False),
      sizes,
      preferred_element_type=out_dtype,
    )

  sizes = jax.ShapeDtypeStruct((row.experts,), jnp.int32)
  shapes = _shape(row.m * row.top, row.k), _shape(row.experts, row.n, row.k)
  (found,) = diagnostics.explain(call, *shapes, sizes, target=target)
  return found.problem


def _quantize(
  row: workloads.Row,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> tuned.Problem:
  assert pair.rhs is not None
  quantize = functools.partial(quantization.quantize, format=pair.rhs)
  x = jax.ShapeDtypeStruct((row.m, row.k), out_dtype)
  (found,) = diagnostics.explain(quantize, x, target=target).quantizations
  (problem,) = found.problems
  return problem


def _dequantize(
  row: workloads.Row,
  pair: workloads.Pair,
  out_dtype: np.dtype,
  target: targets.Target,
) -> tuned.Problem:
  assert pair.rhs is not None
  quantize = functools.partial(quantization.quantize, format=pair.rhs)
  x = jax.eval_shape(quantize, _shape(row.m, row.k))
  dequantize = functools.partial(quantization.dequantize, dtype=out_dtype)
  (found,) = diagnostics.explain(dequantize, x, target=target).quantizations
  (problem,) = found.problems
  return problem


_PROBLEMS: Final = {
  "dot": _dot,
  "experts": _experts,
  "quantize": _quantize,
  "dequantize": _dequantize,
}


def of_module(
  source: modules.Source, target: targets.Target, *, strict: bool = False
) -> Workload:
  """The block-scaled calls of a module; consumes it.

  Args:
    source: the module.
    target: what they are tuned for.
    strict: whether a call that cannot be taken is an error.
  """
  return _of_explained(
    diagnostics.explain_module(source, target, strict=strict)
  )


def of_function(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  target: targets.Target,
) -> Workload:
  """What of a function tables may decide about, of abstract arguments."""
  return _of_explained(diagnostics.explain(function, *arguments, target=target))


def _of_explained(explanation: report.Explanation) -> Workload:
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
  """The work, of some operations alone."""
  items = [i for i in work.items if _name(i) in names]
  left_out = [
    f"{item.problem}: not among --operations {','.join(names)}"
    for item in work.items
    if item not in items
  ]
  return Workload(items=tuple(items), left_out=(*work.left_out, *left_out))


def _name(item: Item) -> str:
  return known.of(item.problem).operation.name


def _unique(items: Sequence[Item], left_out: Sequence[str]) -> Workload:
  """Each problem once, with its first source."""
  found: dict[tuned.Problem, Item] = {}
  for item in items:
    found.setdefault(item.problem, item)
  return Workload(items=tuple(found.values()), left_out=tuple(left_out))
