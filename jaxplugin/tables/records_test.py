# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records keep their rules by whomever they are made, and say who is chosen."""

import dataclasses
import itertools
import math

from absl.testing import parameterized

from jaxplugin.tables import records
from jaxplugin.testing.measured import measured_tables


def timed(name, low, median, high):
  return records.Candidate(
    implementation=name, median_us=median, interval_us=(low, high)
  )


PROBLEM = (("m", 1),)


class PolicyTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("clearly_faster_wins", (5.0, 6.0, 7.0), "other"),
    ("touching_is_a_tie", (5.0, 6.0, 9.0), "default"),
    ("overlapping_is_a_tie", (5.0, 6.0, 9.5), "default"),
    ("faster_by_a_noisy_median_is_a_tie", (1.0, 2.0, 20.0), "default"),
    ("slower_loses", (20.0, 21.0, 22.0), "default"),
  )
  def test_the_default_wins_ties_within_the_interval(self, other, winner):
    default = timed("default", 9.0, 10.0, 11.0)
    row = records.row_of(PROBLEM, [timed("other", *other), default], default)
    self.assertEqual(row.chosen.implementation, winner)

  def test_the_fastest_of_those_that_are_clearly_faster_wins(self):
    default = timed("default", 9.0, 10.0, 11.0)
    row = records.row_of(
      PROBLEM,
      # The fastest median is too uncertain to tell.
      [
        default,
        timed("a", 7.0, 7.5, 8.0),
        timed("b", 6.0, 7.0, 8.5),
        timed("c", 2.0, 6.0, 9.5),
      ],
      default,
    )
    self.assertEqual(row.chosen.implementation, "b")
    names = [c.implementation for c in row.preferred]
    self.assertEqual(names, ["b", "c", "a", "default"])

  def test_the_order_of_measuring_changes_nothing(self):
    default = timed("default", 9.0, 10.0, 11.0)
    all_of = [default, timed("a", 1.0, 2.0, 3.0), timed("b", 1.0, 2.0, 3.0)]
    rows = {
      records.row_of(PROBLEM, order, default)
      for order in itertools.permutations(all_of)
    }
    self.assertLen(rows, 1)
    self.assertEqual(rows.pop().chosen.implementation, "a")


class RecordsTest(parameterized.TestCase):
  @parameterized.parameters(
    *((size, 2 ** math.ceil(math.log2(size))) for size in range(1, 70)),
    (4095, 4096),
    (4097, 8192),
  )
  def test_bucket_is_the_power_of_two_that_covers_a_size(self, size, covered):
    self.assertEqual(records.bucket(size), covered)

  def test_same_content_is_the_same_text_whatever_its_order(self):
    rows = [measured_tables.row(m, n=n) for m in (1, 9, 64) for n in (64, 8)]
    texts = {
      records.table_of(measured_tables.header(), order).to_text()
      for order in itertools.permutations(rows)
    }
    self.assertLen(texts, 1)
    (text,) = texts
    self.assertEqual(text.count("\n"), len(rows) + 3)

  def test_sizes_are_sorted_as_numbers(self):
    table = measured_tables.table(*map(measured_tables.row, (128, 16, 1024, 2)))
    self.assertEqual([row.size("m") for row in table.rows], [2, 16, 128, 1024])

  def test_a_later_row_of_a_bucket_replaces_an_earlier_one(self):
    rows = [measured_tables.row(m) for m in (9, 16, 17, 12)]
    table = records.table_of(measured_tables.header(), rows)
    self.assertEqual([row.size("m") for row in table.rows], [12, 17])

  def test_fingerprint_is_of_what_a_table_is_about(self):
    header = measured_tables.header()
    for same in (
      dataclasses.replace(header, date="2027-01-01"),
      dataclasses.replace(header, about=()),
    ):
      self.assertEqual(same.fingerprint, header.fingerprint)
      self.assertEqual(same.identity, header.identity)
    caches = {"cold", "warm"} - {header.measured.cache}
    for change in (
      {"operation": "other"},
      {"device": dataclasses.replace(header.device, kind="other")},
      {"sources": header.sources[:1]},
      {"measured": dataclasses.replace(header.measured, cache=caches.pop())},
    ):
      other = dataclasses.replace(header, **change)
      self.assertNotEqual(other.fingerprint, header.fingerprint)
      self.assertNotEqual(other.identity, header.identity)

  def test_who_measures_is_held_to_the_rules_too(self):
    for make in (
      lambda: timed("x", 1.0, math.nan, 2.0),
      lambda: timed("x", 2.0, 1.0, 3.0),
      lambda: records.row_of(PROBLEM, [], timed("x", 1.0, 1.0, 1.0)),
      lambda: records.fields_of("config", {"a": [1]}),
      lambda: records.Candidate(
        implementation="x",
        config=(("b", 1), ("a", 1)),
        median_us=1.0,
        interval_us=(1.0, 1.0),
      ),
    ):
      with self.assertRaises(records.TableError):
        make()
