# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes in whole blocks, and the one dimension that an array is blocked along.

Sizes may be symbolic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats
from jaxplugin.jaxext import mesh_axes


def are_static(sizes: Iterable[Any]) -> bool:
  """Returns whether all sizes are integers."""
  return all(isinstance(size, (int, np.integer)) for size in sizes)


def divide_up(size: Any, divisor: int) -> Any:
  """Returns size / divisor, rounded up."""
  # JAX can prove that a symbolic result is the size of a slice with a stride.
  return (size - 1) // divisor + 1


def round_up(size: Any, multiple: int) -> Any:
  """Returns the smallest multiple of `multiple` that is at least `size`."""
  # In this form JAX can prove that a symbolic result is a multiple.
  return (size + multiple - 1) // multiple * multiple


def pad_axis(x: jax.Array, axis: int, size: Any) -> jax.Array:
  """Pads an axis to `size` with zeros; E8M0 has no zero and gets 2^-127."""
  axis %= x.ndim
  missing = size - x.shape[axis]
  if isinstance(missing, int) and missing == 0:
    return x
  zero_code = jnp.zeros((), x.dtype)
  if x.dtype == formats.E8M0:  # byte 0 is its smallest number
    zero_code = lax.bitcast_convert_type(jnp.zeros((), jnp.uint8), x.dtype)
  widths: list[Any] = [(0, 0, 0)] * x.ndim
  widths[axis] = (0, missing, 0)
  return lax.pad(x, zero_code, widths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocking:
  """How an array gets the one dimension along which it is quantized.

  A single dimension stays in place. Several dimensions are merged, in the given
  order, into a new last dimension. If `dims` is empty, a last dimension of size
  1 is added. The dimension is padded with zeros.

  Attributes:
    dims: contracting dimensions of the array, not negative.
    lead: all other dimensions, in the order in which they precede the merged
      dimension. If `dims` has one dimension, this is the matmul's order in
      memory.
    multiple: the size is padded to a multiple of this number.
  """

  dims: tuple[int, ...]
  lead: tuple[int, ...]
  multiple: int

  @classmethod
  def along(cls, axis: int, ndim: int, multiple: int) -> Blocking:
    """Returns the blocking along one dimension of an array of rank `ndim`."""
    lead = tuple(d for d in range(ndim) if d != axis)
    return cls(dims=(axis,), lead=lead, multiple=multiple)

  def axis(self) -> int:
    """Returns the dimension to quantize in the result of `apply`."""
    return self.dims[0] if len(self.dims) == 1 else len(self.lead)

  def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shape of the result of `apply`."""
    k = round_up(math.prod(shape[d] for d in self.dims), self.multiple)
    if len(self.dims) == 1:
      (axis,) = self.dims
      return (*shape[:axis], k, *shape[axis + 1 :])
    lead = self.lead if self.dims else range(len(shape))
    return (*(shape[d] for d in lead), k)

  def apply(self, x: jax.Array) -> jax.Array:
    """Returns `x` with its contracting dimensions merged and padded."""
    x = self._mergeable(x)
    if not self.dims:
      x = jnp.expand_dims(x, -1)
    elif len(self.dims) > 1:
      lead = [x.shape[d] for d in self.lead]
      k = math.prod(x.shape[d] for d in self.dims)
      x = x.transpose(*self.lead, *self.dims).reshape(*lead, k)
    k = x.shape[self.axis()]
    return pad_axis(x, self.axis(), round_up(k, self.multiple))

  def as_in_product(self, shape: Sequence[int]) -> Blocking:
    """Returns a blocking with the same blocks that merges dimensions like dot.

    If `dims` has one dimension and `lead` does not follow the array's order,
    the dimensions directly before it, both in the array and in `lead`, are
    merged with it. This requires whole blocks along `dims`. Otherwise returns
    `self`.
    """
    order = (*self.lead, *self.dims)
    if len(self.dims) != 1 or list(order) == sorted(order):
      return self
    (last,) = self.dims
    first = len(order) - 1
    while order[first - 1] == order[first] - 1:
      first -= 1
    if order[first] == last or shape[last] % self.multiple:
      return self
    return Blocking(
      dims=order[first:], lead=order[:first], multiple=self.multiple
    )

  def _mergeable(self, x: jax.Array) -> jax.Array:
    """Gathers dimensions of `x` whose explicit sharding `apply` cannot keep.

    Without padding, the first of `dims` keeps its sharding, because its shards
    stay contiguous after the merge.
    """
    if not self.dims or mesh_axes.mesh_of([x]) is None:
      return x
    k = math.prod(x.shape[d] for d in self.dims)
    whole = self.dims[k % self.multiple == 0 :]
    spec = mesh_axes.spec_of(x)
    return mesh_axes.reshard(
      x, tuple(() if d in whole else axes for d, axes in enumerate(spec))
    )

  def undo(self, x: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """Returns the array of `shape` that `apply` turned into `x`."""
    k = math.prod(shape[d] for d in self.dims)
    if x.shape[self.axis()] != k:
      x = lax.slice_in_dim(x, 0, k, axis=self.axis())
    if len(self.dims) == 1:
      return x
    if not self.dims:
      return x.reshape(tuple(shape))
    order = (*self.lead, *self.dims)
    x = x.reshape([shape[d] for d in order])
    return x.transpose([order.index(d) for d in range(len(order))])

  @property
  def merges_in_place(self) -> bool:
    """Whether dimensions are merged that lie one after the other in memory.

    All other dimensions keep their order.
    """
    if len(self.dims) < 2 or list(self.lead) != sorted(self.lead):
      return False
    return self.dims == tuple(range(self.dims[0], self.dims[-1] + 1))

  def unmerged(self, x: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """Splits merged dimensions of values or scale, and restores their order.

    The transpose moves no data if a matmul merges the dimensions again.

    Args:
      x: values or scale of the array, with the blocked dimension last.
    """
    order = (*self.lead, *self.dims)
    sizes = [shape[d] for d in order[:-1]]
    x = x.reshape(*sizes, x.size // math.prod(sizes))
    return x.transpose([order.index(d) for d in range(len(order))])

  def position(self, dim: int) -> int:
    """Returns where `apply` puts a dimension that is not in `dims`."""
    return self.lead.index(dim) if len(self.dims) > 1 else dim

  def under_leading_dimension(self) -> Blocking:
    """Returns the blocking of arrays stacked along a new first dimension."""
    return Blocking(
      dims=tuple(d + 1 for d in self.dims),
      lead=(0, *(d + 1 for d in self.lead)),
      multiple=self.multiple,
    )
