# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Locks of files that several processes read, change and replace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Final

LOCK_SECONDS: Final = 60.0  # a change takes milliseconds
_POLL_SECONDS: Final = 0.01


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
  """Holds the file's lock, at most until the process ends.

  The lock is a system lock on a file next to `path`. That file is not removed.
  Otherwise two processes could hold two locks.

  Raises:
    TimeoutError: If other processes hold the lock for `LOCK_SECONDS`.
    OSError: If the lock's file cannot be opened.
  """
  name = path.with_name(f".{path.name}.lock")
  descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    end = time.monotonic() + LOCK_SECONDS
    while True:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() >= end:
          raise TimeoutError(
            errno.ETIMEDOUT,
            f"another process holds its lock, {name}, for more than"
            f" {LOCK_SECONDS:g} s; end that process",
            str(path),
          ) from None
        time.sleep(_POLL_SECONDS)
    yield
  finally:
    os.close(descriptor)
