# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables into files, from several processes that may end at any moment.

A file is replaced in one step (POSIX rename), so a reader sees the old table or
the new one. Who merges holds a lock of the system's on a file beside it, which
the system gives back however its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from jaxplugin.tables import errors
from jaxplugin.tables import reading
from jaxplugin.tables import records

LOCK_SECONDS: Final = 60.0  # a merge takes milliseconds
_POLL_SECONDS: Final = 0.01
_MODE: Final = 0o644  # mkstemp's is the owner's alone


def file_name(header: records.Header) -> str:
  """The file's name of a table: what it is about, and of which sources."""
  device = header.device
  known = "-".join(
    re.sub(r"[^a-z0-9_]+", "_", part.lower()).strip("_")
    for part in (header.operation, device.kind, device.architecture)
  )
  return f"{known}-{device.core_count}-{header.fingerprint[:8]}.json"


def merge(
  path: pathlib.Path,
  table: records.Table,
  *,
  lock_seconds: float = LOCK_SECONDS,
) -> records.Table:
  """Puts a table's rows into a file beside those that it holds.

  Rows of the same problem are replaced. When it returns, the rows are on the
  disk; if it does not, the file holds what it held, or all of it.

  Args:
    path: the file; it and its folder need not be there.
    table: what to put in.
    lock_seconds: how long to wait for others who write.

  Returns:
    What the file holds now.

  Raises:
    TableError: the file is no table, or one about something else, or it cannot
      be written, or others hold its lock for longer.
  """
  # One lock for the file, by whichever link it is reached.
  path = pathlib.Path(os.path.realpath(path))
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, lock_seconds):
      _remove_left_over(path)
      if path.exists() or path.is_symlink():
        table = _merged(path, reading.read(path), table)
      replace(path, table.to_text())
  except OSError as error:
    raise errors.TableError(
      f"table {path}: it cannot be written: {error.strerror or error}; the"
      " file was not changed"
    ) from None
  return table


def _merged(
  path: pathlib.Path, old: records.Table, new: records.Table
) -> records.Table:
  if old.header.identity != new.header.identity:
    raise errors.TableError(
      f"table {path}: the file is for another device, operation or version:"
      f" {difference(old, new)}; write to another file, or delete this one"
    )
  newest = max((new.header, old.header), key=lambda header: header.date)
  return records.table_of(newest, (*old.rows, *new.rows))


def difference(old: records.Table, new: records.Table) -> str:
  """In which parts of their headers two tables differ, in words."""
  parts = (
    "operation",
    "bucketed",
    "device",
    "sources",
    "measured",
  )
  different = []
  for name in parts:
    a, b = getattr(old.header, name), getattr(new.header, name)
    if a != b:
      different.append(f"{name} is {a} there, and {b} here")
  return "; ".join(different)


@contextlib.contextmanager
def locked(path: pathlib.Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
  """Holds the file's lock, which ends with the process at the latest.

  The file of the lock stays: who removed it would let two others hold it.
  """
  name = path.with_name(f".{path.name}.lock")
  descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
  try:
    end = time.monotonic() + seconds
    while True:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() >= end:
          raise errors.TableError(
            f"table {path}: another process holds its lock, {name}, for more"
            f" than {seconds:g} s; end that process"
          ) from None
        time.sleep(_POLL_SECONDS)
    yield
  finally:
    os.close(descriptor)


def _prefix(path: pathlib.Path) -> str:
  return f".{path.name}.new-"


def _remove_left_over(path: pathlib.Path) -> None:
  """Removes what writers left that ended; whoever has the lock is alone."""
  for name in os.listdir(path.parent):
    if name.startswith(_prefix(path)):
      (path.parent / name).unlink(missing_ok=True)


def replace(path: pathlib.Path, text: str) -> None:
  """Replaces the file in one step, its new content being on the disk."""
  descriptor, name = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
  try:
    with open(descriptor, "wb") as file:
      file.write(text.encode())
      file.flush()
      os.fchmod(file.fileno(), _MODE)
      os.fsync(file.fileno())
    os.replace(name, path)
  except BaseException:
    pathlib.Path(name).unlink(missing_ok=True)
    raise
  folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    os.fsync(folder)  # of the name
  finally:
    os.close(folder)
