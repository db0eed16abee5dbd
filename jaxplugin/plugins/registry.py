# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backends of other packages, from entry points and from code.

The first decision, or the first look-up of a name, loads the entry points. They
are loaded once, so later decisions use the same backends. Code may register
backends later. They are part of `jit`'s cache key, so `jit` traces earlier
functions again.

`table` adapts them to the table of an operation. Adapters check what these
backends return. An invalid value is reported with the name of the distribution,
and is never used.

The variable `JAXPLUGIN_BACKENDS` is "all", "off", or a list of the allowed
names, separated by commas. Unset or empty, it is "all".
`JAXPLUGIN_BACKENDS_FIRST` lists backends that are tried before jaxplugin's own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Generic

import jax
import numpy as np

from jaxplugin.core import decisions, error_context, targets
from jaxplugin.jaxext import jax_private
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
  unknown = "an unknown distribution"
  try:
    return f"{point.dist.name} {point.dist.version}" if point.dist else unknown
  except Exception:  # Its metadata may be invalid.
    return unknown


def _load(
  point: importlib.metadata.EntryPoint,
) -> list[records.UsableBackend] | records.Status:
  """Returns the backends of an entry point, at most one for each operation."""
  try:
    value = point.load()
    backends = value if isinstance(value, tuple) and value else (value,)
    others = [x for x in backends if not isinstance(x, records.Backend)]
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # Also an exit, or a panic of a Rust module.
    return _refused(
      point,
      records.Refusal.IMPORT_FAILED,
      f"{point.value}: {type(error).__name__}: {error}",
    )
  if others:
    return _refused(
      point,
      records.Refusal.WRONG_TYPE,
      f"{point.value} is a {type(others[0]).__name__}",
    )
  for backend in backends:
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


_WHO: Final = "register_backend"
# Ranks of jaxplugin's own backends are positive, and lower ranks come first.
_FIRST_RANK: Final = -1000
_adapter_lock: Final = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """The known backends.

  A change replaces the whole state, so readers need no lock.

  Attributes:
    own: names of jaxplugin's own backends.
    in_code: (registration number, backend) of each backend registered in code.
    discovery: backends of entry points; None before the first look-up.
  """

  own: tuple[str, ...] = ()
  in_code: tuple[tuple[int, records.UsableBackend], ...] = ()
  discovery: Discovery | None = None

  def found(self) -> tuple[records.UsableBackend, ...]:
    """Returns the usable backends; those with `is_first` come first."""
    everything = [item for _, item in self.in_code]
    if self.discovery is not None:
      everything += self.discovery.found
    return tuple(sorted(everything, key=lambda item: not item.is_first))


_lock: Final = threading.Lock()
_state = _State()
_numbers: Final = itertools.count(1)
_loading: Final = threading.local()
# Registration numbers of the backends in code, a part of `jit`'s cache key.
_key: Final = jax.make_user_context(default_value=())


def reserve(names: tuple[str, ...]) -> None:
  """Sets the names of jaxplugin's own backends, at import."""
  global _state
  with _lock:
    _state = dataclasses.replace(_state, own=names)


def usable(operation: str | None = None) -> tuple[records.UsableBackend, ...]:
  """Returns the usable backends of an operation, or of all operations.

  The first call loads the entry points.
  """
  return tuple(
    found
    for found in _loaded().found()
    if operation in (None, found.backend.operation)
  )


def statuses() -> tuple[records.Status, ...]:
  """Returns every backend of another package, including unusable ones.

  Returns:
    A `Status` for each.

  Example:
    >>> import jaxplugin as jp
    >>> [status.name for status in jp.backends.statuses()]
    []
  """
  state = _loaded()
  assert state.discovery is not None
  used = tuple(item.status() for item in state.found())
  return used + state.discovery.refused


def reason_missing(name: str) -> str:
  """Returns why a backend that was found is not used, or ""."""
  return "; ".join(
    str(status)
    for status in statuses()
    if status.name == name and status.refusal is not None
  )


def register_backend(
  backend: records.Backend, *, first: bool = False
) -> records.Backend:
  """Adds a backend of an operation.

  It is used if `implementation=` or a tuning table names it. With `first`, it
  is also used if it supports a call that names no backend. `jit` traces earlier
  functions again. An installed package declares an entry point in the group
  "jaxplugin.backends" instead.

  Args:
    backend: a `Backend`.
    first: whether it is tried before jaxplugin's own backends. If several are
      first, they are tried in the order of registration.

  Returns:
    `backend`.

  Raises:
    TypeError: If backend is not a `Backend`.
    ValueError: If its name is taken, or its API version differs.

  Example:
    >>> import jaxplugin as jp
    >>> backend = jp.Backend(
    ...   name="example",
    ...   api_version=1,
    ...   platforms=("cpu",),
    ...   supports=lambda problem, target: "supports no call",
    ...   emit=lambda call: None,
    ... )
    >>> jp.register_backend(backend) is backend
    True
    >>> jp.backends.unregister_backend("example")
  """
  global _state
  if not isinstance(backend, records.Backend):
    raise TypeError(
      f"{_WHO}: backend must be a jp.Backend, got"
      f" {error_context.shown(backend)}"
    )
  if error := records.api_version_error(backend):
    raise ValueError(f"{_WHO}: backend {backend.name!r}: {error}")
  found = records.UsableBackend(
    backend=backend, origin=records.IN_CODE, is_first=bool(first)
  )
  with _lock:
    taken = _taken(_state, backend.operation)
    if _state.discovery is not None:
      taken |= {f.backend.name: f.origin for f in _state.discovery.found}
    if backend.name in taken:
      raise ValueError(
        f"{_WHO}: the name {backend.name!r} is taken, by"
        f" {taken[backend.name]}; choose another name, or call"
        " jp.backends.unregister_backend if code registered that one"
      )
    _state = dataclasses.replace(
      _state, in_code=(*_state.in_code, (next(_numbers), found))
    )
    _enter_key()
  return backend


def unregister_backend(name: str) -> None:
  """Removes the backends of a name that code registered.

  `jit` traces functions that used them again. `register_backend` has an
  example.

  Args:
    name: name of the backend, which may be registered for several operations.

  Raises:
    ValueError: If code has not registered a backend of this name.

  Example:
    >>> import jaxplugin as jp
    >>> try:
    ...   jp.backends.unregister_backend("example")
    ... except ValueError:
    ...   print("code has not registered it")
    code has not registered it
  """
  global _state
  with _lock:
    kept = tuple(
      item for item in _state.in_code if item[1].backend.name != name
    )
    if len(kept) == len(_state.in_code):
      names = tuple(item.backend.name for _, item in _state.in_code)
      raise ValueError(
        f"unregister_backend: no backend {error_context.shown(name)} was"
        f" registered in code; those are {names}"
      )
    _state = dataclasses.replace(_state, in_code=kept)
    _enter_key()


def _enter_key() -> None:
  numbers = tuple(number for number, _ in _state.in_code)
  jax_private.set_everywhere(_key, numbers)


def _loaded() -> _State:
  """Returns the state after the entry points are loaded.

  Imports run without the lock: another thread that imports one of the modules
  may be waiting for it. Several threads may load at once. The result of the
  first thread to finish is used.
  """
  global _state
  state = _state
  if state.discovery is not None:
    return state
  if getattr(_loading, "is_on", False):
    # A backend's module chooses a backend during its import. This decision uses
    # no entry points.
    return dataclasses.replace(state, discovery=Discovery())
  _loading.is_on = True
  try:
    found = _discover(state)
  finally:
    _loading.is_on = False
  with _lock:
    if _state.discovery is not None:
      return _state
    found = _without(found, _taken(_state))
    state = _state = dataclasses.replace(_state, discovery=found)
  for text in found.warnings:
    warnings.warn(text, records.BackendWarning, stacklevel=2)
    logging.getLogger("jaxplugin").warning("%s", text)
  return state


def _discover(state: _State) -> Discovery:
  try:
    points = installed()
    return load(points, _taken(state), os.environ)
  except Exception as error:  # Any installed package's metadata may be invalid.
    text = f"{type(error).__name__}: {error}"
    return Discovery(
      warnings=(f"cannot look for backends of other packages: {text}",)
    )


def _taken(state: _State, operation: str | None = None) -> dict[str, str]:
  """Returns {name: owner} of jaxplugin's backends and of those in code.

  If an operation is given, backends in code for other ones are left out.
  """
  in_code = (
    item.backend.name
    for _, item in state.in_code
    if operation in (None, item.backend.operation)
  )
  own = dict.fromkeys(state.own, "jaxplugin itself")
  return dict.fromkeys(in_code, "a backend registered in code") | own


def _without(found: Discovery, taken: Mapping[str, str]) -> Discovery:
  """Refuses backends whose names code registered during their import."""
  kept, refused = [], []
  for item in found.found:
    if item.backend.name in taken:
      refusal = records.Refusal.NAME_TAKEN
      reason = f"{refusal.value}: by {taken[item.backend.name]}"
      status = item.status()
      refused.append(
        dataclasses.replace(status, refusal=refusal, reason=reason)
      )
    else:
      kept.append(item)
  return dataclasses.replace(
    found, found=tuple(kept), refused=(*found.refused, *refused)
  )


# Adapters to the table of an operation.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface(Generic[decisions.Problem]):
  """How an operation calls the backends of other packages.

  Attributes:
    operation: name of the operation (`records.Backend.operation`).
    problem_of: problem -> view of it, the argument of `supports`.
    emit: (adapter, config, *arguments) -> result. The arguments are those of
      the operation's `decisions.BackendRecord.emit`.
    refusal: problem -> why no plugin backend supports it, or "".
    is_empty: problem -> whether `emit` computes it without the backend.
    notes: (problem, backend) -> additional notes for the plan of a backend
      without `plan`.
  """

  operation: str
  problem_of: Callable[[decisions.Problem], Any]
  emit: Callable[..., Any]
  refusal: Callable[[decisions.Problem], str] = lambda problem: ""
  is_empty: Callable[[decisions.Problem], bool] = lambda problem: False
  notes: Callable[[decisions.Problem, records.Backend], tuple[str, ...]] = (
    lambda problem, backend: ()
  )


def table(
  interface: Interface[decisions.Problem],
) -> dict[str, decisions.BackendRecord[decisions.Problem]]:
  """Returns an operation's bundled backends and usable plugin backends."""
  found = _found(interface.operation)
  with _adapter_lock:  # A backend has one adapter, so that it warns only once.
    return {
      item.backend.name: _adapted(
        interface, item, _FIRST_RANK + i if item.is_first else None
      )
      for i, item in enumerate(found)
    }


def call_targets() -> tuple[str, ...]:
  """Returns the custom calls of all bundled and usable plugin backends."""
  return tuple(
    name
    for operation in records.OPERATIONS
    for item in _found(operation)
    for name in item.backend.call_targets
  )


def _found(operation: str) -> tuple[records.UsableBackend, ...]:
  found = (*bundled(), *usable())
  return tuple(item for item in found if item.backend.operation == operation)


@functools.lru_cache(maxsize=128)
def _adapted(
  interface: Interface[decisions.Problem],
  found: records.UsableBackend,
  rank: int | None,
) -> decisions.BackendRecord[decisions.Problem]:
  backend = found.backend
  adapter = Adapter(found, interface)
  tunable: decisions.Tunable[decisions.Problem] = decisions.Tunable(
    source=functools.partial(_source, found)
  )
  if backend.tuning is not None:
    tunable = dataclasses.replace(
      tunable,
      config_error=adapter.config_error,
      candidates=adapter.candidates,
    )
  return decisions.BackendRecord(
    name=backend.name,
    summary=backend.summary or "of another package",
    origin=found.origin,
    rank=lambda target: rank if target.platform in backend.platforms else None,
    supports=adapter.supports,
    plan=adapter.plan,
    emit=lambda *args, config=(), **options: interface.emit(
      adapter, dict(config), *args, **options
    ),
    reads=lambda layout, problem, target: layout in backend.reads,
    lowering_refusal=adapter.lowering_refusal,
    is_portable=backend.is_portable,
    tunable=tunable,
  )


def _source(
  found: records.UsableBackend, target: targets.Target
) -> decisions.Source | None:
  """Returns the backend's `Tuning.source`, or its distribution's version.

  The result is None if code registered the backend, because its version is then
  unknown.
  """
  backend = found.backend
  if target.platform not in backend.platforms:
    return None
  if backend.tuning is not None and backend.tuning.source is not None:
    return backend.tuning.source(target)
  name, _, version = found.origin.rpartition(" ")
  if found.origin == records.IN_CODE or not name:
    return None
  return decisions.Source(toolchain=((name, version),))


class Adapter(Generic[decisions.Problem]):
  """Calls a plugin backend's functions and checks what they return."""

  def __init__(
    self, found: records.UsableBackend, interface: Interface[decisions.Problem]
  ) -> None:
    self.backend = found.backend
    self._found = found
    self._interface = interface
    self._is_warned = False

  @property
  def name(self) -> str:
    """Name and origin of the backend, for errors."""
    origin = records.origin_phrase(self._found.origin or "jaxplugin")
    return f"backend {self.backend.name!r} ({origin})"

  def supports(
    self, problem: Any, target: targets.Target
  ) -> decisions.Unsupported | None:
    backend = self.backend
    if target.platform not in backend.platforms:
      rule = f"supports {', '.join(backend.platforms)}"
      if backend.platforms == ("cuda",):
        rule = "needs an NVIDIA GPU"
      return decisions.Unsupported(
        f"{rule}, the target's platform is {target.platform}"
      )
    refusal = self._interface.refusal(problem)
    if not (problem.sizes_are_static or backend.takes_symbolic_sizes):
      refusal = refusal or records.NEEDS_STATIC_SIZES
    if refusal:
      return decisions.Unsupported(refusal)
    if self._interface.is_empty(problem):
      return None
    try:
      answer = backend.supports(self._interface.problem_of(problem), target)
    except Exception as error:  # Another package may raise any error.
      return self._wrong(f"its supports raised {type(error).__name__}: {error}")
    if answer is None:
      return None
    if not isinstance(answer, str) or not answer:
      return self._wrong(
        f"its supports returned {answer!r}, which is neither None nor a reason"
      )
    return decisions.Unsupported(answer)

  def lowering_refusal(
    self, target: targets.Target
  ) -> decisions.Unsupported | None:
    error = None
    if self.backend.lowering_error is not None and (
      target.platform in self.backend.platforms
    ):
      error = self.backend.lowering_error(target)
    return decisions.Unsupported(error) if error else None

  def config_error(
    self,
    config: decisions.Fields,
    problem: decisions.Problem,
    target: targets.Target,
  ) -> str | None:
    assert self.backend.tuning is not None
    refusal = self.supports(problem, target)
    if refusal is not None:
      return refusal.reason
    return self.backend.tuning.config_error(
      dict(config), self._interface.problem_of(problem), target
    )

  def candidates(
    self, problem: decisions.Problem, target: targets.Target
  ) -> tuple[decisions.Fields, ...]:
    assert self.backend.tuning is not None
    view = self._interface.problem_of(problem)
    found = self.backend.tuning.candidates(view, target)
    return tuple(tuple(sorted(config.items())) for config in found)

  def plan(
    self,
    problem: decisions.Problem,
    target: targets.Target,
    config: decisions.Fields = (),
  ) -> decisions.Plan:
    if self.backend.plan is None or self._interface.is_empty(problem):
      return self._plan(problem)
    view = self._interface.problem_of(problem)
    plan = self.backend.plan(view, target, dict(config))
    if not isinstance(plan, decisions.Plan):
      raise TypeError(
        f"{self._who()}: plan of {self.name} must return a jp.backends.Plan,"
        f" got {error_context.shown(plan)}"
      )
    return plan

  def _plan(self, problem: Any) -> decisions.Plan:
    """Returns the plan of a backend without `plan`."""
    scale = getattr(problem, "global_scale", "none")
    application: decisions.Application = "separate"
    if scale == "none":
      application = "none"
    elif scale == "scalar" and self.backend.fuses_global_scale:
      application = "fused"
    notes = self._interface.notes(problem, self.backend)
    return decisions.Plan(
      global_scale=application, notes=(*self.backend.notes, *notes)
    )

  def emit(self, view: Any) -> Any:
    """Calls the backend's `emit` with the view of a call."""
    refusal = self.lowering_refusal(view.target)
    try:
      if refusal is not None:
        raise NotImplementedError(refusal.reason)
      return self.backend.emit(view)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"{self._who()}: implementation {self.backend.name}: {error};"
        f" {self._alternative()}"
      ) from error
    except Exception as error:
      error.add_note(f"In emit of {self.name}, for {view.problem}.")
      raise

  def _alternative(self) -> str:
    """Returns how the caller gets another backend."""
    has_argument = self._interface.operation in (
      "block_scaled_dot",
      "ragged_dot",
    )
    if not self._found.is_first:
      if has_argument:
        return "or leave implementation out"
      return "or remove it from the tuning table"
    remedy = f"take it out of {FIRST}"
    if self._found.origin == records.IN_CODE:
      remedy = "call jp.backends.unregister_backend"
    if has_argument:
      remedy += ", or pass another implementation"
    return f"or {remedy}"

  def emit_array(
    self, view: Any, dtype: np.dtype, *shapes: tuple[Any, ...], also: str = ""
  ) -> jax.Array:
    """Calls `emit`; raises TypeError unless the dtype and a shape are right.

    The error has the first shape, and `also` for the others.
    """
    result = self.emit(view)
    if not isinstance(result, jax.Array) or (
      result.dtype != dtype or tuple(result.shape) not in shapes
    ):
      raise self.wrong_result(f"{dtype.name}{list(shapes[0])}{also}", result)
    return result

  def wrong_result(self, wanted: str, got: Any) -> TypeError:
    """Returns the error for an invalid result of `emit`."""
    is_array = isinstance(got, jax.Array)
    text = f"{got.dtype}{list(got.shape)}" if is_array else repr(got)
    return TypeError(
      f"{self._who()}: emit of {self.name} must return {wanted}, got {text}"
    )

  def _who(self) -> str:
    return error_context.who(self._interface.operation)

  def _wrong(self, what: str) -> decisions.Unsupported:
    """Returns a refusal, and warns about it once."""
    if not self._is_warned:
      self._is_warned = True
      kind = self._interface.operation.removeprefix("block_scaled_")
      warnings.warn(
        f"{self.name} is not used for a {kind}: {what}",
        records.BackendWarning,
        stacklevel=2,
      )
    return decisions.Unsupported(what)
