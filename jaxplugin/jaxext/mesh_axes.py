# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings as the mesh axes of each dimension, whatever the partitioner chose.

The partitioner is free to shard a dimension by a part of a mesh axis: a split
or merged dimension, k in whole blocks, 24 rows over 4 devices seen as (6, 4)
rows. A `PartitionSpec` over the caller's mesh cannot say that, and JAX's own
decoding of such a sharding raises. `decode` cuts the axes of the mesh finer
instead, so that every part has an axis of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec

from jaxplugin.jaxext import jax_private

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the mesh axes of each dimension, major to minor


def normalize_spec(spec: PartitionSpec | Sequence[Any], ndim: int) -> Spec:
  """The axes of each dimension of a `PartitionSpec`, as tuples."""
  entries = list(spec) + [None] * (ndim - len(spec))

  def axes(entry: Any) -> Axes:
    if isinstance(entry, str):
      return (entry,)
    return tuple(entry) if isinstance(entry, (tuple, list)) else ()

  return tuple(axes(entry) for entry in entries)


def explicit_axes(mesh: Any) -> Axes:
  """The axes of a mesh that shardings in types are made of."""
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, kind in types if kind == AxisType.Explicit)


def partition_spec(spec: Spec) -> PartitionSpec:
  return PartitionSpec(*(axes or None for axes in spec))


class Taker:
  """Hands out mesh axes, each once, to dimensions that they divide."""

  def __init__(self, axis_sizes: Mapping[str, int]) -> None:
    self._sizes = axis_sizes
    self._used: set[str] = set()

  def count(self, axes: Axes) -> int:
    """Into how many parts the axes split a dimension."""
    return math.prod(self._sizes[axis] for axis in axes)

  def fits(self, axes: Axes, size: Any, granule: int = 1) -> bool:
    return (
      bool(axes)
      and isinstance(size, int)
      and not self._used & set(axes)
      and size % (self.count(axes) * granule) == 0
    )

  def take(self, axes: Axes, size: Any, granule: int = 1) -> Axes:
    """Takes the longest prefix of `axes` that fits, perhaps none."""
    while axes and not self.fits(axes, size, granule):
      axes = axes[:-1]
    self._used |= set(axes)
    return axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Digit:
  """A digit of a device's number: number // stride % size.

  The devices of a mesh are numbered in its order, so each of its axes is one.
  """

  size: int
  stride: int


Digits = tuple[_Digit, ...]  # of one dimension, major to minor


def decode(
  mesh: jax.sharding.Mesh,
  tilings: Sequence[jax_private.Tiling | None],
  ndims: Sequence[int],
) -> tuple[jax.sharding.Mesh, list[Spec]]:
  """The axes of arrays that the partitioner hands to a callback.

  Inside of a `shard_map` over some axes, those of type Manual, it speaks of one
  group of devices, in an order of its own: see `speaking_mesh`.

  Args:
    mesh: the mesh of the program; empty where JAX does not know it.
    tilings: how each array is dealt to devices; None where that is not known.
    ndims: the ranks of the arrays.

  Returns:
    A mesh of the same devices in the same order (or of as many as a group has),
    with axes as fine as the tilings need, and each array's axes in it. Axes of
    `mesh` that are not cut keep their names (but in a group). A dimension whose
    tiles follow no mesh that suits the others as well counts as not sharded.
  """
  known = [t for t in tilings if t is not None]
  if not known:
    return mesh, [((),) * ndim for ndim in ndims]
  all_devices = known[0].devices
  devices = all_devices[: min(len(t.device_numbers) for t in known)]
  # Numbers in a group are no places in the mesh.
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


def automatic_sizes(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
  """Sizes of the axes that the partitioner splits arrays over."""
  types = zip(mesh.devices.shape, mesh.axis_types, strict=True)
  return tuple(size for size, kind in types if kind != AxisType.Manual)


def speaking_mesh(
  mesh: jax.sharding.Mesh, fine: jax.sharding.Mesh
) -> jax.sharding.Mesh | None:
  """The mesh whose axes the devices of a callback may speak along.

  Collectives name devices of the whole program. Which of them a number in a
  group is only tells a mesh with one axis that is not manual: numbers are then
  places along it. Of several the partitioner chooses their order, and does not
  say which.

  Args:
    mesh: of the program.
    fine: what `decode` made of it.

  Returns:
    A mesh of all devices with the axes of `fine`; None where it is not known.
  """
  if AxisType.Manual not in mesh.axis_types or fine.size == mesh.size:
    return fine
  places = [
    place
    for place, kind in enumerate(mesh.axis_types)
    if kind != AxisType.Manual and mesh.devices.shape[place] > 1
  ]
  if len(places) != 1:
    return None
  (place,) = places
  before = math.prod(mesh.devices.shape[:place])
  return jax.sharding.Mesh(
    mesh.devices.reshape(before, *fine.devices.shape, -1),
    ("manual_before", *fine.axis_names, "manual_after"),
  )


def of_whole_axes(axes: Axes, fine: Any, mesh: Any) -> bool:
  """Whether axes of a mesh that `decode` made are axes of the program's mesh.

  If not, no `PartitionSpec` says how they split a dimension, and what leaves
  `jit` must not be split so.

  Args:
    axes: of `fine`.
    fine: the mesh that `decode` returned for `mesh`.
    mesh: the mesh of the program; empty where JAX does not know it.
  """
  if mesh.empty or tuple(mesh.devices.flat) != tuple(fine.devices.flat):
    return mesh.empty
  sizes = list(fine.shape.items())
  inside: list[Axes] = []
  for size in mesh.shape.values():
    names: list[str] = []
    while size > 1:
      name, part = sizes.pop(0)
      names.append(name)
      size //= part
    inside.append(tuple(names))
  while axes:
    found = next((n for n in inside if n and axes[: len(n)] == n), None)
    if found is None:
      return False
    axes = axes[len(found) :]
  return True


def digits_of_tiles(
  counts: Sequence[int], device_numbers: np.ndarray
) -> tuple[Digits, ...]:
  """The digits of a device's number that choose its tile in each dimension.

  Args:
    counts: tiles along each dimension.
    device_numbers: i64[n], the devices of the first tile (one or more copies of
      it), then those of the next, in major to minor order.

  Returns:
    One entry for each of `counts`; none at all where no digits do this.
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
  """Digits, minor first, in whose order `numbers` counts; none if it does not.

  Each is as large as can be: digits of neighbouring axes may be one.
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
  """The boundaries of axes that make up the digits, major to minor.

  Between one and the next lies an axis: the larger one is the next axis' stride
  times the axis' size. They are those of a mesh of `sizes`, and those of as
  many of `parts` as go together, the first ones first.
  """
  bounds = {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}
  for digits in parts:
    ends = ((d.stride, d.stride * d.size) for d in digits)
    finer = sorted(bounds.union(*ends))
    if not any(b % a for a, b in itertools.pairwise(finer)):
      bounds = set(finer)
  return tuple(sorted(bounds, reverse=True))


def _names(mesh: jax.sharding.Mesh) -> dict[tuple[int, int], str]:
  """The names of a mesh's axes, by the bounds between which they lie."""
  names, minor = {}, 1
  for name, size in reversed(mesh.shape.items()):
    if size > 1:
      names[minor * size, minor] = name
    minor *= size
  return names


def _axes(
  digits: Digits, bounds: Sequence[int], names: Mapping[int, str]
) -> Axes:
  """The axes between `bounds` that make up the digits; () where none do."""
  axes: list[str] = []
  for digit in digits:
    end = digit.stride * digit.size
    if digit.stride not in bounds or end not in bounds:
      return ()
    axes += [names[b] for b in names if digit.stride <= b < end]
  return tuple(axes)
