# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every packaged table can be read, and says what kernels allow.

One that was measured with older kernels is still whole: it is refused when it
is asked, and replaced by measuring again.
"""

import pathlib
import tempfile
import warnings
from unittest import mock

from absl.testing import absltest

from jaxplugin.dot import backends
from jaxplugin.tables import reading
from jaxplugin.tables import resolution
from jaxplugin.tables import writing
from jaxplugin.testing.measured import dot_tables
from jaxplugin.testing.measured import packaged

PATHS = sorted(resolution.DATA.glob("*"))


class PackagedTest(absltest.TestCase):
  def test_names_say_what_tables_are_about(self):
    for path in PATHS:
      with self.subTest(path.name):
        header = reading.read(path).header
        self.assertEqual(path.name, writing.file_name(header))

  def test_tables_fit_their_devices_but_for_what_changed_since(self):
    for path in PATHS:
      with self.subTest(path.name):
        table = reading.read(path)
        self.assertNotEmpty(table.rows)
        self.assertEqual(packaged.misfit_but_for_sources(table), "")

  def test_tables_are_of_the_kernels_that_are_here(self):
    """Or they are told: whoever measures makes them anew."""
    stale = []
    for path in PATHS:
      try:
        changed = packaged.staleness(reading.read(path))
      except ValueError as error:
        self.skipTest(str(error))
      if changed:
        stale.append(f"{path.name}: {changed}")
    if stale:
      self.skipTest(
        f"STALE, and not used: {'; '.join(stale)}; on an idle machine:"
        " tools/packaged_tables.py --make"
      )

  def test_of_two_for_other_libraries_the_one_that_fits_is_enough(self):
    """Else each program would be told of tables for others."""
    old = dot_tables.table(dot_tables.XLA_FASTER)
    changes = dot_tables.source_of(old, "xla", toolchain=(("jaxlib", "0.1"),))
    other = dot_tables.table(dot_tables.XLA_FASTER, **changes)
    for tables, count, origin in (
      ((old, other), 0, "packaged table 0.json"),
      ((other,), 1, "rule"),
    ):
      with tempfile.TemporaryDirectory() as folder:
        for i, table in enumerate(tables):
          (pathlib.Path(folder) / f"{i}.json").write_text(table.to_text())
        with (
          mock.patch.object(resolution, "DATA", pathlib.Path(folder)),
          dot_tables.environment(XDG_CONFIG_HOME=folder),
          warnings.catch_warnings(),
        ):
          warnings.simplefilter("error")  # it is told, and nobody is warned
          decision = backends.choose(dot_tables.problem(), dot_tables.H200)
      notes = [note for note in decision.notes if "is not used" in note]
      self.assertLen(notes, count)
      self.assertEqual(decision.implementation_from, origin)

  def test_all_are_read_before_the_first_decision(self):
    read = resolution.packaged()
    self.assertEqual(read.troubles, ())
    self.assertLen(read.tables, len(PATHS))


if __name__ == "__main__":
  absltest.main()
