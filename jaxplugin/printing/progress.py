# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A line on the terminal with the progress of a long command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

# A function of the bytes done and the total bytes.
Report = Callable[[int, int], None]


class Progress:
  """A line of progress. Its methods do nothing if it is not shown."""

  def __init__(self, bar: Any = None, task: Any = None, prints: bool = False):
    self._bar = bar
    self._task = task
    self._prints = prints

  def describe(self, text: str) -> None:
    """Shows the current step."""
    if self._prints:
      print(text, file=sys.stderr, flush=True)
    self.detail(text)

  def detail(self, text: str) -> None:
    """Shows a part of the current step, on the line of progress only."""
    if self._bar is not None:
      self._bar.update(self._task, description=text)

  def advance(self) -> None:
    """Counts a finished step."""
    if self._bar is not None:
      self._bar.advance(self._task)

  def report(self, done: int, total: int) -> None:
    """Shows how many of `total` units are done."""
    if self._bar is not None:
      self._bar.update(self._task, completed=done, total=total)


@contextlib.contextmanager
def reporter(
  progress: Report | bool | None, total: int
) -> Iterator[Callable[[int], None]]:
  """Yields a function to call with the number of bytes of each step.

  Args:
    progress: a function of the bytes done and the total bytes. True shows a bar
      on standard error, False shows nothing. None shows a bar if standard error
      is a terminal.
    total: the total bytes.
  """
  is_shown = None if progress is None else progress is True
  with shown(of_bytes=True, is_shown=is_shown) as bar:
    report = progress if callable(progress) else bar.report
    done = 0

    def add(count: int) -> None:
      nonlocal done
      done += count
      report(done, total)

    yield add


@contextlib.contextmanager
def shown(
  text: str = "",
  total: int | None = None,
  *,
  of_bytes: bool = False,
  is_shown: bool | None = None,
  prints: bool = False,
) -> Iterator[Progress]:
  """Shows a line on standard error until the context ends.

  Args:
    text: description of the first step.
    total: number of steps; None if unknown.
    of_bytes: whether steps are bytes; the line then has a rate.
    is_shown: whether to show the line; by default if standard error is a
      terminal.
    prints: whether to print each description as a line of text if the line of
      progress is not shown.
  """
  if is_shown is None:
    is_shown = sys.stderr is not None and sys.stderr.isatty()
  if not is_shown:
    if prints:
      print(text, file=sys.stderr, flush=True)
    yield Progress(prints=prints)
    return
  from rich import console, progress

  columns: list[Any] = [progress.TimeElapsedColumn()]
  if of_bytes:
    columns += [
      progress.BarColumn(),
      progress.TaskProgressColumn(),
      progress.DownloadColumn(),
      progress.TransferSpeedColumn(),
    ]
  elif total is not None:
    columns += [progress.BarColumn(), progress.MofNCompleteColumn()]
  columns.append(progress.TextColumn("{task.description}", markup=False))
  with progress.Progress(
    *columns,
    console=console.Console(stderr=True, force_jupyter=False),
    transient=not of_bytes,
    # If standard output is redirected, rich must not capture its text.
    redirect_stdout=sys.stdout.isatty(),
  ) as bar:
    yield Progress(bar, bar.add_task(text, total=total))
