# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes tables to files, safely with several processes.

A process that merges holds a system lock on a file next to the table. The
system releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Final

from jaxplugin.core import atomic_files
from jaxplugin.tables import reading, records

LOCK_SECONDS: Final = 60.0  # a merge takes milliseconds
_POLL_SECONDS: Final = 0.01


def file_name(header: records.Header) -> str:
  """Returns the file name of a table, by its operation, device and sources."""
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
  """Adds a table's rows to a file.

  Rows for the same problem are replaced. If the process ends before `merge`
  returns, the file has its old content or its new content.

  Args:
    path: the file. It and its folder are created if they do not exist.
    table: the rows to add.
    lock_seconds: how long to wait for other processes that write.

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
    with locked(path, lock_seconds):
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


@contextlib.contextmanager
def locked(path: pathlib.Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
  """Holds the file's lock, at most until the process ends.

  The lock's file is not removed. Otherwise two processes could hold two locks.
  """
  name = path.with_name(f".{path.name}.lock")
  descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    end = time.monotonic() + seconds
    while True:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() >= end:
          raise records.TableError(
            f"table {path}: another process holds its lock, {name}, for more"
            f" than {seconds:g} s; end that process"
          ) from None
        time.sleep(_POLL_SECONDS)
    yield
  finally:
    os.close(descriptor)
