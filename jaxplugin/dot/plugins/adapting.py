# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend of another package as one of the table's.

It is asked only what it promised to answer, and its answers are checked: what
it says wrongly is told with its distribution's name, and is never a result.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.core import targets
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import problems
from jaxplugin.dot import sides
from jaxplugin.dot.plugins import discovery
from jaxplugin.dot.plugins import records
from jaxplugin.dot.plugins import registry
from jaxplugin.dot.plugins import views

# Before all of jaxplugin's own, whose ranks are positive.
_FIRST_RANK: Final = -1000
_lock: Final = threading.Lock()


def table() -> dict[str, decisions.Backend[problems.DotProblem]]:
  """Returns the bundled and other packages' usable backends, by name."""
  found = (*discovery.bundled(), *registry.usable())
  with _lock:  # one adapter for each backend, because an adapter warns once
    return {
      item.backend.name: _adapted(
        item, _FIRST_RANK + i if item.is_first else None
      )
      for i, item in enumerate(found)
    }


def call_targets() -> tuple[str, ...]:
  """Returns the custom calls of the bundled and other packages' backends."""
  found = (*discovery.bundled(), *registry.usable())
  return tuple(name for item in found for name in item.backend.call_targets)


@functools.lru_cache(maxsize=128)
def _adapted(
  found: records.Found, rank: int | None
) -> decisions.Backend[problems.DotProblem]:
  backend = found.backend
  guest = _Guest(found)
  tunable: decisions.Tunable[problems.DotProblem] = decisions.Tunable(
    source=functools.partial(_source, found)
  )
  if backend.tuning is not None:
    tunable = dataclasses.replace(
      tunable,
      config_error=guest.config_error,
      candidates=guest.candidates,
      configured=lambda config: dataclasses.replace(
        adapted,
        plan=functools.partial(guest.plan, config=config),
        emit=functools.partial(guest.emit, config=config),
      ),
    )
  adapted = decisions.Backend(
    name=backend.name,
    summary=backend.summary or "of another package",
    origin=found.origin,
    rank=lambda target: rank if target.platform in backend.platforms else None,
    supports=guest.supports,
    plan=guest.plan,
    emit=guest.emit,
    reads=guest.reads,
    lowering_refusal=guest.lowering_refusal,
    is_portable=backend.is_portable,
    tunable=tunable,
  )
  return adapted


def _source(
  found: records.Found, target: targets.Target
) -> decisions.Source | None:
  """Returns the backend's own source, or the version of its distribution.

  None if code registered the backend, because its version is unknown.
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


class _Guest:
  """What the table asks, in the words of `records.Backend`."""

  def __init__(self, found: records.Found) -> None:
    self._backend = found.backend
    self._name = f"backend {found.backend.name!r} (of {found.origin})"
    self._is_warned = False

  def supports(
    self, problem: problems.DotProblem, target: targets.Target
  ) -> decisions.Unsupported | None:
    refusal = self._unasked(problem, target)
    if refusal is not None:
      return decisions.Unsupported(refusal)
    if problem.is_empty:
      return None  # nothing is to be computed
    try:
      answer = self._backend.supports(views.problem_of(problem), target)
    except Exception as error:  # whatever another package's function raises
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
    if self._backend.lowering_error is not None and (
      target.platform in self._backend.platforms
    ):
      error = self._backend.lowering_error(target)
    return decisions.Unsupported(error) if error else None

  def config_error(
    self,
    config: decisions.Fields,
    problem: problems.DotProblem,
    target: targets.Target,
  ) -> str | None:
    assert self._backend.tuning is not None
    refusal = self.supports(problem, target)
    if refusal is not None:
      return refusal.reason
    return self._backend.tuning.config_error(
      dict(config), views.problem_of(problem), target
    )

  def candidates(
    self, problem: problems.DotProblem, target: targets.Target
  ) -> tuple[decisions.Fields, ...]:
    assert self._backend.tuning is not None
    found = self._backend.tuning.candidates(views.problem_of(problem), target)
    return tuple(tuple(sorted(config.items())) for config in found)

  def plan(
    self,
    problem: problems.DotProblem,
    target: targets.Target,
    config: decisions.Fields = (),
  ) -> decisions.Plan:
    if self._backend.plan is not None and not problem.is_empty:
      plan = self._backend.plan(views.problem_of(problem), target, dict(config))
      if not isinstance(plan, decisions.Plan):
        raise TypeError(
          f"{sides.who()}: plan of {self._name} must return a jp.backends.Plan,"
          f" got {speaking.shown(plan)}"
        )
      return plan
    is_fused = (
      self._backend.fuses_global_scale and problem.global_scale == "scalar"
    )
    application: decisions.Application = "fused" if is_fused else "separate"
    if problem.global_scale == "none":
      application = "none"
    unread = [
      f"{name}: every call converts its scale to the linear layout"
      for name, side in (("lhs", problem.lhs), ("rhs", problem.rhs))
      if side.scale_layout not in (layouts.LINEAR, *self._backend.reads)
    ]
    return decisions.Plan(
      global_scale=application, notes=(*self._backend.notes, *unread)
    )

  def reads(
    self, layout: str, problem: problems.DotProblem, target: targets.Target
  ) -> bool:
    del problem, target
    return layout in self._backend.reads

  def emit(
    self,
    call: calls.Call,
    problem: problems.DotProblem,
    target: targets.Target,
    config: decisions.Fields = (),
  ) -> jax.Array:
    if problem.is_empty:
      return epilogue.apply(jnp.zeros(call.shape, jnp.float32), call)
    view = views.call_of(
      call,
      problem,
      target,
      dict(config),
      reads_swizzled=layouts.SWIZZLED in self._backend.reads,
    )
    refusal = self.lowering_refusal(target)
    try:
      if refusal is not None:
        raise NotImplementedError(refusal.reason)
      result = self._backend.emit(view)
    except NotImplementedError as error:
      raise NotImplementedError(
        f"{sides.who()}: implementation {self._backend.name}: {error}; or leave"
        " implementation out"
      ) from error
    except Exception as error:
      error.add_note(f"In emit of {self._name}, for {view.problem}.")
      raise
    self._check(result, call, problem)
    return result.reshape(call.shape)

  def _unasked(
    self, problem: problems.DotProblem, target: targets.Target
  ) -> str | None:
    """Why `supports` is not even asked."""
    backend = self._backend
    if target.platform not in backend.platforms:
      rule = f"supports {', '.join(backend.platforms)}"
      if backend.platforms == ("cuda",):
        rule = "needs an NVIDIA GPU"
      return f"{rule}, the target's platform is {target.platform}"
    for side in (problem.lhs, problem.rhs):
      if isinstance(side.format, formats.UnquantizedFormat):
        return f"supports block formats, got {side.format}"
    if not (problem.sizes_are_static or backend.takes_symbolic_sizes):
      return "needs static sizes, some are symbolic"
    return None

  def _wrong(self, what: str) -> decisions.Unsupported:
    """Refuses a problem, and says so once."""
    if not self._is_warned:
      self._is_warned = True
      warnings.warn(
        f"{self._name} is not used for a dot: {what}",
        records.BackendWarning,
        stacklevel=2,
      )
    return decisions.Unsupported(what)

  def _check(
    self, result: Any, call: calls.Call, problem: problems.DotProblem
  ) -> None:
    """Raises TypeError unless the result is what the call asked for."""
    wanted = call.preferred_element_type
    shapes = {tuple(call.shape), (problem.batch, problem.m, problem.n)}
    if not isinstance(result, jax.Array):
      got = repr(result)
    elif result.dtype == wanted and tuple(result.shape) in shapes:
      return
    else:
      got = f"{result.dtype}{list(result.shape)}"
    raise TypeError(
      f"{sides.who()}: emit of {self._name} must return"
      f" {wanted.name}{list(call.shape)}, or the array that as_rows() stands"
      f" for, got {got}"
    )
