# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses between tables: the overlay, then the user's tables.

The first table with a proposal that can compute the problem decides. Otherwise
the rule decides. A process reads the files once, before its first decision, so
all its decisions use the same tables.

A table that does not match this process is refused as a whole. Its kernels,
libraries and device must be those of this process, and the operation and its
backends must support every row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic

import jax
import jaxlib

from jaxplugin.core import call_options, decisions, error_context, targets
from jaxplugin.jaxext import jax_private
from jaxplugin.kernels import architectures, launching
from jaxplugin.runtime import fingerprints
from jaxplugin.tables import reading, records

AGAIN: Final = "rules choose until you run python -m jaxplugin tune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredOperation(Generic[decisions.Problem]):
  """An operation whose backends are measured.

  Attributes:
    name: name of the public function.
    fields_of: converts a problem to a row's fields; returns None if no row can
      describe the problem.
    problem_of: converts a row's fields to a problem; raises ValueError if no
      problem has these fields.
    backends: returns the backends by name.
  """

  name: str
  fields_of: Callable[[decisions.Problem], records.Fields | None]
  problem_of: Callable[[records.Fields], decisions.Problem]
  backends: Callable[
    [], Mapping[str, decisions.BackendRecord[decisions.Problem]]
  ]


def device_of(target: targets.Target) -> records.Device | None:
  """Returns the device of a target, or None if the target is incomplete."""
  architecture = target.architecture
  if target.compute_capability is not None:
    architecture = "sm_{}{}".format(*target.compute_capability)
  kind = targets.DEVICE_KINDS.get(target.name, target.name)
  if target.platform == "cpu":
    # A CPU's name says little about its speed, so tables leave it out.
    architecture, kind = target.cpu_kernels, "cpu"
  if architecture is None or target.core_count is None:
    return None
  return records.Device(
    platform=target.platform,
    kind=kind,
    architecture=architecture,
    core_count=target.core_count,
  )


def sources_of(
  operation: MeasuredOperation[Any],
  target: targets.Target,
  names: Iterable[str],
) -> tuple[tuple[str, records.Source], ...]:
  """Returns the sources of implementations in this process, for a header.

  Raises:
    ValueError: If the sources of an implementation are unknown.
  """
  found = []
  backends = operation.backends()
  for name in sorted({*names}):
    source = _source(backends.get(name), target)
    if source is None:
      raise ValueError(
        "implementation must have known sources, so that a table can become"
        f" stale, got {name}"
      )
    found.append((name, source))
  return tuple(found)


def _source(
  backend: decisions.BackendRecord[Any] | None, target: targets.Target
) -> records.Source | None:
  if backend is None or backend.tunable is None:
    return None
  return backend.tunable.source(target)


def misfit(
  table: records.Table,
  operation: MeasuredOperation[Any],
  target: targets.Target,
) -> str:
  """Returns why a table does not match; "" if it matches.

  The reason has the rule that is broken, and the value that breaks it.
  """
  # A limit refuses a config, and not the whole table.
  target = dataclasses.replace(target, options=call_options.NONE)
  # A process may register backends at any time.
  return _misfit(table, operation, target, tuple(operation.backends().items()))


@functools.lru_cache(maxsize=256)
def _misfit(
  table: records.Table,
  operation: MeasuredOperation[Any],
  target: targets.Target,
  items: tuple[tuple[str, decisions.BackendRecord[Any]], ...],
) -> str:
  backends = dict(items)
  header = table.header
  if header.operation != operation.name:
    return f"its operation is {header.operation}, not {operation.name}"
  device = device_of(target)
  if header.device != device:
    here = device or f"{target}, whose architecture is unknown"
    return f"it was measured on {header.device}, the target is {here}"
  for name, source in header.sources:
    different = _difference(source, backends.get(name), target)
    if different:
      return f"implementation {name}: {different}"
  for number, row in enumerate(table.rows, start=1):
    wrong = _wrong(row, operation, backends, target)
    if wrong:
      return f"row {number}: {wrong}"
  return ""


def _difference(
  measured: records.Source,
  backend: decisions.BackendRecord[Any] | None,
  target: targets.Target,
) -> str:
  """Returns how this process differs from the measured sources, or ""."""
  if backend is None:
    return "this process has no such backend"
  source = _source(backend, target)
  if source is None:
    return "its sources in this process are unknown"
  if measured.kernels != source.kernels:
    there, here = (
      "none" if digest is None else digest[:12]
      for digest in (measured.kernels, source.kernels)
    )
    return (
      "its kernels changed since they were measured (digest of sources"
      f" {there}, now {here}); {AGAIN}"
    )
  there_of, here_of = dict(measured.toolchain), dict(source.toolchain)
  for library in sorted({*there_of, *here_of}):
    if there_of.get(library) != here_of.get(library):
      return (
        f"it was measured with {library} {there_of.get(library, 'unknown')},"
        f" and {here_of.get(library, 'none')} is installed; {AGAIN}"
      )
  return ""


def _wrong(
  row: records.Row,
  operation: MeasuredOperation[Any],
  backends: Mapping[str, decisions.BackendRecord[Any]],
  target: targets.Target,
) -> str:
  try:
    problem = operation.problem_of(row.problem)
  except ValueError as error:
    return f"{error}"
  if operation.fields_of(problem) != row.problem:
    return f"its fields are not in the standard form for {problem}"
  for candidate in row.candidates:
    backend = backends[candidate.implementation]
    refused = backend.config_error(candidate.config, problem, target)
    if refused:
      return (
        f"{candidate.implementation} cannot compute {problem} with"
        f" {dict(candidate.config)}: {refused}"
      )
  return ""


def jaxlib_source(target: targets.Target) -> records.Source:
  """Returns the source of implementations that are XLA's operations."""
  del target
  return records.Source(toolchain=(("jaxlib", jaxlib.__version__),))


def triton_source(
  target: targets.Target, *folders: str
) -> records.Source | None:
  """Returns the digest of Triton kernels and the versions of their compilers.

  Args:
    target: the target. Only GPUs have Triton kernels.
    *folders: folders of `kernels/` besides the two that all operations use, for
      example "gpu/ragged".
  """
  if target.platform not in ("cuda", "rocm"):
    return None
  versions = [
    (name, fingerprints.version(name) or "none")
    for name in ("jax-triton", "triton")
  ]
  versions += _assembled_by(target)
  digest = _kernels_digest(folders)
  return records.Source(kernels=digest, toolchain=tuple(versions))


def _assembled_by(target: targets.Target) -> list[tuple[str, str]]:
  """Returns the range of ptxas versions that decides which kernels are used."""
  if target.compute_capability is None:
    return []
  known = architectures.of_compute_capability(target.compute_capability)
  if known is None or not known.has_e2m1_conversion:
    return []
  oldest = ".".join(map(str, architectures.E2M1_CONVERSION_PTXAS))
  known = dataclasses.replace(known, ptxas_version=target.ptxas_version)
  is_new = known.converts_e2m1
  return [("ptxas", f"from {oldest} on" if is_new else f"before {oldest}")]


@functools.cache
def _kernels_digest(folders: tuple[str, ...]) -> str:
  """Returns the SHA-256 of kernels and of the rules that plan their launches.

  The hashed text has a line "NAME SHA-256" for each file, in sorted order.
  """
  root = pathlib.Path(launching.__file__).resolve().parent
  lines = []
  for place in (".", "gpu", *folders):
    for path in (root / place).glob("*.py"):
      if not path.name.endswith("_test.py"):
        name = path.relative_to(root).as_posix()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{name} {digest}\n")
  return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


# A file or a folder of tables, or OFF to use only rules.
VARIABLE: Final = "JAXPLUGIN_TUNING"
OFF: Final = "off"

OVERLAY: Final = "overlay"
_MAX_FILES: Final = 100  # in a folder
# Largest distance in buckets. At four times the size something else, for
# example bandwidth, limits the speed.
MAX_DISTANCE: Final = 2
_KEY: Final = "jaxplugin/tables"  # of the first digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
  """A table, and its name in decisions.

  Attributes:
    name: "overlay" or "user's table PATH".
    table: the table.
  """

  name: str
  table: records.Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
  """Tables in order of priority.

  Attributes:
    tables: the tables that were read, including those for other targets.
    troubles: why other tables could not be read.
  """

  tables: tuple[Named, ...] = ()
  troubles: tuple[str, ...] = ()

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the tables' content, without their paths."""
    lines = "".join(f"{named.table.digest}\n" for named in self.tables)
    return hashlib.sha256(lines.encode()).hexdigest()

  def __hash__(self) -> int:
    return hash(self.digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
  """The tables of all enclosing `tuning` contexts.

  Attributes:
    tables: tables of the innermost context first.
    is_alone: whether the user's tables are ignored.
    pin: (implementation, config) with priority over all tables.
  """

  tables: tuple[records.Table, ...] = ()
  is_alone: bool = False
  pin: tuple[str, records.Fields] | None = None


_context = jax_private.make_context(None)


def overlay() -> Overlay | None:
  """Returns the overlay of the enclosing `tuning` contexts, if any."""
  return _context.value


@contextlib.contextmanager
def tuning(
  *tables: records.Table | str | os.PathLike[str] | None,
) -> Iterator[tuple[records.Table, ...]]:
  """Makes block-scaled dots traced inside this context use tuning tables.

  These tables come before those of an enclosing `tuning` and the user's. They
  are part of `jit`'s cache key: a function is traced again under other tables.
  Each thread has its own context. docs/how_to/autotune.md explains how to make
  a table.

  Args:
    *tables: tables or paths of their files, in order of priority. A single None
      uses no table. A table for another target is ignored, and `explain` has
      the reason.

  Yields:
    The tables.

  Raises:
    TableError: If a file cannot be read or is not a table.
    TypeError: If an argument has a wrong type, there is no argument, or None is
      not the only one.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> with jp.tuning(None):
    ...   y = jax.jit(jp.linear)(jnp.ones((2, 64)), w)
    >>> print(y[0, 0])
    64.0
  """
  if tables == (None,):
    with _context(Overlay(is_alone=True)):
      yield ()
    return
  if not tables:
    raise TypeError(
      "tuning: tables must have at least one table, got none; pass None to"
      " use no table"
    )
  made = tuple(_table(table) for table in tables)
  outer = overlay() or Overlay()
  with _context(dataclasses.replace(outer, tables=(*made, *outer.tables))):
    yield made


def _table(given: Any) -> records.Table:
  if isinstance(given, records.Table):
    return given
  if isinstance(given, (str, os.PathLike)):
    return reading.read(pathlib.Path(given))
  raise TypeError(
    "tuning: tables must be tables or paths of table files, or one None, got"
    f" {error_context.shown(given)}"
  )


@contextlib.contextmanager
def pinned(implementation: str, config: records.Fields) -> Iterator[None]:
  """Makes dots traced inside use one config if it can compute them.

  The tuner measures with it. The caller must check the decision, because a
  config that cannot compute a dot is ignored.
  """
  with _context(Overlay(is_alone=True, pin=(implementation, config))):
    yield


def stack(over: Overlay | None = None) -> Stack:
  """Returns the tables for a call with the overlay `over`."""
  standing_ = Stack() if over is not None and over.is_alone else standing()
  if over is None or not over.tables:
    return standing_
  named = (Named(name=OVERLAY, table=table) for table in over.tables)
  return dataclasses.replace(standing_, tables=(*named, *standing_.tables))


def decides(over: Overlay | None) -> tuple[Any, ...]:
  """Returns plain data that determines all decisions of tables."""
  pin = None if over is None else over.pin
  return standing().digest, stack(over).digest, pin


@functools.cache
def standing() -> Stack:
  """Reads the user's tables, once.

  Warns with TableWarning about files of the user that cannot be read.
  """
  setting = os.environ.get(VARIABLE)
  if setting == OFF:
    return Stack()
  folder = user_folder()
  user = _read_all(
    pathlib.Path(setting or folder), "user's table", is_wanted=bool(setting)
  )
  for trouble in user.troubles:
    warnings.warn(trouble, records.TableWarning, stacklevel=2)
  return user


def user_folder() -> pathlib.Path:
  """Returns the default folder of the user's tables."""
  # XDG Base Directory 0.8.
  config = os.environ.get("XDG_CONFIG_HOME", "")
  if not os.path.isabs(config):  # the specification ignores relative paths
    config = os.path.join(os.path.expanduser("~"), ".config")
  return pathlib.Path(config) / "jaxplugin" / "tuning"


def _read_all(path: pathlib.Path, kind: str, *, is_wanted: bool) -> Stack:
  """Reads the tables of a file, or of a folder's files sorted by name.

  Args:
    path: a file or a folder.
    kind: start of the tables' names.
    is_wanted: whether a missing path is a trouble.
  """
  try:
    paths = _files(path)
  except OSError as error:
    if isinstance(error, FileNotFoundError) and not is_wanted:
      return Stack()
    trouble = f"{kind} {path}: it cannot be read: {error.strerror or error}"
    return Stack(troubles=(f"{trouble}; it is not used",))
  tables, troubles = [], []
  if len(paths) > _MAX_FILES:
    troubles.append(
      f"{kind}s of {path}: a folder must have at most {_MAX_FILES}, got"
      f" {len(paths)}; none is used"
    )
    paths = []
  for file in paths:
    try:
      table = reading.read(file)
    except records.TableError as error:
      text = str(error).removeprefix("table ")
      troubles.append(f"{kind} {text}; it is not used")
    else:
      label = file if kind.startswith("user") else file.name
      tables.append(Named(name=f"{kind} {label}", table=table))
  return Stack(tables=tuple(tables), troubles=tuple(troubles))


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  if not path.is_dir():
    path.lstat()  # raises if the path does not exist
    return [path]
  names = sorted(os.listdir(path))
  return [
    path / name
    for name in names
    if name.endswith(".json") and not name.startswith(".")
  ]


def ask(
  operation: MeasuredOperation[decisions.Problem],
  problem: decisions.Problem,
  target: targets.Target,
  over: Overlay | None = None,
) -> tuple[tuple[decisions.Measured, ...], tuple[str, ...]]:
  """Returns the tables' proposals for a problem, and why tables were refused.

  The best proposal comes first. The result depends only on the arguments and
  the files that were read first.
  """
  asked = stack(over)
  notes = [*asked.troubles]
  measured = []
  if over is not None and over.pin is not None:
    implementation, config = over.pin
    measured.append(
      decisions.Measured(
        implementation=implementation,
        config=config,
        origin="pin",
        why="it is being measured",
      )
    )
  refused = []
  for named in asked.tables:
    if named.table.header.operation != operation.name:
      continue
    reason = misfit(named.table, operation, target)
    if reason:
      refused.append((named, reason))
      continue
    if (fields := operation.fields_of(problem)) is not None:
      measured += proposals(named.table, fields, named.name)
  for named, reason in refused:
    if _concerns(named, target):
      notes.append(f"{named.name} is not used: {reason}")
      if named.table.header.device == device_of(target):
        _warn_once(notes[-1])
  return tuple(measured), tuple(notes)


def _concerns(named: Named, target: targets.Target) -> bool:
  """Returns whether to report that a table of an operation is not used.

  A folder has tables of several devices. A table that a program names should be
  for its device.
  """
  device = named.table.header.device
  if named.name == OVERLAY:
    return device.platform == target.platform
  return device == device_of(target)


@functools.cache
def _warn_once(text: str) -> None:
  warnings.warn(text, records.TableWarning, stacklevel=4)
  logging.getLogger("jaxplugin").warning("%s", text)


def describe(
  operations: Iterable[MeasuredOperation[Any]], target: targets.Target
) -> list[str]:
  """Returns lines with each table, whether it is used, and the digest."""
  asked = stack(overlay())
  setting = os.environ.get(VARIABLE)
  where = f"{user_folder()} by default"
  if setting is not None:
    where = f"{VARIABLE}={setting}"
  lines = [
    f"measured choices: {len(asked.tables)} tables, digest"
    f" {asked.digest[:16]}, user's tables: {where}"
  ]
  by_name = {operation.name: operation for operation in operations}
  for named in asked.tables:
    header = named.table.header
    operation = by_name.get(header.operation)
    reason = f"{header.operation} uses no tables"
    if operation is not None:
      reason = misfit(named.table, operation, target)
    answer = f"not used: {reason}" if reason else "used"
    lines.append(
      f"  {named.name}: {len(named.table.rows)} rows of {header.operation},"
      f" {header.date}: {answer}"
    )
  return lines + [f"  {trouble}" for trouble in asked.troubles]


def nearest(
  table: records.Table, problem: records.Fields
) -> Iterator[tuple[int, records.Row]]:
  """Yields rows near a problem with their distance in buckets, nearest first.

  The fields of a row equal those of the problem, except one size, which may lie
  in a neighbouring bucket. If two rows have the same distance, the row with the
  larger size comes first, because its config covers the problem.
  """
  covered: Any = dict(records.key_of(problem))[records.BUCKETED]
  for distance in range(MAX_DISTANCE + 1):
    for size in dict.fromkeys((covered << distance, covered >> distance)):
      key = tuple(sorted({**dict(problem), records.BUCKETED: size}.items()))
      if row := _index(table).get(key):
        yield distance, row


def proposals(
  table: records.Table, problem: records.Fields, origin: str
) -> list[decisions.Measured]:
  """Returns a table's proposals for a problem, the best first.

  Args:
    table: a table that matches the operation and the target.
    problem: the problem's fields.
    origin: name of the table in decisions.
  """
  return [
    decisions.Measured(
      implementation=candidate.implementation,
      config=candidate.config,
      origin=origin,
      why=_why(row, candidate, distance),
    )
    for distance, row in nearest(table, problem)
    for candidate in row.preferred
  ]


def _why(row: records.Row, candidate: records.Candidate, distance: int) -> str:
  default = row.candidates[row.default]
  text = f"{candidate.median_us:g} us"
  if candidate is not default:
    text += f", the rule's {default.implementation} {default.median_us:g} us"
  else:
    text += ", the rule's own choice"
  if distance:
    text += f", measured at m={row.size(records.BUCKETED)}"
  return text


@functools.lru_cache(maxsize=64)
def _index(table: records.Table) -> Mapping[records.Fields, records.Row]:
  return {row.key: row for row in table.rows}


class TablesDifferError(RuntimeError):
  """Another process of the same run has other tuning tables.

  Processes that choose different kernels may wait for each other forever. Set
  JAXPLUGIN_TUNING to the same file in all processes.
  """


def tuning_digest() -> str:
  """Returns the SHA-256 of the tuning tables that a choice here uses.

  These are the tables of an enclosing `tuning`, and the user's. Processes with
  equal digests, equal devices and equal installations make equal choices.

  Returns:
    64 hexadecimal digits, a digest of the contents.

  Example:
    >>> import jaxplugin as jp
    >>> with jp.tuning(None):
    ...   print(len(jp.tuning_digest()))
    64
  """
  return stack(overlay()).digest


@functools.cache
def require_same_in_processes() -> None:
  """Compares this process's tables with those of the first process, once.

  The first process that decides publishes the digest of its tables. No process
  waits for another.

  The comparison includes the user's tables. It is skipped if the run has one
  process, or if `jax.distributed.initialize` was not called.

  Raises:
    TablesDifferError: If the first process to decide has other tables.
  """
  if jax.process_count() == 1:
    return
  own = standing()
  first = jax_private.first_published(
    _KEY, f"{jax.process_index()} {own.digest}"
  )
  if first is None:
    return
  index, _, theirs = first.partition(" ")
  if theirs != own.digest:
    names = ", ".join(named.name for named in own.tables) or "none"
    raise TablesDifferError(
      f"tables of measured choices: process {jax.process_index()} and process"
      f" {index} have different ones (digests {own.digest[:16]} and"
      f" {theirs[:16]}; this process has {names}). Processes with different"
      f" choices can deadlock. Set {VARIABLE} to the same file in"
      f" all processes, or to {OFF}"
    )
