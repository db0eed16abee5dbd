# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses untrusted modules in a child process, which they may crash.

`checked` passes a module to the child process (`module_child`) first, and
returns text that is safe to parse in this process. The child starts at the
first use and handles all later ones. It ends with this process or when it is
idle.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from typing import Any
from typing import Final

from jaxplugin.runtime import child_process
from jaxplugin.stablehlo import module_child
from jaxplugin.stablehlo import module_parsing

_MIB: Final = 1 << 20
_START_S: Final = 120.0  # long enough for a busy machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsingLimits:
  """Resource limits for parsing one module.

  Attributes:
    cpu_s, wall_s: CPU time and elapsed time.
    memory_bytes: address space beyond that of the parent.
    stack_bytes: stack size. It is half the usual size of a main thread, because
      the thread that parses the reply may have used a part of its stack.
    out_bytes: size of the module as text.
  """

  cpu_s: int
  wall_s: float
  memory_bytes: int
  stack_bytes: int
  out_bytes: int


def limits(size: int) -> ParsingLimits:
  """Returns the limits for a module of `size` bytes."""
  mebibytes = size // _MIB
  return ParsingLimits(
    cpu_s=10 + 4 * mebibytes,
    wall_s=60.0 + 16 * mebibytes,
    memory_bytes=1024 * _MIB + 64 * size,
    stack_bytes=4 * _MIB,
    out_bytes=256 * _MIB + 32 * size,
  )


def is_available() -> bool:
  """Returns whether this system can fork; Windows cannot."""
  return hasattr(os, "fork")


def checked(data: str | bytes, name: str) -> str | bytes:
  """Parses and verifies a module in the child process.

  Args:
    data: text, HLO text, bytecode or a portable artifact.
    name: name of the module in messages.

  Returns:
    StableHLO text that this process can parse; `data` itself if it is such.

  Raises:
    ModuleError: If the module is not valid, crashes the parser, or exceeds the
      limits.
    OSError: If no process can be started.
  """
  is_text = isinstance(data, str)
  # The child refuses surrogates, which are not valid in UTF-8.
  given = data.encode(errors="surrogatepass") if isinstance(data, str) else data
  request = {"name": name, "is_text": is_text, **vars(limits(len(given)))}
  header, text = _ask(request, given)
  if "error" in header:
    raise module_parsing.ModuleError(header["error"])
  if "died" in header:
    raise module_parsing.ModuleError(
      f"{name}: the module is malformed or too large: jaxlib's parser"
      f" {header['died']}"
    )
  return data if header["is_text"] else text.decode()


_child: child_process.Child | None = None
_lock = threading.Lock()


def _ask(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
  """Returns the child's reply."""
  global _child
  with _lock:
    for _ in range(2):  # a second try if the idle child has just ended
      if _child is None or not _child.is_own:
        _child = _start()
      try:
        _child.send(request, data, seconds=request["wall_s"] + _START_S)
        return _child.receive()
      except child_process.ChildError as error:
        stop()
        if error.kind == "hang":
          return {"died": "does not reply"}, b""
      except BaseException:
        stop()  # the pipes may hold a part of a message
        raise
  return {"died": "cannot be reached"}, b""


def stop() -> None:
  """Ends the child, if there is one."""
  global _child
  child, _child = _child, None
  if child is not None:
    child.stop()


def _start() -> child_process.Child:
  return child_process.Child(
    module_child.__name__, environment={"OPENBLAS_NUM_THREADS": "1"}
  )


atexit.register(stop)
