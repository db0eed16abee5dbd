# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that are launched end, however their program does."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import launcher
from absl.testing import absltest

TIMEOUT_S = 60
# Longer than any test may take: what waits so long was ended.
FOREVER_S = 600
_PARENT = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(launcher.__file__).parent)!r})
import launcher
launcher.launch([sys.executable, "-c", sys.argv[1]], 2, timeout_s={FOREVER_S})
"""
# The first part of `join`, which does not start JAX.
_CHILD = f"""
import os, pathlib, sys, threading, time
sys.path.insert(0, {str(pathlib.Path(launcher.__file__).parent)!r})
import launcher
threading.Thread(target=launcher._end_with_launcher, daemon=True).start()
folder = pathlib.Path(FOLDER)
(folder / f"{{os.environ['LAUNCHER_INDEX']}}.pid").write_text(str(os.getpid()))
time.sleep({FOREVER_S})
"""


def launch(code, processes=3, timeout_s=TIMEOUT_S):
  return launcher.launch(
    [sys.executable, "-c", code], processes, timeout_s=timeout_s
  )


class LaunchTest(absltest.TestCase):
  def test_each_process_knows_its_place_and_one_address(self):
    code = (
      "import os; print(*(os.environ[f'LAUNCHER_{n}'] for n in ('INDEX',"
      " 'PROCESSES', 'COORDINATOR')))"
    )
    found = [output.split() for output in launch(code)]
    self.assertEqual([index for index, _, _ in found], ["0", "1", "2"])
    self.assertEqual({count for _, count, _ in found}, {"3"})
    self.assertLen({address for _, _, address in found}, 1)

  def test_one_that_fails_ends_the_others_and_is_named(self):
    code = (
      "import os, sys, time\n"
      "if os.environ['LAUNCHER_INDEX'] == '1': sys.exit('what went wrong')\n"
      f"time.sleep({FOREVER_S})"
    )
    start = time.monotonic()
    with self.assertRaisesRegex(
      launcher.LaunchError,
      r"process 1 of 3 ended with status 1\n(?s:.*)\[1\] what went wrong",
    ):
      launch(code)
    self.assertLess(time.monotonic() - start, TIMEOUT_S)

  def test_when_time_is_over_all_are_ended(self):
    code = f"import time; print('begun', flush=True); time.sleep({FOREVER_S})"
    with self.assertRaisesRegex(
      launcher.LaunchError, "process 0 of 2 was not done after 0.5 s"
    ):
      launch(code, processes=2, timeout_s=0.5)

  def test_one_that_does_not_listen_is_killed(self):
    code = (
      "import signal, time\n"
      "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
      f"time.sleep({FOREVER_S})"
    )
    with (
      mock.patch.object(launcher, "_GRACE_S", 0.2),
      self.assertRaisesRegex(launcher.LaunchError, "not done after 1 s"),
    ):
      launch(code, processes=1, timeout_s=1)

  def test_a_port_that_is_taken_is_another_trial(self):
    with tempfile.TemporaryDirectory() as folder:
      code = (
        "import os, pathlib, sys\n"
        f"path = pathlib.Path({folder!r}) / 'tried'\n"
        "if not path.exists():\n"
        "  path.write_text(os.environ['LAUNCHER_COORDINATOR'])\n"
        f"  sys.exit({launcher._PORT_TAKEN})\n"
        "print(path.read_text())"
      )
      self.assertIn(launcher._HOST, launch(code, processes=1)[0])

  def test_no_port_at_all_is_an_error(self):
    with self.assertRaisesRegex(launcher.LaunchError, "no port was free, of 3"):
      launch(f"import sys; sys.exit({launcher._PORT_TAKEN})", processes=1)

  def test_they_end_with_whoever_launched_them(self):
    with tempfile.TemporaryDirectory() as folder:
      child = _CHILD.replace("FOLDER", repr(folder))
      parent = subprocess.Popen([sys.executable, "-c", _PARENT, child])
      paths = [pathlib.Path(folder) / f"{i}.pid" for i in range(2)]
      try:
        self.wait(lambda: all(p.exists() and p.read_text() for p in paths))
      finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
      for path in paths:
        self.wait(lambda pid=int(path.read_text()): not is_running(pid))

  def wait(self, condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.02)


def is_running(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  # One that has ended stays until whoever inherited it looks.
  return b") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_bytes()
