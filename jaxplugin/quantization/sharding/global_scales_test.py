# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of an array, in `shard_map`, get the global scale of all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit


def numbers(*shape):
  """A part in one corner has the largest, another is zero, one has a NaN."""
  x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
  x[..., :16, :16] *= 1e3
  x[..., -16:, :16] = 0
  x[..., 20, 20] = np.nan
  return x


class NamedAxesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, ("x", "y"), AxisType.Auto, (4, 2))

  def mapped(self, function, in_specs, out_specs, **kwargs):
    mapped = jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, **kwargs
    )
    return jax.jit(mapped)

  def of_parts(self, function, spec):
    """`function`, of parts: leaves are split as x is, global scales are not."""

    def leaves(x):
      result = function(x)
      each = result if isinstance(result, tuple) else (result,)
      return [leaf for q in each for leaf in (q.values, q.scale)], [
        q.global_scale for q in each
      ]

    # check_vma: a global scale is known to be the same everywhere.
    return self.mapped(leaves, spec, (spec, P()), check_vma=True)

  @parameterized.parameters(
    (jp.quantize, P("x", "y"), ("x", "y")),
    (functools.partial(jp.quantize, axis=0), P("y", "x"), ["x", "y"]),
    (jp.quantize, P("x"), "x"),
    (jp.quantize_both, P("x", "y"), ("y", "x")),
  )
  @pytest.mark.sample(2)
  def test_bits_are_those_of_the_whole_array(self, quantize, spec, names):
    x = numbers(128, 256)
    function = self.of_parts(
      lambda x: quantize(x, jp.NVFP4, axis_name=names), spec
    )
    expected = jax.tree.leaves(jax.jit(lambda x: quantize(x, jp.NVFP4))(x))
    whole = [a for a in expected if a.size > 1]
    scales = [a for a in expected if a.size == 1]
    actual, actual_scales = function(x)
    contract.assert_same_bits(actual, whole)
    contract.assert_same_bits(actual_scales, scales)
    # One maximum for the tensor, along however many axes.
    text = function.lower(x).as_text()
    self.assertEqual(text.count("stablehlo.all_reduce"), 1)

  def test_without_it_each_part_has_its_own(self):
    x = numbers(128, 256)
    scale_of = lambda x: jp.quantize(x, jp.NVFP4).global_scale
    scales = self.mapped(scale_of, P("x", "y"), P("x", "y"))(x)
    self.assertLen(np.unique(scales), 8)

  def test_axes_over_which_x_is_not_split_change_nothing(self):
    x = numbers(32, 64)
    scale_of = lambda x: jp.quantize(
      x, jp.NVFP4, axis_name=("x", "y")
    ).global_scale
    expected = jp.quantize(x, jp.NVFP4).global_scale
    for spec in (P(), P("y")):
      np.testing.assert_array_equal(
        self.mapped(scale_of, spec, P())(x), expected
      )

  def test_each_array_of_a_batch_has_the_scale_of_all_its_parts(self):
    x = numbers(3, 32, 64)
    scale_of = lambda x: jp.quantize(
      x, jp.NVFP4, batch_dims=1, axis_name="x"
    ).global_scale
    np.testing.assert_array_equal(
      self.mapped(scale_of, P(None, "x"), P())(x),
      jp.quantize(x, jp.NVFP4, batch_dims=1).global_scale,
    )

  def test_names_of_vmap_are_taken(self):
    x = numbers(4, 32, 64)
    quantize = lambda x: jp.quantize(x, jp.NVFP4, axis_name="i").global_scale
    scales = jax.vmap(quantize, axis_name="i")(x)
    whole = jp.quantize(x, jp.NVFP4).global_scale
    np.testing.assert_array_equal(scales, np.tile(whole[0], (4, 1, 1)))

  def test_names_of_vmap_and_of_the_mesh_go_together(self):
    x = numbers(2, 64, 64)
    scale_of = jax.vmap(
      lambda x: jp.quantize(x, jp.NVFP4, axis_name=("i", "x")).global_scale,
      axis_name="i",
      out_axes=None,
    )
    # JAX's own maximum over an axis of `vmap` fails with check_vma here.
    function = self.mapped(scale_of, P(None, "x"), P(), check_vma=False)
    whole = jp.quantize(x, jp.NVFP4).global_scale
    np.testing.assert_array_equal(function(x), whole[0])

  def test_derivative_is_that_without_it(self):
    x = numbers(32, 64)
    x[np.isnan(x)] = 1

    def loss(x):
      q = jp.quantize(x, jp.NVFP4, axis_name="x", derivative="straight_through")
      return jax.lax.psum(jnp.sum(jp.dequantize(q) ** 2), "x")

    grad = jax.jit(jax.grad(self.mapped(loss, P("x"), P())))(x)
    np.testing.assert_array_equal(
      grad, 2 * jp.dequantize(jp.quantize(x, jp.NVFP4))
    )

  def test_formats_without_global_scales_are_as_ever(self):
    x = numbers(32, 64)
    function = self.mapped(
      lambda x: jp.dequantize(jp.quantize(x, jp.MXFP8, axis_name="x")),
      P("x"),
      P("x"),
    )
    expected = jp.dequantize(jp.quantize(x, jp.MXFP8))
    np.testing.assert_array_equal(function(x), expected)
    self.assertNotIn("all_reduce", function.lower(x).as_text())

  @parameterized.parameters(jp.quantize, jp.quantize_both)
  def test_names_that_are_not_bound_are_refused(self, quantize):
    x = np.ones((128, 64), np.float32)
    name = quantize.__name__
    with self.assertRaisesRegex(
      ValueError, f"^{name}: no enclosing .* has axis 'z'"
    ):
      self.mapped(
        lambda x: quantize(x, jp.MXFP8, axis_name=("x", "z")), P("x"), P("x")
      )(x)
    with self.assertRaisesRegex(
      ValueError, "axis_name='x'. Name an axis of one that is"
    ):
      quantize(x, jp.NVFP4, axis_name="x")
    with self.assertRaisesRegex(TypeError, "or a tuple of names, got 3"):
      quantize(x, jp.NVFP4, axis_name=3)
    with self.assertRaisesRegex(
      ValueError, "if global_scale is given, got axis_name='i'; leave"
    ):
      jax.vmap(
        lambda x: quantize(x[None], jp.NVFP4, axis_name="i", global_scale=1.0),
        axis_name="i",
      )(np.ones((2, 64, 64), np.float32))
