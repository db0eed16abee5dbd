# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Blocking` agrees with NumPy."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.core import blocking

X = np.arange(2 * 3 * 5 * 7, dtype=np.float32).reshape(2, 3, 5, 7) + 1


def make(dims, lead, multiple=1):
  return blocking.Blocking(dims=dims, lead=lead, multiple=multiple)


class BlockingTest(parameterized.TestCase):
  def check(self, b, wanted, axis):
    np.testing.assert_array_equal(b.apply(jnp.asarray(X)), wanted)
    self.assertEqual(b.shape(X.shape), wanted.shape)
    self.assertEqual(b.axis(), axis)

  def test_one_dimension_stays_and_is_padded_with_zeros(self):
    wanted = np.zeros((2, 3, 8, 7), np.float32)
    wanted[:, :, :5] = X
    self.check(make((2,), (3, 1, 0), 4), wanted, 2)

  def test_several_become_the_last_in_their_order(self):
    wanted = np.zeros((5, 2, 24), np.float32)
    for i in range(3):
      for j in range(7):
        wanted[:, :, j * 3 + i] = X[:, i, :, j].T
    self.check(make((3, 1), (2, 0), 8), wanted, 2)

  def test_of_none_there_is_a_new_last_one(self):
    wanted = np.zeros((2, 3, 5, 7, 4), np.float32)
    wanted[..., 0] = X
    self.check(make((), (0, 1, 2, 3), 4), wanted, 4)

  def test_whole_multiples_are_not_padded(self):
    self.check(make((3,), (0, 1, 2), 7), X, 3)

  def test_empty_dimension_stays_empty(self):
    b = make((0, 1), (2,), 32)
    self.assertEqual(b.apply(jnp.zeros((0, 3, 2))).shape, (2, 0))
    self.assertEqual(b.shape((0, 3, 2)), (2, 0))

  @parameterized.parameters(
    ((2,), (0, 1, 3)), ((1, 2), (3, 0)), ((), (0, 1, 2, 3)), ((2, 0), (3, 1))
  )
  def test_undo_restores_the_array(self, dims, lead):
    b = make(dims, lead, 8)
    restored = b.undo(b.apply(jnp.asarray(X)), X.shape)
    np.testing.assert_array_equal(restored, X)

  @parameterized.parameters(((2,), (0, 1, 3)), ((1, 2), (3, 0)), ((), ()))
  @pytest.mark.sample(1)
  def test_under_a_leading_dimension_each_entry_is_as_alone(self, dims, lead):
    lead = lead or (0, 1, 2, 3)
    b = make(dims, lead, 4)
    stacked = jnp.stack([X, -X])
    np.testing.assert_array_equal(
      b.under_leading_dimension().apply(stacked),
      jnp.stack([b.apply(jnp.asarray(X)), b.apply(jnp.asarray(-X))]),
    )

  def test_symbolic_size_is_padded_to_a_provable_multiple(self):
    (k,) = jax.export.symbolic_shape("k")
    b = make((0, 1), (), 32)
    (size,) = b.shape((k, 3))
    self.assertTrue(size % 32 == 0)
    exported = jax.export.export(jax.jit(b.apply))(
      jax.ShapeDtypeStruct((k, 3), jnp.float32)
    )
    self.assertEqual(exported.call(jnp.ones((11, 3))).shape, (64,))
