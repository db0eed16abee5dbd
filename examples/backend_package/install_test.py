# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The example is installed as any package is, found, and held to the suite."""

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.plugins import registry
from jaxplugin.tables import reading

PACKAGE = pathlib.Path(__file__).parent
NEEDED = ("pip", "flit_core")
MODULE = "jaxplugin_blockwise"


def setUpModule():
  global folder
  missing = [x for x in NEEDED if importlib.util.find_spec(x) is None]
  if missing:
    raise unittest.SkipTest(
      f"needs {', '.join(missing)} to build a wheel; pip install '.[test]'"
    )
  # Outside of the checkout, as it is built where its sources are.
  temporary = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(temporary.cleanup)
  folder = pathlib.Path(temporary.name)
  sources = folder / "sources"
  sources.mkdir()
  for name in ("pyproject.toml", f"{MODULE}.py"):
    (sources / name).write_bytes((PACKAGE / name).read_bytes())
  subprocess.run(
    [
      *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
      *("--no-index", "--no-build-isolation", "--disable-pip-version-check"),
      *("--target", str(folder / "target"), str(sources)),
    ],
    check=True,
  )


class InstalledTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    state = registry._State(own=backends.NAMES)
    self.enter_context(mock.patch.object(registry, "_state", state))
    path = [str(folder / "target"), *sys.path]
    self.enter_context(mock.patch.object(sys, "path", path))
    self.addCleanup(sys.modules.pop, MODULE, None)
    for name in ("JAXPLUGIN_BACKENDS", "JAXPLUGIN_BACKENDS_FIRST"):
      self.enter_context(mock.patch.dict(os.environ))
      os.environ.pop(name, None)
    importlib.invalidate_caches()

  def operands(self):
    # Values times scales are beyond f32, results are not.
    rng = np.random.default_rng(0)
    scales = np.array([[254, 10], [0, 250], [127, 127]], np.uint8)
    backs = 254 - scales[:1].repeat(4, 0)
    made, exact = [], []
    for codes in (scales, backs):
      values = rng.integers(-6, 7, (len(codes), 64)).astype(np.float64)
      values[values == 5] = 4
      values[values == -5] = -4
      made.append(
        jp.ScaledArray(
          values.astype(jp.MXFP4.values_dtype),
          codes.view(jp.MXFP4.scale_dtype),
          None,
          jp.MXFP4,
        )
      )
      powers = np.exp2(codes.astype(np.float64) - 127)
      exact.append(values * powers.repeat(32, 1))
    return made, exact

  def test_it_is_found_with_its_distribution(self):
    self.assertEqual(
      jp.backends.statuses(),
      (
        jp.backends.Status(
          name="blockwise",
          origin="jaxplugin-blockwise 0.1.0",
          platforms=("cpu", "cuda", "rocm", "tpu"),
          operation="block_scaled_dot",
        ),
      ),
    )
    self.assertIn("blockwise, of jaxplugin-blockwise 0.1.0", jp.info())

  def test_it_multiplies_exactly_where_it_is_asked_for(self):
    (lhs, rhs), exact = self.operands()
    actual = jp.block_scaled_dot(lhs, rhs, implementation="blockwise")
    expected = (exact[0][:1] @ exact[1].T).astype(np.float32)
    self.assertTrue(np.isfinite(expected).all())
    np.testing.assert_array_equal(actual[:1], expected)
    (dot,) = jp.explain(jp.block_scaled_dot, lhs, rhs)
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    self.assertEqual(
      reasons["blockwise"],
      "supported, but used only if requested [jaxplugin-blockwise 0.1.0]",
    )

  def test_it_may_come_first_and_says_what_it_does_not_serve(self):
    os.environ["JAXPLUGIN_BACKENDS_FIRST"] = "blockwise"
    (lhs, rhs), _ = self.operands()
    (dot,) = jp.explain(jp.block_scaled_dot, lhs, rhs)
    self.assertEqual(dot.decision.implementation, "blockwise")
    x = np.ones((3, 64), np.float32)
    (dot,) = jp.explain(jp.block_scaled_dot, x, rhs)
    reasons = {r.implementation: r.reason for r in dot.decision.refusals}
    self.assertStartsWith(
      reasons["blockwise"],
      "needs MXFP8 or MXFP4 on both sides, got float32 as lhs",
    )


@pytest.mark.full
class MeasuredTest(absltest.TestCase):
  """`tune` and `bench` in processes that have it installed."""

  def run_command(self, *arguments, **variables):
    path = [str(folder / "target"), *filter(None, sys.path)]
    done = subprocess.run(
      [sys.executable, "-m", "jaxplugin", *arguments],
      env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables},
      cwd=folder,
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-5000:])
    return done.stdout + done.stderr

  def test_it_is_tuned_and_its_table_holds_where_it_is_installed(self):
    dot = ("--lhs", "mxfp8", "--rhs", "mxfp8", "--out", "float32")
    dot += ("-m", "2", "-n", "64", "-k", "128")
    table = folder / "table.json"
    out = self.run_command(
      *("tune", "--shapes", "2x64x128", "--formats", "mxfp8", "-o", str(table)),
      *("--implementations", "blockwise", "--rounds", "5", "--seconds", "0.05"),
      *("--processes", "1", "--workers", "1"),
    )
    self.assertRegex(out, r"\] +[0-9.]+  blockwise\n")
    header = reading.read(table).header
    self.assertEqual(
      dict(header.sources)["blockwise"].toolchain,
      (("jaxplugin-blockwise", "0.1.0"),),
    )
    tuned = {"JAXPLUGIN_TUNING": str(table)}
    out = self.run_command("explain", *dot, "--verbose", **tuned)
    self.assertIn(f"(user's table {table}: ", " ".join(out.split()))
    out = self.run_command(
      "explain", *dot, "--verbose", **tuned, JAXPLUGIN_BACKENDS="off"
    )
    self.assertIn(
      "implementation blockwise: this process has no such backend",
      " ".join(out.split()),
    )
    out = self.run_command(
      *("tune", "--shapes", "2x64x128", "--formats", "mxfp8"),
      *("--target", "h100", "--dry-run"),
    )
    self.assertIn("    blockwise\n", out)

  def test_it_is_measured_beside_others(self):
    out = self.run_command(
      *("bench", "--shapes", "2x64x128", "--formats", "mxfp8"),
      *(
        "--implementations",
        "blockwise",
        "--peers",
        "none",
        "--seconds",
        "0.1",
      ),
    )
    self.assertRegex(out, r"\n2x64x128 +mxfp8 +blockwise +[0-9.]+ ")


@pytest.mark.full
class SuiteTest(absltest.TestCase):
  def test_its_own_tests_pass_in_a_process_that_has_it_installed(self):
    path = [str(folder / "target"), *filter(None, sys.path)]
    done = subprocess.run(
      [sys.executable, str(PACKAGE / "tests" / "test_blockwise.py")],
      env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
      cwd=folder,
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-5000:])
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.M)
    skipped = re.search(r"skipped=(\d+)", done.stderr)
    self.assertIsNotNone(ran)
    count = int(ran[1]) - (int(skipped[1]) if skipped else 0)
    self.assertGreater(count, 150)
    # Exact where values times scales are beyond f32.
    self.assertRegex(done.stderr, r"OK \] \S*values_beyond_f32_are_exact")


if __name__ == "__main__":
  absltest.main()
