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
from typing import Final

import jax.ffi

from jaxplugin.core import formats
from jaxplugin.kernels.cpu import library

# What the kernels are compiled for, by their numbers in kernels/cpu/README.md.
FORMATS: Final = {
  formats.MXFP8: 0,
  formats.MXFP8_E5M2: 1,
  formats.MXFP4: 2,
  formats.NVFP4: 3,
  formats.MXFP6_E2M3: 4,
  formats.MXFP6_E3M2: 5,
}
# Of values that are bytes; others are what their dtype says.
ELEMENTS: Final = {
  formats.E2M3: 1,
  formats.E3M2: 2,
  formats.E4M3: 3,
  formats.E5M2: 4,
}
SCALE_ELEMENTS: Final = {formats.E8M0: 1, formats.E4M3: 2}

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
