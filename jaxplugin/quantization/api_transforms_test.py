# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""quantize, quantize_both and dequantize under vmap, grad, scan and the like.

A gradient is compared with that of the operations, or with a sum in NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings

MXFP8, MXFP8_E5M2 = formats.MXFP8, formats.MXFP8_E5M2
MXFP4, NVFP4 = formats.MXFP4, formats.NVFP4
X = lowerings.X
# Functions of an array and a format, and arguments of `quantize`.
QUANTIZERS = (quantization.quantize, quantization.quantize_both)


def both_of(format):
  """Returns a function that dequantizes both results of `quantize_both`."""
  return lambda x: [
    quantization.dequantize(q) for q in quantization.quantize_both(x, format)
  ]


class BatchingTest(parameterized.TestCase):
  def assert_same(self, actual, entries):
    """Leaves with the mapped dimension first equal those of each entry."""
    expected = jax.tree.map(lambda *a: np.stack(a), *entries)
    contract.assert_same_bits(actual, expected)

  @parameterized.product(
    format=formats.FORMATS,
    in_axis=(0, 1, 2, -1),
    arguments=({"axis": 0}, {"axis": -1}, {"axes": (-1, -2)}),
  )
  @pytest.mark.sample(6)
  def test_vmap_of_quantize_is_quantize_of_each(
    self, format, in_axis, arguments
  ):
    x = np.random.default_rng(14).normal(size=(64, 32, 96)).astype(np.float32)
    function = QUANTIZERS["axes" in arguments]
    quantize = lambda x: function(x, format, **arguments)
    actual = jax.vmap(quantize, in_axes=in_axis)(x)
    self.assert_same(actual, [quantize(a) for a in np.moveaxis(x, in_axis, 0)])

  def test_entries_that_share_a_key_have_the_bits_of_each_alone(self):
    x, key = X[:2], jax.random.key(0)
    quantize = lambda x: quantization.quantize(x, MXFP8, key=key)
    self.assert_same(jax.vmap(quantize)(x), [quantize(a) for a in x])

  @parameterized.product(
    in_axes=((0, None), (None, 0), (0, 0), (1, 0)), function=QUANTIZERS
  )
  @pytest.mark.sample(4)
  def test_vmap_over_a_given_global_scale(self, in_axes, function):
    x, g = X.reshape(4, 4, 16, 8), np.float32([1, 0.1, 3, 1e-3])
    x, (x_axis, scale_axis) = np.tile(x, (1, 1, 1, 2)), in_axes
    quantize = lambda x, g: function(x, NVFP4, global_scale=g)
    args = (x, g if scale_axis == 0 else g[1])
    actual = jax.vmap(quantize, in_axes=in_axes)(*args)
    entry = lambda a, d, i: a if d is None else np.take(a, i, d)
    self.assert_same(
      actual,
      [
        quantize(entry(args[0], x_axis, i), entry(args[1], scale_axis, i))
        for i in range(4)
      ],
    )

  @parameterized.product(
    format=formats.FORMATS,
    in_axes=(
      (0, 0, None),
      (0, None, None),
      (None, 0, None),
      (None, None, 0),
      (1, 0, 0),
      (0, 2, None),
      (2, 1, 0),
    ),
  )
  @pytest.mark.sample(11)
  def test_vmap_of_dequantize_is_dequantize_of_each(self, format, in_axes):
    q = quantization.quantize(X[:3, :3, :], format)
    g = np.float32([0.3, 7, 1e-3])
    full = (np.asarray(q.values), np.asarray(q.scale), g)
    args = [
      a[0] if d is None else np.moveaxis(a, 0, d)
      for a, d in zip(full, in_axes, strict=True)
    ]
    dequantize = lambda v, s, g: quantization.dequantize(
      scaled_array.ScaledArray(v, s, g, format)
    )
    actual = jax.vmap(dequantize, in_axes=in_axes)(*args)
    entries = [
      [a[0] if d is None else a[i] for a, d in zip(full, in_axes, strict=True)]
      for i in range(3)
    ]
    self.assert_same(actual, [dequantize(*entry) for entry in entries])

  @parameterized.parameters(MXFP8, NVFP4)
  @pytest.mark.sample(1)
  def test_vmap_of_vmap_is_each_alone(self, format):
    function = lowerings.round_trip(format)
    x = X.transpose(2, 1, 0)
    actual = jax.vmap(jax.vmap(function, in_axes=1), in_axes=2)(x)
    expected = [[function(row) for row in rows] for rows in X]
    np.testing.assert_array_equal(actual, expected)

  def test_each_vmap_may_map_the_global_scale_or_not(self):
    q = quantization.quantize(X[:3, :3, :], NVFP4)
    g = np.float32([0.3, 7, 1e-3])
    dequantize = lambda v, s, g: quantization.dequantize(
      scaled_array.ScaledArray(v, s, g, NVFP4)
    )
    values, scale = jnp.stack([q.values] * 2), jnp.stack([q.scale] * 2)
    once = jax.vmap(dequantize)
    twice = jax.vmap(once, in_axes=(0, 0, None))(values, scale, g)
    self.assert_same(twice, [once(q.values, q.scale, g)] * 2)

  @lowerings.needs_library
  def test_vmap_keeps_to_the_kernels_unless_each_entry_has_a_global_scale(self):
    for format, expected in ((MXFP8, (1, 1)), (MXFP4, (1, 1)), (NVFP4, (0, 1))):
      found = lowerings.calls(jax.vmap(lowerings.round_trip(format)), X)
      self.assertEqual(found, expected, format)
    given = lambda x: quantization.quantize(x, NVFP4, global_scale=0.1)
    self.assertEqual(lowerings.calls(jax.vmap(given), X), (1, 0))


class GradientTest(parameterized.TestCase):
  """As of the operations, which jax.jvp sees without kernels."""

  @parameterized.parameters(*formats.FORMATS)
  @pytest.mark.sample(2)
  def test_gradient_by_the_global_scale_is_the_sum_without_it(self, format):
    q = quantization.quantize(X, format)
    weight = np.random.default_rng(15).integers(-3, 4, X.shape)

    def function(g):
      x = scaled_array.ScaledArray(q.values, q.scale, g, format)
      return (quantization.dequantize(x) * weight).sum()

    bare = scaled_array.ScaledArray(q.values, q.scale, None, format)
    expected = (np.asarray(quantization.dequantize(bare), float) * weight).sum()
    g = jnp.float32(0.7)
    for f in (jax.grad(function), jax.jit(jax.grad(function))):
      np.testing.assert_allclose(f(g), expected, rtol=1e-4)
    contract.assert_same_bits(
      jax.grad(function)(g), lowerings.by_operations(jax.grad(function))(g)
    )
    _, tangent = jax.jvp(function, (g,), (jnp.float32(2),))
    np.testing.assert_allclose(tangent, 2 * expected, rtol=1e-4)

  def test_straight_through_has_a_gradient_by_the_global_scale(self):
    x = X
    q = quantization.quantize(x, NVFP4)

    def function(g):
      return quantization.dequantize(
        scaled_array.ScaledArray(q.values, q.scale, g, NVFP4, surrogate=x)
      ).sum()

    g = jnp.float32(0.7)
    np.testing.assert_allclose(
      jax.grad(function)(g), function(g) / g, rtol=1e-4
    )

  def test_gradient_under_remat_and_scan(self):
    q = quantization.quantize(X, NVFP4)

    @jax.checkpoint
    def step(g, x):
      array = scaled_array.ScaledArray(x.values, x.scale, g, NVFP4)
      return g * 1.5, jnp.tanh(quantization.dequantize(array)).sum()

    leaves = scaled_array.ScaledArray(q.values, q.scale, None, NVFP4)
    scanned = lambda g: jax.lax.scan(step, g, leaves)[1].sum()

    def unrolled(g):
      total = 0.0
      for i in range(X.shape[0]):
        x = scaled_array.ScaledArray(q.values[i], q.scale[i], g, NVFP4)
        total += jnp.tanh(quantization.dequantize(x)).sum()
        g = g * 1.5
      return total

    g = q.global_scale
    np.testing.assert_allclose(
      jax.grad(scanned)(g),
      lowerings.by_operations(jax.grad(unrolled))(g),
      rtol=1e-4,
    )


class TransformTest(parameterized.TestCase):
  @parameterized.parameters(*formats.FORMATS)
  def test_scan_is_each_step_alone(self, format):
    function = lowerings.round_trip(format)
    _, actual = jax.lax.scan(lambda c, x: (c, function(x)), 0, X)
    np.testing.assert_array_equal(actual, np.stack([function(x) for x in X]))

  @parameterized.product(format=formats.FORMATS, function=QUANTIZERS)
  @pytest.mark.sample(4)
  def test_eval_shape_is_that_of_the_result(self, format, function):
    for dtype in ("float32", "bfloat16"):
      x = X.reshape(32, 64).astype(dtype)
      quantize = lambda x: function(x, format)
      expected = quantize(x)
      shapes = jax.eval_shape(quantize, x)
      self.assertEqual(
        [(a.shape, a.dtype) for a in jax.tree.leaves(shapes)],
        [(a.shape, a.dtype) for a in jax.tree.leaves(expected)],
      )

  @parameterized.product(
    format=formats.FORMATS, round_trip=(lowerings.round_trip, both_of)
  )
  @pytest.mark.sample(5)
  def test_disabled_jit_and_no_tracing_give_the_same_bits(
    self, format, round_trip
  ):
    x, function = jnp.asarray(X.reshape(32, 64)), round_trip(format)
    expected = function(x)
    with jax.no_tracing():  # a second eager call
      contract.assert_same_bits(function(x), expected)
    with jax.disable_jit():
      contract.assert_same_bits(function(x), expected)

  def test_call_without_use_for_its_results_is_dropped(self):
    compiled = jax.jit(
      lambda x: (lowerings.round_trip(MXFP8)(x), x + 1)[1]
    ).lower(X)
    self.assertEqual(lowerings.kernel_calls(compiled.as_text()), (0, 0))
