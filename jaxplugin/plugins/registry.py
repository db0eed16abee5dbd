# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backends of other packages, from entry points and from code.

The first decision, or the first look-up of a name, loads the entry points. They
are loaded once, so later decisions use the same backends. Code may register
backends later. They are part of `jit`'s cache key, so `jit` traces earlier
functions again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from typing import Final

import jax

from jaxplugin.core import error_context
from jaxplugin.jaxext import jax_private
from jaxplugin.plugins import discovery
from jaxplugin.plugins import records

IN_CODE: Final = "registered in code"
_WHO: Final = "register_backend"


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
  discovery: discovery.Discovery | None = None

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
    backend=backend, origin=IN_CODE, is_first=bool(first)
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
    return dataclasses.replace(state, discovery=discovery.Discovery())
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


def _discover(state: _State) -> discovery.Discovery:
  try:
    points = discovery.installed()
    return discovery.load(points, _taken(state), os.environ)
  except Exception as error:  # Any installed package's metadata may be invalid.
    text = f"{type(error).__name__}: {error}"
    return discovery.Discovery(
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


def _without(
  found: discovery.Discovery, taken: Mapping[str, str]
) -> discovery.Discovery:
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
