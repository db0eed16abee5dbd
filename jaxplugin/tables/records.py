# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The records of a tuning table: `Table`, `Header` and `Row`.

Records are frozen and check the rules below when they are created, both by the
tuner and by the reader of a file. The operation defines the fields of a
problem, and the implementation defines the fields of a config (`resolution`).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from jaxplugin.core import decisions

# Schema of the files. A file with another schema is refused.
SCHEMA: Final = 1

# How the times decide which candidate is chosen. Every table has this policy.
POLICY: Final = (
  "the fastest candidate whose interval lies below the default's, else the"
  " default"
)

BUCKETED: Final = "m"  # the size of a problem that is rounded up

MAX_CANDIDATES: Final = 16  # of a row
MAX_FIELDS: Final = 64  # of a problem, a config, and each part of a header
MAX_TEXT: Final = 200  # characters of a name or a text
MAX_INTEGER: Final = 2**53  # every JSON reader represents it exactly
MAX_TIME_US: Final = 1e9  # a thousand seconds

Scalar = decisions.Scalar
Fields = decisions.Fields
Source = decisions.Source

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class TableError(ValueError):
  """A tuning table breaks a rule, or its file cannot be read or written.

  The text names the rule, and the file and its line if the table has one.
  """


class TableWarning(UserWarning):
  """A tuning table of the user that is not used; the text has the reason."""


def _refuse(rule: str, given: object, remedy: str = "") -> TableError:
  text = repr(given)
  if len(text) > MAX_TEXT:
    text = f"{text[:MAX_TEXT]}..."
  return TableError(f"{rule}, got {text}" + (f"; {remedy}" if remedy else ""))


def check_text(what: str, value: object) -> None:
  """Raises TableError unless a value is a short text of printed characters."""
  if (
    not isinstance(value, str)
    or not 0 < len(value) <= MAX_TEXT
    or not value.isprintable()
  ):
    raise _refuse(
      f"{what} must be a string of 1 to {MAX_TEXT} printable characters", value
    )


def _check_name(what: str, value: object) -> None:
  check_text(what, value)
  if not _NAME.fullmatch(str(value)):
    raise _refuse(
      f"{what} must be a name of ASCII letters, digits and _ . -", value
    )


def _check_positive(what: str, value: object) -> None:
  if type(value) is not int or not 1 <= value <= MAX_INTEGER:
    raise _refuse(f"{what} must be a positive number", value)


def fields_of(what: str, values: Mapping[str, Any]) -> Fields:
  """Returns a mapping of plain scalars as `Fields`.

  Raises:
    TableError: If a name or a value is not allowed in tables.
  """
  if not isinstance(values, Mapping):
    raise _refuse(f"{what} must be an object", values)
  if len(values) > MAX_FIELDS:
    raise _refuse(f"{what} must have at most {MAX_FIELDS} fields", len(values))
  for name, value in values.items():
    _check_name(f"a field of {what}", name)
    if type(value) is int:
      if abs(value) > MAX_INTEGER:
        raise _refuse(f"{name} of {what} must be within 2^53", value)
    elif isinstance(value, str):
      check_text(f"{name} of {what}", value)
    elif value is not None and not isinstance(value, bool):
      raise _refuse(
        f"{name} of {what} must be an integer, a string, true, false or null",
        value,
      )
  return tuple(sorted(values.items()))


def _check_fields(what: str, fields: object) -> None:
  """Raises TableError unless `fields` is a valid result of `fields_of`."""
  is_pairs = isinstance(fields, tuple) and all(
    isinstance(pair, tuple) and len(pair) == 2 for pair in fields
  )
  if not is_pairs or fields_of(what, dict(fields)) != fields:  # type: ignore[call-overload]
    raise _refuse(f"{what} must be a result of fields_of", fields)


def bucket(size: int) -> int:
  """Rounds a size up to a power of two: 1, 2, 4, 4, 8, 8, 8, 8, 16, ..."""
  return 1 << (size - 1).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One way of computing a problem, and how long it took.

  Attributes:
    implementation: its backend's name.
    config: the backend's config; empty if its rule decides.
    median_us: median of the measured times, in microseconds.
    interval_us: interval around the median. The header's `interval` says which.
  """

  implementation: str
  config: Fields = ()
  median_us: float
  interval_us: tuple[float, float]

  def __post_init__(self) -> None:
    _check_name("implementation", self.implementation)
    _check_fields("config", self.config)
    interval = self.interval_us
    if not isinstance(interval, tuple) or len(interval) != 2:
      raise _refuse("interval_us must be two times", interval)
    low, high = interval
    for name, time in (
      ("median_us", self.median_us),
      ("the first of interval_us", low),
      ("the second of interval_us", high),
    ):
      if not isinstance(time, float) or not math.isfinite(time):
        raise _refuse(f"{name} must be a finite number with a point", time)
      if not 0 < time <= MAX_TIME_US:
        raise _refuse(f"{name} must be above 0 and at most 1e9", time)
    if not low <= self.median_us <= high:
      raise _refuse(
        "the median must lie inside its interval",
        (low, self.median_us, high),
      )

  @property
  def way(self) -> tuple[str, Fields]:
    """The candidate without its times."""
    return self.implementation, self.config

  def to_json(self) -> dict[str, Any]:
    return {
      "config": dict(self.config),
      "implementation": self.implementation,
      "interval_us": list(self.interval_us),
      "median_us": self.median_us,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One problem, and the measured ways of computing it.

  Attributes:
    problem: the problem's fields, with the size that was measured.
    candidates: sorted by median, then by name and config. A candidate that
      computed wrong numbers is left out.
    default: index of the candidate that the rule chooses without a table.
  """

  problem: Fields
  candidates: tuple[Candidate, ...]
  default: int

  def __post_init__(self) -> None:
    _check_fields("problem", self.problem)
    if not self.problem:
      raise _refuse("problem must have a field", self.problem)
    count = len(self.candidates)
    if not 1 <= count <= MAX_CANDIDATES:
      raise _refuse(f"a row must have 1 to {MAX_CANDIDATES} candidates", count)
    if type(self.default) is not int or not 0 <= self.default < count:
      raise _refuse(
        f"default must be the number of one of {count} candidates", self.default
      )
    if len({c.way for c in self.candidates}) < count:
      raise _refuse(
        "a row must not repeat a candidate", [c.way for c in self.candidates]
      )
    if list(self.candidates) != sorted(self.candidates, key=pace):
      raise _refuse(
        "candidates must be sorted by their medians",
        [c.median_us for c in self.candidates],
        "the row must be one that row_of returns",
      )

  @property
  def chosen(self) -> Candidate:
    """The candidate that `POLICY` puts first."""
    default = self.candidates[self.default]
    for candidate in self.candidates:
      if candidate.interval_us[1] < default.interval_us[0]:
        return candidate
    return default

  @property
  def preferred(self) -> tuple[Candidate, ...]:
    """All candidates: the chosen one first, then the others in order."""
    chosen = self.chosen
    return (chosen, *(c for c in self.candidates if c is not chosen))

  def size(self, name: str) -> int:
    """Returns the problem's size of that name.

    Raises:
      TableError: If the size is missing or not a positive number.
    """
    value: Any = dict(self.problem).get(name)
    _check_positive(f"{name} of problem", value)
    return int(value)

  @property
  def key(self) -> Fields:
    """`key_of` the problem, whose size is validated."""
    self.size(BUCKETED)
    return key_of(self.problem)

  def to_json(self) -> dict[str, Any]:
    return {
      "candidates": [c.to_json() for c in self.candidates],
      "default": self.default,
      "problem": dict(self.problem),
    }


def key_of(problem: Fields) -> Fields:
  """Returns a problem with m rounded up to its bucket."""
  return tuple(
    (name, bucket(value) if name == BUCKETED else value)  # type: ignore[arg-type]
    for name, value in problem
  )


def pace(candidate: Candidate) -> tuple[Any, ...]:
  """Returns a sort key for candidates: the fastest first."""
  return candidate.median_us, candidate.implementation, order(candidate.config)


def row_of(
  problem: Fields, candidates: Iterable[Candidate], default: Candidate
) -> Row:
  """Returns a row of candidates in any order.

  Raises:
    TableError: If the arguments break a rule of `Row`.
  """
  ordered = tuple(sorted(candidates, key=pace))
  if default not in ordered:
    raise _refuse("the default must be among the candidates", default)
  return Row(
    problem=problem, candidates=ordered, default=ordered.index(default)
  )


_RANKS: Final = {type(None): 0, bool: 1, int: 2, str: 3}


def order(fields: Fields) -> tuple[Any, ...]:
  """Returns a sort key for `Fields`: names first, then values."""
  return tuple(
    (name, _RANKS[type(value)], 0 if value is None else value)
    for name, value in fields
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """The device of a measurement. Times are valid only for an equal device.

  Attributes:
    platform: "cpu", "cuda" or "rocm".
    kind: the device's name in JAX; "cpu" for CPUs.
    architecture: "sm_90", "gfx942", ...; the kernels' instruction set for CPUs.
    core_count: number of SMs, CUs, or cores that the process may use.
  """

  platform: str
  kind: str
  architecture: str
  core_count: int

  def __post_init__(self) -> None:
    for name in ("platform", "kind", "architecture"):
      check_text(f"{name} of device", getattr(self, name))
    _check_positive("core_count of device", self.core_count)

  def __str__(self) -> str:
    return f"{self.kind} ({self.architecture}, {self.core_count} cores)"


def _check_source(source: Source) -> None:
  _check_fields("toolchain", source.toolchain)
  for name, version in source.toolchain:
    check_text(f"{name} of toolchain", version)
  if source.kernels is not None and not (
    isinstance(source.kernels, str) and _DIGEST.fullmatch(source.kernels)
  ):
    raise _refuse(
      "kernels must be a SHA-256 of 64 digits, or null", source.kernels
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
  """How times were measured.

  Attributes:
    clock: "device" or "wall".
    cache: "cold" if inputs rotate through more memory than the caches have,
      else "warm".
    interval: meaning of `Candidate.interval_us`: "quartiles" of the rounds, or
      "ratio_95", the 95 % confidence interval of the ratio to the default's
      time, times the default's median. The median is then the same product.
    rounds: maximum number of samples of a candidate. A candidate that used up
      its share of the time has fewer.
  """

  clock: str
  cache: str
  interval: str
  rounds: int

  def __post_init__(self) -> None:
    for name, words in (
      ("clock", ("device", "wall")),
      ("cache", ("cold", "warm")),
      ("interval", ("quartiles", "ratio_95")),
    ):
      if getattr(self, name) not in words:
        raise _refuse(
          f"{name} of measured must be one of {words}", getattr(self, name)
        )
    _check_positive("rounds of measured", self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """The operation, device and sources of a table's rows.

  Attributes:
    operation: name of the public function, for example "block_scaled_dot".
    device: the measured device.
    sources: (implementation, source) of every implementation in the rows,
      sorted.
    measured: how times were measured.
    date: date of the last measurement, for example "2026-11-23".
    about: notes for people. No decision uses them.
  """

  operation: str
  device: Device
  sources: tuple[tuple[str, Source], ...]
  measured: Measurement
  date: str
  about: tuple[tuple[str, str], ...] = ()

  def __post_init__(self) -> None:
    _check_name("operation", self.operation)
    names = [name for name, _ in self.sources]
    for name, source in self.sources:
      _check_name("an implementation", name)
      _check_source(source)
    if not 1 <= len(names) <= MAX_FIELDS or names != sorted({*names}):
      raise _refuse(
        "implementations must be sorted, each once, and at least one", names
      )
    try:
      is_date = datetime.date.fromisoformat(self.date).isoformat() == self.date
    except (TypeError, ValueError):
      is_date = False
    if not is_date:
      raise _refuse("date must be a day as 2026-11-23", self.date)
    _check_fields("about", self.about)
    for name, text in self.about:
      check_text(f"{name} of about", text)

  @property
  def identity(self) -> dict[str, Any]:
    """The parts that must be equal before rows of two tables are merged."""
    names = ("operation", "device", "sources", "measured")
    return {name: getattr(self, name) for name in names}

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `identity`."""
    told = self.to_json()
    told = {n: v for n, v in told.items() if n not in ("about", "date")}
    return hashlib.sha256(_dumps(told).encode()).hexdigest()

  def to_json(self) -> dict[str, Any]:
    return {
      "about": dict(self.about),
      "bucketed": BUCKETED,
      "date": self.date,
      "device": dataclasses.asdict(self.device),
      "implementations": {
        name: {
          "kernels": source.kernels,
          "toolchain": dict(source.toolchain),
        }
        for name, source in self.sources
      },
      "measured": dataclasses.asdict(self.measured),
      "operation": self.operation,
      "policy": POLICY,
      "schema": SCHEMA,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Table:
  """A header and sorted rows; `table_of` accepts rows in any order.

  Attributes:
    header: the header.
    rows: at most one row for each `Row.key`.
  """

  header: Header
  rows: tuple[Row, ...]

  def __post_init__(self) -> None:
    known = {name for name, _ in self.header.sources}
    keys = [row.key for row in self.rows]
    previous: tuple[Any, ...] | None = None
    for key, row in zip(keys, self.rows, strict=True):
      current = order(key)
      if previous == current:
        raise _refuse(
          "rows must not repeat a problem (sizes of one power of two are one"
          " problem)",
          dict(key),
        )
      if previous is not None and current < previous:
        raise _refuse("rows must be sorted by their problems", dict(key))
      previous = current
      missing = {c.implementation for c in row.candidates} - known
      if missing:
        raise _refuse(
          "rows must use only the implementations of the header,"
          f" {sorted(known)}",
          sorted(missing),
        )

  def __repr__(self) -> str:
    # Jaxprs print it.
    header = self.header
    return (
      f"Table({header.operation} on {header.device}, {len(self.rows)} rows,"
      f" {self.digest[:8]})"
    )

  def to_text(self) -> str:
    """Returns JSON with sorted names, one line for the header and each row."""
    rows = ",\n".join(_dumps(row.to_json()) for row in self.rows)
    header = _dumps(self.header.to_json())
    return f'{{"header":{header},\n"rows":[\n{rows}\n]}}\n'

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the text."""
    return hashlib.sha256(self.to_text().encode()).hexdigest()

  def __hash__(self) -> int:
    return hash(self.digest)  # jit needs it at every call


def _dumps(value: dict[str, Any]) -> str:
  return json.dumps(value, sort_keys=True, separators=(",", ":"))


def table_of(header: Header, rows: Iterable[Row]) -> Table:
  """Returns a table of rows in any order; later rows replace earlier ones.

  Raises:
    TableError: If the rows break a rule of `Table`.
  """
  by_key = {row.key: row for row in rows}
  keys = sorted(by_key, key=order)
  return Table(header=header, rows=tuple(by_key[key] for key in keys))
