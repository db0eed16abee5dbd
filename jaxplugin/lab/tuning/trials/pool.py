# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs jobs concurrently in separate processes, within limits.

A job may crash, hang, exhaust memory, or raise an error; see `JobOutcome.kind`.
After a crash, a hang or exhausted memory, the next job runs in a new process.
After any other error, the process continues with other jobs. Processes are
spawned, not forked.

On Linux, a process ends with the *thread* that started the process. Use a pool
in only one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import Literal

from jaxplugin.lab.tuning.trials import worker
from jaxplugin.runtime import child_process

Kind = Literal["done", "error", "wrong", "crash", "hang", "memory"]

_START_SECONDS: Final = 180.0  # imports are slow on a busy machine
_LOOK_SECONDS: Final = 0.1  # how often memory and deadlines are checked
_READ_BYTES: Final = 1 << 20
_GB: Final = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A function call for one process.

  Attributes:
    function: "package.module:function". It is passed the argument, and a
      function that sends a note.
    argument: any JSON.
    seconds: deadline of the call.
  """

  function: str
  argument: Any
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOutcome:
  """How a job ended.

  Attributes:
    kind: "done"; "error" or "wrong" if the function raised; "crash" if the
      process ended; "hang" if the deadline passed; "memory" if the job exceeded
      the memory limit or memory was exhausted.
    value: result of the function, if `kind` is "done".
    reason: why the kind is not "done".
    notes: notes that the function sent.
  """

  kind: Kind
  value: Any = None
  reason: str = ""
  notes: tuple[Any, ...] = ()


class _Process:
  """A child process and its current job."""

  def __init__(
    self,
    memory_bytes: int,
    is_fenced: bool,
    modules: Sequence[str],
    environment: Mapping[str, str],
  ):
    self._memory_bytes, self._is_fenced = memory_bytes, is_fenced
    self._child = child_process.start(
      worker.__name__, (str(os.getpid()), *modules), environment
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
      "memory_bytes": self._memory_bytes if self._is_fenced else 0,
    }
    # `read` detects that the process has ended.
    with contextlib.suppress(BrokenPipeError):
      assert self._child.stdin is not None
      self._child.stdin.write(json.dumps(request).encode() + b"\n")
      self._child.stdin.flush()

  def read(self) -> JobOutcome | None:
    """Reads messages. Returns the outcome if the job has ended, else None."""
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
          self.stop()  # the process may not release its memory
        return self._finished(message["failed"], reason=message["reason"])
      else:
        return self._finished("done", value=message["value"])
    return None

  def look(self) -> JobOutcome | None:
    """Returns an outcome if the job exceeds a limit, else None."""
    if self.is_idle:
      return None
    assert self._job is not None
    if time.monotonic() > self._deadline:
      self.stop()
      seconds = self._job.seconds if self._is_ready else _START_SECONDS
      return self._finished("hang", reason=f"no answer in {seconds:g} s")
    used = _resident(self._child.pid) - self._base
    if self._is_ready and used > self._memory_bytes:
      self.stop()
      reason = f"takes more than {self._memory_bytes / _GB:.3g} GB"
      return self._finished("memory", reason=reason)
    return None

  def _ended(self) -> JobOutcome:
    self.stop()
    status = self._child.returncode
    reason = f"the process ended with status {status}"
    if status < 0:
      reason = f"the process was ended by {signal.Signals(-status).name}"
    return self._finished("crash", reason=reason)

  def _finished(self, kind: Kind, **fields: Any) -> JobOutcome:
    self.index = self._job = None
    return JobOutcome(kind=kind, notes=tuple(self._notes), **fields)

  @property
  def has_ended(self) -> bool:
    return self._child.returncode is not None

  def stop(self) -> None:
    child_process.stop(self._child)


def _resident(pid: int) -> int:
  """Returns the resident bytes of a process; 0 if the system has no /proc."""
  try:
    with open(f"/proc/{pid}/statm") as file:
      pages = int(file.read().split()[1])
  except (OSError, IndexError):
    return 0
  return pages * os.sysconf("SC_PAGE_SIZE")


class Pool:
  """Processes that run jobs. They end with the context.

  Args:
    count: number of jobs that run concurrently.
    memory_bytes: maximum memory of a job. On Linux, this is the limit of the
      growth of resident memory, and of address space if `is_fenced`.
    is_fenced: whether address space is limited. GPU drivers reserve much
      address space, so jobs on a GPU are not fenced.
    modules: modules that a process imports before its first job. The job's
      deadline does not include the imports.
    environment: additional environment variables of the processes.
  """

  def __init__(
    self,
    count: int,
    memory_bytes: int,
    *,
    is_fenced: bool = True,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
  ):
    self._count = count
    self._arguments = memory_bytes, is_fenced, modules, dict(environment or {})
    self._processes: list[_Process] = []

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *unused: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends all processes."""
    for process in self._processes:
      process.stop()
    self._processes = []

  def run(
    self,
    jobs: Sequence[Job],
    on_done: Callable[[int, JobOutcome], None] = lambda index, outcome: None,
  ) -> list[JobOutcome]:
    """Runs all jobs. Returns their outcomes in the order of the jobs.

    Args:
      jobs: the jobs.
      on_done: called with the index and the outcome of each job when it ends.

    Raises:
      KeyboardInterrupt: If the user interrupts. All processes have then ended.
    """
    found: dict[int, JobOutcome] = {}
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
        idle = [_Process(*self._arguments)]
        self._processes += idle
      idle[0].give(*waiting.pop())

  def _wait(self) -> Iterator[tuple[int, JobOutcome]]:
    with selectors.DefaultSelector() as selector:
      for process in self._processes:
        selector.register(process.descriptor, selectors.EVENT_READ, process)
      ready = [key.data for key, _ in selector.select(_LOOK_SECONDS)]
    for process in self._processes:
      index = process.index
      outcome = process.read() if process in ready else None
      if outcome is None:
        outcome = process.look()  # even if notes arrive all the time
      # A process that ends without a job is replaced when it is needed.
      if outcome is not None and index is not None:
        yield index, outcome
