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
import pathlib
import select
import subprocess
import sys
import threading
from typing import Any
from typing import Final

from jaxplugin.stablehlo import module_child
from jaxplugin.stablehlo import module_parsing

# The package's modules without its __init__, which imports JAX.
_PROGRAM: Final = """
import sys, types
package = types.ModuleType("jaxplugin")
package.__path__ = [sys.argv[1]]
sys.modules["jaxplugin"] = package
from jaxplugin.stablehlo import module_child
module_child.serve()
"""
_MIB: Final = 1 << 20
_START_S: Final = 120.0  # on a machine that has much else to do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What parsing one module may take.

  Attributes:
    cpu_s, wall_s: time.
    memory_bytes: address space, beyond what the process has.
    stack_bytes: half of what a main thread has by default, as whoever parses
      the reply may have used some of his.
    out_bytes: of the module as text.
  """

  cpu_s: int
  wall_s: float
  memory_bytes: int
  stack_bytes: int
  out_bytes: int


def limits(size: int) -> Limits:
  """The limits for a module of `size` bytes."""
  mebibytes = size // _MIB
  return Limits(
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
    version: see `module_parsing.Parsed`.
  """

  text: str | None
  version: str | None


def is_available() -> bool:
  """Whether this system can fork: Windows cannot."""
  return hasattr(os, "fork")


def checked(data: str | bytes, name: str) -> Checked:
  """Has a module parsed and verified by the child.

  Args:
    data: text, HLO text, bytecode or a portable artifact.
    name: how messages call it.

  Raises:
    ModuleError: it is not well, or it ended the parser, or went beyond limits.
    OSError: no process can be started.
  """
  is_text = isinstance(data, str)
  # Surrogates, which are in no UTF-8, are for the child to refuse.
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
  """The child, and the process that it belongs to."""

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
    if self.owner != os.getpid():
      return  # of a process that this one was forked from
    for pipe in (self.process.stdin, self.process.stdout):
      assert pipe is not None
      with contextlib.suppress(OSError):
        pipe.close()
    self.process.kill()
    self.process.wait()


_child: _Child | None = None
_lock = threading.Lock()


def _ask(
  request: dict[str, Any], data: bytes, wall_s: float
) -> tuple[dict[str, Any], bytes]:
  global _child
  with _lock:
    for _ in range(2):  # once more if it ended meanwhile, for want of work
      if _child is None or _child.owner != os.getpid():
        _child = _start()
      try:
        reply = _child.ask(request, data, wall_s)
      except TimeoutError:
        reply = {"died": "does not reply"}, b""
        stop()
      except BaseException:
        stop()  # half a message may be under way
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
  path = os.pathsep.join(filter(None, sys.path))
  process = subprocess.Popen(
    [
      sys.executable,
      "-P",  # the current directory holds whatever it holds
      "-c",
      _PROGRAM,
      str(pathlib.Path(__file__).parents[1]),
    ],
    env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )
  return _Child(process=process, owner=os.getpid())


atexit.register(stop)
