# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Equal data have equal encodings, other data different ones, or an error."""

import dataclasses
import enum

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxplugin.jaxext import partitioner_private


class Colour(enum.Enum):
  RED = 1


class Shade(enum.Enum):
  RED = 1


@dataclasses.dataclass(frozen=True)
class Point:
  x: int
  y: object = None


@dataclasses.dataclass(frozen=True)
class Other(Point):
  pass


DISTINCT = (
  *(None, True, 1, 1.0, "1", b"1", "True", "None", 0.1 + 0.2, 0.3, -0.0, 0.0),
  *((), [], {}, set(), frozenset(), (1,), (1, 2), ((1,), 2), (1, (2,)), "1,2"),
  *(("a,b",), ("a", "b"), {"a": 1}, {"a": "1"}, {"a": 1, "b": 2}),
  *(Colour.RED, Shade.RED, Point(1), Other(1), Point(1, 2), Point((1, 2))),
  *(np.dtype(np.float32), jnp.dtype(jnp.float8_e4m3fn), "dtype float32"),
)


class EncodingTest(parameterized.TestCase):
  def test_different_values_have_different_encodings(self):
    texts = [partitioner_private.encode(value) for value in DISTINCT]
    self.assertLen(set(texts), len(DISTINCT))

  def test_order_counts_where_it_means_something(self):
    encode = partitioner_private.encode
    self.assertEqual(encode({"a": 1, "b": 2}), encode({"b": 2, "a": 1}))
    self.assertEqual(encode({"x", "y", "z"}), encode({"z", "y", "x"}))
    self.assertNotEqual(encode((1, 2)), encode((2, 1)))

  @parameterized.named_parameters(
    ("a_function", lambda: None),
    ("an_object", object()),
    ("an_array", np.zeros(2)),
    ("a_class", Point),
    ("a_subclass_of_int", type("Int", (int,), {})(1)),
  )
  def test_what_is_no_plain_data_is_refused(self, value):
    for held in (value, [value], {"a": value}, Point(1, value)):
      with self.assertRaisesRegex(
        partitioner_private.NoEncodingError, "plain data"
      ):
        partitioner_private.encode(held)
