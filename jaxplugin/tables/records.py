# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a table says: `Table`, its `Header` and its `Row`s.

Records are frozen, and made only if they keep the rules below, by whoever
measures as by whoever reads. What the problem's fields and a config's mean is
the operation's and the implementation's to say (`fitting`).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.tables import errors

# Of the files; one of another schema is refused.
SCHEMA: Final = 1

# How the chosen candidate follows from the figures, in the one way there is.
POLICY: Final = (
  "the fastest candidate whose interval lies below the default's, else the"
  " default"
)

MAX_CANDIDATES: Final = 16  # of a row
MAX_FIELDS: Final = 64  # of a problem, a config, and each part of a header
MAX_TEXT: Final = 200  # characters of a name or a text
MAX_INTEGER: Final = 2**53  # what every reader of JSON holds exactly
MAX_TIME_US: Final = 1e9  # a thousand seconds

Scalar = decisions.Scalar
Fields = decisions.Fields
Source = decisions.Source

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def _refuse(rule: str, given: object, remedy: str = "") -> errors.TableError:
  text = repr(given)
  if len(text) > MAX_TEXT:
    text = f"{text[:MAX_TEXT]}..."
  return errors.TableError(
    f"{rule}, got {text}" + (f"; {remedy}" if remedy else "")
  )


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
  assert isinstance(value, str)
  if not _NAME.fullmatch(value):
    raise _refuse(
      f"{what} must be a name of ASCII letters, digits and _ . -", value
    )


def fields_of(what: str, values: Mapping[str, Any]) -> Fields:
  """An object of plain scalars as `Fields`.

  Raises:
    TableError: a name or a value is none that tables have.
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
  """The same of `Fields` that somebody made by hand."""
  is_pairs = isinstance(fields, tuple) and all(
    isinstance(pair, tuple) and len(pair) == 2 for pair in fields
  )
  if not is_pairs or fields_of(what, dict(fields)) != fields:  # type: ignore[call-overload]
    raise _refuse(f"{what} must be a result of fields_of", fields)


def bucket(size: int) -> int:
  """The power of two that covers a size: 1, 2, 4, 4, 8, 8, 8, 8, 16, ..."""
  return 1 << (size - 1).bit_length()


def significant(time_us: float) -> float:
  """A time to six digits, of which a clock and a system leave three."""
  return float(f"{time_us:.6g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One way of computing a problem, and how long it took.

  Attributes:
    implementation: its backend's name.
    config: how the backend computes it, in words of the backend's; empty where
      its rule decides.
    median_us: of its measured times, in microseconds.
    interval_us: that the header's `interval` tells, around the median.
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
    """All but the figures."""
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
  """One problem, and the ways of computing it that were measured in turns.

  Attributes:
    problem: in the operation's words, with the size that it was measured at.
    candidates: the fastest first, by their medians, then by name and config;
      those that computed wrong numbers are not among them.
    default: which of them the rule, without any table, would have chosen.
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
    if list(self.candidates) != sorted(self.candidates, key=_pace):
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
    """All candidates, the chosen one first, then as they are."""
    chosen = self.chosen
    return (chosen, *(c for c in self.candidates if c is not chosen))

  def size(self, name: str) -> int:
    """The problem's size of that name.

    Raises:
      TableError: it has none, or it is no positive number.
    """
    value = dict(self.problem).get(name)
    if type(value) is not int or value < 1:
      raise _refuse(f"{name} of problem must be a positive number", value)
    return value

  def key(self, bucketed: str) -> Fields:
    """The problem with the bucket in the place of one size: one row has it."""
    covered = bucket(self.size(bucketed))
    return tuple(
      (name, covered if name == bucketed else value)
      for name, value in self.problem
    )

  def to_json(self) -> dict[str, Any]:
    return {
      "candidates": [c.to_json() for c in self.candidates],
      "default": self.default,
      "problem": dict(self.problem),
    }


def _pace(candidate: Candidate) -> tuple[Any, ...]:
  return candidate.median_us, candidate.implementation, order(candidate.config)


def row_of(
  problem: Fields, candidates: Iterable[Candidate], default: Candidate
) -> Row:
  """A row of candidates in any order.

  Args:
    problem: as `Row`'s.
    candidates: what was measured.
    default: the one of them that the rule chooses.

  Raises:
    TableError: they make no row.
  """
  ordered = tuple(sorted(candidates, key=_pace))
  if default not in ordered:
    raise _refuse("the default must be among the candidates", default)
  return Row(
    problem=problem, candidates=ordered, default=ordered.index(default)
  )


_RANKS: Final = {type(None): 0, bool: 1, int: 2, str: 3}


def order(fields: Fields) -> tuple[Any, ...]:
  """A key that sorts `Fields`: by names, then numbers by their size."""
  return tuple(
    (name, _RANKS[type(value)], 0 if value is None else value)
    for name, value in fields
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """Where times were measured: what must be the same for them to be of use.

  Attributes:
    platform: "cpu", "cuda" or "rocm".
    kind: the device's name, as JAX has it; of CPUs "cpu".
    architecture: "sm_90", "gfx942"; of CPUs the kernels' instruction set.
    core_count: SMs, CUs, or the cores that the process may use.
  """

  platform: str
  kind: str
  architecture: str
  core_count: int

  def __post_init__(self) -> None:
    for name in ("platform", "kind", "architecture"):
      check_text(f"{name} of device", getattr(self, name))
    if type(self.core_count) is not int or not (
      1 <= self.core_count <= MAX_INTEGER
    ):
      raise _refuse(
        "core_count of device must be a positive number", self.core_count
      )

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
  """How times were taken.

  Attributes:
    clock: "device" or "wall".
    cache: "cold", inputs being rotated through more memory than caches hold,
      or "warm".
    interval: what `Candidate.interval_us` is: "quartiles" of the rounds.
    rounds: in which all candidates ran in turns, at least.
  """

  clock: str
  cache: str
  interval: str
  rounds: int

  def __post_init__(self) -> None:
    for name, words in (
      ("clock", ("device", "wall")),
      ("cache", ("cold", "warm")),
      ("interval", ("quartiles",)),
    ):
      if getattr(self, name) not in words:
        raise _refuse(
          f"{name} of measured must be one of {words}", getattr(self, name)
        )
    if type(self.rounds) is not int or not 1 <= self.rounds <= MAX_INTEGER:
      raise _refuse("rounds of measured must be a positive number", self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """What a table is about.

  Attributes:
    operation: the function whose problems these are, "block_scaled_dot".
    bucketed: the problem's size that stands for all of its `bucket`.
    device: where it was measured.
    sources: (implementation, what it was made of), sorted, of every one that
      rows name.
    measured: how.
    date: of the last measurement, "2026-11-23".
    about: what else is known, for people; nothing is decided by it.
  """

  operation: str
  bucketed: str
  device: Device
  sources: tuple[tuple[str, Source], ...]
  measured: Measurement
  date: str
  about: tuple[tuple[str, str], ...] = ()

  def __post_init__(self) -> None:
    _check_name("operation", self.operation)
    _check_name("bucketed", self.bucketed)
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
  def identity(self) -> tuple[Any, ...]:
    """All that tables whose rows may be put together have in common."""
    return (
      self.operation,
      self.bucketed,
      self.device,
      self.sources,
      self.measured,
    )

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `identity`."""
    told = self.to_json()
    told = {n: v for n, v in told.items() if n not in ("about", "date")}
    return hashlib.sha256(_dumps(told).encode()).hexdigest()

  def to_json(self) -> dict[str, Any]:
    return {
      "about": dict(self.about),
      "bucketed": self.bucketed,
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
  """A header and its rows, sorted; `table_of` takes them in any order.

  Attributes:
    header: what it is about.
    rows: at most one a `Row.key`.
  """

  header: Header
  rows: tuple[Row, ...]

  def __post_init__(self) -> None:
    known = {name for name, _ in self.header.sources}
    keys = [row.key(self.header.bucketed) for row in self.rows]
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
    # As jaxprs have it.
    header = self.header
    return (
      f"Table({header.operation} on {header.device}, {len(self.rows)} rows,"
      f" {self.digest[:8]})"
    )

  def to_text(self) -> str:
    """Its one form as JSON: sorted names, the header and each row on a line."""
    rows = ",\n".join(_dumps(row.to_json()) for row in self.rows)
    header = _dumps(self.header.to_json())
    return f'{{"header":{header},\n"rows":[\n{rows}\n]}}\n'

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of its text."""
    return hashlib.sha256(self.to_text().encode()).hexdigest()

  def __hash__(self) -> int:
    return hash(self.digest)  # jit asks for it at every call


def _dumps(value: dict[str, Any]) -> str:
  return json.dumps(value, sort_keys=True, separators=(",", ":"))


def table_of(header: Header, rows: Iterable[Row]) -> Table:
  """A table of rows in any order, of which later ones replace earlier ones.

  Raises:
    TableError: they make no table.
  """
  by_key = {row.key(header.bucketed): row for row in rows}
  keys = sorted(by_key, key=order)
  return Table(header=header, rows=tuple(by_key[key] for key in keys))
