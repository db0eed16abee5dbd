# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`accept_quantized` reads only the parts of weights that code takes."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax

import jaxplugin as jp
from jaxplugin.testing.models import (
  EPSILON,
  AcceptedTest,
  accepted,
  compiled,
  exact,
  normal,
  quantized,
)


def in_turn(layers, x):
  for w in layers:
    x = x @ w
  return x


EXPERTS = np.array([0, 2, 1, 1, 0])
# Each row: the function, the weight's shape and contracted dimension, and how
# many matmuls use the weight. A function has sums and products only, so that
# the same function of magnitudes bounds its rounding errors.
PARTS = {
  "layer": (lambda w, x: x @ w[1], (3, 64, 64), 1, 1),
  "layer of a small index": (lambda w, x: x @ w[small(1)], (3, 64, 64), 1, 1),
  "all layers": (in_turn, (3, 64, 64), 1, 3),
  "unstacked": (lambda w, x: in_turn(jnp.unstack(w), x), (3, 64, 64), 1, 3),
  "second stack": (lambda w, x: x @ w[:, 1][0], (2, 3, 64, 32), 2, 1),
  "layers of a layer": (
    lambda w, x: jnp.einsum("bk,ekn->ebn", x, w[1]),
    (2, 3, 64, 32),
    2,
    1,
  ),
  "some layers": (lambda w, x: in_turn(w[1:], x), (3, 64, 64), 1, 2),
  "loop": (
    lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ w[i], x),
    (3, 64, 64),
    1,
    1,
  ),
  "jnp.take": (lambda w, x: x @ jnp.take(w, -1, axis=0), (3, 64, 64), 1, 1),
  "out of range": (lambda w, x: x @ jnp.take(w, 3, axis=0), (3, 64, 64), 1, 1),
  "experts of rows": (
    lambda w, x: jnp.einsum("bk,bkn->bn", x, w[EXPERTS]),
    (3, 64, 96),
    1,
    1,
  ),
  "experts under vmap": (
    lambda w, x: jax.vmap(lambda x, i: x @ w[i])(x, jnp.asarray(EXPERTS)),
    (3, 64, 96),
    1,
    1,
  ),
  "columns": (
    lambda w, x: [x @ part for part in jnp.split(w, [32, 80], axis=1)],
    (64, 96),
    0,
    3,
  ),
  "each second column": (lambda w, x: x @ w[:, 1::2], (64, 96), 0, 1),
  "columns at a number": (
    lambda w, x: x @ lax.dynamic_slice_in_dim(w, small(100), 32, axis=1),
    (64, 200),
    0,
    1,
  ),
  "chosen columns": (lambda w, x: x @ w[:, EXPERTS], (64, 96), 0, 1),
  "joined columns": (
    lambda w, x: x @ jnp.concatenate([w[0], w[2]], axis=1),
    (3, 64, 96),
    1,
    1,
  ),
  "joined transposes": (
    lambda w, x: x @ jnp.concatenate([w[0].T, w[2].T]).T,
    (3, 64, 96),
    1,
    1,
  ),
  "joined rows": (
    lambda w, x: jnp.hstack([x, x]) @ jnp.vstack([w[0], w[2]]),
    (3, 64, 96),
    1,
    1,
  ),
  "tied embeddings": (
    lambda w, x: (w[jnp.asarray(EXPERTS)] + x) @ w.T,
    (96, 64),
    1,
    1,
  ),
  "positions": (lambda w, x: (w[:5] @ w.T, x), (96, 64), 1, 1),
  "embeddings of small tokens": (
    lambda w, x: x + jnp.take(w, small([1, 100, 3, 127, -1]), axis=0),
    (200, 64),
    1,
    0,
  ),
  "embeddings out of range": (
    lambda w, x: 2 * jnp.take(w, 95 + jnp.asarray(EXPERTS), axis=0),
    (96, 64),
    1,
    0,
  ),
}


def small(index):
  """Integers that cannot hold the size of every dimension."""
  return jnp.asarray(index, jnp.int8)


class PartsTest(AcceptedTest):
  """Code takes a part of a weight, and only this part is read."""

  @parameterized.parameters(
    *zip(PARTS, itertools.cycle(("mxfp8", "nvfp4", "int4_32")), strict=False)
  )
  def test_result_is_that_of_the_dequantized_part(self, name, format):
    function, shape, axis, num_matmuls = PARTS[name]
    w, x = quantized(normal(*shape), format, axis), normal(5, 64)
    call = accepted(function)
    arrays = exact((w, x))
    with jax.enable_x64(True):
      results = [
        function(*map(jnp.asarray, each))
        for each in (arrays, map(np.abs, arrays))
      ]
    leaves = map(jax.tree.leaves, jax.device_get([call(w, x), *results]))
    for actual, sums, magnitude in zip(*leaves, strict=True):
      self.assertEqual(actual.dtype, np.float32)
      np.testing.assert_array_equal(np.isnan(actual), np.isnan(sums))
      # Each matmul of a chain has the contract's error.
      bound = max(num_matmuls, 1) * EPSILON * magnitude
      is_wrong = np.abs(actual.astype(np.float64) - sums) > bound
      self.assertFalse(np.any(is_wrong))
    hlo = compiled(call, w, x)
    matmuls = re.findall(r'"jaxplugin_(?:block_scaled|ragged)_dot', hlo)
    self.assertLen(matmuls, num_matmuls)
    for dims in (shape, (*shape[:-2], shape[-1], shape[-2])):
      self.assertNotIn(f"f32[{','.join(map(str, dims))}]", hlo)

  def test_prepared_layers_and_their_rows_are_taken(self):
    w, x = quantized(normal(3, 64, 96), "nvfp4", 1), normal(5, 64)
    prepared = jp.prepare_weights(w, jp.named_target("cpu"))
    call = accepted(lambda w, x: x @ w[2][:, 16:48])
    np.testing.assert_array_equal(call(prepared, x), call(w, x))

  def test_ranges_of_the_blocked_dimension_are_refused(self):
    w, x = quantized(normal(64, 96), "mxfp8", 0), normal(5, 32)
    call = jax.jit(jp.accept_quantized(lambda w, x: x @ w[:32]))
    with self.assertWarnsRegex(
      UserWarning, "whole of argument 0.*slice.*blocked along.*Split the param"
    ):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w[:32], w, x)

  def test_part_that_a_matmul_contracts_otherwise_is_named(self):
    w, x = quantized(normal(3, 64, 64), "mxfp8", 1), normal(5, 64)
    call = jax.jit(jp.accept_quantized(lambda w, x: x @ w[1].T))
    with self.assertWarnsRegex(UserWarning, "a part of argument 0.*dot_gener"):
      y = call(w, x)
    self.assert_within(y, lambda w, x: x @ w[1].T, w, x)
