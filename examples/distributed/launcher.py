# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a program as several processes of this machine, as one JAX program.

The program calls `join()` before it first uses JAX's devices. The launcher does
the work of a cluster's scheduler. Each run has its own port. If one process
fails or the time is over, the launcher ends the others. All processes end with
the process that launched them, even if that one is killed.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

import jax

_COORDINATOR: Final = "LAUNCHER_COORDINATOR"
_PROCESSES: Final = "LAUNCHER_PROCESSES"
_INDEX: Final = "LAUNCHER_INDEX"
_HOST: Final = "127.0.0.1"

# Exit statuses: another program has taken the port; whoever launched is gone.
_PORT_TAKEN: Final = 75
_ALONE: Final = 76
_PORT_TRIALS: Final = 3
_POLL_S: Final = 0.05
_GRACE_S: Final = 5.0
_START_TIMEOUT_S: Final = 60


class LaunchError(RuntimeError):
  """A process failed or there was no more time; the message has its output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Process:
  popen: subprocess.Popen[bytes]
  output: str  # a path


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
  """A failed process.

  Attributes:
    index: number of the process.
    what: the failure in words.
    status: exit status; below 0 a signal, None if the process still runs.
  """

  index: int
  what: str
  status: int | None = None


def is_launched() -> bool:
  """Whether this process is one of those that `launch` started."""
  return _COORDINATOR in os.environ


def join(devices: int) -> None:
  """Makes this process one of a JAX over all that were launched together.

  Args:
    devices: of this process, parts of its CPU.
  """
  threading.Thread(target=_end_with_launcher, daemon=True).start()
  coordinator = os.environ[_COORDINATOR]
  index = int(os.environ[_INDEX])
  if index == 0 and not _is_free(int(coordinator.rpartition(":")[2])):
    sys.exit(_PORT_TAKEN)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    coordinator_address=coordinator,
    num_processes=int(os.environ[_PROCESSES]),
    process_id=index,
    initialization_timeout=_START_TIMEOUT_S,
  )


def _end_with_launcher() -> None:
  """The pipe has an end where the launcher has one, even by SIGKILL."""
  while os.read(sys.stdin.fileno(), 1):  # not buffered: no lock is held
    pass
  os._exit(_ALONE)


def _is_free(port: int) -> bool:
  with socket.socket() as probe:
    try:
      probe.bind((_HOST, port))
    except OSError:
      return False
  return True


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind((_HOST, 0))
    return int(probe.getsockname()[1])


def launch(
  command: Sequence[str],
  processes: int,
  *,
  timeout_s: float,
  environment: Mapping[str, str] | None = None,
) -> list[str]:
  """Runs a command as so many processes, and waits for all.

  Args:
    command: the program and its arguments, the same for each.
    processes: how many.
    timeout_s: for all of it.
    environment: beside that of this process.

  Returns:
    What each process wrote.

  Raises:
    LaunchError: a process ended with another status than 0, or timeout_s is
      over. Nothing of it runs any more.
  """
  for _ in range(_PORT_TRIALS):
    with tempfile.TemporaryDirectory() as folder:
      started = _start(command, processes, folder, environment or {})
      try:
        failure = _wait(started, timeout_s)
      finally:
        _end(started)
      outputs = [_read(process.output) for process in started]
    if failure is None:
      return outputs
    if failure.status != _PORT_TAKEN:
      raise LaunchError(_message(failure, outputs))
  raise LaunchError(f"no port was free, of {_PORT_TRIALS} tried")


def _start(
  command: Sequence[str],
  processes: int,
  folder: str,
  environment: Mapping[str, str],
) -> list[_Process]:
  address = f"{_HOST}:{_free_port()}"
  started: list[_Process] = []
  try:
    for index in range(processes):
      path = os.path.join(folder, str(index))
      with open(path, "wb") as output:
        popen = subprocess.Popen(
          command,
          env={
            **os.environ,
            **environment,
            _COORDINATOR: address,
            _PROCESSES: str(processes),
            _INDEX: str(index),
          },
          stdin=subprocess.PIPE,
          stdout=output,
          stderr=subprocess.STDOUT,
        )
      started.append(_Process(popen=popen, output=path))
  except BaseException:
    _end(started)
    raise
  return started


def _wait(started: Sequence[_Process], timeout_s: float) -> _Failure | None:
  """What happened to the first process that failed; None if none did."""
  deadline = time.monotonic() + timeout_s
  while True:
    statuses = [process.popen.poll() for process in started]
    # Others fail because this one did: they come later, or at the same look.
    for index, status in enumerate(statuses):
      if status:
        return _Failure(
          index=index, status=status, what=f"ended with status {status}"
        )
    if None not in statuses:
      return None
    if time.monotonic() > deadline:
      what = f"was not done after {timeout_s:g} s"
      return _Failure(index=statuses.index(None), what=what)
    time.sleep(_POLL_S)


def _end(started: Sequence[_Process]) -> None:
  for process in started:
    if process.popen.poll() is None:
      process.popen.terminate()
  deadline = time.monotonic() + _GRACE_S
  for process in started:
    try:
      process.popen.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.popen.kill()
      process.popen.wait()
    assert process.popen.stdin is not None
    process.popen.stdin.close()


def _read(path: str) -> str:
  with open(path, encoding="utf-8", errors="replace") as file:
    return file.read()


def _message(failure: _Failure, outputs: Sequence[str]) -> str:
  return "\n".join(
    [
      f"process {failure.index} of {len(outputs)} {failure.what}",
      *(
        f"[{index}] {line}"
        for index, output in enumerate(outputs)
        for line in output.splitlines()
      ),
    ]
  )
