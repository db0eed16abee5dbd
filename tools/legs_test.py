# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each leg of conftest.py runs the tests that its description names."""

import dataclasses
import functools
from collections.abc import Callable

from absl.testing import absltest

import conftest


@dataclasses.dataclass(frozen=True)
class Mark:
  name: str
  args: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Class:
  nodeid: str


@dataclasses.dataclass(frozen=True)
class Item:
  """The part of a pytest item that conftest.py reads."""

  name: str
  marks: tuple[Mark, ...] = ()
  parent: Class = Class("a_test.py::Test")
  obj: Callable = lambda: None
  cls: type | None = None
  path: str = "a_test.py"

  def get_closest_marker(self, name):
    return next((mark for mark in self.marks if mark.name == name), None)

  def iter_markers(self):
    return iter(self.marks)


def names(items, leg="test", extra=0, seed=0):
  return [item.name for item in conftest.chosen(items, leg, extra, seed)]


def rows(count, *marks, parent=Class("a_test.py::Test")):
  """Returns the rows of one parameterized test: wrappers of one function."""
  test = lambda number: number
  wrap = lambda number: functools.wraps(test)(lambda: test(number))
  return [Item(f"row{i}", marks, parent, wrap(i)) for i in range(count)]


class SampledTest(absltest.TestCase):
  def test_sample_is_evenly_spaced_with_both_ends(self):
    self.assertEqual(conftest.sampled([*range(10)], 1), [0])
    self.assertEqual(conftest.sampled([*range(10)], 2), [0, 9])
    self.assertEqual(conftest.sampled([*range(10)], 4), [0, 3, 6, 9])
    self.assertEqual(conftest.sampled([*range(3)], 5), [0, 1, 2])

  def test_sample_has_no_row_twice(self):
    for total in range(1, 40):
      for count in range(1, total + 1):
        sample = conftest.sampled([*range(total)], count)
        self.assertLen(set(sample), count)


FULL, LAB, SMOKE = Mark("full"), Mark("lab"), Mark("smoke")
TWO = Mark("sample", (2,))
# Items, a leg and its tests.
LEGS = (
  ([Item("a", (FULL,)), Item("b", (LAB,)), Item("c")], "all", ["a", "b", "c"]),
  ([Item("a", (FULL,)), Item("b", (LAB,)), Item("c")], "test", ["c"]),
  ([Item("a", (FULL, LAB)), Item("b", (LAB,)), Item("c")], "lab", ["b"]),
  ([Item("a", (SMOKE,)), Item("b"), *rows(9, SMOKE, TWO),
    *rows(9, SMOKE, FULL)], "check", ["a", "row0", "row8"]),
  # A sample is of one test of one class.
  (rows(9, TWO) + rows(9, TWO, parent=Class("a_test.py::Other")), "test",
    ["row0", "row8"] * 2),
  # A class is sampled: its two tests have a sample each.
  (rows(5, TWO) + rows(5, TWO), "test", ["row0", "row4"] * 2),
)  # fmt: skip


class LegsTest(absltest.TestCase):
  def test_leg_has_the_tests_of_its_marks(self):
    for items, leg, expected in LEGS:
      with self.subTest(leg, expected=expected):
        self.assertEqual(names(items, leg), expected)

  def test_extra_rows_are_those_of_the_seed(self):
    items = rows(50, TWO)
    choices = [names(items, extra=3, seed=seed) for seed in (1, 1, 2)]
    self.assertLen(choices[0], 5)
    self.assertContainsSubset({"row0", "row49"}, choices[0])
    self.assertEqual(choices[0], choices[1])
    self.assertNotEqual(choices[0], choices[2])

  def test_extra_rows_are_never_full(self):
    items = rows(5, Mark("sample", (1,)), FULL)
    self.assertEqual(names(items, extra=10), [])


class SkipsTest(absltest.TestCase):
  def test_each_file_keeps_one_skip_for_each_reason(self):
    gpu = absltest.skip("needs a GPU")(type("Gpu", (), {}))
    tpu = absltest.skip("needs a TPU")(type("Tpu", (), {}))
    skipped_row = absltest.skip("needs a GPU")(lambda: None)
    items = [
      Item("a", cls=gpu),
      Item("b", cls=gpu),
      Item("c", cls=tpu),
      Item("d", obj=skipped_row),
      Item("e"),
      Item("f", cls=gpu, path="b_test.py"),
    ]
    kept = conftest.without_repeated_skips(items)
    self.assertEqual([item.name for item in kept], ["a", "c", "e", "f"])
