# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writers of one table that are killed at random, and readers beside them.

  python -m jaxplugin.testing.measured.table_writers FOLDER KILLS ROWS SEED

It ends after so many kills and so many rows, however slow the machine is. A
writer reports each row that `merge` returned for, and only then goes on. What
was found is printed as JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from jaxplugin.lab.tuning import store
from jaxplugin.tables import reading
from jaxplugin.testing.measured import measured_tables

WRITERS: Final = 2
_TABLE: Final = "table.json"
_MERGED: Final = "merged.txt"
_WRONG: Final = "wrong.txt"
_READS: Final = "reads.txt"


def _append(path: pathlib.Path, text: str) -> None:
  """Adds a line in one step, which a kill leaves whole or out."""
  descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
  os.write(descriptor, f"{text}\n".encode())
  os.close(descriptor)


def _lines(path: pathlib.Path) -> list[str]:
  return path.read_text().split() if path.exists() else []


def _write(folder: pathlib.Path, first: int) -> None:
  """Merges rows that no other process writes, until it is killed."""
  for n in range(first, first + 10**6):
    row = measured_tables.row(n=n)
    store.merge(folder / _TABLE, measured_tables.table(row))
    _append(folder / _MERGED, str(n))


def _read(folder: pathlib.Path) -> None:
  """Reads all the time: a whole table, with every row that it had before."""
  seen: set[Any] = set()
  while True:
    try:
      table = reading.read(folder / _TABLE)
      rows = {row.problem for row in table.rows}
      if not seen <= rows:
        _append(folder / _WRONG, f"lost {len(seen - rows)} rows")
      seen = rows
      _append(folder / _READS, str(len(rows)))
    except Exception as error:
      _append(folder / _WRONG, repr(error))
    time.sleep(0.001)


def _start(function: Callable[[], None]) -> int:
  pid = os.fork()
  if pid == 0:
    try:
      function()
    finally:
      os._exit(1)
  return pid


def _end(pid: int) -> None:
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)


def main(
  folder: pathlib.Path, least_kills: int, least_rows: int, seed: int
) -> dict[str, Any]:
  """What happened to a table in `folder`, by so many kills and rows."""
  generator = random.Random(seed)
  store.merge(folder / _TABLE, measured_tables.table())
  reader = _start(lambda: _read(folder))
  kills = 0

  def writer() -> int:
    first = (kills + 1) * 10**7
    return _start(lambda: _write(folder, first))

  writers = []
  for _ in range(WRITERS):
    writers.append(writer())
    kills += 1
  while (
    kills < least_kills
    or len(_lines(folder / _MERGED)) < least_rows
    or len(_lines(folder / _READS)) < least_rows
  ):
    time.sleep(generator.uniform(0.0, 0.08))
    # One, or all at once.
    for i in generator.choice(([0], [1], range(WRITERS))):
      _end(writers[i])
      kills += 1
      writers[i] = writer()
  for pid in (*writers, reader):
    _end(pid)
  table = reading.read(folder / _TABLE)
  # Whoever comes next finds the lock free, and leaves nothing behind.
  store.merge(folder / _TABLE, measured_tables.table())
  there = {str(row.size("n")) for row in table.rows}
  merged = _lines(folder / _MERGED)
  return {
    "kills": kills,
    "merged": len(merged),
    "lost": sorted({*merged} - there),
    "reads": len(_lines(folder / _READS)),
    "wrong_reads": _lines(folder / _WRONG),
    "files": sorted(os.listdir(folder)),
  }


if __name__ == "__main__":
  _, _folder, *_numbers = sys.argv
  print(json.dumps(main(pathlib.Path(_folder), *map(int, _numbers))))
