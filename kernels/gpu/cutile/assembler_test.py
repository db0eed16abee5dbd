# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The worker that compiles: deadlines, failures, and what is installed.

Workers are programs of the tests here; `matmul_kernel_compile_test` has the
real one.
"""

import importlib.metadata
import os
import pathlib
import tempfile
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized
from jaxplugin.kernels.gpu.cutile import assembler

SPECIFICATION = {"name": "cutile_test", "gpu_code": "sm_100"}


def is_running(pid):
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return status.rpartition(")")[2].split()[0] != "Z"


class AssembleTest(absltest.TestCase):
  def assemble(self, worker, **options):
    """Returns the result of `assemble` with `worker` as the worker's source."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / "worker.py"
    path.write_text(worker)
    assembler._assemble.cache_clear()
    self.addCleanup(assembler._assemble.cache_clear)
    with mock.patch.object(assembler, "__file__", str(path)):
      return assembler.assemble(SPECIFICATION, **options)

  def test_what_the_worker_writes_is_the_code(self):
    found = self.assemble(
      "import json, sys\n"
      "name = json.load(sys.stdin)['gpu_code']\n"
      "sys.stdout.buffer.write(b'code of ' + name.encode())\n"
    )
    self.assertEqual(found.symbol, "cutile_test")
    self.assertEqual(found.cubin, b"code of sm_100")

  def test_one_specification_is_compiled_once(self):
    with tempfile.NamedTemporaryFile() as log:
      worker = (
        f"open({log.name!r}, 'a').write('x')\n"
        "import sys; sys.stdin.read(); sys.stdout.buffer.write(b'code')\n"
      )
      first = self.assemble(worker)
      self.assertIs(assembler.assemble(SPECIFICATION), first)
      self.assertEqual(log.read(), b"x")

  @pytest.mark.lab
  def test_worker_that_does_not_end_dies_with_what_it_started(self):
    with tempfile.NamedTemporaryFile("r") as log:
      worker = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({log.name!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
      )
      start = time.monotonic()
      with self.assertRaisesRegex(
        assembler.AssemblerError,
        "cutile_test did not compile within 1.5 seconds; another config may",
      ):
        self.assemble(worker, deadline_s=1.5)
      self.assertLess(time.monotonic() - start, 30)
      pids = [int(x) for x in log.read().split()]
    self.assertLen(pids, 2)
    for pid in pids:
      for _ in range(100):  # until the signal has arrived
        if not is_running(pid):
          break
        time.sleep(0.05)
      self.assertFalse(is_running(pid))
    self.assertTrue(is_running(os.getpid()))

  def test_what_fails_is_told_in_the_compilers_words(self):
    with self.assertRaisesRegex(
      assembler.AssemblerError, "cutile_test does not compile: no registers"
    ):
      self.assemble("import sys; sys.exit('no registers')")
    with self.assertRaisesRegex(assembler.AssemblerError, "compile: exit 0"):
      self.assemble("")  # no code, and no word either


class MissingTest(parameterized.TestCase):
  def test_package_that_is_not_there_is_told_with_its_install(self):
    error = importlib.metadata.PackageNotFoundError("cuda-tile")
    with mock.patch.object(importlib.metadata, "version", side_effect=error):
      self.assertEqual(
        assembler.missing(),
        "needs cuda-tile, which is not installed; pip install"
        " 'cuda-tile[tileiras]'",
      )

  @parameterized.parameters(
    ("1.6.9", True),
    ("1.7.0", False),
    ("1.7.3.dev4", False),
    ("1.8.0", True),
    ("2.0", True),
  )
  def test_only_releases_whose_call_is_known_are_used(self, version, refused):
    with mock.patch.object(importlib.metadata, "version", lambda _: version):
      text = assembler.missing()
    self.assertEqual(bool(text), refused)
    if refused:
      self.assertIn(f"from 1.7 to below 1.8, and {version}", text)
