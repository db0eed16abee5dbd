# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of other packages, adapted to the table of an operation.

Adapters check what these backends return. An invalid value is reported with the
name of the distribution, and is never used.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any
from typing import Final
from typing import Generic

import jax
import numpy as np

from jaxplugin.core import decisions
from jaxplugin.core import error_context
from jaxplugin.core import targets
from jaxplugin.plugins import discovery
from jaxplugin.plugins import records
from jaxplugin.plugins import registry

# Ranks of jaxplugin's own backends are positive, and lower ranks come first.
_FIRST_RANK: Final = -1000
_lock: Final = threading.Lock()


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
  with _lock:  # A backend has one adapter, so that it warns only once.
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
  found = (*discovery.bundled(), *registry.usable())
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
  if found.origin == registry.IN_CODE or not name:
    return None
  return decisions.Source(toolchain=((name, version),))


class Adapter(Generic[decisions.Problem]):
  """Calls a plugin backend's functions and checks what they return."""

  def __init__(
    self, found: records.UsableBackend, interface: Interface[decisions.Problem]
  ) -> None:
    self.backend = found.backend
    self.name = f"backend {found.backend.name!r} (of {found.origin})"
    self._interface = interface
    self._is_warned = False

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
        f"{self._who()}: implementation {self.backend.name}: {error}; or leave"
        " implementation out"
      ) from error
    except Exception as error:
      error.add_note(f"In emit of {self.name}, for {view.problem}.")
      raise

  def emit_array(
    self, view: Any, dtype: np.dtype, shape: tuple[Any, ...]
  ) -> jax.Array:
    """Calls `emit`; raises TypeError unless the result has dtype and shape."""
    result = self.emit(view)
    if not isinstance(result, jax.Array) or (
      (result.dtype, tuple(result.shape)) != (dtype, tuple(shape))
    ):
      raise self.wrong_result(f"{dtype.name}{list(shape)}", result)
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
