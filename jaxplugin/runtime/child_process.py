# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes that may crash, hang or use too much memory.

A parent calls `start` and `stop`. A child calls `take_streams`,
`end_with_parent` and `limit`. This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO
from typing import Final

if sys.platform != "win32":
  import resource

  _C_LIBRARY: Final = ctypes.CDLL(None)

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


# In the parent.


def start(
  module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
  """Starts a process that calls `module.serve(*arguments)`.

  The process has pipes, this process's `sys.path` and its environment.

  Args:
    module: the module's full name.
    arguments: arguments of `serve`.
    environment: additional variables.
  """
  package = str(pathlib.Path(__file__).parents[1])
  path = os.pathsep.join(filter(None, sys.path))
  return subprocess.Popen(
    # -P: the current directory may contain any module.
    [sys.executable, "-P", "-c", _PROGRAM, package, module, *arguments],
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
