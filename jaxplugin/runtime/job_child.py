# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A child process that runs jobs.

The process itself does not import JAX. Jobs, and the modules passed to `serve`,
may import JAX. After its imports, the process sends {"ready": true}. A request
(`child_process`) has

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

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO
from typing import Any
from typing import Final

from jaxplugin.runtime import child_process

if sys.platform != "win32":
  import resource

_WATCH_SECONDS: Final = 1.0
# Parts of the messages of XLA and C++ if memory is exhausted.
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")


def serve(parent_id: str, *modules: str) -> None:
  """Answers requests on standard input until standard input ends."""
  parent = int(parent_id)
  child_process.end_with_parent(parent)
  threading.Thread(target=_watch, args=(parent,), daemon=True).start()
  requests, replies = child_process.take_streams()
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  for module in modules:
    importlib.import_module(module)
  child_process.write_message(replies, {"ready": True})
  while (message := child_process.read_message(requests)) is not None:
    child_process.write_message(replies, _answer(message[0], replies))


def _watch(parent: int) -> None:
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
        lambda note: child_process.write_message(replies, {"note": note}),
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
  used = child_process.address_space() if memory_bytes else 0
  if not used:
    yield
    return
  before = child_process.limit(resource.RLIMIT_AS, used + memory_bytes)
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
