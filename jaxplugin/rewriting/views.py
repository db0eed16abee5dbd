# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of quantized weights, and matmuls by a view.

Code gets a weight as a plain array. Its result after reshapes, transposes,
conversions and slices is a `View`, which maps its dimensions to those of the
weight. A matmul by a view is a matmul by the stored weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.rewriting import facts


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "layers"),
  meta_fields=("path",),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
  """A quantized weight among the arguments of a function.

  Attributes:
    path: its name among the arguments.
    array: stored (..., n, k), blocked along k.
    layers: integers[], indices into the first dimensions, which select a layer.
  """

  path: str
  array: scaled_array.ScaledArray
  layers: tuple[Any, ...] = ()

  @property
  def ndim(self) -> int:
    """The number of dimensions of the selected layer."""
    return self.array.ndim - len(self.layers)

  def selected(self) -> scaled_array.ScaledArray:
    """Returns the selected layer."""
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
  """A value that has the elements of a weight, except for roundings.

  Attributes:
    weight: the weight.
    dims: atoms of each dimension of the value.
    stored: atoms of each dimension of the stored weight.
  """

  weight: Weight
  dims: tuple[facts.Atoms, ...]
  stored: tuple[facts.Atoms, ...]

  def has_all_once(self) -> bool:
    """Whether it has each element of the weight exactly once."""
    own = [atom for dim in self.dims for atom in dim]
    stored = [atom for dim in self.stored for atom in dim]
    return len(own) == len(stored) and set(own) == set(stored)

  def at(self, layer: Any) -> View | None:
    """Returns one index of the first dimension; None if it is not of layers."""
    if self.weight.ndim <= 2 or not self.dims:
      return None
    if self.dims[0] != self.stored[0]:
      return None
    return View(
      weight=self.weight.at(layer), dims=self.dims[1:], stored=self.stored[1:]
    )

  def value(self, dtype: Any) -> tuple[jax.Array, facts.ArrayProduct]:
    """Dequantizes the weight to this view, and returns it as a product too."""
    stored = self.weight.dequantized(dtype)
    factor = facts.Factor(array=stored, dims=self.stored, dtype=np.dtype(dtype))
    value = factor.laid_out(self.dims)
    return value, facts.ArrayProduct(self.dims, (factor,))


def stored_dims(
  view: View, contracting: Sequence[int], batch: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns batch and noncontracting dimensions of the weight in a matmul.

  The last dimension of the stored weight is contracted.

  Args:
    view: an operand of the matmul.
    contracting, batch: dimensions of the view.

  Raises:
    facts.NotSupported: If the matmul is not one by the stored weight.
  """
  if not view.has_all_once():
    raise facts.NotSupported("its elements are repeated")
  contracted = {atom for d in contracting for atom in view.dims[d]}
  batched = {atom for d in batch for atom in view.dims[d]}
  if contracted != set(view.stored[-1]):
    raise facts.NotSupported(
      "the matmul contracts other dimensions than the blocked one (a"
      " derivative does: differentiate outside of the function)"
    )
  kinds: dict[bool, list[int]] = {True: [], False: []}
  for d, atoms in enumerate(view.stored[:-1]):
    is_batch = [atom in batched for atom in atoms]
    if len(set(is_batch)) > 1:
      raise facts.NotSupported(
        "only a part of a stored dimension is a batch dimension"
      )
    kinds[any(is_batch)].append(d)
  return tuple(kinds[True]), tuple(kinds[False])
