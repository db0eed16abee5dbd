# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights among the arguments of a function, and views of them.

A slice of a view is a view of a part of the weight. So code may take a layer of
a stack, a part of a projection, or the experts of each token, and only that
part is read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplugin import quantization
from jaxplugin.arrays import layouts, placement, scaled_array, stacking
from jaxplugin.jaxext import mesh_axes
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import facts


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "layers"),
  meta_fields=("path", "is_part", "is_rows", "is_shard"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
  """A quantized weight among the arguments of a function, or a part of one.

  Methods raise `facts.NotSupported` if the stored arrays cannot be indexed,
  placed, split or gathered in this way.

  Attributes:
    path: its name among the arguments.
    array: stored (..., n, k), blocked along k.
    layers: integers[], indices into the first dimensions, which select a layer.
    is_part: whether the array was sliced or gathered from the weight.
    is_rows: whether it is single rows, as from a table of embeddings, which are
      no weight of a matmul.
    is_shard: whether `shard_map` split the whole array, so that all devices
      have the same global scale.
  """

  path: str
  array: scaled_array.ScaledArray
  layers: tuple[Any, ...] = ()
  is_part: bool = False
  is_rows: bool = False
  is_shard: bool = False

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

  def taken(self, dim: int, index: Any) -> Weight:
    """Returns the part that an index of one dimension selects.

    Args:
      dim: a dimension of the selected layer.
      index: a slice, or integers[...] in range.
    """
    if dim == self.ndim - 1:
      raise facts.NotSupported("the weight is blocked along that dimension")
    if dim == self.ndim - 2:
      if self.array.format.is_square:
        raise facts.NotSupported(f"{self.array.format} has blocks of rows")
      if self.array.scale_layout != layouts.LINEAR:
        raise facts.NotSupported("prepare_weights swizzled its scales")
    array = self.selected()
    if not isinstance(index, slice):
      array = array.to_bytes()  # XLA:CPU gathers 8-bit floats as f32
    return dataclasses.replace(
      self,
      array=array[(*(slice(None),) * dim, index)],
      layers=(),
      is_part=True,
    )

  def placed(self, sharding: Any) -> Weight:
    """Returns the selected layer, placed by a sharding of its dimensions."""
    try:
      array = placement.shard(self.selected(), sharding)
    except (TypeError, NotImplementedError) as error:
      raise facts.NotSupported(str(error)) from error
    return dataclasses.replace(self, array=array, layers=())

  def specs(self, sharding: NamedSharding) -> Weight:
    """Returns the weight with a spec for each array.

    Args:
      sharding: of the selected layer.
    """
    spec = P(*(None for _ in self.layers), *sharding.spec)
    try:
      placed = placement.shardings(self.array, sharding.update(spec=spec))
    except TypeError as error:
      raise facts.NotSupported(str(error)) from error
    return dataclasses.replace(
      self,
      array=jax.tree.map(lambda x: x.spec, placed),
      layers=tuple(P() for _ in self.layers),
    )

  def gathered(self, dim: int, params: Mapping[str, Any]) -> Weight:
    """Returns the selected layer with the parts of all devices in a dimension.

    Args:
      dim: a dimension of the selected layer.
      params: of a tiled `all_gather`.
    """
    array = self.selected()
    size = array.shape[dim] * params["axis_size"]
    if array.format.is_square or array.scale_layout != layouts.LINEAR:
      raise facts.NotSupported("its scales are not in rows")
    if dim == array.axis and array.format.along(size) != array.format.along(
      array.shape[dim]
    ):
      raise facts.NotSupported("each device has its own scale for a whole row")
    if array.global_scale is not None and not self.is_shard:
      raise facts.NotSupported("each device may have its own global scale")
    gather = functools.partial(
      lax.all_gather, axis_name=params["axis_name"], axis=dim, tiled=True
    )

    def of_leaf(path: Any, x: jax.Array) -> jax.Array:
      # A global scale for all of a dimension is the same on each device.
      is_global = path[0].name == "global_scale"
      is_one = x.ndim <= dim or (x.shape[dim] == 1 < array.shape[dim])
      return x if is_global and is_one else gather(x)

    data = jax.tree_util.tree_map_with_path(of_leaf, array.to_bytes())
    return dataclasses.replace(self, array=data.to_floats(), layers=())

  def only(self, is_valid: jax.Array, dim: int) -> Weight:
    """Returns the weight with NaN where an index of dimensions is not valid.

    Args:
      is_valid: bool[...].
      dim: the first of these dimensions.
    """
    array = self.array.to_floats()
    (values, scale, *rest), aux = array.tree_flatten()
    shape = (1,) * dim + is_valid.shape
    is_valid = is_valid.reshape(shape + (1,) * (scale.ndim - len(shape)))
    scale = jnp.where(is_valid, scale, jnp.asarray(np.nan, scale.dtype))
    array = array.tree_unflatten(aux, (values, scale, *rest))
    return dataclasses.replace(self, array=array)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("weight",),
  meta_fields=("dims", "stored"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class View:
  """A value that has the elements of a weight, except for roundings.

  Methods raise `facts.NotSupported`, as those of `Weight` do.

  Attributes:
    weight: the weight.
    dims: atoms of each dimension of the value.
    stored: atoms of each dimension of the stored weight.
  """

  weight: Weight
  dims: tuple[facts.Atoms, ...]
  stored: tuple[facts.Atoms, ...]

  def shard(self, mesh: Any, spec: Any) -> tuple[View, Weight]:
    """Returns the view of a device's part of the weight.

    Its weight is still the whole one. The second result is the weight with a
    spec for each array.

    Args:
      mesh: the mesh.
      spec: mesh axes of the dimensions of the view.
    """
    sharding = facts.laid_out_sharding(
      NamedSharding(mesh, spec), self.dims, self.stored
    )
    specs = self.weight.specs(sharding)
    taker = mesh_axes.Taker(mesh.shape)
    axes = mesh_axes.normalize_spec(sharding.spec, len(self.stored))
    parts: dict[facts.Atom, facts.Atom] = {}
    for dim, names in zip(self.stored, axes, strict=True):
      if not names:
        continue
      outermost, *_ = dim
      size, rest = divmod(outermost.size, taker.count(names))
      if rest:
        raise facts.NotSupported(f"{names} do not divide {outermost.size}")
      parts[outermost] = facts.Atom(size)
    # Inside of another `shard_map` devices may have different arrays.
    is_same = not jax.sharding.get_abstract_mesh().manual_axes
    weight = dataclasses.replace(self.weight, is_shard=is_same)
    return dataclasses.replace(self, weight=weight).resized(parts), specs

  def resized(self, parts: Mapping[facts.Atom, facts.Atom]) -> View:
    """Returns the view with other atoms in place of some."""
    dims, stored = (
      tuple(tuple(parts.get(atom, atom) for atom in dim) for dim in whole)
      for whole in (self.dims, self.stored)
    )
    return View(weight=self.weight, dims=dims, stored=stored)

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

  def taken(self, dim: int, index: Any) -> View:
    """Returns the view of the part that an index of one dimension selects.

    Args:
      dim: a dimension of the view.
      index: a slice of at least one element, or integers[...] in range, whose
        dimensions take the place of the view's.
    """
    at = self.stored_dim(dim)
    if isinstance(index, slice):
      shape = (len(range(*index.indices(self.size(dim)))),)
    else:
      shape = np.shape(index)
    if not math.prod(shape):
      raise facts.NotSupported("it takes nothing")
    new = tuple(map(facts.atoms_of, shape))
    return View(
      weight=self.weight.taken(at, index),
      dims=(*self.dims[:dim], *new, *self.dims[dim + 1 :]),
      stored=(*self.stored[:at], *new, *self.stored[at + 1 :]),
    )

  def picked(self, dim: int, index: Any) -> View:
    """Returns `taken`, as rows if it selects vectors along the blocked one."""
    part = self.taken(dim, index)
    is_rows = (
      self.stored_dim(dim) == self.weight.ndim - 2
      and self.dims[-1] == self.stored[-1]
    )
    weight = dataclasses.replace(part.weight, is_rows=is_rows)
    return dataclasses.replace(part, weight=weight)

  def cut(self, dim: int, start: Any, size: int, stride: int = 1) -> View:
    """Returns the view of a range of one dimension.

    Args:
      dim: a dimension of the view.
      start: the first index: an int, or an i32[] in range.
      size: the number of indices.
      stride: the difference between two indices.
    """
    if size == self.size(dim):
      return self
    if size == 1 and self.weight.ndim > 2 and self.stored_dim(dim) == 0:
      layer = np.int32(start) if isinstance(start, int) else start
      dims = (*self.dims[:dim], (), *self.dims[dim + 1 :])
      return View(
        weight=self.weight.at(layer), dims=dims, stored=self.stored[1:]
      )
    if isinstance(start, int):
      return self.taken(dim, slice(start, start + stride * size, stride))
    take = self.picked if size == 1 else self.taken
    return take(dim, start + jnp.arange(size, dtype=np.int32))

  def size(self, dim: int) -> int:
    """The number of elements along a dimension."""
    return math.prod(atom.size for atom in self.dims[dim])

  def stored_dim(self, dim: int) -> int:
    """Returns the dimension of the stored weight that a dimension is."""
    for at, atoms in enumerate(self.stored):
      if atoms and atoms == self.dims[dim]:
        return at
    raise facts.NotSupported("it takes a part of a stored dimension")

  def value(self, dtype: Any) -> tuple[jax.Array, facts.ArrayProduct]:
    """Dequantizes the weight to this view, and returns it as a product too."""
    stored = self.weight.dequantized(dtype)
    factor = facts.Factor(array=stored, dims=self.stored, dtype=np.dtype(dtype))
    value = factor.laid_out(self.dims)
    return value, facts.ArrayProduct(self.dims, (factor,))


# Operations that the quantized weight can do. Each function of RULES takes a
# view and an operation on it, and returns the views that the results are.


def _wide(index: Any) -> jax.Array:
  """Converts integers of fewer than 32 bits, which cannot hold every size."""
  index = jnp.asarray(index)
  return index.astype(np.int32) if index.dtype.itemsize < 4 else index


def _clipped(index: jax.Array, last: int) -> jax.Array:
  return jnp.clip(index, 0, last).astype(np.int32)


def _slice(view: View, operation: binding_private.BoundOperation) -> list[View]:
  params = operation.params
  strides = params["strides"] or (1,) * len(view.dims)
  limits = zip(
    params["start_indices"], params["limit_indices"], strides, strict=True
  )
  for dim, (start, limit, stride) in enumerate(limits):
    size = len(range(start, limit, stride))
    view = view.cut(dim, start, size, stride)
  return [view]


def _dynamic_slice(
  view: View, operation: binding_private.BoundOperation
) -> list[View]:
  _, *starts = operation.args
  sizes = operation.params["slice_sizes"]
  for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
    last = view.size(dim) - size
    view = view.cut(dim, _clipped(_wide(start), last), size)
  return [view]


def _split(view: View, operation: binding_private.BoundOperation) -> list[View]:
  sizes = list(map(int, operation.params["sizes"]))
  starts = (sum(sizes[:i]) for i in range(len(sizes)))
  return [
    view.cut(operation.params["axis"], start, size)
    for start, size in zip(starts, sizes, strict=True)
  ]


def _unstack(
  view: View, operation: binding_private.BoundOperation
) -> list[View]:
  axis = operation.params["axis"]
  parts = (view.cut(axis, i, 1) for i in range(view.size(axis)))
  return [
    dataclasses.replace(part, dims=part.dims[:axis] + part.dims[axis + 1 :])
    for part in parts
  ]


def _gather(
  view: View, operation: binding_private.BoundOperation
) -> list[View]:
  params = operation.params
  numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
  dims = [d for d, size in enumerate(sizes) if size != view.size(d)]
  fill = params["fill_value"]
  is_filled = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
  if (
    [sizes[d] for d in dims] != [1]
    or dims[0] not in numbers.start_index_map
    or numbers.operand_batching_dims
    # The index of another dimension could be out of range.
    or (is_filled and len(numbers.start_index_map) > 1)
    or (is_filled and not (fill is None or np.isnan(fill)))
  ):
    raise facts.NotSupported("it gathers other parts than whole rows or layers")
  (dim,) = dims
  index = _wide(operation.args[1][..., numbers.start_index_map.index(dim)])
  last = view.size(dim) - 1
  part = view.picked(dim, _clipped(index, last))
  if is_filled:
    is_valid = (index >= 0) & (index <= last)
    weight = part.weight.only(is_valid, view.stored_dim(dim))
    part = dataclasses.replace(part, weight=weight)
  gathered = list(part.dims[dim : dim + index.ndim])
  kept = [] if dim in numbers.collapsed_slice_dims else [()]
  others = [*part.dims[:dim], *kept, *part.dims[dim + index.ndim :]]
  rank = len(gathered) + len(others)
  order = (
    others.pop(0) if d in numbers.offset_dims else gathered.pop(0)
    for d in range(rank)
  )
  return [dataclasses.replace(part, dims=tuple(order))]


def concatenated(views: Sequence[View | None], dim: int) -> View:
  """Returns the view of weights that are joined along a dimension of views."""
  first, *others = whole = [view for view in views if view is not None]
  if len(whole) != len(views):
    raise facts.NotSupported("it is joined with an unquantized array")
  order = list(map(first.stored_dim, range(len(first.dims))))
  for view in others:
    if order != list(map(view.stored_dim, range(len(view.dims)))):
      raise facts.NotSupported("weights of other orders are joined")
  at = order[dim]
  try:
    # XLA:CPU converts 8-bit floats to f16 or f32 to join them.
    array = stacking.concatenate(
      [view.weight.selected().to_bytes() for view in whole], at
    )
  except (TypeError, NotImplementedError) as error:
    raise facts.NotSupported(str(error)) from error
  weight = dataclasses.replace(
    first.weight,
    path=" and ".join(view.weight.path for view in whole),
    array=array,
    layers=(),
    is_part=any(view.weight.is_part for view in whole),
    is_shard=all(view.weight.is_shard for view in whole),
  )
  atoms = facts.atoms_of(array.shape[at])
  return View(
    weight=weight,
    dims=(*first.dims[:dim], atoms, *first.dims[dim + 1 :]),
    stored=(*first.stored[:at], atoms, *first.stored[at + 1 :]),
  )


def _place(view: View, operation: binding_private.BoundOperation) -> list[View]:
  """Places the stored arrays by the sharding of a view."""
  params = operation.params
  sharding = params.get("dst_sharding") or params["sharding"]
  if isinstance(sharding, NamedSharding):
    sharding = facts.laid_out_sharding(sharding, view.dims, view.stored)
  return [dataclasses.replace(view, weight=view.weight.placed(sharding))]


def _vary(view: View, operation: binding_private.BoundOperation) -> list[View]:
  """Lets the stored arrays vary over axes of a `shard_map`."""
  axes = operation.params["axes"]
  vary = functools.partial(lax.pcast, axis_name=axes, to="varying")
  return [dataclasses.replace(view, weight=jax.tree.map(vary, view.weight))]


def _all_gather(
  view: View, operation: binding_private.BoundOperation
) -> list[View]:
  """Gathers the stored arrays of all devices of a `shard_map`."""
  params = operation.params
  if not params["tiled"] or params["axis_index_groups"] is not None:
    raise facts.NotSupported("it adds a dimension, or gathers within groups")
  dim = params["all_gather_dimension"]
  if not view.dims[dim]:
    raise facts.NotSupported("the dimension has size 1")
  at = facts.outermost(view.stored, view.dims[dim])
  first, *_ = view.dims[dim]
  whole = facts.Atom(first.size * params["axis_size"])
  weight = view.weight.gathered(at, params)
  return [dataclasses.replace(view, weight=weight).resized({first: whole})]


_Rule = Callable[[View, binding_private.BoundOperation], list[View]]
PARTS: Final[Mapping[str, _Rule]] = {
  "slice": _slice,
  "dynamic_slice": _dynamic_slice,
  "split": _split,
  "unstack": _unstack,
  "gather": _gather,
}
PLACES: Final = {"sharding_constraint": _place, "reshard": _place}
RULES: Final = {**PARTS, **PLACES, "pvary": _vary, "all_gather": _all_gather}
CONCATENATE: Final = "concatenate"
OPERATIONS: Final = frozenset({*RULES, CONCATENATE})
