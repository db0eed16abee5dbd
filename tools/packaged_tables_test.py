# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tool names stale packaged tables and the command that renews them."""

import contextlib
import io
import pathlib
import tempfile
from unittest import mock

import packaged_tables
from absl.testing import absltest

from jaxplugin import __main__ as cli
from jaxplugin.tables import resolution
from jaxplugin.testing.measured import dot_tables


class PackagedTablesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(
      self.enter_context(tempfile.TemporaryDirectory())
    )
    self.enter_context(mock.patch.object(resolution, "DATA", self.folder))

  def run_tool(self, *arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      status = packaged_tables.main(arguments)
    return status, out.getvalue()

  def test_a_table_of_other_kernels_is_stale(self):
    fits = dot_tables.table(dot_tables.faster())
    changes = dot_tables.source_of(fits, "triton", kernels="0" * 64)
    stale = dot_tables.table(dot_tables.faster(), **changes)
    (self.folder / "a.json").write_text(fits.to_text())
    status, out = self.run_tool()
    self.assertEqual(status, 0, out)
    self.assertRegex(out, r"a\.json: .* 1 rows; 1 choose .*: fits\n")
    (self.folder / "b.json").write_text(stale.to_text())
    status, out = self.run_tool()
    self.assertEqual(status, 1, out)
    self.assertRegex(out, r"b\.json: .*STALE: triton \(measured 000000000000,")
    self.assertIn("tools/packaged_tables.py --make", out)

  def test_stale_tables_are_removed_before_pieces_are_measured(self):
    fits = dot_tables.table(dot_tables.faster())
    changes = dot_tables.source_of(fits, "triton", kernels="0" * 64)
    stale = dot_tables.table(dot_tables.faster(), **changes)
    (self.folder / "a.json").write_text(fits.to_text())
    (self.folder / "b.json").write_text(stale.to_text())
    with mock.patch("subprocess.run") as run:
      run.return_value.returncode = 0
      status, _ = self.run_tool("--make", "dots-avx2")
    self.assertEqual(status, 0)
    self.assertEqual([p.name for p in self.folder.iterdir()], ["a.json"])
    (command,) = run.call_args.args
    self.assertIn("avx2", command)
    self.assertEqual(command[-2:], ["-o", str(self.folder)])

  def test_pieces_are_what_tune_takes(self):
    for piece in packaged_tables.PIECES.values():
      with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(
          ["tune", *piece, "--dry-run", "--json"]
          if "--isa" not in piece
          else ["tune", *piece[2:], "--dry-run", "--json"]
        )
      self.assertEqual(status, 0, out.getvalue())
