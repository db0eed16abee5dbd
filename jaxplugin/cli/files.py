# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads modules and writes results; never overwrites an input."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import stat
import sys
from typing import Any, Final

from jaxplugin.cli import functions
from jaxplugin.core import atomic_files
from jaxplugin.stablehlo import modules

STANDARD: Final = "-"  # standard input or output
MAX_BYTES: Final = 1 << 30  # of a module


def read(path: str) -> modules.ParsedModule:
  """Reads a module from a regular file, or from standard input for "-".

  Raises:
    OSError: If the file cannot be read.
    ValueError: If it is not a regular file, has more than `MAX_BYTES`, or is
      the name of a function.
    ModuleError: If it does not hold a module. The message has the path, the
      line and the column.
  """
  if path == STANDARD:
    return modules.read(_bytes(_binary(sys.stdin), "<stdin>"), "<stdin>")
  if functions.is_function(path) and not os.path.exists(path):
    raise ValueError(
      f"{path} must be a file with a module; for a function call jp.explain in"
      " Python, or run compile, which takes functions"
    )
  # Without O_NONBLOCK a pipe that nobody writes to would never be open.
  descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
  try:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
      raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
      raise ValueError(
        f"{path} is not a regular file; redirect its content to standard"
        " input, and pass -"
      )
    with open(descriptor, "rb", closefd=False) as file:
      data = _bytes(file, path)
  finally:
    os.close(descriptor)
  return modules.read(data, path)


def _bytes(file: Any, name: str) -> bytes:
  data = file.read(MAX_BYTES + 1)
  if len(data) > MAX_BYTES:
    raise ValueError(
      f"{name}: a module must have at most {MAX_BYTES} bytes; pass a larger"
      " one to jp.rewrite"
    )
  return data


def check_output(path: str, output: str | None, force: bool) -> None:
  """Raises unless `output` may be written, reading from `path`.

  Raises:
    OSError: If its folder does not exist or is not writable.
    ValueError: If it is the input, or exists.
  """
  if output is None or output == STANDARD:
    return
  if not os.path.isdir(os.path.dirname(output) or os.curdir):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), output)
  if os.path.exists(output) and not os.path.isfile(output):
    raise ValueError(f"{output} is not a regular file; pass the name of a file")
  if _is_input(path, output):
    raise ValueError(
      f"{output} is the input file, which is never overwritten; choose another"
      " name"
    )
  if os.path.lexists(output) and not force:
    raise ValueError(f"{output} exists; choose another name, or pass --force")
  check_folder(os.path.dirname(output))


def check_folder(folder: str) -> None:
  """Raises OSError unless files can be written to `folder`.

  If it does not exist, it must be possible to create it.
  """
  found = folder or os.curdir
  while not os.path.exists(found):
    found = os.path.dirname(found) or os.curdir
  code = 0
  if not os.path.isdir(found):
    code = errno.ENOTDIR
  elif not os.access(found, os.W_OK):
    code = errno.EACCES
  if code:
    raise OSError(code, os.strerror(code), found)


def write(
  data: str | bytes, path: str, output: str | None, force: bool
) -> None:
  """Writes a result to a file, or to standard output.

  A file appears whole or not at all. A link is replaced; its target is not
  changed.

  Raises:
    OSError: If it cannot be written.
    ValueError: See `check_output`.
  """
  data = data.encode() if isinstance(data, str) else data
  if output in (None, STANDARD):
    stream = _binary(sys.stdout)
    stream.write(data)
    stream.flush()
    return
  check_output(path, output, force)
  reserved = not os.path.lexists(output)
  if reserved:
    # Fails where another process was faster.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(output, flags, 0o666))
  try:
    with atomic_files.replacing(pathlib.Path(output)) as file:
      file.write(data)
      # A link's own mode says nothing: 0o777.
      if os.path.exists(output):
        mode = stat.S_IMODE(os.stat(output).st_mode) & 0o666
        os.fchmod(file.fileno(), mode)
  except BaseException as error:
    if isinstance(error, OSError) and error.filename is None:
      error.filename = output  # a full disk gives no name
    if reserved:
      os.unlink(output)
    raise


def _is_input(path: str, output: str) -> bool:
  """Returns whether both paths lead to one file."""
  try:
    there = os.stat(output)
  except OSError:
    return False
  try:
    if path == STANDARD:
      return os.path.samestat(os.fstat(sys.stdin.fileno()), there)
    return os.path.samestat(os.stat(path), there)
  except (OSError, io.UnsupportedOperation):  # no such file; or no real file
    return False


def _binary(stream: Any) -> Any:
  return getattr(stream, "buffer", stream)
