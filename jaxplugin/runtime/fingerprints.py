# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Digests that name a deferred computation, stable across processes.

XLA's partitioner calls back during compilation for the computation of one
device. The module contains only a name for that computation. JAX's persistent
compilation cache finds an executable by the module. The name must therefore
depend on everything that changes the computation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from jaxplugin import jaxext
from jaxplugin.jaxext import partitioner_private
from jaxplugin.kernels import launching
from jaxplugin.runtime import cpu_library

# Packages that change the code of a device's part.
_DISTRIBUTIONS: Final = (
  *("jaxplugin", "jax", "jaxlib", "numpy", "ml_dtypes"),
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
# How much older a file seems than it is, on file systems with coarse clocks.
_CLOCK_NS: Final = 2 * 10**9


def of(*decides: Any) -> str | None:
  """Returns a SHA-256 of `decides` and of this installation.

  The installation is the versions of the package and of its compilers, the
  sources of the package and its kernels, and some environment variables.

  Args:
    *decides: plain data, and dataclasses of plain data.

  Returns:
    The digest. None if a part is not plain data (for example a function), or if
    the package's files changed after the import.
  """
  sources = _sources()
  if sources is None:
    return None
  try:
    text = partitioner_private.encode(
      (decides, sources, _versions(), variables(os.environ))
    )
  except partitioner_private.NoEncodingError:
    return None
  return hashlib.sha256(text.encode()).hexdigest()


def variables(environment: Mapping[str, str]) -> tuple[Any, ...]:
  """Returns environment variables that may change generated code.

  If a variable names a file, the result also has the file's size and time.
  """
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
def _versions() -> tuple[tuple[str, str | None], ...]:
  return (
    *((name, version(name)) for name in _DISTRIBUTIONS),
    ("cpu kernels", cpu_library.sources_digest()),
  )


def versions() -> dict[str, str | None]:
  """Returns the version of each package that changes results, by name.

  The version of "cpu kernels" is the digest of the C++ sources.
  """
  return dict(_versions())


def version(distribution: str) -> str | None:
  """Returns the version of an installed distribution, else None."""
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
  """Returns the SHA-256 of the package's Python files.

  Args:
    folders: folders whose files are read, also in subfolders.
    before_ns: time of the import, in ns since 1970.

  Returns:
    The digest. None if a file is younger than the import, because the process
    may run older code, or if there are no files.
  """
  lines = []
  for number, folder in enumerate(folders):
    for path in sorted(folder.rglob("*.py")):
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
