# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`tune` on the command line: its listings, errors, measurements, tables."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest
from typing import Final
from unittest import mock

import jax.numpy as jnp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.tables import reading
from jaxplugin.testing import command_lines, written_modules

MXFP8: Final = ("--formats", "mxfp8")
ONE: Final = ("--shapes", "16x256x512", *MXFP8)
H100: Final = ("--target", "h100")
QUICK: Final = (
  *("--rounds", "5", "--seconds", "0.05", "--processes", "1"),
  *("--workers", "1", "--implementations", "cpu"),
)


needs_kernels = unittest.skipIf(
  targets.detect_target("cpu").cpu_kernels is None, "no C++ kernels here"
)


class DryRunTest(command_lines.CommandLineTestCase):
  def dry_run(self, *arguments):
    return self.run_command("tune", *arguments, "--dry-run")

  @parameterized.parameters("h100", "b200", "mi300x")
  @pytest.mark.lab
  def test_candidates_of_a_gpu_that_is_not_here(self, name):
    status, out, err = self.dry_run(*ONE, "--target", name)
    self.assertEqual(status, 0)
    self.assertEqual("no cuDNN is assumed: b200" in err, name == "b200")
    self.assertLess(err.count("\n"), 3)
    self.assertIn("mxfp8 x mxfp8 -> bfloat16, batch=1 m=16 n=256 k=512", out)
    self.assertRegex(out, r"\n    triton \(default\) *\n")
    for said in ("pruned, resources: ", "pruned, dominated: ", "roofline: "):
      self.assertIn(said, out)

  def test_candidates_show_the_fields_in_which_they_differ(self):
    _, out, _ = self.dry_run(*ONE, *H100)
    (shared,) = [line for line in out.splitlines() if "every config:" in line]
    table = out.partition(shared)[2]
    self.assertNotIn("block_m", table.partition("\n  not ")[0])
    for name in ("path", "swap", "num_stages", "num_warps"):
      self.assertNotIn(name, shared)
      self.assertIn(f"{name}=", table)

  @pytest.mark.lab
  def test_json_has_all_of_it(self):
    status, out, _ = self.dry_run(*ONE, *H100, "--json")
    (found,) = json.loads(out)
    self.assertEqual(status, 0)
    self.assertEqual(found["default"]["implementation"], "triton")
    self.assertGreater(len(found["candidates"]), 10)
    self.assertGreater(sum(p["count"] for p in found["pruned"]), 1000)
    self.assertEqual(found["faults"], {})

  @pytest.mark.lab
  def test_dots_of_a_function(self):
    self.write(
      "tuned_model.py",
      "import jaxplugin as jp\n"
      "def mlp(x, up, down):\n"
      "  h = jp.block_scaled_dot(x, up, activation='relu')\n"
      "  return jp.block_scaled_dot(jp.quantize(h, 'mxfp8'), down)\n",
    )
    self.enter_context(mock.patch.object(sys, "path", [*sys.path]))
    sys.path.insert(0, str(self.directory))
    status, out, err = self.dry_run(
      *("--module", "tuned_model:mlp", *H100, "--arg", "bfloat16[3,64]"),
      *("--arg", "nvfp4[128,64]", "--arg", "mxfp8[64,128]"),
    )
    self.assertEqual((status, err), (0, ""))
    self.assertIn("bfloat16 x nvfp4 -> float32, batch=1 m=3 n=128 k=64", out)
    self.assertIn("mxfp8 x mxfp8 -> float32, batch=1 m=3 n=64 k=128", out)

  def test_what_quantizes_and_experts_are_listed(self):
    shapes = "quantize:64x128,dequantize:64x128,experts:4x2of8x64x128"
    status, out, err = self.dry_run("--shapes", shapes, *MXFP8, *H100)
    self.assertEqual((status, err), (0, ""))
    self.assertIn("bfloat16[64, 128] to mxfp8", out)
    self.assertIn("mxfp8 to bfloat16[64, 128]", out)
    self.assertIn("XLA fuses the operations with what uses the result", out)
    self.assertIn("groups=8 m=8 n=64 k=128 on h100", out)
    self.assertIn("    triton (default)\n    xla\n", out)

  def test_operations_are_named(self):
    status, out, err = self.dry_run(
      *("--shapes", "quantize:64x128,4x64x128", *MXFP8, *H100),
      *("--operations", "quantize"),
    )
    self.assertEqual(status, 0)
    self.assertIn("bfloat16[64, 128] to mxfp8", out)
    self.assertNotIn(" x ", out)
    self.assertIn(
      "m=4 n=64 k=128: not among --operations quantize", " ".join(err.split())
    )

  @pytest.mark.lab
  def test_what_is_left_out_is_said(self):
    shapes = "training:64x64x64,5x64x64,8x64x64"
    status, _, err = self.dry_run("--shapes", shapes, *MXFP8, *H100)
    self.assertEqual(status, 0)
    said = " ".join(err.split())
    self.assertIn("left out: training:64x64x64: not one operation", said)
    self.assertIn("m=5 n=64 k=64: m=8 stands for its bucket", said)

  @pytest.mark.lab
  def test_refused_call_of_a_module_is_left_out(self):
    good = written_modules.dot_module()
    bad = good.replace("8x2xf8E8M0FNU", "8x3xf8E8M0FNU").replace("@m", "@bad")
    path = self.write("m.mlir", good.rsplit("}", 1)[0] + bad.split("\n", 1)[1])
    arguments = ("tune", "--module", path, "--target", "b200", "--dry-run")
    status, out, err = self.run_command(*arguments)
    self.assertEqual(status, 0)
    self.assertIn("mxfp8 x mxfp8 -> float32, batch=1 m=8 n=16 k=64", out)
    self.assertRegex(
      " ".join(err.split()), "left out: .*k must be a positive multiple"
    )
    self.assertIn("no cuDNN is assumed: b200", err)
    self.check_error([*arguments, "--strict"], "k must be a positive multiple")


class ErrorTest(command_lines.CommandLineTestCase):
  @parameterized.parameters(
    ("", "pass either --shapes or --module"),
    ("--shapes 1x2x3 --module a:b", "pass either --shapes"),
    ("--module a:b --m 1", "--m needs --shapes"),
    ("ONE --arg nvfp4[8,64]", "--arg needs a function as --module"),
    ("ONE --strict", "--strict needs --module"),
    ("ONE --target h100", "--target needs --dry-run"),
    ("ONE --ptxas 13.2", "--ptxas needs --dry-run"),
    ("ONE --compile", "--compile needs --dry-run"),
    ("ONE --dry-run -o a.json", "--output must be left out with --dry-run"),
    ("ONE --dry-run --budget 3", "--budget must be left out with --dry-run"),
    (
      "ONE --dry-run --target h100 --isa avx2",
      "--isa must be left out with --target",
    ),
    ("ONE --margin 1", "--margin must be above 1, got 1"),
    ("ONE --deadline 0", "--deadline must be above 0, got 0"),
    ("ONE --memory inf", "--memory must be below 1e[+]06, got inf"),
    ("ONE --workers 0", "must be at least 1, got 0"),
    ("--shapes 16x256", "unknown shape '16x256'"),
    ("--shapes decode --formats int4", "unknown formats 'int4'"),
    ("ONE --dry-run --implementations magic", "must be None or one of"),
    ("--shapes training --dry-run --target h100", "found nothing to tune"),
    (
      "ONE --operations dequantise --dry-run",
      "--operations must be of block_scaled_dot, quantize, .*, got dequantise",
    ),
    (
      "--shapes quantize:64x64,1x64x64 -o both.json",
      "one operation, got quantize and block_scaled_dot for both.json",
    ),
    (f"ONE -o {__file__}/a.json", "tune_test.py: Not a directory"),
    (
      "ONE --dry-run --target h900",
      "named_target: name must be one of a100, .* got 'h900'",
    ),
    ("--module nowhere.mlir", "nowhere.mlir: No such file"),
  )
  def test_bad_arguments_are_told(self, line, said):
    given = line.replace("ONE", " ".join(ONE)).split()
    self.check_error(["tune", *given], said)

  @needs_kernels
  def test_a_table_about_something_else_is_not_touched(self):
    path = self.write("other.json", "{}")
    self.check_error(["tune", *ONE, *QUICK, "-o", path], "other.json")
    self.assertEqual(pathlib.Path(path).read_text(), "{}")


@needs_kernels
@pytest.mark.full
class TunedTest(command_lines.CommandLineTestCase):
  """Measures on this machine's CPU."""

  def tune(self, *arguments):
    return self.run_command(
      "tune", *ONE, *QUICK, "-o", str(self.path), *arguments
    )

  def setUp(self):
    super().setUp()
    self.path = self.directory / "tuned.json"

  def test_tuned_choices_are_explained_and_kept(self):
    status, out, err = self.tune()
    self.assertEqual((status, err), (0, ""))
    self.assertIn("cpu (default)", out)
    table = reading.read(self.path)
    # QUICK: one process with at most five rounds.
    self.assertEqual(table.header.measured.rounds, 5)
    (row,) = table.rows
    self.assertEqual(dict(row.problem)["m"], 16)
    text = self.path.read_bytes()
    with jp.tuning(str(self.path)):
      explained = jp.explain(
        lambda x, w: jp.block_scaled_dot(x, w),
        *(jp.quantize(jnp.ones((rows, 512)), jp.MXFP8) for rows in (16, 256)),
      )
    (told,) = explained
    self.assertEqual(told.decision.implementation, row.chosen.implementation)
    self.assertEqual(told.decision.config, row.chosen.config)
    self.assertEqual(told.decision.implementation_from, "overlay")
    # The same command measures nothing.
    with mock.patch("jaxplugin.lab.tuning.pool.Pool.run") as run:
      status, out, _ = self.tune()
      run.assert_not_called()
    self.assertEqual(status, 0)
    self.assertIn("is in the table; --again", out)
    status, out, _ = self.tune("--json")
    (result,) = json.loads(out)
    self.assertEqual((status, result["status"]), (0, "kept"))
    self.assertEqual(result["row"]["problem"]["m"], 16)
    self.assertEqual(self.path.read_bytes(), text)

  def test_other_operations_are_tuned_into_tables_of_their_own(self):
    folder = self.directory / "tables"
    folder.mkdir()
    shapes = "quantize:16x512,dequantize:16x512,experts:8x2of4x64x512"
    status, out, err = self.run_command(
      *("tune", "--shapes", shapes, *MXFP8, *QUICK[:-2], "-o", str(folder))
    )
    self.assertEqual((status, err), (0, ""))
    self.assertEqual(out.count("cpu (default)"), 3, out)
    tables = [reading.read(path) for path in sorted(folder.glob("*.json"))]
    names = [table.header.operation for table in tables]
    self.assertEqual(names, ["dequantize", "quantize", "ragged_dot"])

    def all_three(x, w, sizes):
      x_q = jp.quantize(x, jp.MXFP8)
      rows = jp.ragged_dot(x_q, w, sizes)
      return rows, jp.dequantize(x_q)

    w = jp.quantize(jnp.ones((4, 64, 512)), jp.MXFP8)
    with jp.tuning(*tables):
      told = jp.explain(all_three, jnp.ones((16, 512)), w, jnp.full((4,), 4))
    decided = [told.dots[0].decision]
    decided += [item.decisions[0] for item in told.quantizations]
    for decision in decided:
      self.assertEqual(decision.implementation_from, "overlay")

  def test_ctrl_c_keeps_finished_rows_and_leaves_no_process(self):
    command = subprocess.Popen(
      [
        *(sys.executable, "-m", "jaxplugin", "tune", "--shapes"),
        *("16x256x512,64x256x512,256x256x512,1024x256x512", "--formats"),
        *("mxfp8", *QUICK, "-o", str(self.path)),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    # The command prints a row after it has written the row.
    self.assertTrue(any("m=16" in line for line in command.stdout))
    self.assertTrue(self.path.exists())
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    self.assertEqual(command.returncode, 130, err)
    self.assertNotIn("Traceback", err)
    self.assertIn("the same command continues", err)
    rows = reading.read(self.path).rows
    self.assertBetween(len(rows), 1, 3)
    self.assertIn(f"{len(rows)} of 4 rows are in", err)
