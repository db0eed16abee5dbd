# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table that a run of the tuner fills, in a file that programs read."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxplugin.core import targets
from jaxplugin.lab.bench import devices
from jaxplugin.lab.tuning import denials
from jaxplugin.lab.tuning import session
from jaxplugin.lab.tuning import workload
from jaxplugin.lab.tuning.operations import known
from jaxplugin.lab.tuning.operations import tuned
from jaxplugin.tables import errors
from jaxplugin.tables import fitting
from jaxplugin.tables import reading
from jaxplugin.tables import records
from jaxplugin.tables import resolution
from jaxplugin.tables import writing


def header_of(
  operation: fitting.Operation[Any],
  target: targets.Target,
  *,
  rounds: int,
  date: datetime.date,
  implementations: Iterable[str] | None = None,
) -> records.Header:
  """What is measured on a target here.

  Args:
    operation: of what.
    target: the device that is here.
    rounds: of all processes together, at least.
    date: of the measurement.
    implementations: that rows may name; None is all.

  Raises:
    ValueError: too little is known of the device for a table.
  """
  device = fitting.device_of(target)
  if device is None:
    raise ValueError(
      "tune: target must have an architecture and a number of cores, got"
      f" {target}"
    )
  is_cpu = target.platform == "cpu"
  about = {
    "jax": importlib.metadata.version("jax"),
    "jaxplugin": importlib.metadata.version("jaxplugin"),
  }
  if is_cpu:
    about["cpu"] = devices.cpu_name()
  return records.Header(
    operation=operation.name,
    bucketed=operation.bucketed,
    device=device,
    sources=fitting.sources_of(
      operation, target, _implementations(operation, target, implementations)
    ),
    measured=records.Measurement(
      # Of a GPU steps of one program: the device's time (`bench.execution`).
      clock="wall" if is_cpu else "device",
      cache="cold",
      interval="quartiles",
      rounds=rounds,
    ),
    date=date.isoformat(),
    about=records.fields_of("about", about),  # type: ignore[arg-type]
  )


def _implementations(
  operation: fitting.Operation[Any],
  target: targets.Target,
  wanted: Iterable[str] | None,
) -> tuple[str, ...]:
  """All that rows on a target may name, whether this run's do or not.

  Tables whose implementations differ are not put together. A table holds where
  all of them are as they were: one of kernels alone for any version of XLA.
  """
  return tuple(
    name
    for name, backend in operation.backends().items()
    if wanted is None or name in wanted
    if backend.tunable is not None
    and backend.tunable.source(target) is not None
  )


class Table:
  """A file of rows, and what is denied beside it.

  Attributes:
    path: the file.
  """

  def __init__(
    self,
    target: targets.Target,
    path: pathlib.Path | None = None,
    *,
    operation: fitting.Operation[Any],
    rounds: int,
    is_again: bool = False,
    date: datetime.date | None = None,
    implementations: Iterable[str] | None = None,
  ):
    """Initializes it; nothing is written.

    Args:
      target: the device that is here.
      path: the file; None is the user's for this device, and a folder that is
        there has the file of that name.
      operation: of what.
      rounds: in which rows are measured.
      is_again: whether rows that are there are measured again.
      date: of the measurement, today by default.
      implementations: that rows may name; None is all.

    Raises:
      TableError: the file is there, and no table, or about something else.
      ValueError: too little is known of the device.
    """
    today = date or datetime.datetime.now(datetime.UTC).date()
    self._header = header_of(
      operation,
      target,
      rounds=rounds,
      date=today,
      implementations=implementations,
    )
    self._operation = operation
    self._target = target
    name = writing.file_name(self._header)
    path = path or resolution.user_folder()
    is_folder = path.is_dir() or path == resolution.user_folder()
    self.path = path / name if is_folder else path
    self._is_again = is_again
    self._done: set[records.Fields] = set()
    found = self.table()
    empty = records.table_of(self._header, ())
    if found is not None and found.header.identity != self._header.identity:
      raise errors.TableError(
        f"tune: table {self.path} is for another device, operation or version:"
        f" {writing.difference(found, empty)}; pass another -o, or delete it"
      )

  def table(self) -> records.Table | None:
    """What the file holds; None where there is none."""
    return reading.read(self.path) if self.path.exists() else None

  def has(self, problem: tuned.Problem) -> bool:
    """Whether it has a row of a problem that is not to be measured again."""
    return self._known(problem) is not None

  def store(self) -> session.Store:
    """Where a session puts its rows."""
    return session.Store(
      fields=self._fields,
      known=self._known,
      add=self._add,
      denied=self.path.with_name(denials.NAME),
      kernels=self._kernels,
    )

  def _fields(self, problem: tuned.Problem) -> records.Fields:
    fields = self._operation.fields_of(problem)
    assert fields is not None  # the session refuses what has none
    return fields

  def _known(self, problem: tuned.Problem) -> records.Row | None:
    fields = self._operation.fields_of(problem)
    table = self.table()
    if fields is None or table is None:
      return None
    key = key_of(self._operation, fields)
    if self._is_again and key not in self._done:
      return None
    return next(
      (row for row in table.rows if row.key(self._operation.bucketed) == key),
      None,
    )

  def _add(self, row: records.Row) -> None:
    writing.merge(self.path, records.table_of(self._header, (row,)))
    self._done.add(row.key(self._operation.bucketed))

  def _kernels(self, implementation: str) -> str:
    """A digest of an implementation's sources and of the device."""
    source = dict(self._header.sources).get(implementation)
    told = (
      None if source is None else dataclasses.asdict(source),
      dataclasses.asdict(self._header.device),
    )
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()

  def allows(self, row: records.Row, candidate: records.Candidate) -> bool:
    """Whether another row's candidate can compute a row's problem."""
    problem = self._operation.problem_of(row.problem)
    backend = self._operation.backends()[candidate.implementation]
    target = self._target
    return backend.supports(problem, target) is None and (
      backend.config_error(candidate.config, problem, target) is None
    )


def key_of(
  operation: fitting.Operation[Any], fields: records.Fields
) -> records.Fields:
  """What one row of a table is about: a problem's fields with its bucket."""
  bucketed = operation.bucketed
  return tuple(
    (name, records.bucket(value) if name == bucketed else value)  # type: ignore[arg-type]
    for name, value in fields
  )


def one_a_bucket(work: workload.Workload) -> workload.Workload:
  """The work, with the largest problem of each bucket alone."""
  found: dict[object, list[tuple[int, workload.Item]]] = (
    collections.defaultdict(list)
  )
  for number, item in enumerate(work.items):
    operation = known.of(item.problem).operation
    fields = operation.fields_of(item.problem)
    if fields is None:
      found[number].append((0, item))
      continue
    size = dict(fields)[operation.bucketed]
    assert isinstance(size, int)
    key = operation.name, key_of(operation, fields)
    found[key].append((size, item))
  items, left_out = [], list(work.left_out)
  for group in found.values():
    size, largest = max(group, key=lambda pair: pair[0])
    items.append(largest)
    left_out += (
      f"{item.problem}: m={size} stands for its bucket"
      for _, item in group
      if item is not largest
    )
  return workload.Workload(items=tuple(items), left_out=tuple(left_out))
