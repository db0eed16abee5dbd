# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: its help, version, statuses, `info` and width of lines."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin import __main__ as main
from jaxplugin.explanation import information
from jaxplugin.lab.bench import results, table, timing
from jaxplugin.testing import (
  bench_results,
  command_lines,
  installed,
  written_modules,
)

SIZES = ("-m", "128", "-n", "256", "-k", "4096")
ANSWER_SECONDS = 30  # in which a command answers Ctrl-C on a busy machine
ONE_DOT = ("--target", "h200", "--lhs", "mxfp8", "--rhs", "mxfp8", *SIZES)


class MainTest(command_lines.CommandLineTestCase):
  def test_info_is_a_report_or_json(self):
    status, out, _ = self.run_command("info")
    self.assertEqual(status, 0)
    self.assertEqual(out.split(), jp.info().split())
    status, out, _ = self.run_command("info", "--json")
    refusals = json.loads(out)["refusals"]
    self.assertEqual(refusals["xla"]["mxfp8"], "")

  @pytest.mark.full
  def test_info_prints_no_traceback_without_a_gpu(self):
    if main.has_nvidia_gpu():
      self.skipTest("there is an NVIDIA GPU")
    environment = dict(os.environ)
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
      environment.pop(name, None)
    result = subprocess.run(
      [sys.executable, "-m", "jaxplugin", "info"],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertNotIn("Traceback", result.stderr)

  def test_warnings_of_the_package_have_no_line_of_its_source(self):
    def run(argv):
      warnings.warn_explicit("text", UserWarning, main.__file__, 1)
      warnings.warn_explicit("table", jp.TableWarning, "jax.py", 1)
      warnings.warn_explicit("text", UserWarning, "model.py", 1)
      return 0

    with (
      mock.patch.object(main, "_run", run),
      warnings.catch_warnings(record=True) as others,
    ):
      warnings.simplefilter("always")
      _, _, err = self.run_command("info")
    self.assertEqual(err, "warning: text\nwarning: table\n")
    self.assertEqual([other.filename for other in others], ["model.py"])

  def test_version_is_printed(self):
    status, out, _ = self.run_command("--version")
    self.assertEqual((status, out), (0, f"jaxplugin {jp.__version__}\n"))

  def test_console_script_runs_the_command_line(self):
    root = pathlib.Path(jp.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["jaxplugin"].split(":")
    self.assertIs(getattr(importlib.import_module(module), name), main.main)

  def test_unknown_option_prints_the_usage_of_its_command(self):
    for command, usage in (
      ((), "usage: jaxplugin COMMAND ..."),
      (("explain", "m.mlir"), "usage: jaxplugin explain "),
    ):
      status, _, err = self.run_command(*command, "--arg")
      self.assertEqual(status, 2)
      self.assertStartsWith(err, usage)
      self.assertIn("unrecognized arguments: --arg", err)

  def test_function_in_place_of_a_module_is_refused(self):
    for command in ("explain", "rewrite"):
      status, _, err = self.run_command(command, "model:step")
      self.assertEqual(status, 2)
      self.assertIn("model:step must be a file with a module; for a func", err)

  def test_help_lists_every_command_in_a_group(self):
    status, out, _ = self.run_command()
    self.assertEqual((status, out), (0, self.run_command("--help")[1]))
    for name, command in main.COMMANDS.items():
      self.assertIn(f"\n  {name:12}{command.help}\n", out)

  @parameterized.parameters(*main.COMMANDS)
  def test_help_has_an_example_and_exit_statuses(self, name):
    status, out, _ = self.run_command(name, "--help")
    self.assertEqual(status, 0)
    self.assertIn(f"examples:\n  jaxplugin {name}", out)
    self.assertIn("Exit status: 0 if it succeeds, ", out)
    self.assertEqual(" 1 if " in out, bool(main.COMMANDS[name].failure))
    if "--target" in out:
      for gpu in ("h20", "b300", "gb200", "gb300"):
        self.assertRegex(out, rf"\b{gpu}\b")

  def test_interrupted_command_exits_with_130(self):
    with mock.patch.object(
      information, "information", side_effect=KeyboardInterrupt
    ):
      status, _, err = self.run_command("info")
    self.assertEqual((status, err), (130, ""))

  @contextlib.contextmanager
  def interrupt(self, times, until=None):
    """Makes `info` a step that gets Ctrl-C, as a call of XLA would, and fails.

    It fails when `until()`, or when a thread has read the first signal.
    """
    events = []
    interruptible = main._interruptible

    @contextlib.contextmanager
    def kept():
      with interruptible() as event:
        events.append(event)
        yield event

    def step():
      for _ in range(times):
        with contextlib.suppress(KeyboardInterrupt):
          signal.raise_signal(signal.SIGINT)
      end = time.monotonic() + ANSWER_SECONDS
      while times and not (until or events[-1].is_set)():
        if time.monotonic() > end:
          break
        time.sleep(0.01)
      raise RuntimeError("ptxas failed")

    # A shell starts background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    with (
      mock.patch.object(main, "_interruptible", kept),
      mock.patch.object(information, "information", side_effect=step),
    ):
      yield

  def test_error_after_ctrl_c_is_an_interruption(self):
    with self.interrupt(times=1):
      self.assertEqual(self.run_command("info"), (130, "", ""))
    with self.interrupt(times=0):
      self.check_error(["info"], "^error: ptxas failed")

  def test_second_ctrl_c_ends_the_process(self):
    with (
      mock.patch.object(os, "_exit") as end,
      self.interrupt(times=2, until=lambda: end.called),
    ):
      self.run_command("info")
    end.assert_called_once_with(130)
    self.assertEqual(signal.set_wakeup_fd(-1), -1)

  def test_ctrl_c_in_a_long_step_is_answered(self):
    with (
      mock.patch.object(main, "_NOTICE_SECONDS", 0.01),
      self.interrupt(1, until=lambda: "Press Ctrl-C" in sys.stderr.getvalue()),
    ):
      status, _, err = self.run_command("info")
    self.assertEqual(status, 130)
    self.assertIn("Press Ctrl-C again to stop at once", err)

  def test_output_that_cannot_be_written_is_an_error(self):
    """Writes fail at once, or when the stream's buffer is flushed."""
    lines = ((), ("--help",), ("bench", "--help"), ("--version",), ("info",))
    for line in lines:
      for is_buffered in (False, True):
        with self.subTest(line=line, is_buffered=is_buffered):
          err = io.StringIO()
          with (
            open("/dev/full", "w", buffering=1 << 16) as full,
            mock.patch.object(sys, "stdout", full),
            mock.patch.object(sys, "stderr", err),
          ):
            full.reconfigure(write_through=not is_buffered)
            self.assertEqual(main.main(line), 2)
          self.assertEqual(err.getvalue(), "error: No space left on device\n")

  def test_error_that_cannot_be_written_keeps_its_status(self):
    with (
      open("/dev/full", "w", buffering=1 << 16) as full,
      mock.patch.object(sys, "stdout", io.StringIO()),
      mock.patch.object(sys, "stderr", full),
    ):
      self.assertEqual(main.main(["explain", "no.mlir"]), 2)

  def test_letters_that_the_terminal_does_not_have_are_escaped(self):
    name = "\u00e4\u2603.weight"
    path = str(self.directory / "a.safetensors")
    safetensors.numpy.save_file({name: np.ones((2, 2), np.float32)}, path)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with mock.patch.object(sys, "stdout", out):
      self.assertEqual(main.main(["checkpoint", path]), 0)
    self.assertIn(r" \xe4\u2603.weight", out.buffer.getvalue().decode())

  def test_closed_output_is_no_error(self):
    with (
      mock.patch.object(sys, "stdout", None),
      mock.patch.object(sys, "stderr", None),
    ):
      self.assertEqual(main.main(["explain", *ONE_DOT]), 0)
      self.assertEqual(main.main(["explain"]), 2)

  @parameterized.product(
    given=(
      ("explain", "-4", "must be at least 1, got -4"),
      ("explain", str(2**63), "must be at most 9223372036854775807, got 9"),
      ("explain", "1e3", "must be a whole number, got '1e3'"),
      ("explain", "0", "must be at least 1, got 0"),
      ("kernels", "0", "must be at least 1, got 0"),
    ),
    option=("-m", "-n", "-k", "--batch"),
  )
  def test_bad_size_is_refused_with_its_option(self, given, option):
    command, size, said = given
    self.check_error(
      [command, *ONE_DOT, option, size], f"argument {option}: {said}"
    )


LONG = "model.layers.{}.a_long_name_of_a_module.q_proj.weight"
DOT = "--lhs mxfp6_e2m3 --rhs mxfp6_e3m2 -m 16384 -n 128256 -k 16384"
FAST = (
  "info",
  f"explain {DOT} --target b200",
  f"explain {DOT} --verbose --target b200",
  "explain m.mlir --target b200",
  "rewrite m.mlir --target b200 -o out.mlir",
  "checkpoint model",
  "quantize model quantized --dry-run",
  "bench --show run.json",
  "bench --compare run.json run.json",
  "tune --shapes 1x4096x4096 --formats mxfp8 --target b200 --dry-run",
)
# They run compilers for seconds.
SLOW = (
  "kernels --target h200 --lhs bfloat16 --rhs nvfp4 -m 16 -n 256 -k 512",
  "compile m.mlir --target b200 --cudnn 9.13",
  "plan small --layout fsdp=2,tp=2,sp",
)


class WidthTest(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.write("m.mlir", written_modules.dot_module(m=128, n=384, k=256))
    tensors = {LONG.format(i): np.ones((64, 96), np.float32) for i in range(3)}
    (self.directory / "model").mkdir()
    safetensors.numpy.save_file(
      tensors, self.directory / "model" / "model.safetensors"
    )
    row = bench_results.row(
      bench_results.variant("cpu", 1, is_chosen=True),
      bench_results.variant("f32", 2),
      bench_results.variant("bf16", 3),
      row="experts:16384x4of128x2880x2880",
      formats="bfloat16xmxfp6_e2m3",
    )
    results.write(bench_results.run(row), self.directory / "run.json")
    before = os.getcwd()
    os.chdir(self.directory)
    self.addCleanup(os.chdir, before)
    self.enter_context(
      absltest.mock.patch.dict(os.environ, {"COLUMNS": "80", "LINES": "25"})
    )

  def check(self, *arguments):
    status, out, err = self.run_command(*arguments)
    self.assertEqual(status, 0, err)
    self.assertNotEmpty(out + err)
    for line in (out + err).splitlines():
      self.assertLessEqual(len(line), 80, line)

  def test_help(self):
    self.check("--help")
    for name in main.COMMANDS:
      self.check(name, "--help")

  def test_details_of_a_benchmark_have_120_columns(self):
    one = timing.stats([1.0])  # of one call, which a mark says
    names = ("cpu", "xla", "triton", "f32", "bf16", "a-longer-name-of-a-peer")
    row = bench_results.row(
      *(
        bench_results.variant(
          name, 1000, time=one, other_time=one, mode="step", launch_fraction=1.0
        )
        for name in names
      ),
      row="experts:16384x4of128x2880x2880",
    )
    run = bench_results.run(
      row,
      left_out=tuple(f"{i}x16384x16384 mxfp8" for i in range(9)),
      environment={**bench_results.ENVIRONMENT, "device": "A name " * 19},
    )
    lines = table.details(run).splitlines()
    self.assertLessEqual(max(map(len, lines)), 120, "\n".join(lines))
    self.assertIn("launch-bound? one call", "\n".join(lines))

  @parameterized.parameters(*FAST)
  def test_output(self, line):
    self.check(*line.split())

  @parameterized.parameters(*SLOW)
  @installed.needs_gpu_compilers
  @pytest.mark.lab
  def test_output_of_compilers(self, line):
    self.check(*line.split())
