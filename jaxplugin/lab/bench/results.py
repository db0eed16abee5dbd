# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of a run, their files, and the comparison of two files."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import types
import typing
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from jaxplugin.core import atomic_files, strict_json
from jaxplugin.lab import file_locks
from jaxplugin.lab.bench import roofline, timing
from jaxplugin.lab.bench.peers import variants

# The schema of the files. `read` rejects other schemas.
SCHEMA: Final = 2
# If launching takes a larger fraction of the time, launching may be the limit.
LAUNCH_BOUND: Final = 0.9

# Peers whose relative error is at most this many times ours are as accurate.
# Sums in f32 differ by their order only, so they are equally accurate.
EQUAL_ACCURACY: Final = 1.1
F32_ACCURACY: Final = 1e-6

# Types of the entries of `BenchRun.environment` that reports read.
_ENVIRONMENT: Final = {
  **dict.fromkeys(("device", "date", "python", "cache_source"), str),
  **dict.fromkeys(("instruction_set", "cudnn"), str | None),
  "cores": int | None,
  "cache_bytes": int,
  "versions": dict[str, str],
}

Status = Literal["ok", "wrong", "failed", "unavailable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantResult:
  """One variant of a row.

  Attributes:
    name, role, is_chosen: as in `variants.Variant`.
    status: "ok". "wrong" if a result is wrong; the variant is then not timed.
      "failed" if a variant of ours raised an error. "unavailable" if another
      variant raised an error, or if the variant cannot run here.
    reason: why the status is not "ok".
    form: the peer's fastest form; "" if the peer has only one form. If the
      time was measured in other formats, "timed with" these formats.
    error: largest error, in units of 2^-24 * sum(|a * b|).
    relative_error: as in `variants.Variant`; None if no library was timed.
    mode: the mode of `time`, "call" or "step" (see `execution`).
    time: milliseconds of one dot or step.
    other_time: milliseconds in the other mode, if measured.
    num_bytes, flops, arithmetic: as in `variants.Variant`.
    gb_per_s, gflop_per_s: rates of the median time.
    roof_fraction: the roofline's least time / the median time
      (`with_fractions`).
    launch_fraction: time to launch all calls of a sample / time of the sample.
  """

  name: str
  role: str
  status: Status = "ok"
  is_chosen: bool = False
  reason: str = ""
  form: str = ""
  error: float | None = None
  relative_error: float | None = None
  mode: str = ""
  time: timing.Stats | None = None
  other_time: timing.Stats | None = None
  num_bytes: int = 0
  flops: int = 0
  arithmetic: variants.Arithmetic = "floats"
  gb_per_s: float = 0
  gflop_per_s: float = 0
  roof_fraction: float = 0
  launch_fraction: float = 0

  @property
  def is_launch_bound(self) -> bool:
    return self.mode == "step" and self.launch_fraction > LAUNCH_BOUND


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantRatio:
  """Statistics of the time of `other` / the time of `ours`, by round."""

  ours: str
  other: str
  ratio: timing.Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowResult:
  """One row, a `workloads.BenchRow`, in one pair of formats."""

  row: str  # in the syntax of `--shapes`
  kind: str
  m: int
  n: int
  k: int
  layer: str
  formats: str  # in the syntax of `--formats`
  out: str  # dtype of the result
  variants: tuple[VariantResult, ...]
  ratios: tuple[VariantRatio, ...]  # of ours to every other variant
  seconds: float  # duration of the measurement

  @property
  def key(self) -> tuple[str, str, str]:
    """A later measurement with this key replaces an earlier one."""
    return self.row, self.formats, self.out

  def ratios_to(self, ours: VariantResult) -> dict[str, timing.Stats]:
    """Returns the ratio of each other variant to a variant of ours."""
    return {r.other: r.ratio for r in self.ratios if r.ours == ours.name}

  def best_peer(self, ours: VariantResult) -> str | None:
    """Returns the fastest peer that is as accurate as `ours`.

    None if libraries were not timed, or no peer is as accurate.
    """
    if ours.time is None or ours.relative_error is None:
      return None
    limit = max(EQUAL_ACCURACY * ours.relative_error, F32_ACCURACY)
    ratios = self.ratios_to(ours)
    peers = [
      v.name
      for v in self.variants
      if v.role == "peer"
      and v.name in ratios
      and v.relative_error is not None
      and v.relative_error <= limit
    ]
    return min(peers, key=lambda name: ratios[name].median, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRun:
  """All results of a run."""

  command: tuple[str, ...]  # the arguments of the command
  environment: dict[str, Any]  # the result of `devices.environment`
  ceilings: roofline.Ceilings
  rows: tuple[RowResult, ...] = ()  # those measured so far
  left_out: tuple[str, ...] = ()  # rows that did not fit in the budget
  schema: int = SCHEMA

  @property
  def bad(self) -> Iterator[tuple[RowResult, VariantResult]]:
    """Wrong variants, and variants of ours that failed."""
    for row in self.rows:
      for variant in row.variants:
        if variant.status in ("wrong", "failed"):
          yield row, variant


def with_fractions(run: BenchRun) -> BenchRun:
  """Returns the run with each `roof_fraction` for the run's last ceilings.

  The fractions of all rows then refer to the same limits.
  """
  ceilings = run.ceilings

  def updated(result: VariantResult) -> VariantResult:
    if result.time is None:
      return result
    if roofline.ceiling_of(result.name) == "read":
      least = result.num_bytes / ceilings.read
    else:
      least = ceilings.seconds(
        result.num_bytes, result.flops, result.arithmetic
      )
    fraction = timing.significant(1e3 * least / result.time.median)
    return dataclasses.replace(result, roof_fraction=fraction)

  rows = [
    dataclasses.replace(row, variants=tuple(map(updated, row.variants)))
    for row in run.rows
  ]
  return dataclasses.replace(run, rows=tuple(rows))


def joined(earlier: BenchRun, run: BenchRun) -> BenchRun:
  """Returns `run` with the other rows of `earlier`, and the higher ceilings.

  Raises:
    ResultError: If another machine or other versions measured `earlier`.
  """
  for name in ("device", "cores", "instruction_set", "versions"):
    before, now = earlier.environment[name], run.environment[name]
    if before != now:
      raise ResultError(
        f"bench: --append needs a file of the same {name}, got {before}, this"
        f" is {now}; write to another file"
      )
  ceilings = run.ceilings
  for name in (*roofline.NAMES, "int8"):
    ceilings = ceilings.raised(name, getattr(earlier.ceilings, name))
  again = {row.key for row in run.rows}
  kept = [row for row in earlier.rows if row.key not in again]
  return with_fractions(
    dataclasses.replace(run, rows=(*kept, *run.rows), ceilings=ceilings)
  )


class ResultError(ValueError):
  """This version cannot read the file of results."""


def write(run: BenchRun, path: str | os.PathLike[str]) -> None:
  """Writes `to_json` to a file, which is replaced atomically."""
  with atomic_files.replacing(pathlib.Path(path)) as file:
    file.write(to_json(run).encode())


def append(run: BenchRun, path: str | os.PathLike[str]) -> BenchRun:
  """Adds a run to the rows of a file, and returns the file's new content.

  Raises:
    OSError: If the file cannot be read or written, or another process holds
      its lock for too long.
    ResultError: See `read` and `joined`.
  """
  # All links to the file use one lock.
  path = pathlib.Path(os.path.realpath(path))
  with file_locks.locked(path):
    if path.exists():
      run = joined(read(path), run)
    write(run, path)
  return run


def to_json(run: BenchRun) -> str:
  """Returns a run as JSON, with a line for each field and each row."""
  fields = dataclasses.asdict(run)
  rows = [f"  {json.dumps(row)}" for row in fields.pop("rows")]
  lines = [f' "{name}": {json.dumps(value)}' for name, value in fields.items()]
  lines.append("\n".join([' "rows": [', ",\n".join(rows), " ]"]))
  return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: str | os.PathLike[str]) -> BenchRun:
  """Reads a file that `write` wrote.

  Raises:
    OSError: If the file cannot be read.
    ResultError: If it is not a file of results, or has another schema.
  """
  try:
    text = pathlib.Path(path).read_bytes()
    data = strict_json.loads(text, allow_nonfinite=True)
    schema = data["schema"]
    if schema == SCHEMA:
      data.pop("startup", None)  # earlier versions measured it
      run: BenchRun = _value(BenchRun, data)
      for name, kind in _ENVIRONMENT.items():
        _value(kind, run.environment[name])
      return run
  except (ValueError, KeyError, TypeError) as error:
    raise ResultError(
      f"bench: {path} must be a file of results ({type(error).__name__}:"
      f" {error})"
    ) from error
  raise ResultError(
    f"bench: {path} has schema {schema}, this version reads {SCHEMA}; run bench"
    " again"
  )


_type_hints = functools.cache(typing.get_type_hints)


def _value(kind: Any, data: Any) -> Any:
  """Returns a value of JSON as a value of an annotated type.

  Raises:
    KeyError, TypeError, ValueError: If it is not such a value.
  """
  if dataclasses.is_dataclass(kind) and isinstance(data, dict):
    hints = _type_hints(typing.cast(type, kind))
    fields = {name: _value(hints[name], x) for name, x in data.items()}
    found = typing.cast(type, kind)(**fields)
    if isinstance(found, timing.Stats) and not found.median > 0:
      raise ValueError(f"a median must be above 0, got {found.median}")
    return found
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is tuple and isinstance(data, list):
    return tuple(_value(arguments[0], item) for item in data)
  if isinstance(kind, types.UnionType):
    kind = types.NoneType if data is None else arguments[0]
    return _value(kind, data)
  if origin is Literal:
    is_valid = data in arguments
  else:
    # A bool is an int, and a whole number may be a float.
    accepted = (float, int) if kind is float else origin or kind
    is_valid = isinstance(data, accepted)
    is_valid &= not isinstance(data, bool) or kind is bool
  if not is_valid:
    raise TypeError(f"{str(data)[:40]!r} is not of type {origin or kind}")
  return data


class Change(NamedTuple):
  """A ratio in two files. `factor` is below 1 if ours became slower."""

  row: str
  formats: str
  ours: str
  other: str
  before: float
  after: float

  @property
  def factor(self) -> float:
    return self.after / self.before


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunComparison:
  """The comparison of two runs.

  Attributes:
    changes: the ratios to a peer or ceiling that both runs have.
    missing: the ratios that only the first run has, as text.
    threshold: a ratio that falls by more than this fraction is a regression.
  """

  changes: tuple[Change, ...]
  missing: tuple[str, ...]
  threshold: float

  @property
  def regressions(self) -> list[Change]:
    return [c for c in self.changes if c.factor < 1 - self.threshold]


def compare(
  before: BenchRun, after: BenchRun, threshold: float
) -> RunComparison:
  """Compares ratios to peers and ceilings.

  Ratios of different machines are more similar than times.

  Raises:
    ResultError: If the runs have no ratio in common.
  """
  old, new = _ratios(before), _ratios(after)
  common = [key for key in old if key in new]
  if not common:
    raise ResultError(
      "bench: the two files must share a ratio to a peer, got none"
    )
  return RunComparison(
    changes=tuple(Change(*key, old[key], new[key]) for key in common),
    missing=tuple(
      "{} {}: {} to {}".format(*key) for key in old if key not in new
    ),
    threshold=threshold,
  )


def _ratios(run: BenchRun) -> dict[tuple[str, str, str, str], float]:
  """Returns median ratios by (row, formats and dtype, ours, other)."""
  found = {}
  for row in run.rows:
    ours = {v.name for v in row.variants if v.role == "ours"}
    for ratio in row.ratios:
      if ratio.other not in ours:
        key = (row.row, f"{row.formats}->{row.out}", ratio.ours, ratio.other)
        found[key] = ratio.ratio.median
  return found
