# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a call by its plain operands, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.ragged import calls
from jaxplugin.ragged import primitive

_SIZES = np.array([2, 0, 3], np.int32)
_M, _N, _K = 6, 4, 8


class GradientsTest(parameterized.TestCase):
  @parameterized.parameters(((),), ((3,),), ((_M, 1),))
  @pytest.mark.sample(1)
  def test_both_have_the_global_scale(self, shape):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)
    x, w, g = draw(_M, _K), draw(3, _N, _K), draw(_M, _N)
    scale = np.exp2(np.arange(1, np.prod(shape, dtype=int) + 1)).reshape(shape)

    def dot(x, w):
      call = calls.plain(x, w, _SIZES, 2)
      call = call.replace(global_scale=jnp.float32(scale))
      return primitive.bind(call, None)

    of_x, of_w = jax.jit(lambda g: jax.vjp(dot, x, w)[1](g))(g)
    expected_x, expected_w = np.zeros((_M, _K)), np.zeros((3, _N, _K))
    for row, group in enumerate((0, 0, 2, 2, 2)):
      factor = scale.ravel()[{0: 0, 1: group, 2: row}[len(shape)]]
      expected_x[row] = factor * g[row] @ w[group]
      expected_w[group] += factor * np.outer(g[row], x[row])
    np.testing.assert_array_equal(of_x, expected_x)
    np.testing.assert_array_equal(of_w, expected_w)


if __name__ == "__main__":
  absltest.main()
