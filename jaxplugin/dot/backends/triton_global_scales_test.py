# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two global scales, which the kernels take one by one, and transformations.

A product of both that is another one (mapped, or a tangent) must not be
computed of the old ones. Numbers are those of Triton's interpreter.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.core import targets
from jaxplugin.dot.backends import triton
from jaxplugin.runtime import lowering
from jaxplugin.testing import contract
from jaxplugin.testing import interpreted as triton_testing
from jaxplugin.testing.meshes import explicit

M, N, K = 16, 32, 64
# Of sums of positive products, so that they are sum(|a * b|); and two roundings
# of the product of both scales, and by it.
RTOL = contract.DOT_BOUND + 2 * 2.0**-24
# A sum over the result, too, whatever its order.
RTOL_OF_SUM = RTOL + M * N * 2.0**-24


@triton_testing.needs_interpreter
class TwoGlobalScalesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    jax.clear_caches()  # what is launched is seen as it is lowered
    self.launches = []

    def called(launch, inputs, target):
      self.launches.append(launch)
      return triton_testing.interpreted(launch, inputs, target)

    self.enter_context(mock.patch.object(triton, "_call", called))
    self.enter_context(
      mock.patch.object(
        lowering,
        "resolve_target",
        lambda override, _: override or triton_testing.CPU,
      )
    )
    rng = np.random.default_rng(0)
    x, w = (
      jp.quantize(rng.integers(1, 5, (rows, K)).astype(np.float32), jp.NVFP4)
      for rows in (M, N)
    )
    # Without global scales, which no f32 loses.
    self.exact_x, self.exact_w = (
      np.float64(jp.dequantize(self.scaled(operand, 1))) for operand in (x, w)
    )
    self.x, self.w = self.scaled(x, 1.7e-20), self.scaled(w, 3.1e19)
    factors = np.float64(self.x.global_scale) * np.float64(self.w.global_scale)
    self.exact = self.exact_x @ self.exact_w.T * factors
    self.enter_context(jp.use_target(targets.named_target("h200")))

  def scaled(self, x, global_scale):
    return jp.ScaledArray(
      x.values, x.scale, jnp.float32(global_scale), x.format
    )

  def dot(self, x, w, **options):
    return jp.block_scaled_dot(x, w, implementation="triton", **options)

  def kernels_take_both(self):
    tiling = dict(self.launches[0].constexprs)["TILING"]
    return tiling.shape.has_two_global_scales

  @pytest.mark.full
  def test_kernels_take_both(self):
    result = self.dot(self.x, self.w)
    np.testing.assert_allclose(result, self.exact, rtol=RTOL)
    self.assertTrue(self.kernels_take_both())

  @pytest.mark.full
  def test_mapped_values_of_a_global_scale_that_is_not_mapped(self):
    values = jnp.stack([self.x.values, self.x.values[::-1]])
    scales = jnp.stack([self.x.scale, self.x.scale[::-1]])
    each = lambda values, scale: self.dot(
      jp.ScaledArray(values, scale, self.x.global_scale, jp.NVFP4), self.w
    )
    result = jax.vmap(each)(values, scales)
    expected = [self.exact, self.exact[::-1]]
    np.testing.assert_allclose(result, expected, rtol=RTOL)
    self.assertTrue(self.kernels_take_both())

  @parameterized.parameters("values", "one operand")
  @pytest.mark.full
  def test_mapped_global_scale(self, mapped):
    factors = jnp.float32([1, -3, 0.5])
    x = jax.tree.map(lambda a: jnp.stack([a] * 3), self.x)
    x = jp.ScaledArray(
      x.values, x.scale, self.x.global_scale * factors, jp.NVFP4
    )
    if mapped == "values":
      result = jax.vmap(self.dot, in_axes=(0, None))(x, self.w)
    else:
      each = lambda s: self.dot(self.scaled(self.x, s), self.w)
      result = jax.vmap(each)(x.global_scale)
    expected = np.float64(factors)[:, None, None] * self.exact
    np.testing.assert_allclose(result, expected, rtol=RTOL)

  @pytest.mark.full
  def test_derivative_by_a_global_scale(self):
    scale = jnp.float32(0.37)
    bare = self.scaled(self.w, 1)
    weight = jp.ScaledArray(bare.values, bare.scale, None, jp.NVFP4)

    def f(scale):
      return self.dot(self.x, weight, global_scale=scale)

    result, tangent = jax.jvp(f, (scale,), (jnp.float32(-2),))
    exact = self.exact / np.float64(self.w.global_scale)
    np.testing.assert_allclose(result, exact * np.float64(scale), rtol=RTOL)
    self.assertTrue(self.kernels_take_both())
    np.testing.assert_allclose(tangent, exact * -2, rtol=RTOL)
    gradient = jax.grad(lambda scale: f(scale).sum())(scale)
    np.testing.assert_allclose(gradient, exact.sum(), rtol=RTOL_OF_SUM)

  @pytest.mark.full
  def test_derivative_by_a_plain_side(self):
    rng = np.random.default_rng(1)
    plain = jnp.asarray(rng.integers(1, 5, (M, K)), jnp.float32)

    def f(plain):
      return self.dot(plain, self.w, global_scale=jnp.float32(0.25))

    tangent = jax.jvp(f, (plain,), (plain * 2,))[1]
    scale = np.float64(self.w.global_scale) / 4
    exact = np.float64(plain) @ self.exact_w.T * scale
    np.testing.assert_allclose(f(plain), exact, rtol=RTOL)
    np.testing.assert_allclose(tangent, exact * 2, rtol=RTOL)

  @parameterized.parameters((P("x"), P(), P("x")), (P(None, "x"),) * 2 + (P(),))
  @pytest.mark.full
  def test_explicit_axes(self, of_x, of_w, out):
    mesh = explicit.mesh(self, ("x", "y"))
    with jax.set_mesh(mesh):
      x = explicit.put(mesh, self.x, of_x)
      w = explicit.put(mesh, self.w, of_w)
      dot = lambda x, w: self.dot(x, w, out_sharding=out)
      result = jax.jit(dot)(x, w)
    np.testing.assert_allclose(result, self.exact, rtol=RTOL)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
