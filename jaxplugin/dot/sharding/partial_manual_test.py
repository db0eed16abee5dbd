# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dots inside of a `shard_map` over some axes, the others the compiler's.

As a pipeline has its stages, or a mixture its experts: manual; and each of them
tensor parallelism: automatic.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.explanation import deviceless

NUM_DEVICES = 8
STAGES, M, N, K = 2, 16, 96, 256
NUMBERS = (((1,), (1,)), ((), ()))


def _integers(seed, *shape):
  random = np.random.default_rng(seed)
  return random.integers(-4, 5, shape).astype(np.float32)


X, W = _integers(0, STAGES, M, K), _integers(1, STAGES, N, K)
Y = np.einsum("smk,snk->smn", X, W)


def _collectives(text):
  """(operation, element type, shape) of those in optimized HLO."""
  names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  pattern = rf"= \(?(\w+)\[([\d,]*)\]\S* ({names})(?:-start)?\("
  return sorted(
    (operation, dtype, shape)
    for dtype, shape, operation in re.findall(pattern, text)
  )


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
    if jax.device_count() < NUM_DEVICES:
      self.skipTest(f"needs {NUM_DEVICES} devices, has {jax.device_count()}")

  def mesh(self, **sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)

  def compiled(self, function, mesh, args, specs, out):
    """The compiled function, and its arguments in their shardings."""

    def whole(*args):
      result = _in_stages(function, mesh)(*args)
      return jax.lax.with_sharding_constraint(result, NamedSharding(mesh, out))

    with jax.set_mesh(mesh):
      args = [
        jax.tree.map(
          lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), arg
        )
        for arg, spec in zip(args, specs, strict=True)
      ]
      return jax.jit(whole).lower(*args).compile(), args

  def check_shares(self, **sizes):
    mesh = self.mesh(**sizes)
    rows, columns = P("s", "t"), P("s", None, "t")
    w = jp.quantize(W, jp.MXFP8)
    for x_spec, w_spec, out, expected, share in (
      # Columns of the result: no gather, and a part of n each.
      (P("s"), rows, columns, [], f"[{M},{N // 4}]"),
      (rows, P("s"), rows, [], f"[{M // 4},{N}]"),
      # k: parts of the sum, that are summed in each stage.
      (columns, columns, P("s"), ["all-reduce"], f"[{M},{N}]"),
      (columns, columns, columns, ["reduce-scatter"], f"[{M},{N}]"),
    ):
      with self.subTest(str((x_spec, w_spec, out))):
        dot = lambda x, w: jp.block_scaled_dot(x, w, implementation="xla")
        compiled, args = self.compiled(dot, mesh, (X, w), (x_spec, w_spec), out)
        text = compiled.as_text()
        self.assertEqual([o for o, *_ in _collectives(text)], expected)
        dots = re.findall(r"f32(\[[\d,]+\])\S* dot\(", text)
        self.assertEqual(dots or [share], [share])
        np.testing.assert_array_equal(compiled(*args), Y)


class PartialManualTest(_Stages):
  def test_each_device_computes_its_share(self):
    self.check_shares(s=2, t=4)

  def test_several_automatic_axes_share_rows_and_columns(self):
    mesh = self.mesh(f=2, s=2, t=2)
    w = jp.quantize(W, jp.MXFP8)
    compiled, args = self.compiled(
      jp.block_scaled_dot,
      mesh,
      (X, w),
      (P("s", "t"), P("s", "f")),
      P("s", "t", "f"),
    )
    self.assertEmpty(_collectives(compiled.as_text()))
    np.testing.assert_array_equal(compiled(*args), Y)
    # Which device is which along one of them XLA does not say: k is gathered.
    both = P("s", None, "f")
    compiled, args = self.compiled(
      jp.block_scaled_dot, mesh, (X, w), (both, both), P("s", "t")
    )
    self.assertEqual(
      {d for _, d, _ in _collectives(compiled.as_text())} - {"u8"}, {"f32"}
    )
    np.testing.assert_array_equal(compiled(*args), Y)


class MorePartialManualTest(_Stages):
  @parameterized.parameters({"t": 4, "s": 2}, {"r": 1, "t": 4, "s": 2, "u": 1})
  def test_stages_may_be_any_axis(self, **sizes):
    self.check_shares(**sizes)

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  def test_training_step_equals_that_of_one_device(self, format):
    mesh = self.mesh(s=2, t=4)
    dot_general = jp.dot_general(format, format)

    def step(x, w):
      loss = lambda x, w: (dot_general(x, w, NUMBERS) ** 2).sum() * 2.0**-10
      return jnp.concatenate(jax.grad(loss, argnums=(0, 1))(x, w))

    compiled, args = self.compiled(
      step, mesh, (X, W), (P("s"), P("s", "t")), P("s")
    )
    expected = np.stack(
      [jax.jit(step)(x, w) for x, w in zip(X, W, strict=True)]
    )
    found = np.asarray(compiled(*args))
    # Sums over devices in another order: a few f32 roundings.
    np.testing.assert_allclose(
      found, expected, rtol=2.0**-20, atol=2.0**-20 * np.abs(expected).max()
    )


@absltest.skipIf(
  any(
    importlib.util.find_spec(name) is None
    for name in ("triton", "jax_cuda13_plugin")
  ),
  "triton or jax-cuda13-plugin is not installed",
)
class OptimizedTest(absltest.TestCase):
  def test_gpus_multiply_their_share_and_gather_nothing(self):
    target = jp.named_target("b200")
    mesh = deviceless.mesh(target, (2, 4), ("s", "t"))
    rows, columns, k = 512, 1024, 512

    def spec(dtype, *shape, spec):
      sharding = NamedSharding(mesh, spec)
      return jax.ShapeDtypeStruct((2, *shape), dtype, sharding=sharding)

    by_n = P("s", "t")
    w = jp.ScaledArray(
      spec(jnp.float8_e4m3fn, columns, k, spec=by_n),
      spec(jnp.float8_e8m0fnu, columns, k // 32, spec=by_n),
      None,
      jp.MXFP8,
    )
    x = jp.ScaledArray(
      spec(jnp.float8_e4m3fn, rows, k, spec=P("s")),
      spec(jnp.float8_e8m0fnu, rows, k // 32, spec=P("s")),
      None,
      jp.MXFP8,
    )

    def function(x, w):
      dot = lambda x, w: jp.block_scaled_dot(
        x, w, preferred_element_type=jnp.bfloat16
      )
      return jax.lax.with_sharding_constraint(
        _in_stages(dot, mesh)(x, w), NamedSharding(mesh, P("s", None, "t"))
      )

    text = deviceless.compile(
      function, x, w, target=target, mesh=mesh
    ).as_text()
    self.assertEmpty(_collectives(text))
    self.assertRegex(text, rf"bf16\[(1,)?{rows},{columns // 4}\]")
    self.assertNotRegex(text, rf"bf16\[(1,)?{rows},{columns}\]")


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
  absltest.main()
