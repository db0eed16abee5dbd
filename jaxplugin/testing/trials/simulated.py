# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A device whose candidates take the times of a table, on a virtual clock.

It replaces only the processes of `pool`. A job advances the clock when the
tuner waits for its outcome.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import pickle
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.trials import jobs, pool

START_SECONDS: Final = 2.0  # of a process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behaviour:
  """One candidate of one problem.

  Attributes:
    ms: median of its time.
    noise: standard deviation of the logarithm of its time.
    compile_seconds, check_seconds: times of these jobs.
    fault: kind of `pool.JobOutcome`, or "" if it has none.
    during: the job with the fault.
  """

  ms: float = 1.0
  noise: float = 0.0
  compile_seconds: float = 1.0
  check_seconds: float = 0.1
  fault: Any = ""
  during: str = "compile"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A job in the device's log. `key` is "" if it times all candidates."""

  job: str
  problem: Any
  key: str = ""
  start: float
  end: float


class _Fault(Exception):
  """Ends a job like a candidate with a fault."""


class SimulatedDevice:
  """The clock, the table and the log.

  Args:
    table: candidates by problem and key.
    seed: seed of the noise.
  """

  def __init__(self, table: Mapping[tuple[Any, str], Behaviour], seed: int = 0):
    self.now = 0.0
    self.log: list[Entry] = []
    self._table = table
    self._seed = seed

  def pool(self, count: int, memory_bytes: int, **options: Any) -> Any:
    """Replaces `pool.Pool`."""
    del memory_bytes, options
    return _Pool(self, count)

  def seconds(self, *names: str) -> float:
    """Returns the total seconds of jobs."""
    return sum(e.end - e.start for e in self.log if e.job in names)

  def outcome(
    self, job: pool.Job, start: float
  ) -> tuple[pool.JobOutcome, float]:
    """Returns the outcome of a job, and when it ends."""
    name = job.function.partition(":")[2]
    argument = job.argument
    problem = pickle.loads(base64.b64decode(argument["problem"]))
    now, notes = start, []
    # A problem has the same noise in each order of the problems.
    before = [len(x) for x in argument.get("samples", {}).values()]
    rng = np.random.default_rng([self._seed, problem.m, *before])

    def step(key: str, seconds: float) -> None:
      nonlocal now
      found = self._table[problem, key]
      if found.fault and found.during == name:
        now += job.seconds if found.fault == "hang" else seconds
        raise _Fault(found.fault)
      now += seconds

    def sample(key: str) -> float:
      found = self._table[problem, key]
      ms = found.ms * math.exp(found.noise * rng.standard_normal())
      step(key, ms / 1e3)
      return ms

    key, value = "", None
    try:
      if name == "time_all":
        keys = [listing.candidate_of(c).key for c in argument["candidates"]]
        calls = {k: (lambda k=k: sample(k)) for k in keys}
        samples = jobs.run_race(argument, calls, notes.append, lambda: now)
        value = {"samples": samples, "failed": {}}
      else:
        key = listing.candidate_of(argument["candidate"]).key
        step(key, getattr(self._table[problem, key], f"{name}_seconds"))
        value = 0 if name == "compile" else []
      found = pool.JobOutcome(kind="done", value=value, notes=tuple(notes))
    except _Fault as fault:
      kind: Any = str(fault)
      found = pool.JobOutcome(kind=kind, reason=kind, notes=tuple(notes))
    self.log.append(
      Entry(job=name, problem=problem, key=key, start=start, end=now)
    )
    return found, now


class _Pool:
  """Servers that take the jobs in the order of their submission."""

  def __init__(self, device: SimulatedDevice, count: int):
    self._device = device
    self._free = [device.now + START_SECONDS] * count

  def __enter__(self) -> _Pool:
    return self

  def __exit__(self, *unused: object) -> None:
    pass

  def stop(self) -> None:
    pass

  def submit(self, job: pool.Job) -> _Future:
    server = self._free.index(min(self._free))
    start = max(self._device.now, self._free[server])

    def run(job: pool.Job) -> pool.JobOutcome:
      nonlocal start
      outcome, start = self._device.outcome(job, start)
      return outcome

    outcome = pool.tried(job, run)
    ends = outcome.kind in ("crash", "hang", "memory")
    self._free[server] = start + ends * START_SECONDS
    return _Future(self._device, outcome, start)

  def run(self, submitted: list[pool.Job]) -> list[pool.JobOutcome]:
    return [future.result() for future in [*map(self.submit, submitted)]]


@dataclasses.dataclass(frozen=True)
class _Future:
  device: SimulatedDevice
  outcome: pool.JobOutcome
  end: float

  def result(self) -> pool.JobOutcome:
    self.device.now = max(self.device.now, self.end)
    return self.outcome
