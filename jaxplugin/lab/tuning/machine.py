# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A device that checks and times candidates in other processes.

On a CPU, several checks run concurrently, and no other job runs while
candidates are timed. On a GPU, one check runs at a time. Kernels of the next
problems are compiled while the GPU checks and times candidates. The processes
that compile have a low priority.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Final

from jaxplugin.core import targets
from jaxplugin.lab.tuning import jobs, listing, pool, race
from jaxplugin.lab.tuning.operations import operation, registry

Progress = Callable[[str], None]

# The jobs of a problem's candidates, by key.
_Running = Mapping[str, futures.Future[pool.JobOutcome]]

_DOING: Final = {"compile": "compiling", "check": "checking"}


class TrialError(Exception):
  """No candidate of a problem can be timed. The message has the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
  """The results of trying candidates.

  Attributes:
    faults: why candidates cannot be chosen, by key.
    notes: the checks that were skipped, by key.
    samples: milliseconds of each round of all processes, by key. A candidate
      that left the race has fewer.
  """

  faults: Mapping[str, pool.JobOutcome] = dataclasses.field(
    default_factory=dict
  )
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
    timing_seconds: time limit of a process for the rounds of all candidates,
      after `race.MIN_ROUNDS` rounds.
    processes: number of processes that time a problem, one after the other.
      Several processes are used because times depend on the memory pages that
      the system assigns to a process.
  """

  workers: int = 2
  seconds: float = 120.0
  memory_bytes: int = 8_000_000_000
  rounds: int = 256
  timing_seconds: float = 3.0
  processes: int = 2

  @property
  def all_rounds(self) -> int:
    return self.rounds * self.processes


class LocalMachine:
  """The attached device. To only compile, any target.

  Processes that compile and check end with the context.

  Args:
    target: the target.
    options: limits.
    jobs_module: the module of the functions `compile`, `check` and `time_all`.
    environment: additional environment variables of the processes.
    make_pool: creates the processes that run jobs.
  """

  def __init__(
    self,
    target: targets.Target,
    options: TrialOptions,
    jobs_module: str = jobs.__name__,
    environment: Mapping[str, str] | None = None,
    make_pool: Callable[..., pool.Pool] = pool.Pool,
  ):
    self._target = target
    self._options = options
    self._module = jobs_module
    self._environment = dict(environment or {})
    self._make_pool = make_pool
    self._is_gpu = target.platform != "cpu"
    self._standing: dict[str, pool.Pool] = {}
    self._compiling: dict[operation.Problem, _Running] = {}

  def __enter__(self) -> LocalMachine:
    return self

  def __exit__(self, *unused: object) -> None:
    for workers in self._standing.values():
      workers.stop()

  @property
  def all_rounds(self) -> int:
    """Maximum number of rounds of a problem, in all processes together."""
    return self._options.all_rounds

  def prepare(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
  ) -> None:
    """Starts compiling for a GPU. `check` waits for the result."""
    if self._is_gpu and registry.of(problem).compiles:
      triton = [c for c in candidates if c.implementation == "triton"]
      self._compiling[problem] = self._start("compile", problem, triton)

  def compile(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Compiles Triton's candidates. The target need not be attached."""
    if problem not in self._compiling:
      self.prepare(problem, candidates)
    return self._finish("compile", self._compiling.pop(problem, {}), progress)

  def check(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Tries each candidate on exact operands.

    For a GPU, compiles without the GPU first.
    """
    faults = self.compile(problem, candidates, progress).faults
    left = [c for c in candidates if c.key not in faults]
    running = self._start("check", problem, left)
    found = self._finish("check", running, progress)
    return dataclasses.replace(found, faults={**faults, **found.faults})

  def _start(
    self,
    function: str,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
  ) -> _Running:
    """Submits a job for each candidate."""
    if function not in self._standing:
      self._standing[function] = self._pool(function)
    return {
      candidate.key: self._standing[function].submit(
        pool.Job(
          function=f"{self._module}:{function}",
          argument={
            "problem": jobs.packed(problem),
            "target": jobs.packed(self._target),
            "candidate": candidate.to_json(),
          },
          seconds=self._options.seconds,
          is_retried=True,
        )
      )
      for candidate in candidates
    }

  def _finish(
    self, function: str, running: _Running, progress: Progress
  ) -> Trials:
    """Waits for the jobs of all candidates."""
    faults: dict[str, pool.JobOutcome] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for i, (key, future) in enumerate(running.items(), start=1):
      outcome = future.result()
      if outcome.kind != "done":
        faults[key] = outcome
      elif function == "check":
        notes[key] = tuple(outcome.value)
      elif outcome.value:
        spilled = f"{outcome.value} bytes of registers"
        faults[key] = pool.JobOutcome(kind="spills", reason=spilled)
      progress(f"{_DOING[function]} {i}/{len(running)}")
    return Trials(faults=faults, notes=notes)

  def time(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    progress: Progress,
  ) -> Trials:
    """Times candidates that passed their checks, the default first, in a race.

    A process continues the race of the process before. Drops candidates that
    end the process.
    """
    default = candidates[0].key
    samples: dict[str, list[float]] = collections.defaultdict(list)
    faults: dict[str, pool.JobOutcome] = {}
    announces = False
    done = 0
    while done < self._options.processes and default not in faults:
      left = [c for c in candidates if c.key not in faults]
      if done:
        known = {c.key: samples[c.key] for c in left}
        active = race.Race(known, default, self.all_rounds).active
        left = [c for c in left if c.key in active]
        if len(left) == 1:
          break
      progress(f"timing {done + 1}/{self._options.processes}")
      outcome = self._time_once(problem, left, samples, announces)
      if outcome.kind == "done":
        done += 1
        for key, taken in outcome.value["samples"].items():
          samples[key] += taken
        for key, reason in outcome.value["failed"].items():
          reason = f"it passed its check and failed in timing: {reason}"
          faults[key] = pool.JobOutcome(kind="unstable", reason=reason)
      elif not announces:
        announces = True  # runs again to find the candidate that failed
      else:
        # Drops the last candidate that the process named.
        keys = {c.key for c in left}
        named = [note for note in outcome.notes if note in keys]
        if not named:
          raise TrialError(str(outcome))
        faults[named[-1]] = dataclasses.replace(
          outcome, reason=f"while it was timed: {outcome.reason}"
        )
    return Trials(
      faults=faults,
      samples={k: tuple(v) for k, v in samples.items() if k not in faults},
    )

  def _time_once(
    self,
    problem: operation.Problem,
    candidates: Sequence[listing.TrialCandidate],
    samples: Mapping[str, Sequence[float]],
    announces: bool,
  ) -> pool.JobOutcome:
    options = self._options
    job = pool.Job(
      function=f"{self._module}:time_all",
      argument={
        "problem": jobs.packed(problem),
        "candidates": [candidate.to_json() for candidate in candidates],
        "samples": {c.key: list(samples.get(c.key, ())) for c in candidates},
        "rounds": options.rounds,
        "all_rounds": options.all_rounds,
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
    return self._make_pool(
      1 if is_alone else self._options.workers,
      self._options.memory_bytes,
      is_fenced=not is_on_gpu,
      is_background=function == "compile",
      modules=(self._module,),
      environment={
        # Processes that compile and time share the GPU's memory with this one.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **self._environment,
        **({"JAX_PLATFORMS": "cpu"} if function == "compile" else {}),
      },
    )
