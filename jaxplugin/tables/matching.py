# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a table, and checks that it matches this process.

A table that does not match is refused as a whole. Its kernels, libraries and
device must be those of this process, and the operation and its backends must
support every row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Generic

import jaxlib
import numpy as np

from jaxplugin.core import decisions, formats, targets
from jaxplugin.kernels import architectures, launching
from jaxplugin.runtime import fingerprints
from jaxplugin.tables import records

AGAIN: Final = "rules choose until you run python -m jaxplugin tune"
# Dtypes of results and of unquantized operands, by their names in rows.
DTYPES: Final = {
  dtype.name: dtype
  for dtype in (np.dtype(np.float32), formats.BF16, np.dtype(np.float16))
}
FORMATS: Final = {format.name: format for format in formats.NAMED}


class RowFields:
  """The fields of a row that are not read yet.

  Methods raise ValueError with the name of the field and the rule.
  """

  def __init__(
    self, what: str, fields: records.Fields, required: Iterable[str]
  ):
    """Checks that the required fields exist.

    Args:
      what: the operation in messages, for example "the dot".
      fields: all fields of the row.
      required: names of required fields.
    """
    self._what = what
    self._left = dict(fields)
    missing = [name for name in required if name not in self._left]
    if missing:
      raise ValueError(f"a problem of {what} must have {', '.join(missing)}")

  def __contains__(self, name: str) -> bool:
    return name in self._left

  def size(self, name: str) -> int:
    """Reads a positive number."""
    if name not in self._left:
      raise ValueError(f"a problem of {self._what} must have {name}")
    value = self._left.pop(name)
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive number, got {value!r}")
    return value

  def flag(self, name: str) -> bool:
    """Reads a bool."""
    value = self._left.pop(name)
    if type(value) is not bool:
      raise ValueError(f"{name} must be true or false, got {value!r}")
    return value

  def text(self, name: str, allowed: Collection[str]) -> str:
    """Reads one of the allowed words."""
    value = self._left.pop(name)
    if not isinstance(value, str) or value not in allowed:
      raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")
    return value

  def named(self, name: str, table: Mapping[str, Any]) -> Any:
    """Reads a name, and returns its value in the table."""
    return table[self.text(name, table)]

  def stored_dtype(self, name: str, format: formats.BlockFormat) -> np.dtype:
    """Reads the dtype of a format's values, by default its `array_dtype`."""
    if name not in self:
      return format.array_dtype
    return self.named(name, {x.name: x for x in format.storage_dtypes})

  def optional(
    self,
    defaults: Mapping[str, records.Scalar],
    words: Mapping[str, Collection[str]],
    sizes: Collection[str] = (),
  ) -> dict[str, Any]:
    """Reads fields that a row leaves out if they have their default.

    Args:
      defaults: the default of each field.
      words: allowed values of the fields that are texts.
      sizes: names of the fields that are numbers. All others are bools.
    """
    found: dict[str, Any] = {}
    for name, default in defaults.items():
      if name not in self:
        found[name] = default
      elif name in words:
        found[name] = self.text(name, words[name])
      else:
        found[name] = self.size(name) if name in sizes else self.flag(name)
    return found

  def finish(self) -> None:
    """Checks that every field was read."""
    if self._left:
      raise ValueError(
        f"a problem of {self._what} has no {', '.join(self._left)}"
      )


def defaults_of(
  kind: type, without: Collection[str] = ()
) -> dict[str, records.Scalar]:
  """Returns the fields of a dataclass that have a default.

  Rows leave a field out if it has its default.

  Args:
    kind: the dataclass.
    without: names of fields to leave out.
  """
  return {
    field.name: field.default
    for field in dataclasses.fields(kind)
    if field.default is not dataclasses.MISSING and field.name not in without
  }


def not_default(
  problem: Any, defaults: Mapping[str, records.Scalar]
) -> dict[str, records.Scalar]:
  """Returns the attributes of a problem that differ from their default."""
  values = {name: getattr(problem, name) for name in defaults}
  return {
    name: value for name, value in values.items() if value != defaults[name]
  }


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
  target = dataclasses.replace(target, options=targets.NONE)
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
    different = _difference(name, source, backends.get(name), target)
    if different:
      return f"implementation {name}: {different}"
  for number, row in enumerate(table.rows, start=1):
    wrong = _wrong(row, operation, backends, target)
    if wrong:
      return f"row {number}: {wrong}"
  return ""


def _difference(
  name: str,
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
