# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the library of CPU kernels, checks its ABI and loads it.

The package's build (CMakeLists.txt at the top level) installs the library next
to this file. For an editable install that is the same path in site-packages. A
program that runs in a checkout imports the checkout's copy of this file. So
`search_path` also has the libraries of installed packages, and before them the
directory of a library that was built by hand:

  cmake -S kernels/cpu -B build/cpu && cmake --build build/cpu -j2

If the package's build failed, `FAILURE_NAME` is installed instead and contains
the reason. A library that was built from other sources than the checkout's is
refused, with a `StaleLibraryWarning` once per process: its handlers may take
other attributes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import struct
import sys
import warnings
from typing import Final

LIBRARY_NAME: Final = (
  "libjaxplugin_cpu.dylib" if sys.platform == "darwin" else
  "libjaxplugin_cpu.so"
)  # fmt: skip
FAILURE_NAME: Final = "BUILD_FAILED.txt"
DISTRIBUTION: Final = "jaxplugin"
API_HEADER: Final = "xla/ffi/api/c_api.h"
# The `isa` attribute of the handlers, by the name of an instruction set.
INSTRUCTION_SETS: Final = {
  "baseline": 1,
  "baseline_neon": 1,
  "avx2": 2,
  "avx512": 3,
  "avx512_bf16": 4,
  "amx_bf16": 5,
  "neon_dotprod": 6,
  "neon_i8mm": 7,
}
HANDLERS: Final = (
  "jaxplugin_block_scaled_dot",
  "jaxplugin_quantize",
  "jaxplugin_quantize_operand",
  "jaxplugin_dequantize",
  "jaxplugin_ragged_dot",
)
# Functions that check configs of a dot and name engines (config_error.cc).
QUESTIONS: Final = (
  "jaxplugin_cpu_dot_config_error",
  "jaxplugin_cpu_dot_engine",
  "jaxplugin_cpu_engine_name",
)

_REMEDY: Final = (
  "Install gcc or clang, then build the package from source: pip install"
  " --force-reinstall --no-deps --no-binary jaxplugin jaxplugin, or pip install"
  " . in a checkout"
)

_HERE: Final = pathlib.Path(__file__).resolve().parent
_INSTALLED_DIRECTORY: Final = "jaxplugin/kernels/cpu"  # in site-packages
# The first bytes of an ELF file (System V ABI, "ELF Header"): magic, 64 bits,
# little-endian. Then the size of its header, and the offsets in the header of
# fields that describe the section table.
_ELF64: Final = b"\x7fELF\x02\x01"
_ELF64_HEADER_BYTES: Final = 64
_E_SHOFF: Final = 0x28
_E_SHENTSIZE_SHNUM: Final = 0x3A

Version = tuple[int, int]


class StaleLibraryWarning(RuntimeWarning):
  """The library was built from other sources than those next to this file."""


class LibraryError(Exception):
  """The kernels cannot be used, for the reason in the text."""


def find(directories: tuple[pathlib.Path, ...] | None = None) -> pathlib.Path:
  """Returns the path of the first library in `directories`.

  Args:
    directories: directories to search, by default `search_path()`.

  Raises:
    LibraryError: If there is no library. If a build failed, the text has its
      reason.
  """
  if directories is None:
    directories = search_path()
  for directory in directories:
    path = directory / LIBRARY_NAME
    if path.is_file():
      return path
  for directory in directories:
    report = directory / FAILURE_NAME
    if report.is_file():
      text = report.read_text(errors="replace").strip()
      raise LibraryError(
        "not built: the CPU kernels did not compile at install:"
        f" {text.partition(chr(10))[0]} (all of it in {report}). {_REMEDY}"
      )
  places = ", ".join(map(str, directories))
  raise LibraryError(f"not built: no {LIBRARY_NAME} in {places}. {_REMEDY}")


def search_path(here: pathlib.Path = _HERE) -> tuple[pathlib.Path, ...]:
  """Returns the directories that may contain the library, in order.

  Args:
    here: the directory of this file.
  """
  directories = [here]
  checkout = here.parents[1]
  if (checkout / "pyproject.toml").is_file():
    directories.append(checkout / "build" / "cpu")
    directories += _installed(checkout)
  return tuple(directories)


def _installed(checkout: pathlib.Path) -> list[pathlib.Path]:
  """Returns the directories of the library in installed packages."""
  directories = []
  for distribution in importlib.metadata.distributions(name=DISTRIBUTION):
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    is_editable = origin.get("dir_info", {}).get("editable")
    if is_editable and origin.get("url") != checkout.as_uri():
      continue  # an editable install of another checkout
    place = distribution.locate_file(_INSTALLED_DIRECTORY)
    directories.append(pathlib.Path(str(place)))
  return directories


def load(
  include_dir: str | os.PathLike[str], path: pathlib.Path | None = None
) -> ctypes.CDLL:
  """Loads the library if the installed jaxlib supports it. Registers nothing.

  A jaxlib accepts handlers that were built for its FFI's major version and a
  minor version up to its own. This function checks the versions, because
  jaxlib's whole CPU backend fails if it refuses a registration ("Unable to
  initialize backend 'cpu'", jaxlib 0.10.2).

  Args:
    include_dir: result of `jax.ffi.include_dir()`.
    path: the library. If None, `find` finds it.

  Raises:
    LibraryError: If there is no library, or it cannot be loaded, lacks
      functions, has another ABI or was built from other sources.
  """
  if path is None:
    path = find()
  library = _open(path)
  try:
    number = int(library.jaxplugin_cpu_ffi_api_version())
    for name in (*HANDLERS, *QUESTIONS):
      getattr(library, name)
    library.jaxplugin_cpu_isa.restype = ctypes.c_char_p
  except AttributeError as error:
    raise LibraryError(
      f"{path} must be a library of the CPU kernels: {error}"
    ) from None
  check_version(divmod(number, 1000), installed_version(include_dir), path)
  reason = stale_reason(built_from(library), path)
  if reason:
    _warn_once(reason)
    raise LibraryError(reason)
  return library


@functools.cache
def _warn_once(reason: str) -> None:
  """Warns only once, because several modules load the library."""
  warnings.warn(reason, StaleLibraryWarning, stacklevel=3)


def stale_reason(
  digest: str | None,
  path: pathlib.Path | str,
  directory: pathlib.Path = _HERE,
) -> str:
  """Returns why a library does not fit the sources in `directory`, or "".

  Args:
    digest: `built_from` of the library.
    path: the library, for the message.
    directory: the directory of the sources.

  Returns:
    The reason and the remedy. It is empty if the library was built from these
    sources, if its digest is unknown ("", not built by CMake), or if there are
    no sources, as in an installed wheel.
  """
  current = sources_digest(directory)
  if current is None or digest in ("", current):
    return ""
  return (
    f"{path} was built from other sources than those in {directory}. Build it"
    " again: pip install --no-deps --editable . for an editable install, pip"
    " install . for another, cmake --build for a build by hand"
  )


def sources_digest(directory: pathlib.Path = _HERE) -> str | None:
  """Returns the SHA-256 of the library's sources, or None without sources.

  It is the digest of the sorted lines "NAME SHA-256" of the files, as
  CMakeLists.txt computes it.
  """
  if not (directory / "CMakeLists.txt").is_file():
    return None
  names = ["CMakeLists.txt"]
  for pattern in ("*.cc", "*.h", "*.inl"):
    for path in directory.rglob(pattern):
      name = path.relative_to(directory).as_posix()
      if not name.startswith("tests/"):
        names.append(name)
  lines = ""
  for name in sorted(names):
    content = (directory / name).read_bytes()
    lines += f"{name} {hashlib.sha256(content).hexdigest()}\n"
  return hashlib.sha256(lines.encode()).hexdigest()


def available_cores(
  library: ctypes.CDLL, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup"
) -> int:
  """Returns the cores of the affinity and of the cgroups; 0 if unknown."""
  function = getattr(library, "jaxplugin_cpu_available_cores", None)
  if function is None:
    return 0  # an older library
  function.restype = ctypes.c_int64
  return int(function(proc.encode(), cgroups.encode()))


def built_from(library: ctypes.CDLL) -> str | None:
  """Returns the library's `sources_digest`: "" if unknown, None if too old."""
  try:
    function = library.jaxplugin_cpu_sources
  except AttributeError:
    return None
  function.restype = ctypes.c_char_p
  return function().decode()


@functools.cache
def _open(path: pathlib.Path) -> ctypes.CDLL:
  try:
    size = path.stat().st_size
    with path.open("rb") as file:
      least = least_bytes(file.read(_ELF64_HEADER_BYTES))
    # The loader does not check the file's size. An access past its end is a
    # SIGBUS, not an error.
    if size < least:
      raise LibraryError(
        f"{path} is truncated: it has {size} bytes, and {least} by its header;"
        " delete it and build it again: pip install --no-deps --editable . for"
        " an editable install, cmake --build for a build by hand; or install"
        " the wheel again"
      )
    return ctypes.CDLL(str(path))
  except OSError as error:
    raise LibraryError(f"{path} cannot be loaded: {error}") from None


def least_bytes(header: bytes) -> int:
  """Returns the least size of a library, according to its first 64 bytes.

  Linkers put the section table last. The result is 0 unless the file is a
  little-endian 64-bit ELF file.
  """
  if not header.startswith(_ELF64):
    return 0
  if len(header) < _ELF64_HEADER_BYTES:
    return _ELF64_HEADER_BYTES
  (offset,) = struct.unpack_from("<Q", header, _E_SHOFF)
  entry_bytes, count = struct.unpack_from("<HH", header, _E_SHENTSIZE_SHNUM)
  return max(_ELF64_HEADER_BYTES, offset + entry_bytes * count)


def check_version(
  built_for: Version, installed: Version, path: pathlib.Path | str
) -> None:
  """Raises LibraryError unless a jaxlib of `installed` accepts the library."""
  if built_for[0] == installed[0] and built_for[1] <= installed[1]:
    return
  raise LibraryError(
    f"{path} was built for XLA's FFI {built_for[0]}.{built_for[1]}, the"
    f" installed jaxlib has {installed[0]}.{installed[1]}; build it against the"
    " headers of this jaxlib or an older one"
  )


def installed_version(include_dir: str | os.PathLike[str]) -> Version:
  """Returns the (major, minor) version of the FFI in jaxlib's headers.

  Raises:
    LibraryError: If the header is missing or has no version.
  """
  header = pathlib.Path(include_dir) / API_HEADER
  try:
    text = header.read_text()
  except OSError as error:
    raise LibraryError(
      f"cannot read the FFI version of jaxlib: {error}"
    ) from None
  major, minor = (
    re.search(rf"^#define\s+XLA_FFI_API_{part}\s+(\d+)\s*$", text, re.M)
    for part in ("MAJOR", "MINOR")
  )
  if major is None or minor is None:
    raise LibraryError(
      f"cannot read the FFI version of jaxlib: {header} defines none"
    )
  return int(major[1]), int(minor[1])
