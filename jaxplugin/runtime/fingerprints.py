# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of what is computed later, for processes that find it by its name.

XLA's partitioner asks what a device computes while it compiles, so a module
that it splits says by a name alone what that is. A name has to say everything
that decides the answer: an executable is found by it in JAX's persistent
compilation cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping
from typing import Any
from typing import Final

from jaxplugin import jaxext
from jaxplugin.jaxext.partitioner import encoding
from jaxplugin.kernels import launching
from jaxplugin.runtime import cpu_library

# What makes the code that a device's share is lowered to.
_DISTRIBUTIONS: Final = (
  *("jax", "jaxlib", "numpy", "ml_dtypes"),
  *("jax-triton", "triton", "nvidia-cuda-nvcc"),
  *("cuda-tile", "nvidia-cuda-tileiras"),
)
# Prefixes of environment variables of this package, Triton, LLVM and CUDA.
_VARIABLES: Final = (
  *("JAXPLUGIN_", "JAX_TRITON_", "TRITON_", "MLIR_", "LLVM_", "NVPTX_"),
  *("PTXAS_", "DISABLE_", "ALLOW_", "ENABLE_", "USE_", "AMDGCN_", "CUTILE_"),
  *("CUDA_TILE_", "STORE_", "INSERT_", "INSTRUMENTATION_"),
)
_FOLDERS: Final = (
  pathlib.Path(__file__).resolve().parents[1],
  pathlib.Path(launching.__file__).resolve().parent,
)
_SOURCES: Final = ("*.py", "*.json")

# How much older a file seems than it is, on file systems with coarse clocks.
_CLOCK_NS: Final = 2 * 10**9


def of(*decides: Any) -> str | None:
  """SHA-256 of what decides, with all that decides in this installation.

  The versions of the package and of what it lowers with, the sources of the
  package and its kernels, and variables of the environment.

  Args:
    *decides: plain data, and dataclasses of it.

  Returns:
    The digest. None if a part is not plain data (for example a function), or if
    the package's files changed after the import.
  """
  sources = _sources()
  if sources is None:
    return None
  try:
    text = encoding.encode(
      (decides, sources, _versions(), variables(os.environ))
    )
  except encoding.NoEncodingError:
    return None
  return hashlib.sha256(text.encode()).hexdigest()


def variables(environment: Mapping[str, str]) -> tuple[Any, ...]:
  """Variables that may decide, and of the files that they name what may."""
  found: list[Any] = []
  for name, value in sorted(environment.items()):
    if name.startswith(_VARIABLES):
      found.append((name, value))
      path = pathlib.Path(value)
      if name.endswith("_PATH") and path.is_file():
        status = path.stat()
        found.append((status.st_size, status.st_mtime_ns))
  return tuple(found)


@functools.cache
def _versions() -> tuple[Any, ...]:
  """Versions of packages, and the digest of the C++ library's sources."""
  return (
    cpu_library.sources_digest(),
    *((name, _version(name)) for name in _DISTRIBUTIONS),
  )


def _version(distribution: str) -> str | None:
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return None


@functools.cache
def _sources() -> str | None:
  return sources_digest(_FOLDERS, before_ns=jaxext.IMPORTED_NS - _CLOCK_NS)


def sources_digest(
  folders: tuple[pathlib.Path, ...], *, before_ns: int
) -> str | None:
  """SHA-256 of the package's Python files and tables.

  Args:
    folders: with all that is below them.
    before_ns: when they were imported, in ns since 1970.

  Returns:
    The digest. None if a file is younger than the import, because the process
    may run older code, or if there are no files.
  """
  lines = []
  for number, folder in enumerate(folders):
    paths = {path for kind in _SOURCES for path in folder.rglob(kind)}
    for path in sorted(paths):
      if path.name.endswith("_test.py"):
        continue
      try:
        if path.stat().st_mtime_ns > before_ns:
          return None
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
      except OSError:
        return None
      lines.append(f"{number} {path.relative_to(folder)} {digest}\n")
  if not lines:
    return None
  return hashlib.sha256("".join(lines).encode()).hexdigest()
