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
import contextlib
import dataclasses
import os
import select
import subprocess
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


@dataclasses.dataclass(kw_only=True)
class _Child:
  """The child process, and the id of the process that started it."""

  process: subprocess.Popen[bytes]
  owner: int


_child: _Child | None = None
_lock = threading.Lock()


def _ask(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
  """Returns the child's reply."""
  global _child
  with _lock:
    for _ in range(2):  # a second try if the idle child has just ended
      if _child is None or _child.owner != os.getpid():
        _child = _start()
      stdin, stdout = _child.process.stdin, _child.process.stdout
      assert stdin is not None and stdout is not None
      reply = None
      try:
        with contextlib.suppress(BrokenPipeError):
          module_child.write_message(stdin, request, data)
          wait_s = request["wall_s"] + _START_S
          if not select.select([stdout], [], [], wait_s)[0]:
            stop()
            return {"died": "does not reply"}, b""
          reply = module_child.read_message(stdout)
      except BaseException:
        stop()  # the pipes may hold a part of a message
        raise
      if reply is not None:
        return reply
      stop()
  return {"died": "cannot be reached"}, b""


def stop() -> None:
  """Ends the child, if there is one."""
  global _child
  child, _child = _child, None
  # A fork of this process must not end it.
  if child is not None and child.owner == os.getpid():
    child_process.stop(child.process)


def _start() -> _Child:
  process = child_process.start(
    module_child.__name__, (), {"OPENBLAS_NUM_THREADS": "1"}
  )
  return _Child(process=process, owner=os.getpid())


atexit.register(stop)
