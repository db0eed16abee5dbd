# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs jobs concurrently in separate processes, within limits.

A job may crash, hang, exhaust memory, or raise an error; see `JobOutcome.kind`.
After a crash, a hang or exhausted memory, the next job runs in a new process.
After any other error, the process continues with other jobs. Processes are
spawned, not forked.

A thread of the pool runs one process at a time. On Linux, the process ends with
the thread that started it, and so with this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from typing import Final
from typing import Literal

from jaxplugin.lab.tuning.trials import worker
from jaxplugin.runtime import child_process

Kind = Literal["done", "error", "unstable", "wrong", "crash", "hang", "memory"]

_START_SECONDS: Final = 180.0  # imports are slow on a busy machine
_LOOK_SECONDS: Final = 0.1  # how often memory and deadlines are checked
_READ_BYTES: Final = 1 << 20
_NICENESS: Final = 10
_GB: Final = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A function call for one process.

  Attributes:
    function: "package.module:function". It is passed the argument, and a
      function that sends a note.
    argument: any JSON.
    seconds: deadline of the call.
    is_retried: whether a function that raises an error is called again.
  """

  function: str
  argument: Any
  seconds: float
  is_retried: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOutcome:
  """How a job ended.

  Attributes:
    kind: "done"; "error" or "wrong" if the function raised; "unstable" if it
      raised an error only the first time; "crash" if the process ended; "hang"
      if the deadline passed; "memory" if the job exceeded the memory limit or
      memory was exhausted.
    value: result of the function, if `kind` is "done".
    reason: why the kind is not "done".
    notes: notes that the function sent.
  """

  kind: Kind
  value: Any = None
  reason: str = ""
  notes: tuple[Any, ...] = ()


def tried(job: Job, run: Callable[[Job], JobOutcome]) -> JobOutcome:
  """Runs a job with `run`, and again after an error if it is retried."""
  outcome = run(job)
  if outcome.kind != "error" or not job.is_retried:
    return outcome
  again = run(job)
  if again.kind != "done":
    return again
  reason = f"it failed in one of two trials: {outcome.reason}"
  return dataclasses.replace(again, kind="unstable", reason=reason)


class _JobError(Exception):
  """Ends a job. The message has the reason."""

  def __init__(self, kind: Kind, reason: str):
    super().__init__(reason)
    self.kind: Kind = kind


class _Process:
  """A child process that runs one job after the other."""

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
    self._left = b""
    self._is_ready = False

  def run(self, job: Job) -> JobOutcome:
    notes: list[Any] = []
    try:
      if not self._is_ready:
        self._receive(time.monotonic(), _START_SECONDS, None)
        self._is_ready = True
      start, resident = time.monotonic(), _resident(self._child.pid)
      self._send(job)
      while True:
        message = self._receive(start, job.seconds, resident)
        if "value" in message:
          return JobOutcome(
            kind="done", value=message["value"], notes=tuple(notes)
          )
        if "failed" in message:
          raise _JobError(message["failed"], message["reason"])
        notes.append(message["note"])
    except _JobError as error:
      if error.kind in ("crash", "hang", "memory"):
        self.stop()  # the process may not release its memory
      return JobOutcome(kind=error.kind, reason=str(error), notes=tuple(notes))

  def _send(self, job: Job) -> None:
    request = {
      "function": job.function,
      "argument": job.argument,
      "memory_bytes": self._memory_bytes if self._is_fenced else 0,
    }
    # `_receive` detects that the process has ended.
    with contextlib.suppress(BrokenPipeError):
      assert self._child.stdin is not None
      self._child.stdin.write(json.dumps(request).encode() + b"\n")
      self._child.stdin.flush()

  def _receive(
    self, start: float, seconds: float, resident: int | None
  ) -> dict[str, Any]:
    """Returns the next message.

    Raises:
      _JobError: If the process has ended, exceeds the time limit or, unless
        `resident` is None, has grown by more than the memory limit.
    """
    assert self._child.stdout is not None
    while True:
      # Checks the limits even if notes arrive all the time.
      if time.monotonic() > start + seconds:
        raise _JobError("hang", f"no answer in {seconds:g} s")
      if resident is not None:
        used = _resident(self._child.pid) - resident
        if used > self._memory_bytes:
          most = self._memory_bytes / _GB
          raise _JobError("memory", f"takes more than {most:.3g} GB")
      line, newline, rest = self._left.partition(b"\n")
      if newline:
        self._left = rest
        message: dict[str, Any] = json.loads(line)
        return message
      if select.select([self._child.stdout], [], [], _LOOK_SECONDS)[0]:
        data = os.read(self._child.stdout.fileno(), _READ_BYTES)
        if not data:
          raise _JobError("crash", self._ended())
        self._left += data

  def _ended(self) -> str:
    """Returns how the process has ended."""
    self.stop()
    status = self._child.returncode
    if status < 0:
      return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"

  @property
  def has_ended(self) -> bool:
    return self._child.poll() is not None

  def yield_to_others(self) -> None:
    """Lowers the priority, if the system supports it."""
    with contextlib.suppress(AttributeError, OSError):
      os.setpriority(os.PRIO_PROCESS, self._child.pid, _NICENESS)

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
    is_background: whether other processes have priority.
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
    is_background: bool = False,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
  ):
    self._arguments = memory_bytes, is_fenced, modules, dict(environment or {})
    self._is_background = is_background
    self._threads = futures.ThreadPoolExecutor(count)
    self._of_thread = threading.local()  # the attribute `process`
    self._processes: list[_Process] = []
    self._is_stopped = False

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *unused: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends all processes."""
    self._is_stopped = True
    self._threads.shutdown(wait=False, cancel_futures=True)
    for process in self._processes:
      process.stop()

  def submit(self, job: Job) -> futures.Future[JobOutcome]:
    """Runs a job after all jobs that were submitted before."""
    return self._threads.submit(self._run, job)

  def run(self, jobs: Sequence[Job]) -> list[JobOutcome]:
    """Runs jobs. Returns their outcomes in the order of the jobs.

    Raises:
      KeyboardInterrupt: If the user interrupts. All processes have then ended.
    """
    try:
      return [future.result() for future in [*map(self.submit, jobs)]]
    except BaseException:
      self.stop()
      raise

  def _run(self, job: Job) -> JobOutcome:
    return tried(job, self._run_once)

  def _run_once(self, job: Job) -> JobOutcome:
    process: _Process | None = getattr(self._of_thread, "process", None)
    if process is None or process.has_ended:
      process = self._of_thread.process = _Process(*self._arguments)
      self._processes.append(process)
      if self._is_background:
        process.yield_to_others()
      if self._is_stopped:  # while the process started
        process.stop()
    return process.run(job)
