# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that trials run in; `pool` starts it and asks it.

It runs as a program of its own, which imports nothing of the package but what
it is told to. A message, either way, is a line of JSON. The process says
{"ready": true} once its imports are done. A request has

  function          "package.module:function", of an argument and of `tell`
  argument          what it takes, as JSON
  memory_bytes      how much address space it may take beyond what there is; 0
                    is no limit

and its replies are any number of {"note": ...}, which `tell` sends, and one of

  value             what the function returned
  failed, reason    what the error's class has as `kind`, "memory" or "error",
                    and its message

Whatever the function or its libraries print goes nowhere. The process ends with
the one that started it, at once where the system is Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO
from typing import Any
from typing import Final

if sys.platform != "win32":
  import resource

_WATCH_SECONDS: Final = 1.0
_SET_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
# How XLA says it: an XlaRuntimeError.
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")

Tell = Callable[[Any], None]


def serve() -> None:
  """Answers requests on standard input until it ends."""
  _end_with_parent()
  requests = os.fdopen(os.dup(0), "r")
  replies = os.fdopen(os.dup(1), "w")
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # for whoever started it
  for module in sys.argv[2:]:
    importlib.import_module(module)
  write(replies, {"ready": True})
  for line in requests:
    write(replies, _answer(json.loads(line), replies))


def write(file: IO[str], message: dict[str, Any]) -> None:
  """Writes one message."""
  file.write(json.dumps(message) + "\n")
  file.flush()


def _answer(request: dict[str, Any], replies: IO[str]) -> dict[str, Any]:
  module, _, name = request["function"].partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
    with _limited(request["memory_bytes"]):
      value = function(
        request["argument"], lambda note: write(replies, {"note": note})
      )
    return {"value": value}
  except MemoryError as error:
    return {"failed": "memory", "reason": str(error) or "no more memory"}
  # Whatever a candidate raises is its outcome.
  except Exception as error:
    kind = getattr(error, "kind", None)
    if kind is not None:
      return {"failed": kind, "reason": str(error)}
    reason = f"{type(error).__name__}: {error}"
    is_memory = any(word in reason for word in _OUT_OF_MEMORY)
    return {"failed": "memory" if is_memory else "error", "reason": reason}


@contextlib.contextmanager
def _limited(memory_bytes: int) -> Any:
  """Limits the address space, where the system knows such a limit."""
  used = _address_space() if memory_bytes else None
  if used is None:
    yield
    return
  before, most = resource.getrlimit(resource.RLIMIT_AS)
  limit = used + memory_bytes
  if most != resource.RLIM_INFINITY:
    limit = min(limit, most)
  resource.setrlimit(resource.RLIMIT_AS, (limit, most))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _address_space() -> int | None:
  """Bytes that this process has mapped; None where that is not told."""
  try:
    with open("/proc/self/statm") as file:
      return int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return None


def _end_with_parent() -> None:
  parent = int(sys.argv[1])
  if sys.platform == "linux":
    # Of the thread that started this process, which the pool keeps alive.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(_WATCH_SECONDS)
    os._exit(1)

  if sys.platform != "win32":
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
  serve()
