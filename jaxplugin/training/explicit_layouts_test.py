# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two layers trained in the usual layouts of explicit mesh axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing.meshes import explicit

B, S, D, F = 8, 64, 128, 256
NUMBERS = (((2,), (0,)), ((), ()))

# Specs of x, both weights, and the results of both matmuls.
LAYOUTS = {
  "dp": (P(("f", "t")), P(), P(), None, None),
  "fsdp": (P("f"), P("f"), P("f"), P("f"), P("f")),
  "fsdp_of_all": (P("f"), P(("f", "t")), P(("t", "f")), P("f"), P("f")),
  "tp": (P(), P(None, "t"), P("t"), None, P()),
  "tp_sp": (
    P(None, "t"),
    P(None, "t"),
    P("t"),
    P(None, None, "t"),
    P(None, "t"),
  ),
  "fsdp_tp": (P("f"), P("f", "t"), P("t", "f"), P("f", None, "t"), P("f")),
  "fsdp_tp_sp": (
    P("f", "t"),
    P("f", "t"),
    P("t", "f"),
    P("f", None, "t"),
    P("f", "t"),
  ),
  "two_dims_of_weights": (
    P("f", None, "t"),
    P("t", "f"),
    P("f", "t"),
    P("f"),
    P("f", None, "t"),
  ),
}


def _integers(seed, *shape):
  random = np.random.default_rng(seed)
  return random.integers(-2, 3, shape).astype(np.float32)


def _arrays():
  # Quantization, products and sums are all exact in MXFP8.
  arrays = _integers(0, B, S, D), _integers(1, D, F), _integers(2, F, D) / 8
  return arrays, _integers(3, B, S, D)


def _layers(dot_general, outs, arrays, c):
  x, first, second = arrays
  hidden = dot_general(x, first, NUMBERS, out_sharding=outs[0])
  result = dot_general(
    jnp.maximum(hidden, 0), second, NUMBERS, out_sharding=outs[1]
  )
  return (result * c).sum(), result


class _Layouts(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, ("f", "t"))

  def step(self, dot_general, outs):
    def function(arrays, c):
      return _layers(dot_general, outs, arrays, c)

    return jax.jit(jax.grad(function, has_aux=True))

  def check(self, layout, dot_general, bound=0):
    """Bits of one device, and the types of `lax.dot_general`.

    `bound` is of an error in units of the largest number of an array.
    """
    *specs, hidden, out = LAYOUTS[layout]
    arrays, c = _arrays()
    expected = self.step(dot_general, (None, None))(arrays, c)
    step = self.step(dot_general, (hidden, out))
    with jax.set_mesh(self.mesh):
      put = functools.partial(explicit.put, self.mesh)
      arrays = tuple(map(put, arrays, specs))
      c = put(c, specs[0] if out is None else out)
      lowered = step.lower(arrays, c)
      found = lowered.compile()(arrays, c)
      types = jax.eval_shape(
        self.step(jax.lax.dot_general, (hidden, out)), arrays, c
      )
    # All is in the types: the partitioner calls nothing back.
    text = lowered.as_text()
    self.assertNotIn("jaxplugin_partitioned", text)
    self.assertNotIn("CustomSPMDPartitioning", text)
    for actual, e, t in zip(
      *map(jax.tree.leaves, (found, expected, types)), strict=True
    ):
      atol = bound * np.abs(np.asarray(e)).max()
      np.testing.assert_allclose(actual, e, rtol=0, atol=atol)
      self.assertEqual(jax.typeof(actual).sharding, t.sharding)


class LayoutsTest(_Layouts):
  @parameterized.parameters("fsdp", "tp_sp", "fsdp_tp_sp")
  @pytest.mark.full
  def test_mxfp8(self, layout):
    self.check(layout, jp.dot_general(jp.MXFP8, jp.MXFP8))


@pytest.mark.full
class MoreLayoutsTest(_Layouts):
  """The others, and a recipe of transforms, squares and random bits."""

  @parameterized.parameters(
    "dp", "fsdp_of_all", "tp", "fsdp_tp", "two_dims_of_weights"
  )
  def test_mxfp8(self, layout):
    self.check(layout, jp.dot_general(jp.MXFP8, jp.MXFP8))

  @parameterized.parameters("fsdp_tp_sp", "two_dims_of_weights")
  def test_nvfp4_recipe(self, layout):
    dot_general = jp.dot_general(recipe=jp.training.NVFP4_RECIPE, weight="rhs")
    key = jax.random.key(0)
    # Devices exchange sums that are not integers.
    self.check(
      layout,
      lambda *args, **kw: dot_general(*args, key=key, **kw),
      bound=2.0**-20,
    )


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", explicit.NUM_DEVICES)
  absltest.main()
