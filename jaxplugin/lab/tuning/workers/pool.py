# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs jobs in processes of their own, several at once, within limits.

A job may crash, hang, take all memory, or raise: that is its outcome, and the
next one runs in a new process. The processes are spawned, not forked, and live
as long as the jobs that they are given end well.

On Linux a process ends with the *thread* that started it: a pool belongs to one
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

Kind = Literal["done", "error", "wrong", "crash", "hang", "memory"]

_PROGRAM: Final = pathlib.Path(__file__).with_name("child.py")
_START_SECONDS: Final = 180.0  # of imports, on a machine with much else to do
_LOOK_SECONDS: Final = 0.1  # how often memory and deadlines are looked at
_READ_BYTES: Final = 1 << 20
_GB: Final = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """What one process is to do.

  Attributes:
    function: "package.module:function", of the argument and of a function that
      sends a note.
    argument: JSON.
    seconds: until it is stopped.
  """

  function: str
  argument: Any
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """How a job ended.

  Attributes:
    kind: "done"; "error" and "wrong" were raised; "crash" ended the process,
      "hang" was stopped at the deadline, "memory" took too much of it.
    value: what the function returned, if it is done.
    reason: why it is not.
    notes: what it sent meanwhile.
  """

  kind: Kind
  value: Any = None
  reason: str = ""
  notes: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What the jobs of a pool may take.

  Attributes:
    memory_bytes: of one job. On Linux its address space may grow by so much,
      and the process is ended where it has as much resident.
    is_fenced: whether address space is limited; not where a GPU's driver
      reserves what it likes.
  """

  memory_bytes: int
  is_fenced: bool = True


class _Process:
  """One child, and the job that it has."""

  def __init__(
    self,
    limits: Limits,
    modules: Sequence[str],
    environment: Mapping[str, str],
  ):
    self._limits = limits
    path = os.pathsep.join(filter(None, sys.path))
    self._child = subprocess.Popen(
      [sys.executable, "-P", str(_PROGRAM), str(os.getpid()), *modules],
      env={**os.environ, "PYTHONPATH": path, **environment},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C is for the one who started it
    )
    assert self._child.stdout is not None
    self.descriptor = self._child.stdout.fileno()
    self.index: int | None = None
    self._job: Job | None = None
    self._left = b""
    self._notes: list[Any] = []
    self._is_ready = False
    self._deadline = time.monotonic() + _START_SECONDS
    self._base = 0

  @property
  def is_idle(self) -> bool:
    return self.index is None

  def give(self, index: int, job: Job) -> None:
    self.index, self._job, self._notes = index, job, []
    if self._is_ready:
      self._send()

  def _send(self) -> None:
    job = self._job
    assert job is not None
    self._deadline = time.monotonic() + job.seconds
    self._base = _resident(self._child.pid)
    request = {
      "function": job.function,
      "argument": job.argument,
      "memory_bytes": (
        self._limits.memory_bytes if self._limits.is_fenced else 0
      ),
    }
    # One that has ended is found by the end of what it writes.
    with contextlib.suppress(BrokenPipeError):
      assert self._child.stdin is not None
      self._child.stdin.write(json.dumps(request).encode() + b"\n")
      self._child.stdin.flush()

  def read(self) -> Outcome | None:
    """What there is to read; the job's outcome if that was the last of it."""
    data = os.read(self.descriptor, _READ_BYTES)
    if not data:
      return self._ended()
    *lines, self._left = (self._left + data).split(b"\n")
    for line in lines:
      message = json.loads(line)
      if "ready" in message:
        self._is_ready = True
        if self._job is not None:
          self._send()
      elif "note" in message:
        self._notes.append(message["note"])
      elif "failed" in message:
        if message["failed"] == "memory":
          self.stop()  # what it took may not come back
        return self._finished(message["failed"], reason=message["reason"])
      else:
        return self._finished("done", value=message["value"])
    return None

  def look(self) -> Outcome | None:
    """An outcome where the job went beyond a limit."""
    if self.is_idle:
      return None
    assert self._job is not None
    if time.monotonic() > self._deadline:
      self.stop()
      seconds = self._job.seconds if self._is_ready else _START_SECONDS
      return self._finished("hang", reason=f"no answer in {seconds:g} s")
    used = _resident(self._child.pid) - self._base
    if self._is_ready and used > self._limits.memory_bytes:
      self.stop()
      most = self._limits.memory_bytes / _GB
      reason = f"takes more than {most:.3g} GB"
      return self._finished("memory", reason=reason)
    return None

  def _ended(self) -> Outcome:
    self.stop()
    status = self._child.returncode
    reason = f"the process ended with status {status}"
    if status < 0:
      reason = f"the process was ended by {signal.Signals(-status).name}"
    return self._finished("crash", reason=reason)

  def _finished(self, kind: Kind, **fields: Any) -> Outcome:
    self.index = self._job = None
    return Outcome(kind=kind, notes=tuple(self._notes), **fields)

  @property
  def has_ended(self) -> bool:
    return self._child.returncode is not None

  def stop(self) -> None:
    """Ends the process and all that it started."""
    if self.has_ended:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._child.pid, signal.SIGKILL)
    self._child.wait()
    for pipe in (self._child.stdin, self._child.stdout):
      assert pipe is not None
      with contextlib.suppress(OSError):
        pipe.close()


def _resident(pid: int) -> int:
  """Bytes of memory that a process has; 0 where the system does not tell."""
  try:
    with open(f"/proc/{pid}/statm") as file:
      pages = int(file.read().split()[1])
  except (OSError, IndexError):
    return 0
  return pages * os.sysconf("SC_PAGE_SIZE")


class Pool:
  """Processes that run jobs; a context, at whose end all of them end.

  Args:
    count: how many jobs run at once.
    limits: of each.
    modules: what a process imports before its first job, whose time it is not.
    environment: what the processes have besides this one's.
  """

  def __init__(
    self,
    count: int,
    limits: Limits,
    *,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
  ):
    self._count = count
    self._limits = limits
    self._modules = tuple(modules)
    self._environment = dict(environment or {})
    self._processes: list[_Process] = []

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *unused: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends all processes, whatever they do."""
    for process in self._processes:
      process.stop()
    self._processes = []

  def run(
    self,
    jobs: Sequence[Job],
    on_done: Callable[[int, Outcome], None] = lambda index, outcome: None,
  ) -> list[Outcome]:
    """Runs all jobs; returns their outcomes in the jobs' order.

    Args:
      jobs: what to run.
      on_done: called with the place of a job and its outcome, when it ends.

    Raises:
      KeyboardInterrupt: all processes have been ended then.
    """
    found: dict[int, Outcome] = {}
    waiting = list(enumerate(jobs))[::-1]
    try:
      while len(found) < len(jobs):
        self._fill(waiting)
        for index, outcome in self._wait():
          found[index] = outcome
          on_done(index, outcome)
    except BaseException:
      self.stop()
      raise
    return [found[i] for i in range(len(jobs))]

  def _fill(self, waiting: list[tuple[int, Job]]) -> None:
    self._processes = [p for p in self._processes if not p.has_ended]
    while waiting:
      idle = [p for p in self._processes if p.is_idle]
      if not idle and len(self._processes) >= self._count:
        return
      if not idle:
        idle = [_Process(self._limits, self._modules, self._environment)]
        self._processes += idle
      idle[0].give(*waiting.pop())

  def _wait(self) -> Iterator[tuple[int, Outcome]]:
    with selectors.DefaultSelector() as selector:
      for process in self._processes:
        selector.register(process.descriptor, selectors.EVENT_READ, process)
      ready = [key.data for key, _ in selector.select(_LOOK_SECONDS)]
    for process in self._processes:
      index = process.index
      outcome = process.read() if process in ready else None
      if outcome is None:
        outcome = process.look()  # also while notes arrive without a pause
      # One without a job that ends is replaced when it is needed.
      if outcome is not None and index is not None:
        yield index, outcome
