# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How far reading or writing is: a function of the caller, or a bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator

from jaxplugin.printing import progress as printing

# Takes the bytes done and all of them.
Progress = Callable[[int, int], None]


@contextlib.contextmanager
def reporter(progress: Progress | bool | None) -> Iterator[Progress]:
  """Returns a function to call with the bytes done and all of them.

  Args:
    progress: that function; True for a bar on standard error, False for
      nothing, None for a bar if standard error is a terminal.
  """
  if callable(progress):
    yield progress
    return
  with printing.shown(of_bytes=True, is_shown=progress) as bar:
    yield bar.report
