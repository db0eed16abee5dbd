# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces files in one step (POSIX rename).

A reader sees the old file or the new one, and the new one is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(
  path: pathlib.Path, unfinished: pathlib.Path | None = None
) -> Iterator[BinaryIO]:
  """Opens a new file, which gets the path when it is complete.

  An error removes the new file, and the path does not change.

  Args:
    unfinished: path of the new file until then, by default a unique one in the
      same folder.
  """
  if unfinished is None:
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
  try:
    with open(unfinished, "wb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(unfinished, path)
  except BaseException:
    unfinished.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def sync_folder(path: pathlib.Path) -> None:
  """Syncs a folder's entries to the disk, if the system supports it."""
  if os.name != "posix":
    return
  try:
    descriptor = os.open(path, os.O_RDONLY)
  except PermissionError:  # Files may be created but not listed.
    return
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
