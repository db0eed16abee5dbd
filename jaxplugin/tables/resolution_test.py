# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tables a call uses, and an error if processes have different ones."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.jaxext import jax_private
from jaxplugin.tables import resolution
from jaxplugin.testing.measured import dot_tables, measured_tables

# A process of a run of two: its product, and what came of it.
PROCESS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jaxplugin as jp
import numpy as np
try:  # whichever asks tables first: quantizing, or the dot
  x = jp.quantize(np.ones((2, 64), np.float32), jp.MXFP8)
  y = jax.jit(jp.block_scaled_dot)(x, x)
  print("sum", float(y.sum()))
except jp.TablesDifferError as error:
  print("error", error)
jax.distributed.shutdown()
"""


class TuningTest(absltest.TestCase):
  def test_tables_of_the_inner_context_come_first(self):
    first, second, inner = (
      dot_tables.table(dot_tables.faster(m=m)) for m in (1, 2, 4)
    )
    with resolution.tuning(first, second), resolution.tuning(inner):
      self.assertEqual(resolution.overlay().tables, (inner, first, second))
    self.assertIsNone(resolution.overlay())


class CheckTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    resolution.require_same_in_processes.cache_clear()
    self.addCleanup(resolution.require_same_in_processes.cache_clear)
    patch = lambda *args, **kwargs: self.enter_context(
      mock.patch.object(*args, **kwargs)
    )
    patch(jax, "process_count", return_value=2)
    patch(jax, "process_index", return_value=1)
    named = resolution.Named(
      name="user's table /x.json", table=measured_tables.table()
    )
    self.stack = resolution.Stack(tables=(named,))
    patch(resolution, "standing", return_value=self.stack)
    self.published = patch(jax_private, "first_published", return_value=None)

  def test_it_publishes_what_it_has_once(self):
    resolution.require_same_in_processes()
    resolution.require_same_in_processes()
    self.published.assert_called_once_with(
      "jaxplugin/tables", f"1 {self.stack.digest}"
    )

  def test_the_same_tables_pass(self):
    self.published.return_value = f"0 {self.stack.digest}"
    resolution.require_same_in_processes()

  def test_other_tables_are_an_error_that_names_both(self):
    self.published.return_value = f"0 {'b' * 64}"
    with self.assertRaisesRegex(
      resolution.TablesDifferError,
      "process 1 and process 0 have different .*bbbbbbbbbbbbbbbb.*/x.json.*"
      "JAXPLUGIN_TUNING to the same file in all processes, or to off",
    ):
      resolution.require_same_in_processes()

  def test_one_process_has_nobody_to_compare_with(self):
    with mock.patch.object(jax, "process_count", return_value=1):
      resolution.require_same_in_processes()
    self.published.assert_not_called()


@pytest.mark.full
class TwoProcessesTest(absltest.TestCase):
  def run_of(self, *tables):
    """Output of each process, which has the tables of a file or none."""
    with socket.socket() as server:
      server.bind(("localhost", 0))
      address = f"localhost:{server.getsockname()[1]}"
    processes = []
    for i, setting in enumerate(tables):
      processes.append(
        subprocess.Popen(
          [sys.executable, "-c", PROCESS, address, str(i)],
          env=os.environ
          | {resolution.VARIABLE: setting, "JAX_PLATFORMS": "cpu"},
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
        )
      )
    found = []
    for process in processes:
      out, err = process.communicate(timeout=120)
      self.assertIn(out.split(" ")[0], ("sum", "error"), err)
      found.append(out)
    return found

  def test_processes_that_have_other_tables_are_stopped(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "mine.json"
      path.write_text(measured_tables.table().to_text())
      same = self.run_of(str(path), str(path))
      self.assertEqual(same, ["sum 256.0\n"] * 2)
      outputs = self.run_of(str(path), resolution.OFF)
    # The first to decide goes on, whichever it is.
    errors = [text for text in outputs if text.startswith("error")]
    self.assertLen(errors, 1)
    self.assertRegex(errors[0], "process [01] and process [01] have different")
