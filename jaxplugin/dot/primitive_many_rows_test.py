# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs beyond the sizes at which XLA's CPU compiler is known to fail.

With jaxlib 0.10.2 `vmap(lambda r: sum((m @ r) ** 2))` of more than 32,768 rows
of 3 gives wrong values (jax-ml/jax#39103), and some programs of rank 7 crash
(jax-ml/jax#40412). Ours are right there. Numbers are small integers, so that
NumPy's products are exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.testing import exact_numbers
from jaxplugin.testing.oracles import quantization_oracle

ROWS = 32_769
MATVEC = (((0,), (1,)), ((), ()))
RANK_7 = (2, 1, 3, 1, 2, 2, 32)
OF_3 = jp.BlockFormat(
  name="e4m3 of 3",
  values_dtype=jp.MXFP8.values_dtype,
  scale_dtype=jp.MXFP8.scale_dtype,
  block_size=3,
)


def integers(shape, seed=0):
  return exact_numbers.integers(seed, *shape)


def quantized(x, format):
  """Integers of a magnitude of up to 4, exactly, by a scale of 1."""
  blocks = (*x.shape[:-1], x.shape[-1] // format.block_size)
  return jp.ScaledArray(
    jnp.asarray(x, format.values_dtype),
    jnp.ones(blocks, format.scale_dtype),
    None,
    format,
  )


class ManyRowsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    # XLA's operations, which kernels for CPUs would replace.
    self.enter_context(targets.use_target(targets.named_target("cpu")))

  @pytest.mark.full
  def test_quantize(self):
    for format in (jp.MXFP8, jp.NVFP4):
      size = format.block_size
      for shape in ((ROWS, size), (3, ROWS, size), RANK_7):
        x = integers(shape)
        with self.subTest(format.name, shape=shape):
          result = jax.jit(lambda x, f=format: jp.quantize(x, f))(x)
          codes, scale, *_ = quantization_oracle.reference(x, format)
          quantization_oracle.assert_codes(result, codes, scale)

  def test_dequantize(self):
    for shape in ((ROWS, 32), (2, ROWS, 32), RANK_7):
      x = integers(shape)
      with self.subTest(shape=shape):
        result = jax.jit(jp.dequantize)(quantized(x, jp.MXFP8))
        np.testing.assert_array_equal(result, x)

  @pytest.mark.full
  def test_dots(self):
    w = integers((3, 32), 1)
    x = integers((ROWS, 32))
    product = x @ w.T
    batched = integers((2, 1, 3, 1, 2, 4, 32), 1)
    rank_7 = integers(RANK_7)
    product_of_7 = rank_7 @ batched.swapaxes(-1, -2)
    few, of_3 = integers((ROWS, 3)), integers((3, 3), 1)
    squares_of_3 = ((few @ of_3.T) ** 2).sum(1)
    dot = jp.block_scaled_dot
    squares = lambda rows, w: jax.vmap(
      lambda row: jnp.sum(dot(row, w, dimension_numbers=MATVEC) ** 2)
    )(rows)
    table = {
      "rows": (dot, x, w, jp.MXFP8, product),
      "columns": (lambda x, w: dot(w, x), x, w, jp.MXFP8, product.T),
      "vmap": (squares, x, w, jp.MXFP8, (product**2).sum(1)),
      "vmap of rows of 3": (squares, few, of_3, OF_3, squares_of_3),
      "rank 7": (dot, rank_7, batched, jp.MXFP8, product_of_7),
    }
    for name, (function, x, w, format, expected) in table.items():
      for lhs in (x, quantized(x, format)):
        with self.subTest(name, lhs=type(lhs).__name__):
          result = jax.jit(function)(lhs, quantized(w, format))
          np.testing.assert_array_equal(result, expected)

  @pytest.mark.full
  def test_gradients(self):
    x, w = integers((ROWS, 32)), integers((3, 32), 1)
    signs = np.sign(integers((ROWS, 3), 2))
    dot = jp.dot_general("mxfp8", "mxfp8")

    def loss(x, w):
      return jnp.sum(dot(x, w, (((1,), (1,)), ((), ()))) * signs)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    np.testing.assert_array_equal(found[0], signs @ w)
    np.testing.assert_array_equal(found[1], signs.T @ x)

  @pytest.mark.full
  def test_ragged_dot(self):
    x, w = integers((ROWS, 32)), integers((3, 8, 32), 1)
    sizes = np.array([ROWS - 12, 0, 12])
    expected = np.concatenate([x[:-12] @ w[0].T, x[-12:] @ w[2].T])
    result = jax.jit(jp.ragged_dot)(x, quantized(w, jp.MXFP8), sizes)
    np.testing.assert_array_equal(result, expected)
    _, pullback = jax.vjp(
      lambda x: jp.ragged_dot(x, quantized(w, jp.MXFP8), jnp.asarray(sizes)), x
    )
    cotangent = integers(expected.shape, 3)
    wanted = np.concatenate([cotangent[:-12] @ w[0], cotangent[-12:] @ w[2]])
    np.testing.assert_array_equal(pullback(cotangent)[0], wanted)


if __name__ == "__main__":
  absltest.main()
