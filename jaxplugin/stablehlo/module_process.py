# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses untrusted modules in a child process, which they may crash.

`checked` passes a module to the child process first, and returns text that is
safe to parse in this process. The child starts at the first use and handles all
later ones. It ends with this process or when it is idle.

jaxlib's parsers abort on some malformed modules, after they corrupted memory.
The child therefore handles each request in a new fork with limits. A crash of
the fork is also a reply.

The bytes of a request (`child_process`) are the module. Its object has

  name, is_text         see `module_parsing.parse`
  cpu_s, memory_bytes, stack_bytes, out_bytes, wall_s
                        limits of the fork

The bytes of a reply are the module as text with locations. They are empty if
the request was StableHLO text. The object has one of

  error                 text of a `ModuleError`
  died                  how the fork ended without a reply
  is_text               attribute of `module_parsing.Parsed`; the module is
                        valid

The parent parses the text of a reply next. The fork has already parsed that
text with a smaller stack than the parent has.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import select
import signal
import sys
import tempfile
import threading
from typing import IO, Any, Final

from jaxplugin.jaxext import jaxlib_private
from jaxplugin.runtime import child_process
from jaxplugin.stablehlo import module_parsing

if sys.platform != "win32":  # Windows has no `os.fork` either
  import resource

IDLE_S: Final = 60.0  # the child ends after this time without a request
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
    __name__, environment={"OPENBLAS_NUM_THREADS": "1"}
  )


atexit.register(stop)


# The child process.


def serve() -> None:
  """Answers requests on standard input until it ends."""
  requests, replies = child_process.take_streams()
  context = jaxlib_private.make_ir_context()
  gc.disable()  # so that forks share memory that nothing writes to
  while select.select([requests], [], [], IDLE_S)[0]:
    request = child_process.read_message(requests)
    if request is None:
      return
    child_process.write_message(replies, *_serve(context, requests, *request))


def _serve(
  context: Any, requests: IO[bytes], request: dict[str, Any], data: bytes
) -> tuple[dict[str, Any], bytes]:
  """Handles one request in a fork and returns the reply."""
  with tempfile.TemporaryFile() as file:
    end, start = os.pipe()  # the system closes it when the fork ends
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
      os.close(end)
      _answer(context, request, data, file, parent)
    os.close(start)
    died = ""
    try:
      waited = [end, requests.fileno()]
      ready, _, _ = select.select(waited, [], [], request["wall_s"])
      if end not in ready:
        os.kill(pid, signal.SIGKILL)
        died = f"was stopped after {request['wall_s']:.0f} s"
    finally:
      os.close(end)
      _, status = os.waitpid(pid, 0)
    if requests.fileno() in ready:  # the parent has gone
      sys.exit()
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError, KeyError):
      reply = None if status else child_process.read_message(file)
      if reply is not None:
        return reply
    status = os.waitstatus_to_exitcode(status)
    ending = _ENDINGS.get(status) or child_process.ending(status)
    return {"died": died or ending}, b""


_ENDINGS: Final = {
  -signal.SIGXCPU: "exceeded its CPU time",
  -signal.SIGXFSZ: "returned too much text",
}


def _answer(
  context: Any,
  request: dict[str, Any],
  data: bytes,
  file: IO[bytes],
  parent: int,
) -> None:
  """Writes a reply to `file`, and ends the process."""
  status = 1
  try:
    _limit(request, parent)
    try:
      reply, text = _parse(context, request, data)
    except module_parsing.ModuleError as error:
      reply, text = {"error": str(error)}, b""
    except Exception as error:  # the bindings raise any type of exception
      why = f"{request['name']}: malformed: {error!r}"
      reply, text = {"error": why}, b""
    child_process.write_message(file, reply, text)
    status = 0
  finally:
    os._exit(status)  # no destructors, because objects may be corrupt


def _parse(
  context: Any, request: dict[str, Any], data: bytes
) -> tuple[dict[str, Any], bytes]:
  name = request["name"]
  given = data.decode() if request["is_text"] else data
  parsed = module_parsing.parse(given, name, context)
  module_parsing.read_places(parsed.module)
  reply = {"is_text": parsed.is_text}
  text = parsed.module.operation.get_asm(
    binary=True, enable_debug_info=True, print_generic_op_form=True
  )
  if parsed.is_text:
    return reply, b""  # the parent parses its own text
  module_parsing.parse(text.decode(), name, context)
  return reply, text


def _limit(request: dict[str, Any], parent: int) -> None:
  """Sets the limits of this process."""
  used = child_process.address_space()
  for kind, value in (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, request["cpu_s"]),
    (resource.RLIMIT_FSIZE, request["out_bytes"]),
    (resource.RLIMIT_STACK, request["stack_bytes"]),
    (resource.RLIMIT_AS, used + request["memory_bytes"]),
  ):
    child_process.limit(kind, value)
  child_process.end_with_parent(parent)
