# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How far reading or writing is: a function of the caller's, or a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

# Takes the bytes done and all of them.
Progress = Callable[[int, int], None]

_WIDTH: Final = 30
_SECONDS: Final = 0.1  # between two pictures
_GB: Final = 1e9


def reporter(progress: Progress | bool | None) -> Progress:
  """What is told how far it is.

  Args:
    progress: a function; True for a bar on standard error, False for nothing,
      None for a bar where standard error is a terminal.
  """
  if callable(progress):
    return progress
  if progress is None:
    progress = sys.stderr is not None and sys.stderr.isatty()
  return _Bar() if progress else _nothing


def _nothing(done: int, total: int) -> None:
  del done, total


class _Bar:
  """A line on standard error, drawn anew at most ten times a second."""

  def __init__(self) -> None:
    self._start = time.monotonic()
    self._drawn: float | None = None

  def __call__(self, done: int, total: int) -> None:
    now = time.monotonic()
    is_last = done >= total
    if self._drawn is not None and now - self._drawn < _SECONDS and not is_last:
      return
    self._drawn = now
    part = done / total if total else 1.0
    signs = "#" * round(part * _WIDTH)
    rate = done / _GB / max(now - self._start, 1e-9)
    print(
      f"\r[{signs:<{_WIDTH}}] {part:4.0%} {done / _GB:.2f} of"
      f" {total / _GB:.2f} GB, {rate:.2f} GB/s ",
      end="\n" if is_last else "",
      file=sys.stderr,
      flush=True,
    )
