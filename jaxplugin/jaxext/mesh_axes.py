# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings of arrays as mesh axes, for any tiling that the partitioner chose.

The partitioner may shard a dimension by a part of a mesh axis. This happens for
a split or merged dimension, for k in whole blocks, and for 24 rows over 4
devices that are viewed as (6, 4) rows. A `PartitionSpec` over the caller's mesh
cannot express that, and JAX raises when it decodes such a sharding. `decode`
splits the mesh axes instead, so that each part of an axis is an axis.

An axis of type Explicit appears in the shardings of types. Functions that only
read types accept arrays, tracers and abstract values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxplugin.jaxext import jax_private

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the mesh axes of each dimension, major to minor


def normalize_spec(spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
  """Returns the axes of each dimension of a `PartitionSpec`, as tuples."""
  entries = list(spec) + [None] * (ndim - len(spec))

  def axes(entry: Any) -> Axes:
    if isinstance(entry, str):
      return (entry,)
    return tuple(entry) if isinstance(entry, (tuple, list)) else ()

  return tuple(axes(entry) for entry in entries)


def partition_spec(spec: Spec) -> PartitionSpec:
  return PartitionSpec(*(axes or None for axes in spec))


class Taker:
  """Assigns mesh axes to dimensions. Each axis is used at most once."""

  def __init__(self, axis_sizes: Mapping[str, int]) -> None:
    self._sizes = axis_sizes
    self._used: set[str] = set()

  def count(self, axes: Axes) -> int:
    """Returns the number of parts into which the axes split a dimension."""
    return math.prod(self._sizes[axis] for axis in axes)

  def fits(self, axes: Axes, size: Any, granule: int = 1) -> bool:
    return (
      bool(axes)
      and isinstance(size, int)
      and not self._used & set(axes)
      and size % (self.count(axes) * granule) == 0
    )

  def take(self, axes: Axes, size: Any, granule: int = 1) -> Axes:
    """Takes the longest prefix of `axes` that fits, possibly none."""
    while axes and not self.fits(axes, size, granule):
      axes = axes[:-1]
    self._used |= set(axes)
    return axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Digit:
  """A digit of a device's number: number // stride % size.

  Devices are numbered in the order of the mesh, so each mesh axis is a digit.
  """

  size: int
  stride: int


Digits = tuple[_Digit, ...]  # digits of one dimension, major to minor


def decode(
  mesh: jax.sharding.Mesh,
  tilings: Sequence[jax_private.DeviceTiling | None],
  ndims: Sequence[int],
) -> tuple[jax.sharding.Mesh, list[Spec]]:
  """Returns the mesh axes of arrays that the partitioner passes to a callback.

  Args:
    mesh: the mesh of the program, or the mesh of a `Group`; empty if JAX does
      not know it.
    tilings: how each array is divided among devices; None if that is unknown.

  Returns:
    A mesh of the same devices in the same order, with axes as fine as the
    tilings need, and the axes of each array in this mesh. Axes of `mesh` that
    are not split keep their names. A dimension counts as unsharded if its tiles
    fit no mesh that also fits the other dimensions.
  """
  known = [t for t in tilings if t is not None]
  if not known:
    return mesh, [((),) * ndim for ndim in ndims]
  all_devices = known[0].devices
  # A replicated array lists all devices of the program, even inside a group.
  counts = [len(t.device_numbers) for t in known]
  devices = all_devices[: min(counts if mesh.empty else [*counts, mesh.size])]
  is_mesh_order = tuple(mesh.devices.flat) == devices
  shape = mesh.devices.shape if is_mesh_order else (len(devices),)
  parts = [
    () if t is None else digits_of_tiles(t.counts, t.device_numbers)
    for t in tilings
  ]
  bounds = refine(shape, [digits for dims in parts for digits in dims])
  sizes = [major // minor for major, minor in itertools.pairwise(bounds)]
  given = _names(mesh) if is_mesh_order else {}
  names = {
    minor: given.get((major, minor), f"stride{minor}")
    for major, minor in itertools.pairwise(bounds)
  }
  fine = jax.sharding.Mesh(
    np.array(devices, dtype=object).reshape(sizes), tuple(names.values())
  )
  specs = []
  for dims, ndim in zip(parts, ndims, strict=True):
    spec = [_axes(digits, bounds, names) for digits in dims]
    specs.append((*spec, *[()] * (ndim - len(spec))))
  return fine, specs


def decode_shardings(
  mesh: jax.sharding.Mesh, arrays: Sequence[Any]
) -> tuple[jax.sharding.Mesh, list[Spec]]:
  """Decodes the shardings of arrays that the partitioner passes to a callback.

  Args:
    mesh: the argument of `decode`.
    arrays: objects with a shape and a sharding. The sharding may be None.
  """
  ndims = [len(x.shape) for x in arrays]
  tilings = [
    jax_private.partitioner_tiling(x.sharding, ndim)
    for x, ndim in zip(arrays, ndims, strict=True)
  ]
  return decode(mesh, tilings, ndims)


def automatic_sizes(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
  """Returns the sizes of the axes that the partitioner splits arrays over."""
  types = zip(mesh.devices.shape, mesh.axis_types, strict=True)
  return tuple(size for size, kind in types if kind != AxisType.Manual)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The devices that a callback sees inside a `shard_map` over some axes.

  All have the same position along the manual axes. The partitioner numbers them
  in an order that it chooses for each operation.

  Attributes:
    mesh: the devices of a group in the partitioner's order. Its axes are parts
      of the automatic axes of `program`.
    parts: the axes of `mesh` that make up each automatic axis, major to minor.
    program: the mesh of the program.
  """

  mesh: jax.sharding.Mesh
  parts: Mapping[str, Axes]
  program: jax.sharding.Mesh

  def collective_mesh(self, fine: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh for collectives between the devices of a group.

    Collectives name devices of the whole program, in its order.

    Args:
      fine: the mesh that `decode` returned.

    Returns:
      A mesh of all devices with the axes of `fine` and the manual axes.
    """
    cut = _cut_axes(self.mesh, fine)
    sizes: list[int] = []
    names: list[str] = []
    for name, size in self.program.shape.items():
      if name in self.parts:
        own = [axis for part in self.parts[name] for axis in cut[part]]
        sizes += [fine.shape[axis] for axis in own]
        names += own
      else:
        sizes.append(size)
        names.append(f"others_{name}")
    return jax.sharding.Mesh(self.program.devices.reshape(sizes), names)


def automatic_axes(mesh: jax.sharding.Mesh) -> Axes:
  """Returns the axes that the partitioner splits arrays over, except axes of
  size 1."""
  types = zip(mesh.shape.items(), mesh.axis_types, strict=True)
  return tuple(
    name for (name, size), kind in types if kind != AxisType.Manual and size > 1
  )


def group_of(
  mesh: jax.sharding.Mesh, order: jax_private.DeviceTiling | None
) -> Group:
  """Returns the group in which the partitioner numbers an operation's devices.

  Args:
    order: the tiling of an array that has one dimension for each of
      `automatic_axes`, and is split over just that axis along it.

  Raises:
    RuntimeError: If `order` is not the tiling of such an array.
  """
  names = automatic_axes(mesh)
  sizes = tuple(mesh.shape[name] for name in names)
  digits: tuple[Digits, ...] = ()
  if order is not None and order.counts == sizes:
    digits = digits_of_tiles(order.counts, order.device_numbers)
  if order is None or len(digits) != len(names):
    raise RuntimeError(
      "jaxplugin: the order in which the partitioner numbers devices must be"
      f" known for automatic mesh axes {names} of sizes {sizes}, got {order};"
      " please report the program"
    )
  found: dict[int, tuple[str, int]] = {}
  parts: dict[str, Axes] = {}
  for name, own in zip(names, digits, strict=True):
    own_names = [name]
    if len(own) != 1:
      own_names = [f"{name}_part{i}" for i in range(len(own))]
    parts[name] = tuple(own_names)
    for part, digit in zip(own_names, own, strict=True):
      found[digit.stride] = (part, digit.size)
  in_order = [found[stride] for stride in sorted(found, reverse=True)]
  shape = [size for _, size in in_order]
  devices = np.array(order.devices[: math.prod(shape)], dtype=object)
  return Group(
    mesh=jax.sharding.Mesh(
      devices.reshape(shape), tuple(name for name, _ in in_order)
    ),
    parts=parts,
    program=mesh,
  )


def _cut_axes(
  mesh: jax.sharding.Mesh, fine: jax.sharding.Mesh
) -> dict[str, Axes]:
  """Returns, for each axis of a mesh, the axes that `decode` split it into."""
  left = list(fine.shape.items())
  cut: dict[str, Axes] = {}
  for name, size in mesh.shape.items():
    names: list[str] = []
    while size > 1:
      part, part_size = left.pop(0)
      names.append(part)
      size //= part_size
    cut[name] = tuple(names)
  return cut


def digits_of_tiles(
  counts: Sequence[int], device_numbers: np.ndarray
) -> tuple[Digits, ...]:
  """Returns the digits of a device's number that select its tile.

  Args:
    counts: tiles along each dimension.
    device_numbers: i64[n], the devices of each tile in major to minor order. A
      tile may be on several devices, which are adjacent.

  Returns:
    The digits of each dimension, or () if no digits select the tiles.
  """
  digits = _digits_of_order(device_numbers)
  copies = len(device_numbers) // math.prod(counts)
  result: list[Digits] = []
  for count in reversed((*counts, copies)):
    taken: list[_Digit] = []
    while count > 1:
      if not digits:
        return ()
      digit = digits.pop(0)
      if count < digit.size:
        if digit.size % count:
          return ()
        rest = _Digit(size=digit.size // count, stride=digit.stride * count)
        digits.insert(0, rest)
        digit = _Digit(size=count, stride=digit.stride)
      if count % digit.size:
        return ()
      taken.insert(0, digit)
      count //= digit.size
    result.insert(0, tuple(taken))
  return tuple(result[:-1])


def _digits_of_order(numbers: np.ndarray) -> list[_Digit]:
  """Returns digits, minor first, that count in the order of `numbers`.

  Each digit is as large as possible, so one digit may span several mesh axes.
  Returns [] if no digits count in this order.
  """
  digits = []
  counted = np.zeros(1, np.int64)
  while counted.size < numbers.size:
    rest = numbers[:: counted.size]
    stride = int(rest[1])
    breaks = np.flatnonzero(rest != np.arange(rest.size) * stride)
    size = int(breaks[0]) if breaks.size else rest.size
    if size < 2:
      return []
    digits.append(_Digit(size=size, stride=stride))
    counted = (np.arange(size)[:, None] * stride + counted).reshape(-1)
  return digits if np.array_equal(counted, numbers) else []


def refine(sizes: Sequence[int], parts: Sequence[Digits]) -> tuple[int, ...]:
  """Returns the boundaries of axes that make up the digits, major to minor.

  An axis lies between two adjacent boundaries. The smaller one is its stride,
  the larger one its stride times its size. The result includes the boundaries
  of a mesh of `sizes`. It includes those of each of `parts` that is compatible
  with the sizes and with the earlier parts.
  """
  bounds = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}
  for digits in parts:
    ends = ((d.stride, d.stride * d.size) for d in digits)
    finer = sorted(bounds.union(*ends))
    if not any(b % a for a, b in itertools.pairwise(finer)):
      bounds = set(finer)
  return tuple(sorted(bounds, reverse=True))


def _names(mesh: jax.sharding.Mesh) -> dict[tuple[int, int], str]:
  """Returns the names of a mesh's axes by their boundaries."""
  names, minor = {}, 1
  for name, size in reversed(mesh.shape.items()):
    if size > 1:
      names[minor * size, minor] = name
    minor *= size
  return names


def _axes(
  digits: Digits, bounds: Sequence[int], names: Mapping[int, str]
) -> Axes:
  """Returns the axes between `bounds` that make up the digits, or ()."""
  axes: list[str] = []
  for digit in digits:
    end = digit.stride * digit.size
    if digit.stride not in bounds or end not in bounds:
      return ()
    axes += [names[b] for b in names if digit.stride <= b < end]
  return tuple(axes)


def axes_of(mesh: Any) -> Axes:
  """Returns the mesh axes that appear in the shardings of types."""
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in types if kind == AxisType.Explicit)


def sharding_of(x: Any) -> NamedSharding:
  """Returns the sharding in the type of `x`."""
  is_type = isinstance(x, jax.core.ShapedArray)
  return x.sharding if is_type else jax.typeof(x).sharding


def mesh_of(arrays: Iterable[Any]) -> Any:
  """Returns the first mesh with explicit axes among the types, or None."""
  for x in arrays:
    mesh = sharding_of(x).mesh
    if axes_of(mesh):
      return mesh
  return None


def explicit_sharding_of(x: Any) -> NamedSharding | None:
  """Returns the sharding in the type of `x`; None without explicit axes."""
  return None if mesh_of([x]) is None else sharding_of(x)


def automatic(
  function: Callable[..., Any], sharding: NamedSharding | None
) -> Callable[..., Any]:
  """Returns `function` with the explicit mesh axes made auto axes.

  Args:
    function: function of trees of arrays.
    sharding: sharding of its result; None returns `function`.
  """
  if sharding is None:
    return function
  return jax.sharding.auto_axes(
    function, axes=axes_of(sharding.mesh), out_sharding=sharding
  )


def spec_of(x: Any) -> Spec:
  """Returns the mesh axes of each dimension from the type of `x`."""
  return normalize_spec(sharding_of(x).spec, len(x.shape))


def type_of(shape: Sequence[int], x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns an f32 type of a shape that is sharded like `x`.

  Args:
    shape: shape of the type.
    x: array whose spec the type gets. If `x` is on no mesh, the type is
      replicated.
    mesh: mesh of the type; None for a type without a sharding.
  """
  sharding = None
  if mesh is not None:
    spec = partition_spec(spec_of(x))
    sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(tuple(shape), np.float32, sharding=sharding)


def validate_out_sharding(who: str, out_sharding: Any) -> None:
  """Checks the type of an `out_sharding`, and that it has no unreduced axes.

  Args:
    who: the function that the error names.
    out_sharding: the argument of `lax.dot_general`.

  Raises:
    TypeError, NotImplementedError: If it does not.
  """
  if not isinstance(out_sharding, (NamedSharding, PartitionSpec, type(None))):
    raise TypeError(
      f"{who}: out_sharding must be a NamedSharding or a PartitionSpec, got"
      f" a {type(out_sharding).__name__}. Pass a jax.sharding.PartitionSpec"
    )
  spec = getattr(out_sharding, "spec", out_sharding)
  if getattr(spec, "unreduced", None):
    raise NotImplementedError(
      f"{who}: out_sharding must have no unreduced axes, got {out_sharding};"
      " leave them out, because the call computes the sum"
    )


def result_sharding(
  function: Callable[..., Any], *args: Any, mesh: Any
) -> NamedSharding:
  """Returns the sharding that JAX gives the result of a function.

  Args:
    function: a function of arrays, traced for its result.
    *args: abstract arrays.
    mesh: the mesh of the context; None for the current one.
  """
  context: Any = contextlib.nullcontext()
  if mesh is not None:
    context = jax.sharding.use_abstract_mesh(mesh)
  with context:
    # `jax.eval_shape` drops the sharding if some axes of the mesh are Auto.
    (aval,) = jax.make_jaxpr(function)(*args).out_avals
  sharding = aval.sharding
  assert isinstance(sharding, NamedSharding)
  return sharding


def reshard(x: jax.Array, spec: Spec) -> jax.Array:
  """Shards `x` by `spec` over its own mesh, or over the mesh of the context."""
  mesh = sharding_of(x).mesh
  target: Any = partition_spec(spec)
  if not mesh.empty:
    if spec_of(x) == spec:
      return x
    target = NamedSharding(mesh, target)
  return jax.sharding.reshard(x, target)


def divided(x: jax.Array, dim: int, granule: int) -> jax.Array:
  """Reshards `x` so that no shard cuts a group of `granule` values of `dim`."""
  mesh = mesh_of([x])
  if mesh is None:
    return x
  spec = list(spec_of(x))
  taker = Taker(mesh.shape)
  spec[dim] = taker.take(spec[dim], x.shape[dim], granule)
  return reshard(x, tuple(spec))


def gathered(x: jax.Array) -> jax.Array:
  """Returns `x` replicated on every device."""
  return reshard(x, ((),) * x.ndim)


def on_mesh(x: jax.Array) -> jax.Array:
  """Replicates `x` if it is on no mesh; otherwise returns it unchanged."""
  return gathered(x) if jax.typeof(x).sharding.mesh.empty else x


def shard_map(
  function: Callable[..., Any],
  mesh: Any,
  in_specs: Sequence[Spec],
  out_specs: Spec | list[Spec],
) -> Callable[..., Any]:
  """Maps `function` over the shards along the explicit axes of a mesh.

  Args:
    function: a function of one device's shards. It may use collectives over the
      explicit axes. It returns one array, or a sequence if `out_specs` is a
      list.
    mesh: mesh of the context.
    in_specs: spec of each argument. The arguments are resharded to it.
    out_specs: spec of the result, or a list with the spec of each result.
  """
  axes = set(axes_of(mesh))
  given: Any
  if isinstance(out_specs, list):
    given = tuple(map(partition_spec, out_specs))
    inside = lambda *parts: tuple(function(*parts))
  else:
    given = partition_spec(out_specs)
    inside = function
  mapped = jax.shard_map(
    inside,
    mesh=mesh,
    in_specs=tuple(map(partition_spec, in_specs)),
    out_specs=given,
    # An enclosing `vmap` over a mesh axis maps that axis itself.
    axis_names=axes - jax_private.mapped_mesh_axes(),
    # Kernels do not declare the axes over which their results vary.
    check_vma=False,
  )

  def call(*args: jax.Array) -> Any:
    return mapped(*map(reshard, args, in_specs))

  return call
