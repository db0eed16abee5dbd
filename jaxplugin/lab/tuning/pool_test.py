# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Jobs that crash, hang or eat memory are outcomes, and others go on."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest
from typing import Final

import pytest
from absl.testing import absltest

from jaxplugin.lab.tuning import pool
from jaxplugin.testing import folders
from jaxplugin.testing.trials import faults

FOLDER: Final = str(pathlib.Path(faults.__file__).parent)
MEMORY_BYTES: Final = 200_000_000
SECONDS: Final = 30.0
GONE_SECONDS: Final = 10.0


def job(name, argument=None, seconds=SECONDS):
  return pool.Job(function=f"faults:{name}", argument=argument, seconds=seconds)


def is_alive(pid):
  """Whether a process runs; one that waits to be reaped does not."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids):
  deadline = time.monotonic() + GONE_SECONDS
  while time.monotonic() < deadline:
    if not any(map(is_alive, pids)):
      return True
    time.sleep(0.02)
  return False


@unittest.skipIf(sys.platform != "linux", "limits and signals are Linux's")
class PoolTest(absltest.TestCase):
  def make(self, count=2, **options):
    found = pool.Pool(
      count,
      MEMORY_BYTES,
      **options,
      modules=("faults",),
      environment={"PYTHONPATH": FOLDER},
    )
    return self.enter_context(found)

  def folder(self):
    return folders.new(self)

  def test_outcomes_come_in_the_order_of_the_jobs(self):
    jobs = [job("give", i) for i in range(7)]
    found = self.make().run(jobs)
    self.assertEqual([outcome.value for outcome in found], list(range(7)))
    self.assertEqual({outcome.kind for outcome in found}, {"done"})
    self.assertEqual({outcome.notes for outcome in found}, {("given",)})

  def test_a_worker_does_not_import_jax(self):
    found = self.make().run([job("imported", "jax"), job("imported", "json")])
    self.assertEqual([outcome.value for outcome in found], [False, True])

  @pytest.mark.lab
  def test_each_fault_is_told_and_the_others_go_on(self):
    jobs = [
      job("crash"),
      job("give", 1),
      job("read_null"),
      job("hang", seconds=0.5),
      job("give", 2),
      job("spin", seconds=0.5),
      job("allocate", 10_000_000),
      job("wrong"),
      job("refuse", "no layout"),
      job("leave", 3),
      job("chatter", "{}"),
      job("give", 3),
    ]
    found = self.make().run(jobs)
    self.assertEqual(
      [(outcome.kind, outcome.value) for outcome in found],
      [
        ("crash", None),
        ("done", 1),
        ("crash", None),
        ("hang", None),
        ("done", 2),
        ("hang", None),
        ("memory", None),
        ("wrong", None),
        ("error", None),
        ("crash", None),
        ("done", "said"),
        ("done", 3),
      ],
    )
    said = [outcome.reason for outcome in found]
    self.assertIn("SIGSEGV", said[0])
    self.assertIn("SIGSEGV", said[2])
    self.assertEqual(said[3], "no answer in 0.5 s")
    self.assertEqual(said[7], "at (0, 1): got 3, exact 2")
    self.assertEqual(said[8], "ValueError: no layout")
    self.assertIn("status 3", said[9])
    self.assertEqual(found[0].notes, ("about to crash",))

  def test_notes_without_end_do_not_put_off_the_deadline(self):
    (found,) = self.make().run([job("send_notes", "on", seconds=0.5)])
    self.assertEqual(found.kind, "hang")

  @pytest.mark.lab
  def test_memory_without_a_fence_is_watched(self):
    # As of a GPU's driver, which reserves address space as it likes.
    (found,) = self.make(is_fenced=False).run([job("allocate", 10_000_000)])
    self.assertEqual(found.kind, "memory")
    self.assertEqual(found.reason, "takes more than 0.2 GB")

  def test_a_process_serves_again_but_not_after_a_fault(self):
    workers = self.make(count=1)
    first, second = workers.run([job("process"), job("process")])
    self.assertEqual(first.value, second.value)
    workers.run([job("crash")])
    (third,) = workers.run([job("process")])
    self.assertNotEqual(third.value, first.value)

  def test_a_process_that_ends_between_jobs_is_replaced(self):
    workers = self.make(count=1)
    (first,) = workers.run([job("process")])
    os.kill(first.value, signal.SIGKILL)
    # All threads of the process have ended; the pool is to notice it.
    os.waitid(os.P_PID, first.value, os.WEXITED | os.WNOWAIT)
    (second,) = workers.run([job("give", 1)])
    self.assertEqual((second.kind, second.value), ("done", 1))

  def test_background_processes_have_a_low_priority(self):
    (found,) = self.make(is_background=True).run([job("niceness")])
    self.assertEqual(found.value, min(os.nice(0) + 10, 19))

  def test_jobs_run_at_once(self):
    jobs = [job("process") for _ in range(2)]
    pids = {outcome.value for outcome in self.make(count=2).run(jobs)}
    self.assertLen(pids, 2)

  @pytest.mark.lab
  def test_a_deadline_ends_what_the_job_started(self):
    path = self.folder() / "pids"
    self.make().run([job("hang", str(path), seconds=1.0)])
    pids = list(map(int, path.read_text().split()))
    self.assertLen(pids, 2)
    self.assertTrue(wait_until_gone(pids))

  @pytest.mark.lab
  def test_an_interrupt_ends_all_processes(self):
    # A shell may have started this process with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    workers = self.make()
    pids = [outcome.value for outcome in workers.run([job("process")])]

    def interrupt():
      time.sleep(0.5)
      os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with self.assertRaises(KeyboardInterrupt):
      workers.run([job("hang"), job("hang")])
    self.assertTrue(wait_until_gone(pids))

  @pytest.mark.lab
  def test_processes_end_with_one_that_is_killed(self):
    # SIGKILL leaves no time to tidy up.
    path = self.folder() / "pids"
    program = f"""
import sys, types
for suffix in ("", ".lab", ".lab.tuning", ".runtime"):
  name = "jaxplugin" + suffix
  package = types.ModuleType(name)
  package.__path__ = [sys.argv[1] + suffix.replace(".", "/")]
  sys.modules[name] = package
from jaxplugin.lab.tuning import pool
workers = pool.Pool(
  1,
  10**9,
  environment={{"PYTHONPATH": {FOLDER!r}}},
)
workers.run(
  [pool.Job(function="faults:hang", argument={str(path)!r}, seconds=99)]
)
"""
    root = pathlib.Path(pool.__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program, str(root)])
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and len(path.read_text().split()) == 2):
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.02)
    worker, grandchild = map(int, path.read_text().split())
    self.assertTrue(is_alive(worker))
    parent.kill()
    parent.wait()
    self.assertTrue(wait_until_gone([worker]))
    with contextlib.suppress(ProcessLookupError):
      os.kill(grandchild, signal.SIGKILL)
