# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads tables from untrusted text: a whole table, or an error.

A table has exactly one valid text. If a file was edited or truncated, the error
has the number of the line.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
from collections.abc import Iterable
from typing import Any, Final

from jaxplugin.core import strict_json
from jaxplugin.tables import records

MAX_BYTES: Final = 4 << 20

_END: Final = "]}"
_ROWS: Final = '"rows":['
_HEADER: Final = (
  *("about", "bucketed", "date", "device", "implementations", "measured"),
  *("operation", "policy", "schema"),
)


def read(path: pathlib.Path) -> records.Table:
  """Reads the table of a file.

  Raises:
    TableError: If the file does not exist, cannot be read or is not a table.
      The message has the file, the line and the rule.
  """
  text = read_text(path)
  try:
    return parse(text)
  except records.TableError as error:
    raise records.TableError(f"table {path}: {error}") from None


def read_text(path: pathlib.Path) -> str:
  """Reads a regular UTF-8 file of at most `MAX_BYTES`.

  Raises:
    TableError: If the file is not regular, is too large or cannot be read.
  """
  try:
    # Opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
      found = os.fstat(file.fileno())
      if not stat.S_ISREG(found.st_mode):
        raise records.TableError(f"table {path}: it must be a regular file")
      data = file.read(MAX_BYTES + 1)
  except OSError as error:
    raise records.TableError(
      f"table {path}: it cannot be read: {error.strerror or error}"
    ) from None
  if len(data) > MAX_BYTES:
    raise records.TableError(
      f"table {path}: it must have at most {MAX_BYTES} bytes, got"
      f" {max(found.st_size, len(data))}"
    )
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    raise records.TableError(
      f"table {path}: it must be UTF-8: byte {error.start} is not"
    ) from None


def parse(text: str) -> records.Table:
  """Reads a table from text.

  Raises:
    TableError: If the text is not a table. The message has the line and the
      rule.
  """
  lines = text.split("\n")
  if lines[-2:] != [_END, ""] or len(lines) < 5 or lines[1] != _ROWS:
    raise records.TableError(
      "it is truncated or not a table: line 1 must be the header, line 2 must"
      f" be {_ROWS}, and the last one {_END}"
    )
  start = '{"header":'
  if not lines[0].startswith(start) or not lines[0].endswith(","):
    raise records.TableError(f"line 1: it must start with {start} and end in ,")
  header = _in_line(1, _header, lines[0].removeprefix(start)[:-1])
  body = lines[2:-2]
  rows = []
  for number, line in enumerate(body, start=3):
    if number - 2 < len(body):
      if not line.endswith(","):
        raise records.TableError(f"line {number}: it must end in ,")
      line = line[:-1]
    if line or len(body) > 1:  # a table without rows has one empty line
      rows.append(_in_line(number, _row, line))
  table = records.Table(header=header, rows=tuple(rows))
  canonical = table.to_text()
  if canonical != text:
    pairs = zip(lines, canonical.split("\n"), strict=False)
    different = next(i for i, (a, b) in enumerate(pairs, start=1) if a != b)
    raise records.TableError(
      f"line {different}: it must have sorted names, no blanks and the"
      f" shortest form of numbers, got {lines[different - 1][:80]!r}"
    )
  return table


def _in_line(number: int, function: Any, line: str) -> Any:
  """Returns `function` of a line's JSON. An error names the line."""
  try:
    try:
      value = strict_json.loads(line)
    except ValueError as error:
      raise records.TableError(f"it must be JSON: {error}") from None
    return function(value)
  except records.TableError as error:
    raise records.TableError(f"line {number}: {error}") from None


def _object(what: str, value: Any, names: Iterable[str]) -> dict[str, Any]:
  """Returns a value that must be an object with exactly these names."""
  names = sorted(names)
  if not isinstance(value, dict) or sorted(value) != names:
    given = sorted(value) if isinstance(value, dict) else type(value).__name__
    text = str(given)[: records.MAX_TEXT]
    raise records.TableError(f"{what} must be an object of {names}, got {text}")
  return value


def _fields(what: str, value: Any, record: type) -> dict[str, Any]:
  """Returns a value that must be an object with the fields of a record."""
  return _object(what, value, (f.name for f in dataclasses.fields(record)))


def _list(what: str, value: Any) -> list[Any]:
  if not isinstance(value, list):
    raise records.TableError(
      f"{what} must be a list, got {type(value).__name__}"
    )
  return value


def _header(value: Any) -> records.Header:
  # The schema comes first, because the content of other schemas is unknown.
  schema = value.get("schema") if isinstance(value, dict) else None
  if type(schema) is not int or schema != records.SCHEMA:
    age = "another"
    if type(schema) is int:
      age = "a newer" if schema > records.SCHEMA else "an older"
    raise records.TableError(
      f"schema must be {records.SCHEMA}, got {str(schema)[:20]}: {age} release"
      " wrote it; measure again with python -m jaxplugin tune"
    )
  header = _object("the header", value, _HEADER)
  if header["policy"] != records.POLICY:
    raise records.TableError(
      f"policy must be {records.POLICY!r}, got {str(header['policy'])[:80]!r}"
    )
  if header["bucketed"] != records.BUCKETED:
    raise records.TableError(
      f"bucketed must be {records.BUCKETED!r}, got"
      f" {str(header['bucketed'])[:80]!r}"
    )
  implementations = header["implementations"]
  if not isinstance(implementations, dict):
    raise records.TableError("implementations must be an object")
  device = _fields("device", header["device"], records.Device)
  measured = _fields("measured", header["measured"], records.Measurement)
  about: Any = records.fields_of("about", header["about"])
  return records.Header(
    operation=header["operation"],
    device=records.Device(**device),
    sources=tuple(
      (name, _source(name, source)) for name, source in implementations.items()
    ),
    measured=records.Measurement(**measured),
    date=header["date"],
    about=about,
  )


def _source(name: str, value: Any) -> records.Source:
  what = f"implementation {name[: records.MAX_TEXT]!r}"
  source = _fields(what, value, records.Source)
  toolchain: Any = records.fields_of("toolchain", source["toolchain"])
  return records.Source(kernels=source["kernels"], toolchain=toolchain)


def _row(value: Any) -> records.Row:
  row = _fields("a row", value, records.Row)
  candidates = _list("candidates", row["candidates"])
  return records.Row(
    problem=records.fields_of("problem", row["problem"]),
    candidates=tuple(map(_candidate, candidates)),
    default=row["default"],
  )


def _candidate(value: Any) -> records.Candidate:
  candidate = _fields("a candidate", value, records.Candidate)
  interval: Any = tuple(_list("interval_us", candidate["interval_us"]))
  config = records.fields_of("config", candidate["config"])
  return records.Candidate(
    **{**candidate, "config": config, "interval_us": interval}
  )
