# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes that may crash, hang or use too much memory.

A parent starts a `Child`, which calls `take_streams`, `end_with_parent` and
`limit`. A message in either direction is a line with a JSON object, and then as
many bytes as the object's "size". This module imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, Literal

if sys.platform != "win32":
  import resource

  _C_LIBRARY: Final = ctypes.CDLL(None)

_WATCH_SECONDS: Final = 1.0
# Parts of the messages of XLA and C++ if memory is exhausted.
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")
_LOOK_SECONDS: Final = 0.1  # how often limits are checked
_START_SECONDS: Final = 180.0  # imports are slow on a busy machine
_READ_BYTES: Final = 1 << 20
_GB: Final = 1e9
_SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
# Imports a module of the package without the package's __init__, which imports
# JAX. Later imports of the package run its __init__.
_PROGRAM: Final = """
import importlib, sys, types
package = types.ModuleType("jaxplugin")
package.__path__ = [sys.argv[1]]
sys.modules["jaxplugin"] = package
module = importlib.import_module(sys.argv[2])
del sys.modules["jaxplugin"]
module.serve(*sys.argv[3:])
"""


# In both.


def write_message(
  file: IO[bytes], header: Mapping[str, Any], data: bytes = b""
) -> None:
  """Writes a message: a line with a JSON object, and bytes."""
  line = json.dumps({**header, "size": len(data)})
  file.write(f"{line}\n".encode())
  file.write(data)
  file.flush()


def read_message(file: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
  """Reads a message; None at the end of the file."""
  line = file.readline()
  if not line.endswith(b"\n"):
    return None
  header = json.loads(line)
  size = header.pop("size")
  data = file.read(size)
  return None if len(data) < size else (header, data)


def _memory(process: int | str) -> tuple[int, int]:
  """Returns the mapped and the resident bytes; 0 without /proc."""
  try:
    with open(f"/proc/{process}/statm") as file:
      mapped, resident, *_ = map(int, file.read().split())
  except (OSError, ValueError):
    return 0, 0
  page = resource.getpagesize()
  return mapped * page, resident * page


def ending(status: int) -> str:
  """Returns how a process ended, given its return code."""
  if status < 0:
    return f"was ended by {signal.Signals(-status).name}"
  return f"ended with status {status}"


# In the parent.


class ChildError(Exception):
  """A child does not answer. The message says why.

  Attributes:
    kind: "crash" if it has ended, "hang" after the time limit, "memory" if it
      takes too much memory.
  """

  def __init__(self, kind: Literal["crash", "hang", "memory"], reason: str):
    super().__init__(reason)
    self.kind: Literal["crash", "hang", "memory"] = kind


class Child:
  """A process that calls `module.serve(*arguments)`, and answers requests.

  The process has this process's `sys.path` and its environment. A fork of this
  process cannot stop it.

  Args:
    module: the module's full name.
    arguments: arguments of `serve`.
    environment: additional variables.
    errors: file of the process's stderr; by default it is dropped.

  Attributes:
    process: the process, with pipes.
  """

  def __init__(
    self,
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    errors: IO[bytes] | int = subprocess.DEVNULL,
  ):
    package = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, sys.path))
    self.process = subprocess.Popen(
      # -P: the current directory may contain any module.
      [sys.executable, "-P", "-c", _PROGRAM, package, module, *arguments],
      env={**os.environ, "PYTHONPATH": path, **(environment or {})},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=errors,
      start_new_session=True,  # Ctrl-C reaches only the parent
    )
    self._owner = os.getpid()
    self._left = bytearray()
    self._limit(_START_SECONDS, math.inf)

  @property
  def is_own(self) -> bool:
    """Whether this process started it, and is not a fork of that process."""
    return self._owner == os.getpid()

  def _limit(self, seconds: float, memory_bytes: float) -> None:
    self._start, self._seconds = time.monotonic(), seconds
    self._resident = _memory(self.process.pid)[1]
    self._memory_bytes = memory_bytes

  def send(
    self,
    header: Mapping[str, Any],
    data: bytes = b"",
    *,
    seconds: float = math.inf,
    memory_bytes: float = math.inf,
  ) -> None:
    """Sends a request, and sets the limits until the next one.

    Args:
      header, data: the message.
      seconds: time for all replies.
      memory_bytes: limit on the growth of resident memory, if the system has
        /proc.
    """
    self._limit(seconds, memory_bytes)
    assert self.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `receive` says why it ended
      write_message(self.process.stdin, header, data)

  def receive(self) -> tuple[dict[str, Any], bytes]:
    """Returns the next message.

    Raises:
      ChildError: If the process has ended, or exceeds a limit, even if messages
        arrive all the time.
    """
    assert self.process.stdout is not None
    while True:
      if time.monotonic() > self._start + self._seconds:
        raise ChildError("hang", f"no answer in {self._seconds:g} s")
      used = _memory(self.process.pid)[1] - self._resident
      if used > self._memory_bytes:
        most = self._memory_bytes / _GB
        raise ChildError("memory", f"takes more than {most:.3g} GB")
      if (message := self._message()) is not None:
        return message
      if select.select([self.process.stdout], [], [], _LOOK_SECONDS)[0]:
        data = os.read(self.process.stdout.fileno(), _READ_BYTES)
        if not data:
          self.stop()
          how = ending(self.process.returncode)
          raise ChildError("crash", f"the process {how}")
        self._left += data

  def _message(self) -> tuple[dict[str, Any], bytes] | None:
    """Removes the first message from the bytes that were read."""
    start = self._left.find(b"\n") + 1
    if not start:
      return None
    header = json.loads(self._left[:start])
    end = start + header.pop("size")
    if len(self._left) < end:
      return None
    data = bytes(self._left[start:end])
    del self._left[:end]
    return header, data

  def stop(self) -> None:
    """Ends the process and all processes that it started."""
    if not self.is_own or self.process.returncode is not None:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()
    for pipe in (self.process.stdin, self.process.stdout):
      assert pipe is not None
      with contextlib.suppress(OSError):
        pipe.close()


# In the child.


def take_streams() -> tuple[IO[bytes], IO[bytes]]:
  """Returns standard input and output.

  Libraries then read an empty input, and their output goes to stderr.
  """
  streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  return streams


def end_with_parent(parent: int) -> None:
  """On Linux, ends this process when the parent's thread that started it ends.

  Args:
    parent: the parent's process id.
  """
  if sys.platform == "linux":
    _C_LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
      os._exit(1)


def address_space() -> int:
  """Returns the mapped bytes of this process; 0 if the system has no /proc."""
  return _memory("self")[0]


def limit(kind: int, value: int) -> tuple[int, int]:
  """Lowers a resource limit if the system supports it; returns the old one."""
  before = resource.getrlimit(kind)
  most = before[1]
  if most != resource.RLIM_INFINITY:
    value = min(value, most)
  with contextlib.suppress(OSError, ValueError):  # macOS has no RLIMIT_AS
    resource.setrlimit(kind, (value, most))
  return before


# A child that runs jobs.


def serve(parent_id: str, *modules: str) -> None:
  """Answers requests on standard input until standard input ends.

  The process itself does not import JAX. Jobs, and `modules`, may import JAX.
  After its imports, the process sends {"ready": true}. A request has

    function          "package.module:function". The function is passed the
                      argument, and a function that sends a note.
    argument          any JSON
    memory_bytes      limit on additional address space; 0 for no limit

  The process replies with any number of {"note": ...}, then with either of

    value             result of the function
    failed, reason    the error's attribute `kind`, "memory" or "error", and the
                      error's message

  Output of the function and its libraries is dropped.
  """
  parent = int(parent_id)
  end_with_parent(parent)
  threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
  requests, replies = take_streams()
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  for module in modules:
    importlib.import_module(module)
  write_message(replies, {"ready": True})
  while (message := read_message(requests)) is not None:
    write_message(replies, _answer(message[0], replies))


def _watch_parent(parent: int) -> None:
  while os.getppid() == parent:
    time.sleep(_WATCH_SECONDS)
  os._exit(1)


def _answer(request: dict[str, Any], replies: IO[bytes]) -> dict[str, Any]:
  module, _, name = request["function"].partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
    with _limited(request["memory_bytes"]):
      value = function(
        request["argument"],
        lambda note: write_message(replies, {"note": note}),
      )
    return {"value": value}
  except MemoryError as error:
    return {"failed": "memory", "reason": str(error) or "no more memory"}
  except Exception as error:  # any error is the outcome of the job
    kind = getattr(error, "kind", None)
    if kind is not None:
      return {"failed": kind, "reason": str(error)}
    reason = f"{type(error).__name__}: {error}"
    is_memory = any(word in reason for word in _OUT_OF_MEMORY)
    return {"failed": "memory" if is_memory else "error", "reason": reason}


@contextlib.contextmanager
def _limited(memory_bytes: int) -> Iterator[None]:
  """Limits the additional address space, if the system supports the limit."""
  used = address_space() if memory_bytes else 0
  if not used:
    yield
    return
  before = limit(resource.RLIMIT_AS, used + memory_bytes)
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
