# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a compiled program moves between devices.

  compiled = deviceless.compile(f, *args, target=target, mesh=mesh)
  found = collectives.of_compiled(compiled, mesh)
  collectives.received(found)                       # bytes of one device
  collectives.received(found, axis="tp", dtype="u8")

The count is the bytes that one device receives with ring collectives in a group
of g devices. S is the larger of the device's input and output:

  all-gather, reduce-scatter, all-to-all          S (g - 1) / g
  all-reduce                                      2 S (g - 1) / g
  collective-permute, collective-broadcast, recv  S
  ragged-all-to-all                               at most its output

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), sections 4.1 and 4.4.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from jax.sharding import Mesh

from jaxplugin.lab.compilation import hlo_text

# Bytes that a device in a group of g receives, divided by its result's bytes.
_RECEIVED: Final[dict[str, Callable[[int], float]]] = {
  "all-gather": lambda g: (g - 1) / g,
  "all-reduce": lambda g: 2 * (g - 1) / g,
  "all-to-all": lambda g: (g - 1) / g,
  "collective-broadcast": lambda g: 1,
  "collective-permute": lambda g: 1,
  # An upper bound, because rows of the result may stay unused.
  "ragged-all-to-all": lambda g: 1,
  "recv": lambda g: 1,
  "reduce-scatter": lambda g: g - 1,
}
_OF_PAIRS: Final = ("collective-permute", "recv")
# An asynchronous "-start" returns a tuple of operands and results.
_START: Final = "-start"
_PARTITIONS: Final = re.compile(r"\bnum_partitions=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """Arrays of one element type that one instruction moves.

  Attributes:
    kind: a key of `_RECEIVED`.
    dtype: element type in HLO, such as "bf16" or "u8".
    axes: names of the mesh axes over which the collective communicates.
    group: number of devices in a group. For a permutation, number of devices
      that send or receive.
    num_bytes: bytes that one device receives each time the instruction runs.
    times: how often the instruction runs in one run of the program.
    is_bound: whether `num_bytes` is an upper bound (ragged-all-to-all), or
      `times` a lower bound (loops without a known count).
    source: the op_name of the HLO metadata; "" if unknown.
  """

  kind: str
  dtype: str
  axes: tuple[str, ...]
  group: int
  num_bytes: float
  times: int = 1
  is_bound: bool = False
  source: str = ""

  @property
  def total(self) -> float:
    """Bytes that one device receives in one run of the program."""
    return self.num_bytes * self.times


def of_compiled(compiled: Any, mesh: Mesh) -> tuple[Collective, ...]:
  """Returns the collectives of `jax.stages.Compiled` or jaxlib's executable.

  `mesh` is the mesh of the arguments' shardings. Raises as `of_text` does.
  """
  return of_text(hlo_text.of_compiled(compiled), mesh.shape)


def of_text(text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
  """Returns the collectives of optimized HLO, in program order.

  The collectives of a loop are counted once per iteration. Those of a
  conditional are from the branch that moves the most bytes. Collectives in
  groups of one device are left out.

  Args:
    text: HLO with backend_config, which contains the trip counts of loops.
    mesh: names and sizes of the mesh axes.

  Raises:
    ValueError: If the program and the mesh have different numbers of devices,
      or the groups of a collective have an unknown syntax.
  """
  partitions = _PARTITIONS.search(text)
  count = int(partitions[1]) if partitions is not None else 1
  if count != math.prod(mesh.values()):
    raise ValueError(
      "collectives: mesh must have as many devices as the program has"
      f" partitions, {count}, got {dict(mesh)}; pass the mesh of the program's"
      " shardings"
    )

  def of_instruction(
    name: str, instruction: hlo_text.HloInstruction
  ) -> Iterable[Collective]:
    del name
    kind = instruction.opcode.removesuffix(_START)
    return _collective(kind, instruction, mesh) if kind in _RECEIVED else ()

  return hlo_text.counted(
    hlo_text.parse(text),
    of_instruction,
    received,
    running=("fusion", *hlo_text.RUNNING),
  )


def received(
  found: Iterable[Collective],
  *,
  kind: str | None = None,
  axis: str | None = None,
  dtype: str | None = None,
) -> float:
  """Returns the bytes that one device receives in one run of the program.

  Args:
    found: the result of `of_compiled`.
    kind: counts only collectives of this kind. None counts all.
    axis: counts only collectives over this mesh axis, including those over
      several axes. None counts all.
    dtype: counts only arrays of this HLO element type. None counts all.
  """
  return sum(
    one.total
    for one in found
    if kind in (None, one.kind)
    and (axis is None or axis in one.axes)
    and dtype in (None, one.dtype)
  )


def _collective(
  kind: str, instruction: hlo_text.HloInstruction, mesh: Mapping[str, int]
) -> Iterator[Collective]:
  line = instruction.line
  if kind in _OF_PAIRS:
    groups = _pairs_of_line(line)
    size = len(np.unique(groups))
  else:
    groups = _groups_of_line(line, math.prod(mesh.values()))
    size = groups.shape[1]
  axes = _axes_of(groups, mesh)
  if not axes:
    return
  for dtype, num_bytes in _result_bytes(kind, instruction).items():
    yield Collective(
      kind=kind,
      dtype=dtype,
      axes=axes,
      group=size,
      num_bytes=num_bytes * _RECEIVED[kind](size),
      is_bound=kind == "ragged-all-to-all",
      source=instruction.op_name,
    )


def _result_bytes(
  kind: str, instruction: hlo_text.HloInstruction
) -> dict[str, float]:
  """Returns the bytes of the result on one device, by element type."""
  shape = instruction.shape
  if kind == "recv" or (
    # Only all-reduce-start returns its result without the operands.
    instruction.opcode.endswith(_START) and kind != "all-reduce"
  ):
    parts = hlo_text.parts(shape)
    shape = parts[0 if kind == "recv" else 1]
  found: dict[str, float] = {}
  for dtype, count in hlo_text.arrays(shape):
    num_bytes = count * hlo_text.bits(dtype) / 8
    found[dtype] = found.get(dtype, 0) + num_bytes
  return found


# {{0,1},{2,3}}; {} is a group of all devices.
_LISTED: Final = re.compile(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})")
# [2,4]<=[4,2]T(1,0): 2 groups of 4 devices.
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4] {'a','b':(2)2}, in XLA since 2026. If the devices are not in
# order, device_ids=([4,2]T(1,0)) or (0,2,1,3) follows, inside the brackets or
# after them.
_MESH: Final = re.compile(
  r"replica_groups=mesh\[(?P<sizes>[^\]]*?)\]?"
  r"(?:, device_ids=\((?P<ids>.*?)\))?\]? \{(?P<axes>[^}]*)\}"
)
_IDS: Final = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
_MESH_SIZE: Final = re.compile(r"'?([\w.-]+)'?=(\d+)")
_MESH_AXIS: Final = re.compile(r"'?([\w.-]+)'?(?::\((\d+)\)(\d+))?")
_PAIRS: Final = re.compile(r'source_target_pairs="?(\{(?:\{\d+,\d+\},?)*\})')


def _groups_of_line(line: str, count: int) -> np.ndarray:
  """Returns the replica groups in a line of HLO, s64[groups, group size].

  Raises:
    ValueError: If the line has no groups in a known syntax, or the groups
      differ in size.
  """
  mesh = _MESH.search(line)
  if mesh is not None:
    return _of_mesh(mesh["sizes"], mesh["ids"], mesh["axes"])
  listed = _LISTED.search(line)
  if listed is not None:
    groups = [_numbers(x) for x in re.findall(r"\{([\d,]+)\}", listed[1])]
    groups = groups or [[*range(count)]]
    if len({len(group) for group in groups}) > 1:
      raise ValueError(f"collectives: groups differ in size: {listed[1]}")
    return np.asarray(groups)
  start = line.find("replica_groups=[")
  iota = _IOTA.search(line, start) if start >= 0 else None
  if iota is not None:
    return _of_iota(*iota.groups())
  raise ValueError(f"collectives: cannot read replica groups in: {line}")


def _pairs_of_line(line: str) -> np.ndarray:
  """Returns the (source, target) pairs of a permutation, s64[pairs, 2]."""
  found = _PAIRS.search(line)
  if found is None:
    raise ValueError(f"collectives: cannot read pairs of devices in: {line}")
  return np.asarray(_numbers(found[1])).reshape(-1, 2)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r"\d+", text)]


def _of_iota(shape: str, reshaped: str, order: str | None) -> np.ndarray:
  ids = np.arange(math.prod(_numbers(reshaped))).reshape(_numbers(reshaped))
  if order is not None:
    ids = ids.transpose(_numbers(order))
  return ids.reshape(_numbers(shape))


def _of_ids(text: str) -> np.ndarray:
  """Returns the devices of a mesh in row-major order of their positions."""
  iota, transposed = _IOTA.search(text), _IDS.search(text)
  if iota is not None:
    found = _of_iota(*iota.groups())
  elif transposed is not None:
    found = _of_iota(transposed[1], *transposed.groups())
  else:
    found = np.asarray(_numbers(text))
  return found.reshape(-1)


def _of_mesh(sizes: str, ids: str | None, axes: str) -> np.ndarray:
  """Returns the replica groups over axes or parts of axes of a mesh."""
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


def _axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which devices in the same group differ.

  Raises:
    ValueError: If a position in s64[groups, group size] is not in the mesh.
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
