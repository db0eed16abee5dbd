# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of `block_scaled_dot` under JAX's transformations.

Operands are integers with power-of-two scales, so every result is exact and
tests compare bits. `dots_of` finds the dots within a jaxpr.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract

PRIMITIVE: Final = "block_scaled_dot"


def array(rng, format, shape, **kwargs) -> jp.ScaledArray:
  return contract.operand(rng, format, shape, **kwargs).operand


def equations(jaxpr: Any) -> Iterator[Any]:
  """All equations of a jaxpr and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    yield from inner_equations(eqn)


def inner_equations(eqn: Any) -> Iterator[Any]:
  """All equations of the jaxprs inside of an equation."""
  for value in jax.tree.leaves(
    list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
  ):
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
      yield from equations(inner)


def count(name: str, jaxpr: Any) -> int:
  """Returns how often a primitive is in a jaxpr and in those inside it."""
  return sum(eqn.primitive.name == name for eqn in equations(jaxpr))


def dots_of(jaxpr: Any) -> list[Any]:
  return [e for e in equations(jaxpr) if e.primitive.name == PRIMITIVE]


class PrimitiveTestCase(parameterized.TestCase):
  def assert_same(self, actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    self.assertEqual(actual.dtype, expected.dtype)
    np.testing.assert_array_equal(
      actual.astype(np.float64), expected.astype(np.float64), strict=True
    )
