# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writers that meet, end anywhere or find no room lose nothing."""

import dataclasses
import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
from unittest import mock

import pytest
from absl.testing import absltest

from jaxplugin.lab import file_locks
from jaxplugin.lab.tuning import store
from jaxplugin.tables import reading, records
from jaxplugin.testing import folders
from jaxplugin.testing.measured import measured_tables, users

TABLE = measured_tables.table()


class Folder(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = folders.new(self)
    self.path = self.folder / "table.json"

  def files(self):
    return sorted(p.name for p in self.folder.iterdir())


class MergeTest(Folder):
  def test_a_new_file_holds_the_table_and_its_folder_is_made(self):
    path = self.folder / "a" / "b" / "table.json"
    self.assertEqual(store.merge(path, TABLE), TABLE)
    self.assertEqual(path.read_text(), TABLE.to_text())

  def test_rows_are_put_together_and_those_of_a_problem_replaced(self):
    store.merge(self.path, TABLE)
    faster = measured_tables.candidate("xla", 1.0)
    new = records.row_of(TABLE.rows[0].problem, [faster], faster)
    more = measured_tables.row(512)
    merged = store.merge(self.path, measured_tables.table(new, more))
    self.assertEqual(merged, measured_tables.table(new, *TABLE.rows[1:], more))
    self.assertEqual(reading.read(self.path), merged)

  def test_order_of_merging_changes_no_byte(self):
    one, other = (measured_tables.table(measured_tables.row(m)) for m in (4, 8))
    store.merge(self.path, one)
    store.merge(self.path, other)
    path = self.folder / "other.json"
    store.merge(path, other)
    store.merge(path, one)
    self.assertEqual(path.read_bytes(), self.path.read_bytes())

  def test_the_later_date_stays(self):
    for date in ("2026-11-23", "2026-12-01", "2026-11-30"):
      store.merge(self.path, measured_tables.table(date=date))
    self.assertEqual(reading.read(self.path).header.date, "2026-12-01")

  def test_a_table_of_other_kernels_is_not_mixed_in(self):
    store.merge(self.path, TABLE)
    sources = dict(TABLE.header.sources)
    sources["triton"] = dataclasses.replace(sources["triton"], kernels="b" * 64)
    other = measured_tables.table(sources=tuple(sources.items()))
    with self.assertRaisesRegex(
      records.TableError, "version: sources is .*bbbb"
    ):
      store.merge(self.path, other)
    self.assertEqual(reading.read(self.path), TABLE)
    self.assertNotEqual(
      store.file_name(other.header), store.file_name(TABLE.header)
    )

  def test_a_broken_file_is_left_as_it_is(self):
    self.path.write_text(TABLE.to_text()[:100])
    with self.assertRaisesRegex(records.TableError, "truncated"):
      store.merge(self.path, TABLE)
    self.assertEqual(self.path.read_text(), TABLE.to_text()[:100])

  def test_a_link_stays_and_its_file_is_written(self):
    link = self.folder / "link.json"
    link.symlink_to(self.path)
    store.merge(link, TABLE)
    store.merge(link, measured_tables.table(measured_tables.row(512)))
    self.assertTrue(link.is_symlink())
    self.assertLen(reading.read(self.path).rows, 4)
    self.assertIn(".table.json.lock", self.files())
    self.assertNotIn(".link.json.lock", self.files())

  def test_paths_that_are_no_file_are_refused(self):
    self.path.mkdir()
    (self.folder / "file").write_text("x")
    (self.folder / "circle").symlink_to(self.folder / "circle")
    for name, message in (
      ("table.json", "Is a directory"),
      ("file/table.json", "cannot be written"),
      ("circle", "table .*symbolic links"),
    ):
      with self.assertRaisesRegex(records.TableError, message):
        store.merge(self.folder / name, TABLE)

  def test_file_is_for_others_to_read(self):
    store.merge(self.path, TABLE)
    self.assertEqual(self.path.stat().st_mode & 0o777, 0o644)

  def test_name_says_what_it_is_about(self):
    self.assertRegex(
      store.file_name(TABLE.header),
      r"^block_scaled_dot-nvidia_h200-sm_90-132-[0-9a-f]{8}\.json$",
    )


class FaultTest(Folder):
  def failing(self, name, error):
    """Makes a function of `os` fail as it does on some disks."""

    def fail(*args, **kwargs):
      raise OSError(error, os.strerror(error))

    self.enter_context(absltest.mock.patch.object(os, name, fail))

  def refused(self, message):
    more = measured_tables.table(measured_tables.row(512))
    with self.assertRaisesRegex(records.TableError, message):
      store.merge(self.path, more)
    self.assertEqual(self.path.read_text(), TABLE.to_text())
    self.assertEqual(self.files(), [".table.json.lock", "table.json"])

  def test_full_disk(self):
    store.merge(self.path, TABLE)
    for name in ("fsync", "replace"):
      with self.subTest(name):
        self.failing(name, errno.ENOSPC)
        self.refused(
          "cannot be written: No space left on device; the file was not"
        )

  def test_disk_that_is_full_for_real(self):
    """A process that may write no file of more than 200 bytes."""
    store.merge(self.path, TABLE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
      self.refused("cannot be written: File too large; the file was not")
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  def test_read_only_folder(self):
    store.merge(self.path, TABLE)
    (self.folder / ".table.json.lock").unlink()
    self.folder.chmod(0o555)
    users.become_nobody(self)
    with self.assertRaisesRegex(
      records.TableError, "Permission denied; the fi"
    ):
      store.merge(self.path, TABLE)
    self.assertEqual(reading.read(self.path), TABLE)

  def test_what_a_killed_writer_left_is_removed(self):
    store.merge(self.path, TABLE)
    (self.folder / ".table.json.new").write_text("half" * 10_000)
    (self.folder / ".other.json.new").write_text("of another table")
    store.merge(self.path, TABLE)
    self.assertEqual(
      self.files(), [".other.json.new", ".table.json.lock", "table.json"]
    )
    self.assertEqual(self.path.read_text(), TABLE.to_text())

  def test_lock_of_others_is_waited_for_and_named(self):
    store.merge(self.path, TABLE)
    with (
      mock.patch.object(file_locks, "LOCK_SECONDS", 0.05),
      (self.folder / ".table.json.lock").open() as lock,
      self.assertRaisesRegex(
        records.TableError,
        "another process holds its lock, .*lock, for more than 0.05 s",
      ),
    ):
      fcntl.flock(lock, fcntl.LOCK_EX)
      store.merge(self.path, TABLE)
    store.merge(self.path, TABLE)


class KilledWritersTest(Folder):
  @pytest.mark.full
  def test_writers_killed_at_random_lose_no_row_and_readers_read_whole(self):
    kills, rows, seed = 300, 100, 1
    command = [sys.executable, "-m", "jaxplugin.testing.measured.table_writers"]
    out = subprocess.run(
      [*command, *map(str, (self.folder, kills, rows, seed))],
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    found = json.loads(out)
    self.assertEqual(found["lost"], [])
    self.assertEqual(found["wrong_reads"], [])
    for file in found["files"]:
      self.assertNotIn("new", file)
