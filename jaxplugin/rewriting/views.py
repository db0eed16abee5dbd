# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights as a function's code sees them: laid out in many ways.

Code gets a weight as a plain array. What is made of it by reshapes, transposes,
conversions and slices is a `View`: of which weight, and which of its elements
is where. Products of views are products with the weight as it is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.rewriting import facts


class NotServed(Exception):
  """What is made of a weight is no product with it; says why."""


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "layers"),
  meta_fields=("path",),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
  """A weight that a function was given.

  Attributes:
    path: its name among the arguments.
    array: stored (..., n, k), blocked along k.
    layers: integers[], of each of the first dimensions which one is meant.
  """

  path: str
  array: scaled_array.ScaledArray
  layers: tuple[Any, ...] = ()

  @property
  def ndim(self) -> int:
    """That of one layer."""
    return self.array.ndim - len(self.layers)

  def selected(self) -> scaled_array.ScaledArray:
    """The layer that is meant."""
    array = self.array
    for layer in self.layers:
      array = array[layer]
    return array

  def dequantized(self, dtype: Any) -> jax.Array:
    return quantization.dequantize(self.selected(), dtype)

  def at(self, layer: Any) -> Weight:
    return dataclasses.replace(self, layers=(*self.layers, layer))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("weight",),
  meta_fields=("dims", "stored"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class View:
  """A value that has the numbers of a weight, up to roundings.

  Attributes:
    weight: which.
    dims: of each of its dimensions the atoms.
    stored: of each of the stored weight's the atoms.
  """

  weight: Weight
  dims: tuple[facts.Atoms, ...]
  stored: tuple[facts.Atoms, ...]

  def has_all_once(self) -> bool:
    """Whether it is neither repeated nor cut."""
    own = [atom for dim in self.dims for atom in dim]
    stored = [atom for dim in self.stored for atom in dim]
    return len(own) == len(stored) and set(own) == set(stored)

  def at(self, layer: Any) -> View | None:
    """Of one index of its first dimension; None if that is no layer."""
    if self.weight.ndim <= 2 or not self.dims:
      return None
    if self.dims[0] != self.stored[0]:
      return None
    return View(
      weight=self.weight.at(layer), dims=self.dims[1:], stored=self.stored[1:]
    )

  def value(self, dtype: Any) -> tuple[jax.Array, facts.Product]:
    """Made anew of the weight: what it is, and what is known of it."""
    stored = self.weight.dequantized(dtype)
    factor = facts.Factor(array=stored, dims=self.stored, dtype=np.dtype(dtype))
    value = factor.laid_out(self.dims)
    return value, facts.Product(self.dims, (factor,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
  """What a product does with the stored dimensions of a weight, but the last.

  Attributes:
    batch: those that are batch dimensions.
    free: those that it keeps.
  """

  batch: tuple[int, ...]
  free: tuple[int, ...]


def stored_dims(
  view: View, contracting: Sequence[int], batch: Sequence[int]
) -> Dims:
  """What a product with a view does with the weight.

  Args:
    view: a side of the product.
    contracting, batch: its dimensions of these kinds.

  Raises:
    NotServed: it is no product of the weight as it is stored.
  """
  if not view.has_all_once():
    raise NotServed("its elements are repeated")
  contracted = {atom for d in contracting for atom in view.dims[d]}
  batched = {atom for d in batch for atom in view.dims[d]}
  if contracted != set(view.stored[-1]):
    raise NotServed(
      "the matmul contracts other dimensions than the blocked one (a"
      " derivative does: differentiate outside of the function)"
    )
  kinds: dict[bool, list[int]] = {True: [], False: []}
  for d, atoms in enumerate(view.stored[:-1]):
    is_batch = [atom in batched for atom in atoms]
    if len(set(is_batch)) > 1:
      raise NotServed("only a part of a stored dimension is a batch dimension")
    kinds[any(is_batch)].append(d)
  return Dims(batch=tuple(kinds[True]), free=tuple(kinds[False]))


def other_side(
  x: jax.Array,
  view: View,
  dims: Dims,
  pairs: Sequence[tuple[int, int]],
) -> tuple[jax.Array, int]:
  """The other operand with its dimensions in the order of the weight's.

  Args:
    x: the other operand.
    view: the weight.
    dims: of the weight.
    pairs: of each contracting and batch dimension that of x and of the view.

  Returns:
    x of dimensions: batch, as stored; its own; contracting. And how many its
    own are.
  """
  of_view = dict(pairs)
  sizes: list[int] = []
  places: dict[facts.Atom, int] = {}
  own = []
  for d, size in enumerate(x.shape):
    if d not in of_view:
      own.append(len(sizes))
      sizes.append(size)
      continue
    for atom in view.dims[of_view[d]]:
      places[atom] = len(sizes)
      sizes.append(atom.size)
  batch = [[places[a] for a in view.stored[d]] for d in dims.batch]
  contracting = [places[a] for a in view.stored[-1]]
  order = [*(p for group in batch for p in group), *own, *contracting]
  shape = (
    *(math.prod(sizes[p] for p in group) for group in batch),
    *(sizes[p] for p in own),
    math.prod(sizes[p] for p in contracting),
  )
  x = x.reshape(sizes) if tuple(sizes) != x.shape else x
  x = x.transpose(order) if order != sorted(order) else x
  return (x.reshape(shape) if shape != x.shape else x), len(own)


def in_order(
  result: jax.Array,
  view: View,
  dims: Dims,
  num_own: int,
  batch: Sequence[int],
  free: Sequence[int],
  is_lhs: bool,
) -> jax.Array:
  """The result as `lax.dot_general` has its dimensions.

  Args:
    result: of dimensions: batch, as stored; the other side's own; the weight's
      that are kept, as stored.
    view, dims: of the weight.
    num_own: how many the other side's own dimensions are.
    batch, free: the view's, in order.
    is_lhs: whether the weight is the left side.
  """
  sizes: list[int] = []
  places: dict[facts.Atom, int] = {}

  def split(stored: Sequence[int]) -> None:
    for atom in (a for d in stored for a in view.stored[d]):
      places[atom] = len(sizes)
      sizes.append(atom.size)

  split(dims.batch)
  first = len(dims.batch)
  own = list(range(len(sizes), len(sizes) + num_own))
  sizes.extend(result.shape[first : first + num_own])
  split(dims.free)
  of = lambda ds: [places[a] for d in ds for a in view.dims[d]]
  sides = (of(free), own) if is_lhs else (own, of(free))
  order = [*of(batch), *sides[0], *sides[1]]
  shape_of = lambda ds: [math.prod(a.size for a in view.dims[d]) for d in ds]
  own_shape = [sizes[p] for p in own]
  kept = shape_of(free)
  tail = [*kept, *own_shape] if is_lhs else [*own_shape, *kept]
  shape = (*shape_of(batch), *tail)
  if order != sorted(order):
    result = jnp.transpose(result.reshape(sizes), order)
  return result.reshape(shape) if result.shape != shape else result
