# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The speed of exported products: compared, timed, and written."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

import export_speed
import jax
from absl.testing import absltest

SMALL = ("--n=64", "--k=64", "--rounds=2")


class ExportSpeedTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    if jax.device_count() < export_speed.NUM_DEVICES:
      self.skipTest(f"needs {export_speed.NUM_DEVICES} devices")

  def test_it_writes_what_it_prints(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "times.json"
      argv = ["export_speed.py", *SMALL, f"--json={path}"]
      out = io.StringIO()
      # The number of devices is set before the first of them is used.
      with (
        mock.patch("sys.argv", argv),
        mock.patch.object(jax.config, "update"),
        contextlib.redirect_stdout(out),
      ):
        export_speed.main()
      written = json.loads(path.read_text())
      self.assertNotIn(folder, json.dumps(written))
    self.assertEqual(written["command"][1:], [*SMALL])
    layouts = [row["layout"] for row in written["rows"]]
    self.assertEqual(layouts, [*export_speed.LAYOUTS])
    for row in written["rows"]:
      self.assertEqual((*row["variants"],), export_speed.VARIANTS)
      self.assertEqual(row["variants"]["jit"]["times_jit"]["median"], 1)
      for variant in row["variants"].values():
        self.assertGreater(variant["ms"]["min"], 0)
    self.assertLen(out.getvalue().splitlines(), 9)

  def test_another_result_is_no_measurement(self):
    functions = export_speed.functions

    def wrong(args):
      made = functions(args)
      return made | {"jp.export": lambda x, w: made["jit"](2 * x, w)}

    patched = mock.patch.object(export_speed, "functions", wrong)
    with patched, self.assertRaises(AssertionError):
      export_speed.measure("one device", 1, 64, 64, rounds=1)
