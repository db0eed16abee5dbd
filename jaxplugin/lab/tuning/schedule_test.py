# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Order, overlap, choices and resumption of runs, on a simulated device.

The device's clock is virtual, so no test depends on the speed of this machine.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.lab.tuning import (
  jobs,
  listing,
  machine,
  pool,
  session,
  store,
  workload,
)
from jaxplugin.tables import reading, records
from jaxplugin.testing import dot_problems, folders

START_SECONDS: Final = 2.0  # of a simulated process
GPU: Final = jp.named_target("h100")
CPU: Final = jp.Target(
  name="some cpu", platform="cpu", core_count=2, cpu_kernels="avx2"
)
OPTIONS: Final = machine.TrialOptions(workers=4, seconds=30.0)
# The project's goal for the wall time of a run.
MOST_OVERHEAD: Final = 1.15


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


def item(i):
  problem = dot_problems.problem(jp.MXFP8, m=1 << i, n=32, k=64)
  return workload.Item(problem=problem)


def candidate(number, implementation="triton"):
  config = records.fields_of("config", {"number": number} if number else {})
  return listing.TrialCandidate(implementation=implementation, config=config)


def behaviours(items, of, count=6, implementation="triton"):
  """Returns the table of a device; `of` is passed the indices of both."""
  return {
    (item.problem, candidate(number, implementation).key): of(i, number)
    for i, item in enumerate(items)
    for number in range(count)
  }


class Run:
  """A session on a simulated device, with a table in a folder."""

  def __init__(self, folder, table, target=GPU, seed=0, options=OPTIONS):
    self.device = SimulatedDevice(table, seed)
    implementation = "cpu" if target.platform == "cpu" else "triton"
    count = len({key for _, key in table})

    def listed(problem):
      found = [candidate(number, implementation) for number in range(count)]
      return listing.Listing(
        problem=problem,
        target=target,
        candidates=tuple(found),
        pruned=(),
        refused=(),
      )

    self.rows = store.Store(
      target,
      folder / "table.json",
      operation=backends.OPERATION,
      rounds=options.all_rounds,
    )
    local = machine.LocalMachine(target, options, make_pool=self.device.pool)
    self.session = session.Session(local, self.rows, listed)

  def tune(self, items, **options):
    return [*session.tune_all(items, lambda item: self.session, **options)]

  def entries(self, *names):
    return [e for e in self.device.log if e.job in names]


def chosen_number(result):
  return dict(result.row.chosen.config).get("number", 0)


class ScheduleTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)

  @parameterized.named_parameters(
    ("compilation_is_longer", 5.0, 2.0),
    ("both_are_equal", 2.0, 2.0),
    ("timing_is_longer", 1.0, 8.0),
  )
  def test_compilation_and_timing_overlap(self, compile_seconds, ms):
    items = [item(i) for i in range(24)]
    rng = random.Random(0)
    table = behaviours(
      items,
      lambda i, number: Behaviour(
        ms=ms * (1 + number / 10),
        noise=0.02,
        compile_seconds=rng.uniform(0.2, 1.8) * compile_seconds,
      ),
    )
    run = Run(self.folder, table)
    run.tune(items)
    compiling = run.device.seconds("compile") / OPTIONS.workers
    # Each process that times candidates has to start.
    starts = START_SECONDS * len(run.entries("time_all"))
    measuring = run.device.seconds("check", "time_all") + starts
    overhead = run.device.now / max(compiling, measuring)
    print(
      f"wall {run.device.now:.0f} s, compilation {compiling:.0f} s,"
      f" measurement {measuring:.0f} s: {overhead:.2f}"
    )
    self.assertBetween(overhead, 1.0, MOST_OVERHEAD)
    self.assertGreater(compiling + measuring, 1.2 * run.device.now)

  def test_order_of_jobs(self):
    items = [item(i) for i in range(6)]
    run = Run(
      self.folder,
      behaviours(items, lambda i, number: Behaviour(ms=1 + number)),
    )
    results = run.tune(items)
    self.assertEqual([r.item for r in results], items)
    on_device = run.entries("check", "time_all")
    for first, second in itertools.pairwise(on_device):
      self.assertLessEqual(first.end, second.start)
    for i, one in enumerate(items):
      compiled = [e for e in run.entries("compile") if e.problem == one.problem]
      measured = [e for e in on_device if e.problem == one.problem]
      self.assertLen(compiled, 6)
      self.assertLessEqual(
        max(e.end for e in compiled), min(e.start for e in measured)
      )
      if i:
        before = [e for e in on_device if e.problem == items[i - 1].problem]
        self.assertLess(
          min(e.start for e in compiled), max(e.end for e in before)
        )

  def test_nothing_runs_on_a_cpu_while_it_is_timed(self):
    items = [item(i) for i in range(4)]
    table = behaviours(
      items,
      lambda i, number: Behaviour(ms=1 + number),
      implementation="cpu",
    )
    run = Run(self.folder, table, CPU)
    run.tune(items)
    self.assertLen(run.entries("check"), 24)
    for timed in run.entries("time_all"):
      for other in run.device.log:
        if other is not timed:
          self.assertTrue(other.end <= timed.start or timed.end <= other.start)

  def test_faults_of_all_kinds_and_the_fastest_other_one(self):
    faults = {
      1: ("crash", "compile"),
      2: ("hang", "compile"),
      3: ("error", "compile"),
      4: ("wrong", "check"),
      5: ("memory", "check"),
      6: ("crash", "time_all"),
      7: ("hang", "time_all"),
    }

    def of(i, number):
      fault, during = faults.get(number, ("", ""))
      return Behaviour(
        ms={0: 1.0, 8: 0.8, 9: 0.9}.get(number, 0.1),
        noise=0.02,
        fault=fault,
        during=during,
      )

    items = [item(i) for i in range(2)]
    run = Run(self.folder, behaviours(items, of, count=10))
    results = run.tune(items)
    for result in results:
      self.assertEqual(
        {key: fault.kind for key, fault in result.faults.items()},
        {candidate(n).key: kind for n, (kind, _) in faults.items()},
      )
      self.assertEqual(chosen_number(result), 8)

  def test_no_problem_starts_after_the_budget(self):
    items = [item(i) for i in range(9)]
    run = Run(self.folder, behaviours(items, lambda i, number: Behaviour()))
    results = run.tune(items, is_over=lambda: run.device.now > 15)
    self.assertBetween(len(results), 1, 8)
    self.assertLen(run.rows.table().rows, len(results))


# The run that is killed.

KILLED: Final = 2  # the index of its last problem
COUNT: Final = 5


def killed_table(items):
  def of(i, number):
    is_bad = (i, number) == (KILLED, 1)
    return Behaviour(
      ms=1 + number / 10,
      noise=0.02,
      fault="crash" if is_bad else "",
      during="check",
    )

  return behaviours(items, of, count=4)


def run_until_killed(folder):
  """Tunes in a folder. Never returns: it waits in the last problem's timing."""
  items = [item(i) for i in range(COUNT)]
  run = Run(pathlib.Path(folder), killed_table(items))
  outcome = run.device.outcome

  def wait(job, start):
    found = outcome(job, start)
    last = run.device.log[-1]
    if last.job == "time_all" and last.problem == items[KILLED].problem:
      print("waiting", flush=True)
      signal.pause()
    return found

  run.device.outcome = wait
  run.tune(items)


class KilledTest(absltest.TestCase):
  def test_run_continues_after_kill_9(self):
    folder, other = folders.new(self), folders.new(self)
    program = (
      "import sys; from jaxplugin.lab.tuning import schedule_test;"
      "schedule_test.run_until_killed(sys.argv[1])"
    )
    killed = subprocess.Popen(
      [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE
    )
    self.assertEqual(killed.stdout.readline(), b"waiting\n")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    self.assertEqual(killed.returncode, -signal.SIGKILL)

    items = [item(i) for i in range(COUNT)]
    first, second = (Run(f, killed_table(items)) for f in (folder, other))
    rows = reading.read(first.rows.path).rows
    self.assertEqual([row.size("m") for row in rows], [1, 2])
    # The crash was written before the timing started.
    (failure,) = store.read_failures(first.rows.failures)
    self.assertEqual(failure.candidate, candidate(1).key)

    results = first.tune(items)
    statuses = ["kept"] * KILLED + ["done"] * (COUNT - KILLED)
    self.assertEqual([r.status for r in results], statuses)
    tried = {e.problem.m for e in first.device.log}
    self.assertEqual(tried, {1 << i for i in range(KILLED, COUNT)})
    self.assertNotIn(
      (items[KILLED].problem, candidate(1).key),
      [(e.problem, e.key) for e in first.device.log],
    )
    # The table is that of a run without interruption.
    second.tune(items)
    self.assertEqual(
      first.rows.path.read_bytes(), second.rows.path.read_bytes()
    )
