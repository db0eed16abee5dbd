# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a file about a failure if JAXPLUGIN_REPRO_DIR names a folder.

`jp.repro.replay` reads the file. It has shapes, dtypes and statistics, but
neither data nor names. A failure that has a file already gets no second one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from jaxplugin.core import blocking
from jaxplugin.operation import repro_files

VARIABLE: Final = "JAXPLUGIN_REPRO_DIR"
PREFIX: Final = "jaxplugin-"
# Limits of the folder.
MAX_FILES: Final = 32
MAX_BYTES: Final = 64 << 20
_REMEMBERED: Final = 256  # calls
_LOGGER: Final = logging.getLogger("jaxplugin")
# Names of handlers in errors, by primitive. A GPU launches kernels by others.
_HANDLERS: Final = {
  "block_scaled_dot": "jaxplugin_block_scaled_dot",
  "block_scaled_ragged_dot": "jaxplugin_ragged_dot",
  "block_quantize": "jaxplugin_quantize",
  "block_dequantize": "jaxplugin_dequantize",
}
_LAUNCH: Final = "triton_kernel_call"

Call = tuple[str, Any, Sequence[Any]]

_lock: Final = threading.Lock()
_lowered: Final[dict[str, Call]] = {}


def is_on() -> bool:
  """Returns whether failures are written."""
  return bool(os.environ.get(VARIABLE))


def write(reason: str, calls: Sequence[Call]) -> str:
  """Writes a file of calls, and logs its name.

  Args:
    reason: the event, a part of the file's name.
    calls: name of the primitive, its parameter `call` or `problem`, and the
      operands of each call. Abstract operands have no statistics.

  Returns:
    A line for an error's message, "" if `is_on` is False.
  """
  if not is_on():
    return ""
  inputs: list[Any] = []
  records: list[repro_files.CallRecord] = []
  try:
    for operation, form, operands in calls:
      problem = form
      if hasattr(form, "filled"):
        problem = form.filled(operands).problem()
      places = range(len(inputs), len(inputs) + len(operands))
      records.append(
        repro_files.record(operation, form, places, description=str(problem))
      )
      inputs += operands
  # The format of another package may hold other objects.
  except TypeError as error:
    return f"No file was written: {error}"
  return write_file(
    reason,
    records,
    lambda: repro_files.Repro(
      reason=reason,
      inputs=tuple(map(repro_files.input_of, inputs)),
      calls=tuple(records),
      environment=repro_files.environment(),
    ),
  )


def write_file(
  reason: str,
  records: Sequence[repro_files.CallRecord],
  make: Callable[[], repro_files.Repro],
) -> str:
  """Writes the file of some calls, unless it exists; see `write`."""
  digest = hashlib.sha256(repr([vars(x) for x in records]).encode())
  folder = pathlib.Path(os.environ[VARIABLE])
  path = folder / f"{PREFIX}{reason}-{digest.hexdigest()[:16]}.zip"
  try:
    with _lock:
      folder.mkdir(parents=True, exist_ok=True)
      if path.exists():
        return f"Written before: {path}"
      sizes = [x.stat().st_size for x in folder.glob(f"{PREFIX}*.zip")]
      if len(sizes) >= MAX_FILES or sum(sizes) >= MAX_BYTES:
        text = (
          f"No file was written, because {folder} has {len(sizes)} files of"
          f" {sum(sizes)} bytes. Remove some of them"
        )
      else:
        repro_files.write(path, make())
        text = f"To reproduce it: python -m jaxplugin repro {path}"
  except OSError as error:
    text = f"No file was written to {path}: {error.strerror}"
  _LOGGER.warning("%s", text)
  return text


# Errors of kernels at run time.


def remember(
  operation: str, params: Mapping[str, Any], avals: Sequence[Any]
) -> None:
  """Remembers a call that is lowered, for `handler_failed`."""
  if not is_on() or operation not in _HANDLERS:
    return
  if not all(blocking.are_static(x.shape) for x in avals):
    return
  _hook()
  form = params.get("call", params.get("problem"))
  types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
  with _lock:
    _lowered[repr((operation, form, types))] = (operation, form, types)
    while len(_lowered) > _REMEMBERED:
      del _lowered[next(iter(_lowered))]


def handler_failed(error: BaseException) -> str:
  """Writes the calls that may have raised a kernel's error.

  Returns:
    The line of `write`; "" if no kernel of this package raised the error.
  """
  text = str(error)
  if not is_on():
    return ""
  with _lock:
    calls = [
      call
      for call in _lowered.values()
      if f"{_HANDLERS[call[0]]}:" in text or _LAUNCH in text
    ]
  return write("handler", calls) if calls else ""


@contextlib.contextmanager
def noted() -> Iterator[None]:
  """Adds a note to a kernel's error that names the file."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    note(error)
    raise


def note(error: BaseException) -> None:
  """Writes the calls of `handler_failed`, and adds its line to the error."""
  if text := handler_failed(error):
    error.add_note(text)


@functools.cache
def _hook() -> None:
  """Makes an uncaught error of a kernel write a file. Only if `is_on`."""
  before, before_in_thread = sys.excepthook, threading.excepthook

  def hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if isinstance(error, jax.errors.JaxRuntimeError):
      note(error)
    before(kind, error, traceback)

  def thread_hook(args: threading.ExceptHookArgs) -> None:
    if isinstance(args.exc_value, jax.errors.JaxRuntimeError):
      note(args.exc_value)
    before_in_thread(args)

  sys.excepthook, threading.excepthook = hook, thread_hook
