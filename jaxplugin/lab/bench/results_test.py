# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of results, and their comparison."""

import dataclasses
import functools
import json
import operator
import os
import pathlib
from unittest import mock

from absl.testing import absltest, parameterized

from jaxplugin.lab import file_locks
from jaxplugin.lab.bench import results
from jaxplugin.testing import bench_results, folders


class FileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folders.new(self) / "r.json"

  def test_what_was_written_is_read(self):
    wrong = bench_results.variant(
      "xla", 1, status="wrong", reason="off", time=None
    )
    run = bench_results.run(
      bench_results.row(
        bench_results.variant("cpu", 2), bench_results.variant("f32", 5), wrong
      ),
      bench_results.row(
        bench_results.variant("cpu", 3, other_time=None), kind="quantize"
      ),
      left_out=("a", "b"),
    )
    results.write(run, self.path)
    self.assertEqual(results.read(self.path), run)
    self.assertEqual(os.listdir(self.path.parent), ["r.json"])
    # Earlier versions wrote one more field.
    text = self.path.read_text().replace("{", '{"startup": null,', 1)
    self.path.write_text(text)
    self.assertEqual(results.read(self.path), run)

  def test_file_says_its_schema_and_quartiles(self):
    results.write(
      bench_results.run(bench_results.row(bench_results.variant("cpu", 2))),
      self.path,
    )
    data = json.loads(self.path.read_text())
    self.assertEqual(data["schema"], 2)
    self.assertEqual(
      data["rows"][0]["variants"][0]["time"],
      dict(median=2.0, q1=1.9, q3=2.2, min=1.8, max=2.4, count=3),
    )

  def test_row_is_a_line(self):
    row = bench_results.row(bench_results.variant("cpu", 2))
    counts = []
    for rows in ((), (row,), (row, row, row)):
      results.write(bench_results.run(*rows), self.path)
      self.assertEqual(results.read(self.path).rows, rows)
      counts.append(len(self.path.read_text().splitlines()))
    self.assertEqual(counts[2] - counts[1], 2)

  @parameterized.parameters(
    ("{", "must be a file of results"),
    ("[]", "must be a file of results"),
    ('{"rows": []}', r"must be a file of results \(KeyError: 'schema'\)"),
    ('{"schema": 2, "rows": []}', "must be a file of results"),
    ('{"schema": 1}', "has schema 1, this version reads 2; run bench again"),
    ('{"schema": 7}', "has schema 7, this version reads 2"),
  )
  def test_other_files_are_refused(self, text, pattern):
    self.path.write_text(text)
    with self.assertRaisesRegex(results.ResultError, pattern):
      results.read(self.path)

  @parameterized.parameters(
    (("environment", "date"), 3, "'3' is not of type <class 'str'>"),
    (("environment", "versions"), None, "'None' is not of type <class 'dict'>"),
    (("ceilings", "read"), "1", "'1' is not of type <class 'float'>"),
    (("rows", 0, "m"), 1.5, "'1.5' is not of type <class 'int'>"),
    (("rows", 0, "variants"), "cpu", "'cpu' is not of type <class 'tuple'>"),
    (("rows", 0, "variants", 0, "status"), "fine", "'fine' is not of type"),
    (("rows", 0, "variants", 0, "time", "median"), 0, "median must be above 0"),
    (("rows", 0, "variants", 0, "time", "mean"), 1.0, "KeyError: 'mean'"),
  )
  def test_damaged_files_are_refused(self, place, value, pattern):
    row = bench_results.row(bench_results.variant("cpu", 2))
    data = json.loads(results.to_json(bench_results.run(row)))
    *path, last = place
    functools.reduce(operator.getitem, path, data)[last] = value
    self.path.write_text(json.dumps(data))
    with self.assertRaisesRegex(results.ResultError, pattern):
      results.read(self.path)

  def test_fractions_of_all_rows_are_by_the_ceilings_of_the_run(self):
    # Of 4 ms: 1e8 bytes at 25e9 a second, 2e9 operations at 450e9, and 1e8
    # bytes at 50e9. A GPU's products are measured against copies.
    ceilings = dataclasses.replace(
      bench_results.CEILINGS, copy=25e9, is_gpu=True
    )
    made = [
      ("cpu", "floats", 1, 1.0),
      ("f32", "f32", 2 * 10**9, 2 / 0.45 / 4),
      ("read", "floats", 0, 0.5),
      ("read by numpy", "floats", 0, 0.5),
    ]
    variants = [
      bench_results.variant(
        name, 4, arithmetic=arithmetic, flops=flops, roof_fraction=9
      )
      for name, arithmetic, flops, _ in made
    ]
    untimed = bench_results.variant("xla", 1, time=None, roof_fraction=0)
    run = bench_results.run(
      bench_results.row(*variants, untimed),
      bench_results.row(*variants),
      ceilings=ceilings,
    )
    for row in results.with_fractions(run).rows:
      for found, (name, *_, expected) in zip(row.variants, made, strict=False):
        with self.subTest(name):
          self.assertAlmostEqual(found.roof_fraction, expected, places=5)


class AppendTest(absltest.TestCase):
  def test_two_runs_add_rows_to_one_file(self):
    variant = bench_results.variant("cpu", 2)
    first, second, third, again = (
      bench_results.row(variant, row=row, seconds=seconds)
      for row, seconds in (("1", 1.0), ("2", 1.0), ("3", 1.0), ("1", 2.0))
    )
    folder = folders.new(self)
    path = os.path.join(folder, "r.json")
    results.append(bench_results.run(first), path)
    results.append(bench_results.run(second, again), path)
    found = results.append(bench_results.run(first, third), path)
    rows = [(row.row, row.seconds) for row in found.rows]
    self.assertEqual(rows, [("2", 1.0), ("1", 1.0), ("3", 1.0)])
    self.assertEqual(results.read(path), found)
    with (
      mock.patch.object(file_locks, "LOCK_SECONDS", 0.05),
      file_locks.locked(pathlib.Path(path)),
      self.assertRaisesRegex(TimeoutError, "another process holds its lock"),
    ):
      results.append(bench_results.run(), path)

  def test_rows_of_another_machine_are_refused(self):
    for name, value in (("device", "Another"), ("versions", {"jax": "0"})):
      earlier = bench_results.run(
        environment={**bench_results.ENVIRONMENT, name: value}
      )
      with self.assertRaisesRegex(
        results.ResultError, f"--append needs a file of the same {name}, got"
      ):
        results.joined(earlier, bench_results.run())


class CompareTest(absltest.TestCase):
  def runs(self, before_ms, after_ms):
    """Runs in which cpu takes these times, xla 10 and f32 4 ms."""
    return [
      bench_results.run(
        bench_results.row(
          bench_results.variant("cpu", ms),
          bench_results.variant("xla", 10),
          bench_results.variant("f32", 4),
        )
      )
      for ms in (before_ms, after_ms)
    ]

  def test_slower_ours_is_a_regression_beyond_the_threshold(self):
    compared = results.compare(*self.runs(1, 1.25), threshold=0.1)
    (change,) = compared.regressions
    self.assertEqual((change.ours, change.other), ("cpu", "f32"))
    self.assertAlmostEqual(change.before, 4)
    self.assertAlmostEqual(change.after, 3.2)
    self.assertAlmostEqual(change.factor, 0.8)
    for before, after, threshold in ((1, 1.25, 0.21), (1.25, 1, 0.01)):
      compared = results.compare(*self.runs(before, after), threshold)
      self.assertEmpty(compared.regressions)

  def test_ratios_between_ours_do_not_count(self):
    compared = results.compare(*self.runs(1, 1), threshold=0.1)
    self.assertEqual(
      [(c.ours, c.other) for c in compared.changes],
      [("cpu", "f32"), ("xla", "f32")],
    )

  def test_ratio_that_is_gone_is_told(self):
    before, after = self.runs(1, 1)
    after = dataclasses.replace(
      after,
      rows=(
        bench_results.row(
          bench_results.variant("cpu", 1), bench_results.variant("f32", 4)
        ),
      ),
    )
    compared = results.compare(before, after, 0.1)
    self.assertEqual(
      compared.missing, ("1x4096x4096 mxfp8->float32: xla to f32",)
    )

  def test_runs_without_a_common_ratio_are_refused(self):
    before = bench_results.run(
      bench_results.row(bench_results.variant("cpu", 1))
    )
    with self.assertRaisesRegex(results.ResultError, "must share a ratio"):
      results.compare(before, before, 0.1)
