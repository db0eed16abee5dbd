# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What functions are traced under, kept for functions that are traced later.

A device's share of a call is traced while XLA compiles, which may be outside of
the contexts that the call was lowered in. It is traced under those all the
same, so they can be part of the call's name.
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
  # An enclosing `shard_map` sets it. The types of parts have no varying axes.
  "check_vma",
)
# Contexts of JAX that are not options.
_OTHERS: Final = ("compute_on_context_manager", "xla_metadata_context_manager")

_own: Final[list[Any]] = []


def make(default: Any) -> Any:
  """`jax.make_user_context`, of a context that `Snapshot` keeps."""
  context = jax.make_user_context(default_value=default)
  _own.append(context)
  return context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
  """Contexts under which a function is traced.

  Attributes:
    everything: (name, value) of all that is part of `jit`'s key, but of what
      says devices and meshes. A name may come several times.
    own: the values of contexts that `make` made, in its order.
  """

  everything: tuple[tuple[str, Any], ...]
  own: tuple[Any, ...]

  @contextlib.contextmanager
  def restored(self) -> Iterator[None]:
    """Has in this thread what was there when it was taken."""
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
  """What this thread would trace a function under now."""
  named = zip(config.trace_context_names(), config.trace_context(), strict=True)
  return Snapshot(
    everything=tuple((n, v) for n, v in named if n not in _OF_DEVICES),
    own=tuple(context.value for context in _own),
  )


@contextlib.contextmanager
def _set(state: Any, value: Any) -> Iterator[None]:
  """Sets what `value` of an option says, which is parsed already."""
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
