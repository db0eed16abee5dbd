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
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Final, Literal

from jaxplugin.runtime import child_process

Kind = Literal[
  "done", "error", "unstable", "wrong", "crash", "hang", "memory", "spills"
]

_NICENESS: Final = 10


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
      memory was exhausted. `machine` adds "spills" if a kernel of a candidate
      spills registers.
    value: result of the function, if `kind` is "done".
    reason: why the kind is not "done".
    notes: notes that the function sent.
  """

  kind: Kind
  value: Any = None
  reason: str = ""
  notes: tuple[Any, ...] = ()

  def __str__(self) -> str:
    return f"{self.kind}: {self.reason}"


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
    self._child = child_process.Child(
      child_process.__name__,
      str(os.getpid()),
      *modules,
      environment=environment,
    )
    self._is_ready = False

  def run(self, job: Job) -> JobOutcome:
    notes: list[Any] = []

    def outcome(kind: Kind, **fields: Any) -> JobOutcome:
      if kind in ("crash", "hang", "memory"):
        self.stop()  # the process may not release its memory
      return JobOutcome(kind=kind, notes=tuple(notes), **fields)

    request = {
      "function": job.function,
      "argument": job.argument,
      "memory_bytes": self._memory_bytes if self._is_fenced else 0,
    }
    try:
      if not self._is_ready:
        self._child.receive()
        self._is_ready = True
      self._child.send(
        request, seconds=job.seconds, memory_bytes=self._memory_bytes
      )
      while True:
        message, _ = self._child.receive()
        if "value" in message:
          return outcome("done", value=message["value"])
        if "failed" in message:
          return outcome(message["failed"], reason=message["reason"])
        notes.append(message["note"])
    except child_process.ChildError as error:
      return outcome(error.kind, reason=str(error))

  @property
  def has_ended(self) -> bool:
    return self._child.process.poll() is not None

  def yield_to_others(self) -> None:
    """Lowers the priority, if the system supports it."""
    with contextlib.suppress(AttributeError, OSError):
      process = os.PRIO_PROCESS, self._child.process.pid
      os.setpriority(*process, os.getpriority(*process) + _NICENESS)

  def stop(self) -> None:
    self._child.stop()


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
    return self._threads.submit(tried, job, self._run_once)

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
