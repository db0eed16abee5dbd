# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the handlers of kernels/cpu known to XLA."""

from __future__ import annotations

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
