# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recipes with `axis_name` in a `jax.shard_map` or a `jax.vmap`."""

import dataclasses
import functools

import jax
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp

# Sums of f32 over devices, in another order, of at most 512 terms.
SUM_ERROR = 512 * 2.0**-24
MATMUL = (((1,), (0,)), ((), ()))
RECIPE = dataclasses.replace(
  jp.training.NVFP4_RECIPE, stochastic_rounding=False
)
ACROSS = dataclasses.replace(RECIPE, axis_name="d")
_RNG = np.random.default_rng(0)
# Magnitudes grow along both dimensions, so each shard has another amax.
X, W, C = (
  (_RNG.normal(size=s) * np.geomspace(1, 99, s[0])[:, None]).astype(np.float32)
  * np.geomspace(1, 9, s[1], dtype=np.float32)
  for s in ((512, 256), (256, 64), (512, 64))
)


def run(recipe, x, w, c, reduced=lambda y: y):
  """Returns the result and both gradients for the cotangent c."""
  dot = jp.dot_general(recipe=recipe, weight="rhs")
  y, transpose = jax.vjp(lambda x, w: reduced(dot(x, w, MATMUL)), x, w)
  return y, *transpose(c)


@functools.cache
def on_one_device(recipe):
  return jax.jit(lambda *args: run(recipe, *args))(X, W, C)


def gathered(w):
  return jax.lax.all_gather(w, "d", axis=0, tiled=True)


class ShardMapTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

  def outcome(self, function, in_specs, out_specs, **options):
    sharded = jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      **options,
    )
    return jax.jit(sharded)(X, W, C)

  def check(self, actual, bitwise, recipe=RECIPE):
    expected = on_one_device(recipe)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
      if i in bitwise:
        np.testing.assert_array_equal(a, e)
      bound = SUM_ERROR * np.abs(e).max()
      np.testing.assert_allclose(a, e, rtol=0, atol=bound)

  @parameterized.parameters(
    {},
    {"weight_2d": False, "wgrad_hadamard": None},
    {"four_over_six": True},
  )
  def test_data_parallel_gradients_are_those_of_one_device(self, **fields):
    specs = P("d"), P(), P("d")
    recipe = dataclasses.replace(RECIPE, **fields)
    across = dataclasses.replace(recipe, axis_name="d")
    function = lambda *args: run(across, *args)
    found = self.outcome(function, specs, (P("d"), P("d"), P()))
    self.check(found, (0, 1), recipe)

  def test_data_parallel_without_vma_differs_only_by_the_sum(self):
    def function(x, w, c):
      y, dx, dw = run(ACROSS, x, w, c)
      return y, dx, jax.lax.psum(dw, "d")

    specs = P("d"), P(), P("d")
    out = P("d"), P("d"), P()
    self.check(self.outcome(function, specs, out, check_vma=False), (0, 1))

  def test_fsdp_gradients_are_those_of_one_device(self):
    def function(x, w, c):
      dot = jp.dot_general(recipe=ACROSS, weight="rhs")
      f = lambda x, w: dot(x, gathered(w), MATMUL)
      y, transpose = jax.vjp(f, x, w)
      return y, *transpose(c)

    specs = P("d"), P("d"), P("d")
    self.check(self.outcome(function, specs, specs), (0, 1))

  def test_contracting_dimension_is_split_between_devices(self):
    reduced = lambda y: jax.lax.psum(y, "d")
    function = lambda *args: run(ACROSS, *args, reduced=reduced)
    specs = P(None, "d"), P("d"), P()
    self.check(
      self.outcome(function, specs, (P(), P(None, "d"), P("d"))), (1, 2)
    )

  def test_operand_quantized_before_shares_the_global_scale(self):
    def function(x, w, c):
      w_q = jp.quantize_operand(w, ACROSS)
      dot = jp.dot_general(recipe=ACROSS, weight="rhs")
      f = lambda x, w: dot(x, w_q.with_primal(w), MATMUL)
      y, transpose = jax.vjp(f, x, w)
      return y, *transpose(c)

    specs = P("d"), P(), P("d")
    self.check(self.outcome(function, specs, (P("d"), P("d"), P())), (0, 1))

  def test_quantize_dots_around_a_shard_map(self):
    loss = lambda x, w, c: jax.lax.psum((x @ w * c).sum(), "d")
    specs = P("d"), P(), P("d")
    inner = jax.shard_map(loss, mesh=self.mesh, in_specs=specs, out_specs=P())
    by_w = lambda w, x, c: inner(x, w, c)
    dw = jax.jit(jax.grad(jp.quantize_dots(by_w, ACROSS)))(W, X, C)
    self.check((*on_one_device(RECIPE)[:2], dw), ())

  def test_vmap_shares_the_global_scale(self):
    split = lambda a: a.reshape(8, -1, a.shape[1])
    function = jax.vmap(
      lambda *args: run(ACROSS, *args), (0, None, 0), axis_name="d"
    )
    y, dx, dw = jax.jit(function)(split(X), W, split(C))
    y, dx = y.reshape(C.shape), dx.reshape(X.shape)
    self.check((y, dx, dw.sum(0)), (0, 1))

  def test_unbound_axis_is_refused(self):
    with self.assertRaisesRegex(
      ValueError,
      "dot_general: no enclosing jax.shard_map or jax.vmap has axis 'd'.*or"
      " leave axis_name out",
    ):
      run(ACROSS, X, W, C)

  def test_axis_name_must_be_a_name(self):
    with self.assertRaisesRegex(
      TypeError, "Recipe: axis_name must be .* got 3"
    ):
      dataclasses.replace(RECIPE, axis_name=3)
    names = dataclasses.replace(RECIPE, axis_name=["d"]).axis_name
    self.assertEqual(names, ("d",))

  @parameterized.parameters("mxfp8", "nvfp4")
  def test_devices_without_rows_have_gradients_of_zeros(self, format):
    specs = P("d"), P(), P("d")
    recipe = ACROSS if format == "nvfp4" else jp.training.MXFP8_RECIPE
    sharded = jax.shard_map(
      lambda *args: run(recipe, *args),
      mesh=self.mesh,
      in_specs=specs,
      out_specs=(P("d"), P("d"), P()),
    )
    y, dx, dw = jax.jit(sharded)(X[:0], W, C[:0])
    self.assertEqual((y.shape, dx.shape), ((0, 64), (0, 256)))
    np.testing.assert_array_equal(dw, np.zeros_like(W))

  @parameterized.parameters(False, True)
  def test_explicit_axis_next_to_a_manual_one(self, is_inside):
    mesh = jax.make_mesh(
      (2, 4), ("d", "b"), axis_types=(AxisType.Explicit,) * 2
    )
    dot = jp.dot_general(recipe=jp.training.MXFP8_RECIPE, weight="rhs")

    def gradients(x, w, c):
      _, transpose = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
      return transpose(c)

    def manual(function, in_specs, out_specs):
      return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={"d"}
      )

    with jax.set_mesh(mesh):
      x, w, c = (
        jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
        for a, spec in ((X, P("d")), (W, P(None, "b")), (C, P("d", "b")))
      )
      if is_inside:
        specs = P("d"), P(), P("d")
        function = manual(gradients, specs, (P("d"), P()))
      else:
        split = manual(lambda x, w: dot(x, w, MATMUL), (P("d"), P()), P("d"))
        function = lambda x, w, c: jax.vjp(split, x, w)[1](c)
      actual = jax.jit(function)(x, w, c)
    for a, e in zip(actual, gradients(X, W, C), strict=True):
      bound = SUM_ERROR * np.abs(e).max()
      np.testing.assert_allclose(a, e, rtol=0, atol=bound)

  def test_formats_without_global_scale_ignore_axes(self):
    recipe = dataclasses.replace(jp.training.MXFP8_RECIPE, axis_name="d")
    y = jp.dot_general(recipe=recipe, weight="rhs")(X, W, MATMUL)
    e = jp.dot_general(recipe=jp.MXFP8, weight="rhs")(X, W, MATMUL)
    np.testing.assert_array_equal(y, e)


if __name__ == "__main__":
  absltest.main()
