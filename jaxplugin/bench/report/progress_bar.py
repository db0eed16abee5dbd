# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: a bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class Progress:
  """Prints, and shows how far things are where tqdm is installed."""

  def __init__(self, bar: Any = None):
    self._bar = bar

  def describe(self, text: str) -> None:
    if self._bar is not None:
      self._bar.set_postfix_str(text)

  def write(self, text: str) -> None:
    if self._bar is not None:
      self._bar.clear()
    print(text, flush=True)
    if self._bar is not None:
      self._bar.refresh()

  def advance(self) -> None:
    if self._bar is not None:
      self._bar.update()


@contextlib.contextmanager
def shown(total: int) -> Iterator[Progress]:
  """A bar of so many rows, where tqdm is installed too."""
  if not sys.stderr.isatty():
    yield Progress()
    return
  try:
    import tqdm  # optional
  except ImportError:
    yield Progress()
    return
  with tqdm.tqdm(
    total=total, unit="row", file=sys.stderr, leave=False, dynamic_ncols=True
  ) as bar:
    yield Progress(bar)
