# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`vmap` of a ragged dot: one ragged dot of the rows of all entries.

If the weights are not mapped, all entries share the groups. Rows are sorted by
group, so that each weight is read once for all entries. Otherwise each entry
has separate groups. A contraction with one mapped operand becomes one with more
columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from jaxplugin.operation import primitive
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups

Bind = primitive.Bind

_ROWS: Final = frozenset({"lhs", "lhs_scale"})
_WEIGHTS: Final = frozenset({"rhs", "rhs_scale", "rhs_square_scale"})
_SCALES: Final = frozenset({"global_scale", "global_power"})
_EPILOGUE: Final = _SCALES | {"bias"}


def batch(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Returns the batched result and its mapped dimension.

  Args:
    bind: binds the primitive.
    call: call of the batched arrays.
    mapped: mapped dimension of each array that has one.
    size: number of entries.
  """
  names = set(mapped)
  if names <= _ROWS:
    return _of_rows(bind, call, mapped, size)
  if not names & _WEIGHTS and names & _EPILOGUE:
    return _of_epilogues(bind, call, mapped, size)
  return _of_groups(bind, call, mapped, size)


def batch_contraction(
  bind: Bind,
  call: calls.RaggedContraction,
  mapped: Mapping[str, int],
  size: int,
) -> tuple[jax.Array, int]:
  """Batches a contraction, with arguments and results as for `batch`."""
  names = {name.removesuffix("_scale") for name in mapped}
  # A scalar global scale applies to all columns.
  is_number = call.global_scale is None or not call.global_scale.ndim
  if not is_number or names not in ({"lhs"}, {"rhs"}):
    return _one_by_one(bind, call, mapped)
  (name,) = names
  side = getattr(call, name)
  changed = side.replace(
    values=_merged_columns(side.values, mapped.get(name), size),
    scale=_merged_columns(side.scale, mapped.get(f"{name}_scale"), size),
  )
  result = bind(call.replace(**{name: changed}))
  # `shape` is that of an entry. The result does not show its columns if `size`
  # is 0.
  shape = list(side.values.shape)
  if name in mapped:
    del shape[mapped[name]]
  dim = 1 if name == "lhs" else 2
  split = (*result.shape[:dim], size, shape[1], *result.shape[dim + 1 :])
  return result.reshape(split), dim


def _merged_columns(x: Any, dim: int | None, size: int) -> Any:
  """Merges batched [rows, columns] to [rows, entries * columns]."""
  if x is None:
    return None
  x = jnp.moveaxis(batching.bdim_at_front(x, dim, size), 0, 1)
  return x.reshape(x.shape[0], size * x.shape[2])


def _one_by_one(
  bind: Bind, call: calls.RaggedContraction, mapped: Mapping[str, int]
) -> tuple[jax.Array, int]:
  arrays = call.arrays()
  moved = {name: jnp.moveaxis(arrays[name], d, 0) for name, d in mapped.items()}
  return lax.map(lambda entry: bind(call.with_arrays(**entry)), moved), 0


def _of_rows(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with only lhs mapped: a row's entries are in its group."""

  def merged(name: str, x: jax.Array) -> jax.Array:
    x = batching.bdim_at_front(x, mapped.get(name), size)
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0] * size, *x.shape[2:])

  arrays = call.arrays()
  # The number of rows is read from the shape, because `size` may be 0.
  num_rows = arrays["lhs"].shape[1 if mapped.get("lhs") == 0 else 0]
  changes = {name: merged(name, arrays[name]) for name in _ROWS & {*arrays}}
  for name in _SCALES & {*arrays}:
    if arrays[name].ndim == 2:
      changes[name] = jnp.repeat(arrays[name], size, axis=0)
  # Sizes are clipped first, so that the product does not wrap around in i32.
  sizes = jnp.clip(call.group_sizes, 0, num_rows) * size
  result = bind(call.with_arrays(group_sizes=sizes, **changes))
  return result.reshape(num_rows, size, result.shape[1]), 1


def _of_epilogues(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with a mapped bias or global scale and unmapped weights."""
  rest = {name: d for name, d in mapped.items() if name not in _EPILOGUE}
  dim: int | None = None
  if rest:
    sums, dim = batch(bind, call.bare(), rest, size)
  else:
    sums = bind(call.bare())
  arrays = call.arrays()
  names = [name for name in arrays if name not in _WEIGHTS]

  def apply(sums: jax.Array, *own: jax.Array) -> jax.Array:
    entry = call.with_arrays(**dict(zip(names, own, strict=True)))
    return epilogue.apply(sums, entry)

  follow = jax.vmap(apply, in_axes=(dim, *map(mapped.get, names)))
  return follow(sums, *(arrays[name] for name in names)), 0


def _of_groups(
  bind: Bind, call: calls.RaggedDotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Batches a call with mapped group sizes or weights.

  Rows are sorted by group, and the result's rows are put back in order.
  """
  has_weights = bool(_WEIGHTS & {*mapped})
  arrays = call.arrays()

  def entries(name: str) -> jax.Array:
    return batching.bdim_at_front(arrays[name], mapped.get(name), size)

  sizes = entries("group_sizes")
  num_groups = sizes.shape[1]
  num_rows = entries("lhs").shape[1]
  ends = jax.vmap(groups.ends, (0, None))(sizes, num_rows)
  starts = jax.vmap(groups.starts)(ends)
  of_row = jax.vmap(groups.of_rows, (0, None))(ends, num_rows)
  new_sizes = ends - starts
  if has_weights:
    first = num_groups * jnp.arange(size, dtype=jnp.int32)[:, None]
    of_row = jnp.where(of_row < num_groups, of_row + first, size * num_groups)
    new_sizes = new_sizes.reshape(-1)
  else:
    new_sizes = jnp.sum(new_sizes, axis=0, dtype=jnp.int32)
  order = jnp.argsort(of_row.reshape(-1), stable=True)

  changes = {"group_sizes": new_sizes}
  # `global_scale` and `global_power` must have the same shape.
  scales_are_mapped = bool(_SCALES & {*mapped})
  for name, x in arrays.items():
    is_scale = name in _SCALES
    ndim = x.ndim - (name in mapped)
    if name in _ROWS or (is_scale and ndim == 2):
      changes[name] = _merged(entries(name))[order]
    elif is_scale and ndim == 0 and scales_are_mapped:
      by_groups = (size, num_groups)
      x = jnp.broadcast_to(entries(name)[:, None], by_groups)
      changes[name] = _merged(x)
    elif has_weights and ndim and name != "group_sizes":
      changes[name] = _merged(entries(name))
  result = bind(call.with_arrays(**changes))
  result = jnp.zeros_like(result).at[order].set(result, unique_indices=True)
  return result.reshape(size, num_rows, result.shape[1]), 0


def _merged(x: jax.Array) -> jax.Array:
  """Merges the first two dimensions."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
