# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The file of a tuning table, and the file of candidates that failed.

The tuner writes the table, and programs read it. Later runs of the tuner do not
try the candidates that failed, unless the sources of their kernels have
changed.

A process that merges holds the table's lock (`file_locks`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Final

from jaxplugin.core import atomic_files, strict_json, targets
from jaxplugin.lab import file_locks
from jaxplugin.lab.bench import devices
from jaxplugin.lab.tuning.operations import operation as operation_lib
from jaxplugin.runtime import fingerprints
from jaxplugin.tables import reading, records, resolution

FAILURES_NAME: Final = "denied.jsonl"  # in the folder of the table
_MAX_BYTES: Final = 4 << 20
_MAX_REASON: Final = 500


def file_name(header: records.Header) -> str:
  """Returns the file name of a table, by its operation, device and sources."""
  device = header.device
  known = "-".join(
    re.sub(r"[^a-z0-9_]+", "_", part.lower()).strip("_")
    for part in (header.operation, device.kind, device.architecture)
  )
  return f"{known}-{device.core_count}-{header.fingerprint[:8]}.json"


def merge(path: pathlib.Path, table: records.Table) -> records.Table:
  """Adds a table's rows to a file.

  Rows for the same problem are replaced. If the process ends before `merge`
  returns, the file has its old content or its new content.

  Args:
    path: the file. It and its folder are created if they do not exist.
    table: the rows to add.

  Returns:
    The file's new content.

  Raises:
    TableError: If the file is not a table or has another header, if it cannot
      be written, or if another process holds its lock for longer.
  """
  # All links to the file use one lock.
  path = pathlib.Path(os.path.realpath(path))
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_locks.locked(path):
      if path.exists() or path.is_symlink():
        table = _merged(path, reading.read(path), table)
      # This also replaces the unfinished file of a process that ended.
      unfinished = path.with_name(f".{path.name}.new")
      with atomic_files.replacing(path, unfinished) as file:
        file.write(table.to_text().encode())
  except OSError as error:
    raise records.TableError(
      f"table {path}: it cannot be written: {error.strerror or error}; the"
      " file was not changed"
    ) from None
  return table


def _merged(
  path: pathlib.Path, old: records.Table, new: records.Table
) -> records.Table:
  if old.header.identity != new.header.identity:
    raise records.TableError(
      f"table {path}: the file is for another device, operation or version:"
      f" {difference(old.header, new.header)}; write to another file, or delete"
      " this one"
    )
  newest = max((new.header, old.header), key=lambda header: header.date)
  return records.table_of(newest, (*old.rows, *new.rows))


def difference(old: records.Header, new: records.Header) -> str:
  """Returns the parts of two headers that differ, for a message."""
  return "; ".join(
    f"{name} is {part} there, and {new.identity[name]} here"
    for name, part in old.identity.items()
    if part != new.identity[name]
  )


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Failure:
  """One candidate that failed."""

  kernels: str  # a digest of the kernels' sources and of the device
  problem: str
  candidate: str  # `TrialCandidate.key`
  kind: str
  reason: str


class FailuresError(ValueError):
  """The file cannot be read or written. The message has the reason."""


def read_failures(path: pathlib.Path) -> tuple[Failure, ...]:
  """Returns the failures in a file; () if the file does not exist.

  Lines that are not failures are skipped.

  Raises:
    FailuresError: If the file cannot be read.
  """
  try:
    with open(path, "rb") as file:
      data = file.read(_MAX_BYTES)
  except FileNotFoundError:
    return ()
  except OSError as error:
    raise FailuresError(f"{path}: cannot be read: {error.strerror}") from None
  lines = data.decode(errors="replace").splitlines()
  found = {failure for line in lines if (failure := _parse(line))}
  return tuple(sorted(found))


def _parse(line: str) -> Failure | None:
  try:
    failure = Failure(**strict_json.loads(line))
  except (ValueError, TypeError):  # TypeError: no object, or other fields
    return None
  values = dataclasses.astuple(failure)
  return failure if all(isinstance(x, str) for x in values) else None


def add_failures(path: pathlib.Path, failures: Iterable[Failure]) -> None:
  """Adds failures to a file, which is replaced atomically.

  Raises:
    FailuresError: If the file cannot be written. The file is then unchanged.
  """
  new = [
    dataclasses.replace(failure, reason=failure.reason[:_MAX_REASON])
    for failure in failures
  ]
  if not new:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_locks.locked(path):
      # The last failure of a candidate replaces earlier ones.
      merged = {
        (failure.kernels, failure.problem, failure.candidate): failure
        for failure in (*read_failures(path), *new)
      }
      with atomic_files.replacing(path) as file:
        for failure in sorted(merged.values()):
          line = json.dumps(dataclasses.asdict(failure), sort_keys=True)
          file.write(f"{line}\n".encode())
  except OSError as error:
    raise FailuresError(
      f"{path}: cannot be written: {error.strerror}"
    ) from None


class Store:
  """The file `path` of rows, and the file `failures` in the same folder."""

  def __init__(
    self,
    target: targets.Target,
    path: pathlib.Path | None = None,
    *,
    operation: resolution.MeasuredOperation[Any],
    rounds: int,
    is_again: bool = False,
    implementations: Iterable[str] | None = None,
  ):
    """Initializes the store. Writes nothing.

    Args:
      target: the attached device.
      path: the file, or an existing folder for the file. None is the user's
        folder.
      operation: the operation of the rows.
      rounds: the maximum number of rounds of each row, in all processes
        together.
      is_again: whether to measure again the rows that the file has.
      implementations: backends that rows may name; None is all.

    Raises:
      TableError: If the file is not a table, or has another header.
      ValueError: If the target lacks an architecture or a number of cores.
    """
    device = resolution.device_of(target)
    if device is None:
      raise ValueError(
        "tune: target must have an architecture and a number of cores, got"
        f" {target}"
      )
    # Tables with different backends cannot be merged. The header therefore has
    # all backends that rows may name, even if this run measures only some.
    names = [
      name
      for name, backend in operation.backends().items()
      if implementations is None or name in implementations
      if backend.tunable is not None
      and backend.tunable.source(target) is not None
    ]
    is_cpu = target.platform == "cpu"
    versions = {n: fingerprints.version(n) for n in ("jax", "jaxplugin")}
    about = {
      # A checkout may not be installed.
      **{n: version for n, version in versions.items() if version is not None},
      **({"cpu": devices.cpu_name()} if is_cpu else {}),
    }
    self._header = records.Header(
      operation=operation.name,
      device=device,
      sources=resolution.sources_of(operation, target, names),
      measured=records.Measurement(
        # On a GPU, steps measure device time (`bench.execution`).
        clock="wall" if is_cpu else "device",
        cache="cold",
        interval="ratio_95",
        rounds=rounds,
      ),
      date=datetime.datetime.now(datetime.UTC).date().isoformat(),
      about=records.fields_of("about", about),  # type: ignore[arg-type]
    )
    self._operation = operation
    path = path or resolution.user_folder()
    is_folder = path.is_dir() or path == resolution.user_folder()
    self.path = path / file_name(self._header) if is_folder else path
    self.failures = self.path.with_name(FAILURES_NAME)
    self._is_again = is_again
    self._done: set[records.Fields] = set()
    found = self.table()
    if found is not None and found.header.identity != self._header.identity:
      different = difference(found.header, self._header)
      raise records.TableError(
        f"tune: table {self.path} is for another device, operation or version:"
        f" {different}; pass another -o, or delete it"
      )

  def table(self) -> records.Table | None:
    """Returns the table of the file; None if the file does not exist."""
    return reading.read(self.path) if self.path.exists() else None

  def fields(self, problem: operation_lib.Problem) -> records.Fields:
    """Returns the fields of a problem's row."""
    fields = self._operation.fields_of(problem)
    assert fields is not None  # the session rejects problems without fields
    return fields

  def row(self, problem: operation_lib.Problem) -> records.Row | None:
    """Returns a problem's row; None if the problem must be measured."""
    fields = self._operation.fields_of(problem)
    table = self.table()
    if fields is None or table is None:
      return None
    key = records.key_of(fields)
    if self._is_again and key not in self._done:
      return None
    return next((row for row in table.rows if row.key == key), None)

  def add(self, row: records.Row) -> None:
    """Writes a row to the file."""
    merge(self.path, records.table_of(self._header, (row,)))
    self._done.add(row.key)

  def kernels(self, implementation: str) -> str:
    """Returns a digest of a backend's sources and of the device."""
    source = dict(self._header.sources).get(implementation)
    described = (
      None if source is None else dataclasses.asdict(source),
      dataclasses.asdict(self._header.device),
    )
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
