# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks slowdowns of held-out rows, on tables with known answers."""

from absl.testing import absltest

from jaxplugin.lab.tuning import session
from jaxplugin.tables import lookup
from jaxplugin.tables import records
from jaxplugin.testing.measured import measured_tables


def timed(name, median_us):
  return records.Candidate(
    implementation=name,
    median_us=median_us,
    interval_us=(median_us, median_us),
  )


def row(m, triton_us, xla_us, n=64):
  """Triton is the default."""
  triton, xla = timed("triton", triton_us), timed("xla", xla_us)
  problem = records.fields_of("problem", {"m": m, "n": n})
  return records.row_of(problem, [triton, xla], triton)


def table(*rows):
  return records.table_of(measured_tables.header(), rows)


class NearestTest(absltest.TestCase):
  def found(self, m, *sizes):
    rows = table(*(row(size, 1.0, 2.0) for size in sizes))
    problem = records.fields_of("problem", {"m": m, "n": 64})
    near = lookup.nearest(rows, problem)
    return [(distance, row.size("m")) for distance, row in near]

  def test_nearest_first_and_of_two_the_one_of_more_rows(self):
    self.assertEqual(
      self.found(64, 16, 32, 64, 128, 256),
      [(0, 64), (1, 128), (1, 32), (2, 256), (2, 16)],
    )

  def test_nothing_beyond_two_buckets(self):
    self.assertEqual(self.found(64, 8, 512), [])
    self.assertEqual(self.found(1, 1, 2, 3, 5), [(0, 1), (1, 2), (2, 3)])

  def test_a_row_is_found_by_its_bucket(self):
    self.assertEqual(self.found(100, 65), [(0, 65)])

  def test_other_sizes_are_as_measured(self):
    rows = table(row(64, 1.0, 2.0))
    problem = records.fields_of("problem", {"m": 64, "n": 65})
    self.assertEqual(list(lookup.nearest(rows, problem)), [])
    problem = records.fields_of("problem", {"m": 64, "n": 64, "batch": 2})
    self.assertEqual(list(lookup.nearest(rows, problem)), [])


class SlowdownTest(absltest.TestCase):
  def test_neighbours_that_choose_alike_lose_nothing(self):
    found = session.held_out(table(row(16, 10.0, 5.0), row(32, 20.0, 8.0)))
    self.assertEqual(found.slowdowns, (1.0, 1.0))
    self.assertIn("1.000 times", str(found))

  def test_slowdown_is_of_what_the_neighbour_chose(self):
    # At 16 rows Triton is right, at 32 XLA, each measured four times slower by
    # the other's choice.
    found = session.held_out(table(row(16, 1.0, 4.0), row(32, 12.0, 3.0)))
    self.assertEqual(found.slowdowns, (4.0, 4.0))
    self.assertIn("take 4.000 times as long", str(found))
    self.assertIn("at worst 4.000", str(found))

  def test_without_a_neighbour_the_rule_chooses(self):
    found = session.held_out(table(row(16, 9.0, 3.0), row(1024, 1.0, 2.0)))
    self.assertEqual(found.slowdowns, ())
    self.assertEqual([r.slowdown for r in found.rows], [3.0, 1.0])
    self.assertIn("2 without a neighbour", str(found))

  def test_a_choice_that_was_not_measured_is_counted_and_not_guessed(self):
    triton = timed("triton", 9.0)
    alone = records.row_of(
      records.fields_of("problem", {"m": 16, "n": 64}), [triton], triton
    )
    found = session.held_out(table(alone, row(32, 9.0, 3.0)))
    self.assertEqual(found.unmeasured, 1)
    self.assertEqual(found.slowdowns, (3.0,))
    self.assertIn(
      "1 whose neighbour chose a candidate that was not measured", str(found)
    )

  def test_a_choice_that_cannot_compute_is_not_followed(self):
    found = session.held_out(
      table(row(16, 4.0, 2.0), row(32, 9.0, 3.0)),
      lambda row, candidate: candidate.implementation != "xla",
    )
    self.assertEqual(found.slowdowns, (2.0, 3.0))

  def test_an_empty_table_has_none(self):
    self.assertEqual(str(session.held_out(table())), "no rows")


if __name__ == "__main__":
  absltest.main()
