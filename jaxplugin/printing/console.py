# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints reports, which are lines of text and tables, or returns their text.

Functions import rich, so that `import jaxplugin` does not load it.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
  from rich import table as rich_table

# The width of reports that are not printed on a terminal.
WIDTH: Final = 80
# The least width of a column whose cells wrap, and of lines of text.
_LEAST_WIDTH: Final = 10
_GAP: Final = 2  # columns between two cells

# A text, or a text with its style: "green", "dim", "bold red".
Cell = str | tuple[str, str]
# Lines of text, or a table that `table` returned.
Part: TypeAlias = "str | rich_table.Table"


def table(
  header: Sequence[str],
  rows: Iterable[Sequence[Cell]],
  *,
  names: Collection[str] = (),
  figures: Collection[str] = (),
  indent: int = 0,
) -> rich_table.Table:
  """Returns a table.

  Args:
    header: the titles.
    rows: a cell for each title.
    names: titles of columns whose cells wrap.
    figures: titles of columns that are aligned to the right.
    indent: columns left of the table.
  """
  from rich import table as rich_table
  from rich import text

  lines = [
    [
      text.Text(cell) if isinstance(cell, str) else text.Text(*cell)
      for cell in row
    ]
    for row in [header, *rows]
  ]
  made = rich_table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
  if indent:
    made.add_column(min_width=indent - _GAP)
  for title, *cells in zip(*lines, strict=True):
    is_name = title.plain in names
    made.add_column(
      title,
      justify="right" if title.plain in figures else "left",
      no_wrap=not is_name,
      overflow="fold",
      min_width=_LEAST_WIDTH
      if is_name
      else max(cell.cell_len for cell in (title, *cells)),
    )
  for line in lines[1:]:
    made.add_row(*([text.Text()] if indent else []), *line)
  return made


def size(num_bytes: int) -> str:
  """Returns a number of bytes with a decimal unit, "33.3 kB"."""
  from rich import filesize

  return filesize.decimal(num_bytes)


def text(parts: Iterable[Part]) -> str:
  """Returns a report as a string. Tables have at most `WIDTH` columns."""
  return "\n".join(
    part
    if isinstance(part, str)
    else "\n".join(_lines(part, _console(io.StringIO(), WIDTH)))
    for part in parts
  )


def show(parts: Iterable[Part], stream: IO[str] | None = None) -> None:
  """Prints a report with the width of the terminal, or `WIDTH` columns.

  The environment variable COLUMNS sets another width. Continuation lines are
  indented by four more columns. A word that is longer than a line, such as a
  path, is not broken. If a terminal is too narrow for the cells of a table,
  each row becomes a line of text. Tables have colors on a terminal unless
  NO_COLOR is set.

  Args:
    parts: the report.
    stream: a file; standard output by default.
  """
  stream = sys.stdout if stream is None else stream
  has_width = stream.isatty() or os.environ.get("COLUMNS", "0") != "0"
  console = _console(stream, None if has_width else WIDTH)
  width = console.width
  for part in parts:
    if isinstance(part, str):
      lines = _wrapped(part, width)
    elif has_width and _least_width(part) > width:
      lines = _wrapped(_sentences(part), width)
    else:
      lines = _lines(part, console)
    print("\n".join(lines), file=stream)
  stream.flush()


def _console(stream: IO[str], width: int | None) -> Any:
  from rich import console as rich_console

  class Console(rich_console.Console):
    def on_broken_pipe(self) -> None:
      raise  # rich would end the program with status 1

  return Console(
    file=stream,
    width=width,
    force_jupyter=False,
    markup=False,
    highlight=False,
    emoji=False,
  )


def _least_width(part: rich_table.Table) -> int:
  return sum((column.min_width or 0) + _GAP for column in part.columns) - _GAP


def _sentences(part: rich_table.Table) -> str:
  """Returns a line for each row of a table: "name: b, k: 16"."""
  titled = [column for column in part.columns if column.header]
  indent = _least_width(part) - sum(
    (column.min_width or 0) + _GAP for column in titled
  )
  lines = []
  for row in zip(*(column.cells for column in titled), strict=True):
    cells = zip(titled, row, strict=True)
    lines.append(", ".join(f"{c.header}: {cell}" for c, cell in cells if cell))
  return textwrap.indent("\n".join(lines), " " * (indent + _GAP))


def _lines(part: rich_table.Table, console: Any) -> list[str]:
  console.width = max(console.width, _least_width(part))
  with console.capture() as captured:
    console.print(part)
  return [line.rstrip() for line in captured.get().splitlines()]


def _wrapped(lines: str, width: int) -> list[str]:
  found = []
  for line in lines.split("\n"):
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    wrapped = textwrap.wrap(
      line,
      width,
      subsequent_indent=indent,
      break_long_words=False,
      break_on_hyphens=False,
    )
    found += wrapped if len(line) > width else [line]
  return found
