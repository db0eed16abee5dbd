# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates that go wrong are listed and never chosen; rows are pure."""

import dataclasses
import importlib.metadata
import io
import pathlib
import random
import sys
import unittest.mock
from typing import Final

import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.lab.tuning import listing, machine, session, store, workload
from jaxplugin.lab.tuning.operations import operation
from jaxplugin.printing import console
from jaxplugin.tables import records
from jaxplugin.testing import dot_problems, folders
from jaxplugin.testing.trials import faults

FOLDER: Final = str(pathlib.Path(faults.__file__).parent)
OPTIONS: Final = machine.TrialOptions(
  seconds=1.0, memory_bytes=200_000_000, rounds=10, timing_seconds=0.0
)
TARGET: Final = jp.Target(name="some cpu", platform="cpu", core_count=2)
PROBLEM: Final = dot_problems.problem(jp.MXFP8, m=4, n=32, k=64)
FIELDS: Final = records.fields_of("problem", {"m": 4})


def candidate(**config):
  return listing.TrialCandidate(
    implementation="cpu", config=records.fields_of("config", config)
  )


DEFAULT: Final = candidate(us=1000)


def listed(*candidates, default=DEFAULT):
  return listing.Listing(
    problem=PROBLEM,
    target=TARGET,
    candidates=(default, *candidates),
    pruned=(),
    refused=(),
  )


class Rows(list):
  """A store whose rows are in memory."""

  def __init__(self, *rows, failures, kernels="one"):
    super().__init__(rows)
    self.failures = failures
    self._kernels = kernels
    self.add = self.append

  def fields(self, problem):
    return FIELDS

  def row(self, problem):
    return self[0] if self else None

  def kernels(self, implementation):
    return self._kernels


class ScriptedMachine:
  """Candidates take the times of a script, in microseconds; others take 1.

  Attributes:
    tried: the keys of the candidates of each check.
  """

  all_rounds = 64

  def __init__(self, times=None):
    self._times = times or {}
    self.tried = []

  def prepare(self, problem, candidates):
    pass

  def check(self, problem, candidates, progress):
    self.tried.append([c.key for c in candidates])
    return machine.Trials()

  def time(self, problem, candidates, progress):
    samples = {
      c.key: tuple(us / 1e3 for us in self._times.get(c.key, (1,) * 20))
      for c in candidates
    }
    return machine.Trials(samples=samples)


def chosen_key(row):
  config = " ".join(f"{name}={value}" for name, value in row.chosen.config)
  return f"{row.chosen.implementation} {config}"


class SessionTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)

  def tune(
    self,
    *candidates,
    device,
    default=DEFAULT,
    problem=PROBLEM,
    rows=(),
    kernels="one",
    is_retrying=True,
  ):
    self.rows = Rows(
      *rows, failures=self.folder / store.FAILURES_NAME, kernels=kernels
    )
    one = session.Session(
      device,
      self.rows,
      lambda problem: listed(*candidates, default=default),
      is_retrying=is_retrying,
    )
    return one.tune(workload.Item(problem=problem))


@unittest.skipIf(sys.platform != "linux", "limits and signals are Linux's")
class FaultsTest(SessionTestCase):
  def tune(self, *candidates, device=None, **options):
    device = device or self.enter_context(
      machine.LocalMachine(TARGET, OPTIONS, "faults", {"PYTHONPATH": FOLDER})
    )
    return super().tune(*candidates, device=device, **options)

  @parameterized.parameters(
    ("check", "sometimes", "unstable", "one of two"),
    ("time", "crash", "crash", "while it was timed"),
    ("time", "refuse", "unstable", "failed in timing"),
  )
  @pytest.mark.lab
  def test_what_goes_wrong_is_left_out(self, when, do, kind, words):
    counter = str(self.folder / "count")
    bad = candidate(do=do, us=10, when=when, counter=counter)
    good = candidate(us=700)
    result = self.tune(good, bad, candidate(us=701))
    self.assertEqual(
      {key: fault.kind for key, fault in result.faults.items()},
      {bad.key: kind},
    )
    self.assertIn(words, result.faults[bad.key].reason)
    self.assertEqual(chosen_key(result.row), good.key)

  def test_a_row_whose_default_fails_fails(self):
    result = self.tune(candidate(us=500), default=candidate(do="wrong"))
    self.assertEqual((result.status, self.rows), ("failed", []))
    self.assertIn("the default cpu do=wrong failed: wrong:", result.reason)

  @pytest.mark.lab
  def test_failures_are_not_tried_again_with_the_same_kernels(self):
    self.folder /= "new"
    bad, good = candidate(do="crash", us=10), candidate(us=800)
    self.tune(bad, good)
    (failure,) = store.read_failures(self.rows.failures)
    self.assertEqual((failure.candidate, failure.kind), (bad.key, "crash"))
    device = ScriptedMachine()
    for options in (
      dict(kernels="one", is_retrying=False),
      dict(kernels="another", is_retrying=False),
      dict(kernels="one", is_retrying=True),
    ):
      self.tune(bad, good, device=device, **options)
    everything = [DEFAULT.key, bad.key, good.key]
    self.assertEqual(
      device.tried, [[DEFAULT.key, good.key], everything, everything]
    )

  def test_symbolic_problems_fail_with_a_reason(self):
    symbolic = dataclasses.replace(PROBLEM, m=None)
    result = self.tune(problem=symbolic, device=ScriptedMachine())
    self.assertEqual(result.status, "failed")
    self.assertIn("sizes are symbolic", result.reason)


class StoreTest(SessionTestCase):
  def test_a_failure_holds_on_one_device(self):
    digests = {
      name: store.Store(
        jp.named_target(name),
        self.folder / name,
        operation=backends.OPERATION,
        rounds=1,
      ).kernels("triton")
      for name in ("h100", "h200")
    }
    self.assertNotEqual(digests["h100"], digests["h200"])

  def test_checkout_that_is_not_installed_has_tables(self):
    missing = importlib.metadata.PackageNotFoundError("jaxplugin")
    with unittest.mock.patch.object(
      importlib.metadata, "version", side_effect=missing
    ):
      rows = store.Store(
        jp.named_target("h100"),
        self.folder,
        operation=backends.OPERATION,
        rounds=1,
        implementations=["triton"],
      )
    self.assertIsNone(rows.table())


class ChoiceTest(SessionTestCase):
  def row(self, times, order=None):
    candidates = [candidate(us=int(name)) for name in order or times]
    scripted = {f"cpu us={name}": taken for name, taken in times.items()}
    return self.tune(
      *(c for c in candidates if c != DEFAULT), device=ScriptedMachine(scripted)
    ).row

  def test_the_default_wins_a_tie_within_the_interval(self):
    # The other is a little faster, but not in each third round.
    times = {"1000": [990, 1000, 1010] * 8, "1": [975, 995, 1018] * 8}
    row = self.row(times)
    self.assertLess(row.candidates[0].median_us, 1000)
    self.assertEqual(chosen_key(row), DEFAULT.key)
    result = session.Result(
      item=workload.Item(problem=PROBLEM), status="done", row=row
    )
    shown = io.StringIO()
    console.show(session.parts(result), shown)
    self.assertEqual(shown.getvalue().count("tie"), 1, shown.getvalue())
    times["1"] = [980, 990, 1000] * 8
    row = self.row(times)
    self.assertEqual(chosen_key(row), "cpu us=1")
    low, high = row.chosen.interval_us
    self.assertTrue(low <= 990 <= high < 1000)

  def test_the_same_timings_give_the_same_bytes_in_any_order(self):
    rng = random.Random(0)
    times = {
      str(name): [rng.choice([900, 1000, 1100]) for _ in range(20)]
      for name in (1000, 1, 2, 3)
    }
    texts = set()
    for seed in range(5):
      order = random.Random(seed).sample([*times], len(times))
      texts.add(repr(self.row(times, order).to_json()))
    self.assertLen(texts, 1)

  def test_a_row_keeps_the_fastest_and_the_default(self):
    times = {str(name): [name] * 20 for name in range(1, 41)}
    times["1000"] = [1000] * 20
    row = self.row(times)
    self.assertLen(row.candidates, records.MAX_CANDIDATES)
    medians = [c.median_us for c in row.candidates]
    self.assertEqual(medians, [*map(float, range(1, 16)), 1000.0])
    self.assertEqual(row.default, 15)

  def test_a_row_that_is_there_is_kept(self):
    row, device = self.row({"1000": [1000]}), ScriptedMachine()
    result = self.tune(rows=[row], device=device)
    self.assertEqual((result.status, result.row), ("kept", row))
    self.assertEqual((self.rows, device.tried), ([row], []))

  def test_pruned_by_denial_is_listed_and_never_the_default(self):
    bad = candidate(us=3)
    found = listed(bad).without({bad.key: "crash before", DEFAULT.key: "x"})
    self.assertEqual(found.candidates, (DEFAULT,))
    self.assertEqual(
      found.pruned,
      (
        operation.Pruned(
          rule="denied",
          reason="crash before",
          implementation="cpu",
          example=bad.config,
        ),
      ),
    )
    self.assertIn(
      "  pruned, denied: 1 cpu config (us=3): crash before", [*found.parts()]
    )
