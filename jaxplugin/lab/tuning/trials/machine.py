# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A device that checks and times candidates in other processes.

On a CPU, several checks run concurrently. On a GPU, compilations run
concurrently, and one check runs at a time. No other job runs while candidates
are timed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Final

from jaxplugin.core import targets
from jaxplugin.lab.tuning.candidates import listing
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.lab.tuning.operations import registry
from jaxplugin.lab.tuning.trials import jobs
from jaxplugin.lab.tuning.trials import pool

Progress = Callable[[str], None]

_DOING: Final = {"compile": "compiling", "check": "checking"}


class TrialError(Exception):
  """No candidate of a problem can be timed. The message has the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialFault:
  """Why a candidate cannot be chosen.

  Attributes:
    kind: a kind of `pool.JobOutcome`, "unstable" if the candidate fails only
      sometimes, or "spills" if a kernel spills registers.
    reason: the reason, in words.
  """

  kind: str
  reason: str

  def __str__(self) -> str:
    return f"{self.kind}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
  """The results of trying candidates.

  Attributes:
    faults: the faults of candidates that failed, by key.
    notes: the checks that were skipped, by key.
    samples: milliseconds of each round of all processes, by key.
  """

  faults: Mapping[str, TrialFault] = dataclasses.field(default_factory=dict)
  notes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  samples: Mapping[str, tuple[float, ...]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialOptions:
  """Limits of trials.

  Attributes:
    workers: number of concurrent checks on a CPU, or of concurrent compilations
      for a GPU.
    seconds: time limit of compiling or checking a candidate.
    memory_bytes: memory limit of a job.
    rounds: maximum number of rounds of timing in a process.
    timing_seconds: time limit of a process for the rounds of all candidates.
    processes: number of processes that time a problem, one after the other.
      Several processes are used because times depend on the memory pages that
      the system assigns to a process.
  """

  workers: int = 2
  seconds: float = 120.0
  memory_bytes: int = 8_000_000_000
  rounds: int = 30
  timing_seconds: float = 3.0
  processes: int = 2


class LocalMachine:
  """The attached device. To only compile, any target.

  Processes that compile and check end with the context. They are idle while
  another process times candidates.

  Args:
    target: the target.
    options: limits.
    jobs_module: the module of the functions `compile`, `check` and `time_all`.
    environment: additional environment variables of the processes.
  """

  def __init__(
    self,
    target: targets.Target,
    options: TrialOptions,
    jobs_module: str = jobs.__name__,
    environment: Mapping[str, str] | None = None,
  ):
    self._target = target
    self._options = options
    self._module = jobs_module
    self._environment = dict(environment or {})
    self._is_gpu = target.platform != "cpu"
    self._standing: dict[str, pool.Pool] = {}

  def __enter__(self) -> LocalMachine:
    return self

  def __exit__(self, *unused: object) -> None:
    for workers in self._standing.values():
      workers.stop()

  def compile(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Compiles Triton's candidates. The target need not be attached."""
    if not registry.of(problem).compiles:
      return Trials()
    triton = [c for c in candidates if c.implementation == "triton"]
    return self._try("compile", problem, triton, progress)

  def check(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Tries each candidate on exact operands.

    For a GPU, compiles without the GPU first.
    """
    faults: Mapping[str, TrialFault] = {}
    if self._is_gpu:
      faults = self.compile(problem, candidates, progress).faults
    left = [c for c in candidates if c.key not in faults]
    found = self._try("check", problem, left, progress)
    return dataclasses.replace(found, faults={**faults, **found.faults})

  def _try(
    self,
    function: str,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Runs a job for each candidate, and again if the job raises an error."""
    if function not in self._standing:
      self._standing[function] = self._pool(function)
    faults: dict[str, TrialFault] = {}

    def run(trying: Sequence[listing.TrialCandidate]) -> list[pool.JobOutcome]:
      done = itertools.count(1)

      def on_done(i: int, outcome: pool.JobOutcome) -> None:
        progress(f"{_DOING[function]} {next(done)}/{len(trying)}")

      work = [
        pool.Job(
          function=f"{self._module}:{function}",
          argument={
            "problem": jobs.packed(problem),
            "target": jobs.packed(self._target),
            "candidate": candidate.to_json(),
          },
          seconds=self._options.seconds,
        )
        for candidate in trying
      ]
      return self._standing[function].run(work, on_done)

    keys = [candidate.key for candidate in candidates]
    found = dict(zip(keys, run(candidates), strict=True))
    again = [c for c in candidates if found[c.key].kind == "error"]
    for candidate, outcome in zip(again, run(again), strict=True):
      first = found[candidate.key].reason
      if outcome.kind == "done":
        reason = f"it failed in one of two trials: {first}"
        faults[candidate.key] = TrialFault(kind="unstable", reason=reason)
    notes: dict[str, tuple[str, ...]] = {}
    for key, outcome in found.items():
      if outcome.kind != "done":
        fault = TrialFault(kind=outcome.kind, reason=outcome.reason)
        faults.setdefault(key, fault)
      elif function == "check":
        notes[key] = tuple(outcome.value)
      elif outcome.value:
        spilled = f"{outcome.value} bytes of registers"
        faults.setdefault(key, TrialFault(kind="spills", reason=spilled))
    return Trials(faults=faults, notes=notes)

  def time(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Times candidates that passed their checks, in turns.

    Drops candidates that end the process.
    """
    faults: dict[str, TrialFault] = {}
    taken: list[Mapping[str, list[float]]] = []
    announces = False
    while len(taken) < self._options.processes:
      left = [c for c in candidates if c.key not in faults]
      if not left:
        break
      progress(f"timing {len(taken) + 1}/{self._options.processes}")
      outcome = self._time_once(problem, left, announces)
      if outcome.kind == "done":
        taken.append(outcome.value["samples"])
        for key, reason in outcome.value["failed"].items():
          reason = f"it passed its check and failed in timing: {reason}"
          faults[key] = TrialFault(kind="unstable", reason=reason)
      elif not announces:
        announces = True  # runs again to find the candidate that failed
      else:
        # Drops the last candidate that the process named.
        known = {c.key for c in left}
        named = [note for note in outcome.notes if note in known]
        if not named:
          raise TrialError(f"{outcome.kind}: {outcome.reason}")
        faults[named[-1]] = TrialFault(
          kind=outcome.kind, reason=f"while it was timed: {outcome.reason}"
        )
    return Trials(
      faults=faults,
      samples={
        candidate.key: tuple(
          sample for samples in taken for sample in samples[candidate.key]
        )
        for candidate in candidates
        if candidate.key not in faults
      },
    )

  def _time_once(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    announces: bool,
  ) -> pool.JobOutcome:
    options = self._options
    job = pool.Job(
      function=f"{self._module}:time_all",
      argument={
        "problem": jobs.packed(problem),
        "candidates": [candidate.to_json() for candidate in candidates],
        "rounds": options.rounds,
        "seconds": options.timing_seconds,
        "announces": announces,
      },
      seconds=options.timing_seconds + options.seconds,
    )
    with self._pool("time_all") as workers:
      return workers.run([job])[0]

  def _pool(self, function: str) -> pool.Pool:
    is_on_gpu = self._is_gpu and function != "compile"
    is_alone = is_on_gpu or function == "time_all"
    return pool.Pool(
      1 if is_alone else self._options.workers,
      self._options.memory_bytes,
      is_fenced=not is_on_gpu,
      modules=(self._module,),
      environment={
        # Processes that compile and time share the GPU's memory with this one.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **self._environment,
        **({"JAX_PLATFORMS": "cpu"} if function == "compile" else {}),
      },
    )
