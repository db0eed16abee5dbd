# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records the contexts of tracing, for functions that are traced later.

One device's part of a call is traced while XLA compiles. The contexts in which
the call was lowered may have ended by then. They are restored for the trace, so
they can be part of the call's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from typing import Final

import jax
from jax._src import config

# Contexts of devices and meshes. The callbacks set them for the function of one
# device.
_OF_DEVICES: Final = (
  "mesh_context_manager",
  "abstract_mesh_context_manager",
  "axis_env_state",
  "jax_default_device",
  # An enclosing `shard_map` sets it. Types of one device's parts do not vary.
  "check_vma",
)
# Contexts of JAX that are not options.
_OTHERS: Final = ("compute_on_context_manager", "xla_metadata_context_manager")

_own: Final[list[Any]] = []


def make(default: Any) -> Any:
  """Calls `jax.make_user_context`; a `Snapshot` includes the new context."""
  context = jax.make_user_context(default_value=default)
  _own.append(context)
  return context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
  """Contexts under which a function is traced.

  Attributes:
    everything: (name, value) of each context in `jit`'s cache key, except
      contexts of devices and meshes. A name may occur several times.
    own: values of the contexts that `make` made, in order.
  """

  everything: tuple[tuple[str, Any], ...]
  own: tuple[Any, ...]

  @contextlib.contextmanager
  def restored(self) -> Iterator[None]:
    """Restores in this thread the contexts at the time of the snapshot."""
    with contextlib.ExitStack() as stack:
      for context, value in zip(_own, self.own, strict=False):
        stack.enter_context(context(value))
      for name, value in self.everything:
        state = config.config_states.get(name)
        if state is None and name in _OTHERS:
          state = getattr(config, name)
        if state is not None and state.value != value:
          stack.enter_context(_set(state, value))
      yield


def snapshot() -> Snapshot:
  """Returns the contexts in which this thread would trace a function now."""
  named = zip(config.trace_context_names(), config.trace_context(), strict=True)
  return Snapshot(
    everything=tuple((n, v) for n, v in named if n not in _OF_DEVICES),
    own=tuple(context.value for context in _own),
  )


@contextlib.contextmanager
def _set(state: Any, value: Any) -> Iterator[None]:
  """Sets an option of JAX to a value that is parsed already."""
  hook = getattr(state, "_update_thread_local_hook", None)
  before = state.swap_local(value)
  if hook:
    hook(value)
  try:
    yield
  finally:
    state.set_local(before)
    if hook:
      hook(None if before is config.config_ext.unset else before)
