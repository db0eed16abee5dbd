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


class LegsTest(absltest.TestCase):
  def test_all_is_every_test(self):
    items = [Item("a", (Mark("full"),)), Item("b", (Mark("lab"),)), Item("c")]
    self.assertEqual(names(items, "all"), ["a", "b", "c"])

  def test_test_leaves_out_full_and_lab(self):
    items = [Item("a", (Mark("full"),)), Item("b", (Mark("lab"),)), Item("c")]
    self.assertEqual(names(items), ["c"])

  def test_lab_leaves_out_full(self):
    items = [Item("a", (Mark("full"), Mark("lab"))), Item("b", (Mark("lab"),))]
    self.assertEqual(names([*items, Item("c")], "lab"), ["b"])

  def test_check_is_smoke(self):
    items = [Item("a", (Mark("smoke"),)), Item("b")]
    items += rows(9, Mark("smoke"), Mark("sample", (2,)))
    items += rows(9, Mark("smoke"), Mark("full"))
    self.assertEqual(names(items, "check"), ["a", "row0", "row8"])

  def test_sample_is_of_one_test_of_one_class(self):
    mark = Mark("sample", (2,))
    items = rows(9, mark) + rows(9, mark, parent=Class("a_test.py::Other"))
    self.assertEqual(names(items), ["row0", "row8"] * 2)

  def test_two_tests_of_a_class_have_a_sample_each(self):
    of_the_class = Mark("sample", (1,))
    items = rows(5, of_the_class) + rows(5, of_the_class)
    self.assertEqual(names(items), ["row0", "row0"])

  def test_extra_rows_are_those_of_the_seed(self):
    items = rows(50, Mark("sample", (2,)))
    choices = [names(items, extra=3, seed=seed) for seed in (1, 1, 2)]
    self.assertLen(choices[0], 5)
    self.assertContainsSubset({"row0", "row49"}, choices[0])
    self.assertEqual(choices[0], choices[1])
    self.assertNotEqual(choices[0], choices[2])

  def test_extra_rows_are_never_full(self):
    items = rows(5, Mark("sample", (1,)), Mark("full"))
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
