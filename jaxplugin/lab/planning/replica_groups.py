# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses the replica groups of a collective, and finds their mesh axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import numpy as np

# {{0,1},{2,3}}; {} is a group of all devices.
_LISTED: Final = re.compile(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})")
# [2,4]<=[4,2]T(1,0): 2 groups of 4 devices.
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4] {'a','b':(2)2}, in XLA since 2026. If devices are not in
# order, device_ids=([4,2]T(1,0)) or (0,2,1,3) is inside or after the mesh.
_MESH: Final = re.compile(
  r"replica_groups=mesh\[(?P<sizes>[^\]]*?)\]?"
  r"(?:, device_ids=\((?P<ids>.*?)\))?\]? \{(?P<axes>[^}]*)\}"
)
_IDS: Final = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
_MESH_SIZE: Final = re.compile(r"'?([\w.-]+)'?=(\d+)")
_MESH_AXIS: Final = re.compile(r"'?([\w.-]+)'?(?::\((\d+)\)(\d+))?")
_PAIRS: Final = re.compile(r'source_target_pairs="?(\{(?:\{\d+,\d+\},?)*\})')
_NUMBERS: Final = re.compile(r"\d+")


def of_line(line: str, count: int) -> np.ndarray:
  """Returns the groups of a collective: s64[groups, devices of a group].

  Args:
    line: an instruction of HLO's text.
    count: number of devices of the program.

  Raises:
    ValueError: If the line has no groups in a known syntax, or groups of
      several sizes.
  """
  mesh = _MESH.search(line)
  if mesh is not None:
    return _of_mesh(mesh["sizes"], mesh["ids"], mesh["axes"])
  listed = _LISTED.search(line)
  if listed is not None:
    groups = [
      [int(n) for n in _NUMBERS.findall(group)]
      for group in re.findall(r"\{([\d,]+)\}", listed[1])
    ]
    groups = groups or [[*range(count)]]
    if len({len(group) for group in groups}) > 1:
      raise ValueError(f"collectives: groups differ in size: {listed[1]}")
    return np.asarray(groups)
  start = line.find("replica_groups=[")
  iota = _IOTA.search(line, start) if start >= 0 else None
  if iota is not None:
    return _of_iota(*iota.groups())
  raise ValueError(f"collectives: cannot read replica groups in: {line}")


def pairs_of_line(line: str) -> np.ndarray:
  """Returns senders and receivers of a permutation: s64[pairs, 2].

  Raises:
    ValueError: If the line has no pairs.
  """
  found = _PAIRS.search(line)
  if found is None:
    raise ValueError(f"collectives: cannot read pairs of devices in: {line}")
  numbers = [int(n) for n in _NUMBERS.findall(found[1])]
  return np.asarray(numbers).reshape(-1, 2)


def _sizes(text: str) -> list[int]:
  return [int(n) for n in text.split(",")]


def _of_iota(shape: str, reshaped: str, order: str | None) -> np.ndarray:
  ids = np.arange(math.prod(_sizes(reshaped))).reshape(_sizes(reshaped))
  if order is not None:
    ids = ids.transpose(_sizes(order))
  return ids.reshape(_sizes(shape))


def _of_ids(text: str) -> np.ndarray:
  """Returns the devices of a mesh in the order of their positions."""
  iota, transposed = _IOTA.search(text), _IDS.search(text)
  if iota is not None:
    found = _of_iota(*iota.groups())
  elif transposed is not None:
    found = _of_iota(transposed[1], *transposed.groups())
  else:
    found = np.asarray([int(n) for n in _NUMBERS.findall(text)])
  return found.reshape(-1)


def _of_mesh(sizes: str, ids: str | None, axes: str) -> np.ndarray:
  """Returns the groups, after splitting each axis at the groups' borders."""
  by_name = {name: int(size) for name, size in _MESH_SIZE.findall(sizes)}
  count = math.prod(by_name.values())
  devices: np.ndarray = np.arange(count)
  if ids is not None:
    devices = _of_ids(ids)
  parts: dict[str, set[tuple[int, int]]] = {name: set() for name in by_name}
  taken: list[tuple[str, int]] = []  # axis and start of each part
  for name, before, size in _MESH_AXIS.findall(axes):
    before, size = int(before or 1), int(size or by_name[name])
    parts[name].add((before, size))
    taken.append((name, before))
  split: list[int] = []
  inside: dict[tuple[str, int], int] = {}
  for name, whole in by_name.items():
    at = 1
    for before, size in sorted(parts[name]):
      split.append(before // at)
      inside[name, before] = len(split)
      split.append(size)
      at = before * size
    split.append(whole // at)
  within = [inside[one] for one in taken]
  others = [d for d in range(len(split)) if d not in within]
  group = math.prod(split[d] for d in within)
  return devices.reshape(split).transpose(others + within).reshape(-1, group)


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ.

  Args:
    groups: s64[groups, devices of a group], positions in the mesh.
    mesh: names and sizes of the mesh axes.

  Raises:
    ValueError: If a position is outside of the mesh.
  """
  if groups.size and groups.max() >= math.prod(mesh.values()):
    raise ValueError(
      f"collectives: a group has device {groups.max()}, the mesh has"
      f" {math.prod(mesh.values())}: {dict(mesh)}"
    )
  places = np.unravel_index(groups, tuple(mesh.values()))
  return tuple(
    name
    for name, place in zip(mesh, places, strict=True)
    if (place != place[:, :1]).any()
  )
