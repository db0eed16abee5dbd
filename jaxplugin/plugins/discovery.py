# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the backends of installed distributions from their entry points.

The variable `JAXPLUGIN_BACKENDS` is "all", "off", or a list of the allowed
names, separated by commas. Unset or empty, it is "all".
`JAXPLUGIN_BACKENDS_FIRST` lists backends that are tried before jaxplugin's own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from jaxplugin.plugins import records

GROUP: Final = "jaxplugin.backends"
ALLOWED: Final = "JAXPLUGIN_BACKENDS"
FIRST: Final = "JAXPLUGIN_BACKENDS_FIRST"
# Backends of jaxplugin that use the plugin interface. The environment variables
# do not apply to them, and `statuses` does not list them.
BUNDLED: Final = (
  importlib.metadata.EntryPoint(
    name="cutile", value="jaxplugin.cutile:BACKEND", group=GROUP
  ),
)
_OFF: Final = "off"
_ALL: Final = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discovery:
  """The backends of all entry points, in order of names.

  Attributes:
    found: usable backends. Those of `JAXPLUGIN_BACKENDS_FIRST` come first.
    refused: status of the other backends.
    warnings: warnings to print.
  """

  found: tuple[records.UsableBackend, ...] = ()
  refused: tuple[records.Status, ...] = ()
  warnings: tuple[str, ...] = ()


def installed() -> tuple[importlib.metadata.EntryPoint, ...]:
  """Returns the entry points of all distributions without importing any."""
  return tuple(importlib.metadata.entry_points(group=GROUP))


@functools.cache
def bundled() -> tuple[records.UsableBackend, ...]:
  """Imports the backends of `BUNDLED`."""
  return tuple(
    records.UsableBackend(backend=point.load(), origin="") for point in BUNDLED
  )


def load(
  points: Iterable[importlib.metadata.EntryPoint],
  taken: Mapping[str, str],
  environment: Mapping[str, str],
) -> Discovery:
  """Imports the backends of entry points that the environment allows.

  Args:
    points: the entry points.
    taken: {name: owner} of the names that backends must not have.
    environment: the environment variables.
  """
  points = sorted(points, key=lambda p: (p.name, origin_of(p), p.value))
  counts = collections.Counter(point.name for point in points)
  allowed = _allowed(environment)
  found, refused, warnings = [], [], []
  result: list[records.UsableBackend] | records.Status
  for point in points:
    if allowed is not None and point.name not in allowed:
      refused.append(_refused(point, records.Refusal.NOT_ALLOWED))
      continue
    if point.name in taken:
      others = taken[point.name]
      result = _refused(point, records.Refusal.NAME_TAKEN, f"by {others}")
    elif counts[point.name] > 1:
      others = ", ".join(
        origin_of(other)
        for other in points
        if other.name == point.name and other is not point
      )
      # All are refused, so that an installation cannot replace a backend.
      result = _refused(
        point, records.Refusal.NAME_TAKEN, f"by {others} too; uninstall one"
      )
    else:
      result = _load(point)
    if isinstance(result, list):
      found += result
    else:
      refused.append(result)
      warnings.append(f"backend {result}")
  names = {point.name for point in points}
  order = _names(environment, FIRST)
  for variable, wanted in ((ALLOWED, allowed or ()), (FIRST, order)):
    warnings += _unknown(variable, wanted, names, points)
  return Discovery(
    found=_in_order(found, order),
    refused=tuple(refused),
    warnings=tuple(warnings),
  )


def origin_of(point: importlib.metadata.EntryPoint) -> str:
  """Returns the distribution of an entry point and its version."""
  distribution = point.dist
  if distribution is None:
    return "an unknown distribution"
  return f"{distribution.name} {distribution.version}"


def _load(
  point: importlib.metadata.EntryPoint,
) -> list[records.UsableBackend] | records.Status:
  """Returns the backends of an entry point, at most one for each operation."""
  try:
    value = point.load()
  except (Exception, SystemExit) as error:  # An import may raise any error.
    return _refused(
      point,
      records.Refusal.IMPORT_FAILED,
      f"{point.value}: {type(error).__name__}: {error}",
    )
  backends = value if isinstance(value, tuple) and value else (value,)
  for backend in backends:
    if not isinstance(backend, records.Backend):
      return _refused(
        point,
        records.Refusal.WRONG_TYPE,
        f"{point.value} is a {type(backend).__name__}",
      )
    if error_text := records.api_version_error(backend):
      return _refused(
        point, records.Refusal.WRONG_API_VERSION, error_text, is_whole=True
      )
    if backend.name != point.name:
      return _refused(
        point,
        records.Refusal.WRONG_NAME,
        f"the backend is named {backend.name!r}; give both the same name",
      )
  operations = [backend.operation for backend in backends]
  if len(set(operations)) < len(operations):
    return _refused(
      point,
      records.Refusal.NAME_TAKEN,
      f"{point.value} has two backends of one operation",
    )
  return [
    records.UsableBackend(backend=backend, origin=origin_of(point))
    for backend in backends
  ]


def _refused(
  point: importlib.metadata.EntryPoint,
  refusal: records.Refusal,
  details: str = "",
  *,
  is_whole: bool = False,
) -> records.Status:
  reason = f"{refusal.value}: {details}" if details else refusal.value
  return records.Status(
    name=point.name,
    origin=origin_of(point),
    refusal=refusal,
    reason=details if is_whole else reason,
  )


def _names(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
  """Returns the distinct names of a comma-separated variable."""
  words = (word.strip() for word in environment.get(variable, "").split(","))
  return tuple(dict.fromkeys(word for word in words if word))


def _allowed(environment: Mapping[str, str]) -> tuple[str, ...] | None:
  """Returns the names that may be loaded; None allows all."""
  names = _names(environment, ALLOWED)
  if names in ((), (_ALL,)):
    return None
  return () if names == (_OFF,) else names


def _unknown(
  variable: str,
  wanted: Iterable[str],
  names: Collection[str],
  points: Iterable[importlib.metadata.EntryPoint],
) -> list[str]:
  unknown = [name for name in wanted if name not in names]
  if not unknown:
    return []
  known = ", ".join(f"{p.name} (of {origin_of(p)})" for p in points)
  return [
    f"{variable} names {', '.join(unknown)}, which no installed distribution"
    f" provides; known backends: {known or 'none'}"
  ]


def _in_order(
  found: Iterable[records.UsableBackend], order: tuple[str, ...]
) -> tuple[records.UsableBackend, ...]:
  """Returns the backends named in `order`, in that order, then the others."""
  found = tuple(found)
  first = [
    dataclasses.replace(item, is_first=True)
    for name in order
    for item in found
    if item.backend.name == name
  ]
  others = (item for item in found if item.backend.name not in order)
  return (*first, *others)
