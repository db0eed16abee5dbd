# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots inside of a `shard_map` over some axes, the others the compiler's.

As a pipeline has its stages, or a mixture its experts: manual; and each of them
tensor parallelism: automatic.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.lab.compilation import deviceless
from jaxplugin.testing import exact_numbers, installed
from jaxplugin.testing.exported import reading
from jaxplugin.testing.meshes import explicit

STAGES, M, N, K = 2, 16, 96, 256
X = exact_numbers.integers(0, STAGES, M, K)
W = exact_numbers.integers(1, STAGES, N, K)
Y = np.einsum("smk,snk->smn", X, W)


def _in_stages(function, mesh):
  """`function` of one stage's arrays, of arrays of all stages."""

  def inside(*args):
    own = jax.tree.map(lambda x: x[0], args)
    return jax.tree.map(lambda x: x[None], function(*own))

  return jax.shard_map(
    inside, mesh=mesh, in_specs=P("s"), out_specs=P("s"), axis_names={"s"}
  )


class _Stages(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    explicit.need_devices(self)

  def mesh(self, **sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)

  def compiled(self, function, mesh, args, specs, out):
    """The compiled function, and its arguments in their shardings.

    Args:
      out: that of the results; None leaves it to the compiler.
    """

    def whole(*args):
      result = _in_stages(function, mesh)(*args)
      if out is None:
        return result
      return jax.lax.with_sharding_constraint(result, NamedSharding(mesh, out))

    with jax.set_mesh(mesh):
      args = [
        jax.tree.map(
          lambda x, spec=spec: jax.device_put(
            np.asarray(x), NamedSharding(mesh, spec)
          ),
          arg,
        )
        for arg, spec in zip(args, specs, strict=True)
      ]
      return jax.jit(whole).lower(*args).compile(), args


class PartialManualTest(_Stages):
  @parameterized.parameters(
    {"f": 2, "s": 2, "t": 2},
    {"t": 2, "r": 1, "f": 2, "s": 2},
  )
  @pytest.mark.full
  def test_automatic_axes_gather_nothing(self, **sizes):
    mesh = self.mesh(**sizes)
    w = jp.quantize(W, jp.MXFP8)
    k_over_f, k_over_both = P("s", None, "f"), P("s", None, ("t", "f"))
    summed = lambda m, n: [("all-reduce", f"f32[{m},{n}]")]
    scattered = lambda m, n: [("reduce-scatter", f"f32[{m},{n}]")]
    for x_spec, w_spec, out, expected in (
      (P("s", "t"), P("s", "f"), P("s", "t", "f"), []),
      (P("s", "f"), P("s", "t"), P("s", "f", "t"), []),
      # k over either axis: XLA numbers devices as the result is split.
      (k_over_f, k_over_f, P("s", "t"), summed(M // 2, N)),
      (k_over_f, k_over_f, P("s", None, "t"), summed(M, N // 2)),
      (P("s", None, "t"), P("s", None, "t"), P("s", "f"), summed(M // 2, N)),
      (P("s", "t", "f"), k_over_f, P("s", "t", "f"),
       scattered(M // 2, N // 2)),
      (k_over_both, k_over_both, P("s"), summed(M, N)),
      (k_over_both, k_over_both, P("s", "f", "t"),
       scattered(M // 2, N // 2) + scattered(M // 2, N)),
    ):  # fmt: skip
      with self.subTest(str((x_spec, w_spec, out))):
        compiled, args = self.compiled(
          jp.block_scaled_dot, mesh, (X, w), (x_spec, w_spec), out
        )
        self.assertEqual(reading.collectives(compiled), expected)
        np.testing.assert_array_equal(compiled(*args), Y)

  @parameterized.parameters((P("s", "t", "f"),), (P("s", None, ("t", "f")),))
  @pytest.mark.sample(1)
  def test_what_is_quantized_has_the_bits_of_its_stage(self, spec):
    mesh = self.mesh(f=2, s=2, t=2)
    key = jax.random.key(0)

    def function(x):
      return jax.tree.leaves(
        (jp.quantize(x, jp.NVFP4), jp.quantize(x, jp.MXFP4, key=key))
      )

    compiled, args = self.compiled(function, mesh, (X,), (spec,), None)
    # The largest magnitude of a stage, and nothing else.
    collectives = [("all-reduce", "u32[1,1]")]
    self.assertEqual(reading.collectives(compiled), collectives)
    expected = zip(*map(function, X), strict=True)
    for have, want in zip(compiled(*args), expected, strict=True):
      self.assertEqual(np.asarray(have).tobytes(), np.stack(want).tobytes())

  def test_one_block_is_contracted_where_no_mesh_is_known(self):
    x, w = X[0, :, :32], W[0, :, :32]
    with jax.set_mesh(self.mesh(s=2, t=4)):
      result = jax.jit(jp.block_scaled_dot)(x, jp.quantize(w, jp.MXFP8))
    np.testing.assert_array_equal(result, x @ w.T)


class ExplicitAxesTest(parameterized.TestCase):
  """The axes that are not manual are explicit."""

  @parameterized.parameters(
    (None, "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp8", None), (None, "uint4_32_min")
  )
  def test_gradients_are_those_of_numpy(self, *operand_formats):
    explicit.need_devices(self)
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("s", "t"), axis_types=kinds)
    # Minima and scales of blocks with both extrema are powers of two.
    w = W.copy()
    w[..., ::32], w[..., 1::32] = -8, 7
    g = exact_numbers.integers(2, STAGES, M, N)

    def dot(x, w):
      given = [
        x
        if name is None
        else jp.quantize(x, name, derivative="straight_through")
        for x, name in zip((x, w), operand_formats, strict=True)
      ]
      return jp.block_scaled_dot(*given)

    def gradients(x, w, g):
      return jax.vjp(dot, x, w)[1](g)

    with jax.set_mesh(mesh):
      rows = jax.device_put(X, NamedSharding(mesh, P(None, "t")))
      weights = jax.device_put(w, NamedSharding(mesh, P()))
      cotangent = jax.device_put(g, NamedSharding(mesh, P(None, "t")))
      found = jax.jit(_in_stages(gradients, mesh))(rows, weights, cotangent)
    np.testing.assert_array_equal(found[0], g @ w)
    np.testing.assert_array_equal(found[1], np.swapaxes(g, 1, 2) @ X)


@installed.needs_gpu_compilers
class OptimizedTest(absltest.TestCase):
  ROWS, COLUMNS, K = 512, 1024, 512

  def compiled(self, mesh_shape, names, x_spec, w_spec, out):
    """Compiles a dot of MXFP8 in each stage for GPUs."""
    target = jp.named_target("b200")
    mesh = deviceless.mesh(target, mesh_shape, names)

    def quantized(rows, spec):
      def array(dtype, *shape):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((2, *shape), dtype, sharding=sharding)

      return jp.ScaledArray(
        array(jnp.float8_e4m3fn, rows, self.K),
        array(jnp.float8_e8m0fnu, rows, self.K // 32),
        None,
        jp.MXFP8,
      )

    def function(x, w):
      dot = lambda x, w: jp.block_scaled_dot(
        x, w, preferred_element_type=jnp.bfloat16
      )
      return jax.lax.with_sharding_constraint(
        _in_stages(dot, mesh)(x, w), NamedSharding(mesh, out)
      )

    return deviceless.compile(
      function,
      quantized(self.ROWS, x_spec),
      quantized(self.COLUMNS, w_spec),
      target=target,
      mesh=mesh,
    )

  @pytest.mark.full
  def test_gpus_multiply_their_share_and_gather_nothing(self):
    compiled = self.compiled(
      (2, 4), ("s", "t"), P("s"), P("s", "t"), P("s", None, "t")
    )
    self.assertEmpty(reading.collectives(compiled))
    text = compiled.as_text()
    self.assertRegex(text, rf"bf16\[(1,)?{self.ROWS},{self.COLUMNS // 4}\]")
    self.assertNotRegex(text, rf"bf16\[(1,)?{self.ROWS},{self.COLUMNS}\]")

  @pytest.mark.full
  def test_gpus_sum_along_the_axis_that_has_k(self):
    k_over_f = P("s", None, "f")
    compiled = self.compiled(
      (2, 2, 2), ("f", "s", "t"), k_over_f, k_over_f, P("s", "t")
    )
    summed = f"f32[{self.ROWS // 2},{self.COLUMNS}]"
    self.assertEqual(reading.collectives(compiled), [("all-reduce", summed)])
    # Devices 4 apart differ in their place along "f" alone.
    (groups,) = re.findall(
      r"replica_groups=(.*?), use_global", compiled.as_text()
    )
    self.assertIn(
      groups,
      (
        "{{0,4},{1,5},{2,6},{3,7}}",
        "[4,2]<=[2,4]T(1,0)",
        "mesh['f'=2,'others_s'=2,'t'=2] {'f'}",
      ),
    )
