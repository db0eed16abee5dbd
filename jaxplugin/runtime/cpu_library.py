# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the handlers of kernels/cpu known to XLA, when it is imported.

An executable that was compiled elsewhere and is only loaded here, by
`jax.experimental.serialize_executable` for example, needs them although nothing
is lowered. In a process that has not imported this package it cannot be loaded:
"NOT_FOUND: No FFI handler registered for jaxplugin_block_scaled_dot".
"""

from __future__ import annotations

import contextlib
import functools
import threading

import jax.ffi

from jaxplugin.kernels.cpu import library

_registration_lock = threading.Lock()


def register() -> None:
  """Registers the handlers with XLA, once, whatever thread comes first.

  Raises:
    library.LibraryError: there is no library that this jaxlib can take.
  """
  with _registration_lock:
    _register_once()


@functools.cache
def _register_once() -> None:
  loaded = library.load(jax.ffi.include_dir())
  for name in library.HANDLERS:
    jax.ffi.register_ffi_target(
      name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu"
    )


# No kernels here: `Target.missing_libraries` says why, and nothing calls them.
with contextlib.suppress(library.LibraryError):
  register()
