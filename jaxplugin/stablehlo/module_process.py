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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
  """A valid module.

  Attributes:
    text: StableHLO that this process can parse; None if the module was
      StableHLO text.
    version: attribute of `module_parsing.Parsed`.
  """

  text: str | None
  version: str | None


def is_available() -> bool:
  """Returns whether this system can fork; Windows cannot."""
  return hasattr(os, "fork")


def checked(data: str | bytes, name: str) -> Checked:
  """Parses and verifies a module in the child process.

  Args:
    data: text, HLO text, bytecode or a portable artifact.
    name: name of the module in messages.

  Raises:
    ModuleError: If the module is not valid, crashes the parser, or exceeds the
      limits.
    OSError: If no process can be started.
  """
  is_text = isinstance(data, str)
  # The child refuses surrogates, which are not valid in UTF-8.
  given = data.encode(errors="surrogatepass") if isinstance(data, str) else data
  allowed = limits(len(given))
  request = {"name": name, "is_text": is_text, **dataclasses.asdict(allowed)}
  header, text = _ask(request, given, allowed.wall_s)
  if "error" in header:
    raise module_parsing.ModuleError(header["error"])
  if "died" in header:
    raise module_parsing.ModuleError(
      f"{name}: the module is malformed or too large: jaxlib's parser"
      f" {header['died']}"
    )
  return Checked(
    text=None if header["is_text"] else text.decode(),
    version=header["version"],
  )


@dataclasses.dataclass(kw_only=True)
class _Child:
  """The child process, and the id of the process that started it."""

  process: subprocess.Popen[bytes]
  owner: int

  def ask(
    self, request: dict[str, Any], data: bytes, wall_s: float
  ) -> tuple[dict[str, Any], bytes] | None:
    """Returns the child's reply, or None if the child has ended.

    Raises:
      TimeoutError: If the child neither replies nor ends.
    """
    stdin, stdout = self.process.stdin, self.process.stdout
    assert stdin is not None
    assert stdout is not None
    try:
      module_child.write_message(stdin, request, data)
    except BrokenPipeError:
      return None
    if not select.select([stdout], [], [], wall_s + _START_S)[0]:
      raise TimeoutError
    return module_child.read_message(stdout)

  def stop(self) -> None:
    if self.owner == os.getpid():  # a fork of this process must not end it
      child_process.stop(self.process)


_child: _Child | None = None
_lock = threading.Lock()


def _ask(
  request: dict[str, Any], data: bytes, wall_s: float
) -> tuple[dict[str, Any], bytes]:
  global _child
  with _lock:
    for _ in range(2):  # a second try if the idle child has just ended
      if _child is None or _child.owner != os.getpid():
        _child = _start()
      try:
        reply = _child.ask(request, data, wall_s)
      except TimeoutError:
        reply = {"died": "does not reply"}, b""
        stop()
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
  if _child is not None:
    _child.stop()
    _child = None


def _start() -> _Child:
  process = child_process.start(
    module_child.__name__, (), {"OPENBLAS_NUM_THREADS": "1"}
  )
  return _Child(process=process, owner=os.getpid())


atexit.register(stop)
