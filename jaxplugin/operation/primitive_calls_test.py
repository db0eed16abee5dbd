# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls as parameters of primitives."""

import dataclasses
from typing import Any

from absl.testing import absltest

from jaxplugin.operation import primitive


@dataclasses.dataclass(frozen=True)
class _Side:
  name: str
  values: Any = None
  scale: Any = None

  def replace(self, **changes):
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call(primitive.OperationCall):
  ARRAYS = primitive.paths_of_two_sides("bias", "sizes")

  lhs: _Side
  rhs: _Side
  bias: Any = None
  sizes: Any = None
  activation: str | None = None


_CALL = _Call(
  lhs=_Side("lhs", [1]), rhs=_Side("rhs", [2], [3]), sizes=[4], activation="a"
)


class CallTest(absltest.TestCase):
  def test_arrays_are_those_that_are_not_none_in_order(self):
    self.assertEqual(
      list(_CALL.arrays().items()),
      [("lhs", [1]), ("rhs", [2]), ("rhs_scale", [3]), ("sizes", [4])],
    )

  def test_form_is_hashable_and_equal_whatever_the_arrays_are(self):
    other = _CALL.with_arrays(lhs=[9], rhs=[8], rhs_scale=[7], sizes=[6])
    self.assertEqual(hash(_CALL.form()), hash(other.form()))
    self.assertEqual(_CALL.form(), other.form())
    self.assertNotEqual(_CALL.form(), _CALL.replace(activation=None).form())
    self.assertNotEqual(_CALL.form(), _CALL.with_arrays(bias=[1]).form())
    self.assertNotEqual(_CALL.form(), _CALL.with_arrays(rhs_scale=None).form())

  def test_form_filled_with_its_arrays_is_the_call(self):
    self.assertEqual(_CALL.form().filled(_CALL.flatten()), _CALL)
    with self.assertRaises(ValueError):
      _CALL.form().filled([1, 2])

  def test_both_fields_of_a_side_change_at_once(self):
    changed = _CALL.with_arrays(lhs=[5], lhs_scale=[6], bias=[7])
    self.assertEqual(changed.lhs, _Side("lhs", [5], [6]))
    self.assertEqual(changed.rhs, _CALL.rhs)
    self.assertEqual(changed.bias, [7])
    with self.assertRaises(KeyError):
      _CALL.with_arrays(activation="b")


if __name__ == "__main__":
  absltest.main()
