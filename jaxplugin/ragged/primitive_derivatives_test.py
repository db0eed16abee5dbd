# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a call by its plain operands, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
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
      return primitive.bind(call)

    of_x, of_w = jax.jit(lambda g: jax.vjp(dot, x, w)[1](g))(g)
    expected_x, expected_w = np.zeros((_M, _K)), np.zeros((3, _N, _K))
    for row, group in enumerate((0, 0, 2, 2, 2)):
      factor = scale.ravel()[{0: 0, 1: group, 2: row}[len(shape)]]
      expected_x[row] = factor * g[row] @ w[group]
      expected_w[group] += factor * np.outer(g[row], x[row])
    np.testing.assert_array_equal(of_x, expected_x)
    np.testing.assert_array_equal(of_w, expected_w)

  def test_cotangents_of_rows_of_no_group_are_not_read(self):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(_M, _K)), rng.normal(size=(3, _N, _K))

    @jax.jit
    def gradient(g):
      def dot(scale):
        call = calls.plain(jnp.float32(x), jnp.float32(w), _SIZES, 2)
        call = call.replace(global_scale=scale, activation="gelu")
        return primitive.bind(call)

      return jax.vjp(dot, jnp.float32(2))[1](g)[0]

    g = np.ones((_M, _N), np.float32)
    g[_SIZES.sum() :] = np.nan
    self.assertEqual(gradient(g), gradient(np.nan_to_num(g)))

  def test_gradient_of_a_forced_implementation_is_chosen(self):
    w = jp.quantize(np.ones((3, _N, 32), np.float32), "mxfp8")
    # The kernels for CPUs read w along its blocks; the gradient needs rows.
    dot = lambda x: jp.ragged_dot(x, w, _SIZES, implementation="cpu").sum()
    gradient = jax.jit(jax.grad(dot))(jnp.ones((_M, 32)))
    expected = np.repeat(_SIZES.sum() > np.arange(_M), 32).reshape(_M, 32) * _N
    np.testing.assert_array_equal(gradient, expected)
