# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes that may crash, hang or use too much memory.

A parent calls `start` and `stop`. A child calls `take_streams`,
`end_with_parent` and `limit`. The module imports only the standard library, so
a child can run it without JAX.

Run as a program, the module is a worker for `lab.tuning.trials.pool`. The
arguments are the parent's process id and modules to import. A message in either
direction is a line of JSON. The worker sends {"ready": true} after its imports.
A request has

  function          "package.module:function". The function is called with the
                    argument and with a function that sends a note.
  argument          any JSON
  memory_bytes      limit for additional address space; 0 for no limit

The worker replies with any number of {"note": ...}, then with one of

  value             result of the function
  failed, reason    the error's attribute `kind`, "memory" or "error", and the
                    error's message

Output of the function and its libraries is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO
from typing import Any
from typing import Final

if sys.platform != "win32":
  import resource

  _C_LIBRARY: Final = ctypes.CDLL(None)

_WATCH_SECONDS: Final = 1.0
_SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
# Messages of XLA and C++ when memory is exhausted.
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")


# In the parent.


def start(
  arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
  """Starts Python with pipes, this process's modules and its environment.

  Args:
    arguments: arguments of Python.
    environment: additional variables.
  """
  path = os.pathsep.join(filter(None, sys.path))
  return subprocess.Popen(
    # -P: the current directory may contain any module.
    [sys.executable, "-P", *arguments],
    env={**os.environ, "PYTHONPATH": path, **environment},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    start_new_session=True,  # Ctrl-C reaches only the parent
  )


def stop(process: subprocess.Popen[bytes]) -> None:
  """Ends a process and all processes that it started."""
  if process.returncode is not None:
    return
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  for pipe in (process.stdin, process.stdout):
    assert pipe is not None
    with contextlib.suppress(OSError):
      pipe.close()


# In the child.


def take_streams() -> tuple[IO[bytes], IO[bytes]]:
  """Returns standard input and output; later output of libraries is dropped."""
  streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
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
  with contextlib.suppress(OSError), open("/proc/self/statm") as file:
    return int(file.read().split()[0]) * resource.getpagesize()
  return 0


def limit(kind: int, value: int) -> tuple[int, int]:
  """Lowers a resource limit if the system supports it; returns the old one."""
  before = resource.getrlimit(kind)
  most = before[1]
  if most != resource.RLIM_INFINITY:
    value = min(value, most)
  with contextlib.suppress(OSError, ValueError):  # macOS has no RLIMIT_AS
    resource.setrlimit(kind, (value, most))
  return before


# In the worker of `lab.tuning.trials.pool`.


def _work(parent: int, modules: Sequence[str]) -> None:
  """Answers requests on standard input until it ends."""
  end_with_parent(parent)
  threading.Thread(target=_watch, args=(parent,), daemon=True).start()
  requests, replies = take_streams()
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  for module in modules:
    importlib.import_module(module)
  _write(replies, {"ready": True})
  for line in requests:
    _write(replies, _answer(json.loads(line), replies))


def _watch(parent: int) -> None:
  while os.getppid() == parent:
    time.sleep(_WATCH_SECONDS)
  os._exit(1)


def _write(file: IO[bytes], message: dict[str, Any]) -> None:
  file.write(json.dumps(message).encode() + b"\n")
  file.flush()


def _answer(request: dict[str, Any], replies: IO[bytes]) -> dict[str, Any]:
  module, _, name = request["function"].partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
    with _limited(request["memory_bytes"]):
      value = function(
        request["argument"], lambda note: _write(replies, {"note": note})
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


if __name__ == "__main__":
  _work(int(sys.argv[1]), sys.argv[2:])
