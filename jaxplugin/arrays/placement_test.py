# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings of block-scaled arrays, parts on each device, and their matmuls."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.testing import contract
from jaxplugin.testing.meshes import explicit

M, N, K = 8, 16, 256


def quantized(format, *shape, seed=0, axis=-1):
  """Returns an array of NumPy's, whose products are exact in any order."""
  # JAX compiles a program to split an array of one device.
  x = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)
  return jax.device_get(contract.quantized(x, format, axis))


class PlacementTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.mesh = explicit.mesh(self, kind=AxisType.Auto)

  def named(self, *spec):
    return NamedSharding(self.mesh, P(*spec))

  def assert_each_device_dequantizes_its_part(self, x, placed, spec):
    """Checks that each device's leaves dequantize to its part of the array."""
    expected = contract.dequantized(x)
    parts = NamedSharding(self.mesh, P(*spec)).devices_indices_map(x.shape)
    leaves, structure = jax.tree.flatten(placed)
    for device, part in parts.items():
      local = [
        next(s.data for s in leaf.addressable_shards if s.device == device)
        for leaf in leaves
      ]
      own = jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in local])
      np.testing.assert_array_equal(contract.dequantized(own), expected[part])

  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4),
    spec=((), (("a", "b"),), (None, "b"), ("b", "a")),
    is_packed=(False, True),
  )
  @pytest.mark.sample(1)
  def test_each_device_has_whole_blocks_with_their_scales(
    self, format, spec, is_packed
  ):
    x = quantized(format, N, K)
    x = x.pack() if is_packed else x.unpack()
    placed = jp.shard(x, self.named(*spec))
    self.assertEqual(placed.values.sharding, self.named(*spec))
    self.assert_each_device_dequantizes_its_part(x, placed, spec)

  @parameterized.parameters(
    ((), ("b",), P()),
    ((4,), ("b",), P("b")),
    ((4, 1, 1), ("b",), P("b", None, None)),
    ((4, 1, 1), (None, "a"), P(None, None, None)),
    ((4, 6, 1), ("b", "a"), P("b", "a", None)),
  )
  @pytest.mark.sample(1)
  def test_global_scales_of_every_shape(self, shape, spec, expected):
    x = quantized(jp.NVFP4, 4, 6, K)
    scales = np.exp2(np.arange(np.prod(shape))).reshape(shape).astype("f")
    x = jp.ScaledArray(x.values, x.scale, jnp.asarray(scales), jp.NVFP4)
    placed = jp.shard(x, self.named(*spec))
    self.assertEqual(placed.global_scale.sharding.spec, expected)
    self.assert_each_device_dequantizes_its_part(x, placed, spec)

  def test_blocks_along_another_axis(self):
    x = quantized(jp.NVFP4, K, N, axis=0)
    for spec in (("a", "b"), ("b",), (None, ("a", "b"))):
      placed = jp.shard(x, self.named(*spec))
      self.assert_each_device_dequantizes_its_part(x, placed, spec)

  @parameterized.product(
    format=("mxfp8", "nvfp4"), spec=((None, "b"), ("a",), ("b", "a"))
  )
  @pytest.mark.sample(2)
  def test_shardings_of_a_jitted_function(self, format, spec):
    x, w = quantized(format, M, K, seed=1), quantized(format, N, K, seed=2)
    expected = jp.block_scaled_dot(x, w)
    own = jp.shardings(w, self.named(*spec))
    whole = jp.shardings(x, self.named())

    @functools.partial(
      jax.jit, in_shardings=(whole, own), out_shardings=(None, own)
    )
    def function(x, w):
      return jp.block_scaled_dot(x, w), w

    result, again = function(x, w)
    np.testing.assert_array_equal(result, expected)
    self.assertEqual(again.values.sharding.spec, P(*spec))
    contract.assert_same_bits(again, w)
    placed = jax.device_put(w, own)
    self.assert_each_device_dequantizes_its_part(w, placed, spec)

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.sample(1)
  def test_inside_jit_it_is_a_constraint(self, format):
    x, w = quantized(format, M, K, seed=1), quantized(format, N, K, seed=2)
    place = lambda w: jp.shard(w, self.named("b"))
    compiled = jax.jit(place).lower(w).compile()
    for sharding in jax.tree.leaves(compiled.output_shardings)[:2]:
      self.assertTrue(sharding.is_equivalent_to(self.named("b"), 2))
    function = jax.jit(lambda x, w: jp.block_scaled_dot(x, place(w)))
    np.testing.assert_array_equal(function(x, w), jp.block_scaled_dot(x, w))

  @parameterized.parameters((("a", "b"),), ((None, "b"),))
  @pytest.mark.sample(1)
  def test_unpacked_fp4_moves_as_bytes(self, spec):
    w = quantized(jp.NVFP4, N, K).unpack()
    placed = jp.shard(w, self.named(*spec))
    for place in (jp.shard, jax.jit(jp.shard, static_argnums=1)):
      again = place(placed, self.named("b", "a"))
      self.assertEqual(again.values.dtype, w.values.dtype)
      self.assertTrue(
        again.values.sharding.is_equivalent_to(self.named("b", "a"), 2)
      )
      self.assert_each_device_dequantizes_its_part(w, again, ("b", "a"))
    whole = jax.jit(lambda values: jp.shard(values, self.named()))
    text = whole.lower(placed.values).compile().as_text()
    moved = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather", text)
    self.assertEqual(set(moved), {"u8"})

  def test_specs_inside_set_mesh(self):
    w = quantized(jp.NVFP4, N, K)
    for kind in (AxisType.Auto, AxisType.Explicit):
      mesh = jax.make_mesh((2, 4), ("a", "b"), (kind,) * 2)
      with jax.set_mesh(mesh):
        for place in (jp.shard, jax.jit(jp.shard, static_argnums=1)):
          placed = place(w, P("b"))
          expected = NamedSharding(mesh, P("b"))
          self.assertTrue(
            placed.values.sharding.is_equivalent_to(expected, 2), placed
          )
          np.testing.assert_array_equal(
            jp.dequantize(jax.device_get(placed)), jp.dequantize(w)
          )
        self.assertEqual(jp.shardings(w, P("b")).global_scale, P(None, None))
        with self.assertRaisesRegex(TypeError, "16 over mesh axes"):
          jp.shardings(quantized(jp.NVFP4, 2, 16), P(None, "b"))

  def test_trees_of_arrays_and_of_shardings(self):
    tree = {
      "w": [quantized(jp.NVFP4, N, K), quantized(jp.MXFP8, N, K)],
      "bias": jnp.zeros(N),
    }
    placed = jp.shard(tree, {"w": self.named(None, "b"), "bias": self.named()})
    for own, x in zip(placed["w"], tree["w"], strict=True):
      self.assert_each_device_dequantizes_its_part(x, own, (None, "b"))
    self.assertTrue(placed["bias"].sharding.is_fully_replicated)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    for leaf in jax.tree.leaves(jp.shard(tree, one)):
      self.assertEqual(leaf.sharding, one)

  def test_shapes_are_enough_for_shardings(self):
    spec = jax.ShapeDtypeStruct((4, N, K), jnp.float32)
    quantize = lambda x: jp.quantize(x, jp.NVFP4, batch_dims=1)
    shapes = jax.eval_shape(quantize, spec)
    named = self.named("b", "a")
    own = jp.shardings(shapes, named)
    self.assertEqual(own.global_scale.spec, P("b", None, None))
    x = np.random.default_rng(0).normal(size=(4, N, K)).astype(np.float32)
    made = jax.jit(quantize, out_shardings=own)(x)
    self.assert_each_device_dequantizes_its_part(quantize(x), made, ("b", "a"))

  def test_weights_interleaved_for_a_gpu(self):
    w = quantized(jp.NVFP4, N, K)
    prepared = jp.prepare_weights(w, jp.named_target("a100"))
    placed = jp.shard(prepared, self.named("a", "b"))
    self.assert_each_device_dequantizes_its_part(w, placed, ("a", "b"))

  @parameterized.named_parameters(
    ("rows", lambda: quantized("nvfp4", 6, K), ("b",),
     r"dimension 0 of an array of shape \(6, 256\).*4 parts, got size 6"),
    # The bytes of 6 blocks divide by 4, but the blocks do not.
    ("blocks", lambda: quantized("nvfp4", N, 96), (None, "b"),
     "dimension 1.*4 parts of whole blocks of 16, got size 96.*pad it"),
    ("row", lambda: quantized("int8_row", N, K), (None, "b"),
     "dimension 1.*whole, because a row has one.*size 256.*split another"),
    ("rank", lambda: quantized("nvfp4", N, K), (None, None, "b"),
     r"at most 2 dimensions for an array of shape \(16, 256\)"),
    ("swizzled", lambda: jp.prepare_weights(
       quantized("nvfp4", 256, K), jp.named_target("b200")), ("a",),
     "swizzled scales must be whole on each device.*unprepare_weights"),
  )  # fmt: skip
  def test_sharding_that_cuts_blocks_is_refused(self, make, spec, message):
    array = make()
    for f in (jp.shard, jp.shardings):
      with self.assertRaisesRegex(TypeError, f"^{f.__name__}: .*{message}"):
        f(array, self.named(*spec))
      with self.assertRaisesRegex(TypeError, f"^{f.__name__}: .*{message}"):
        jax.jit(lambda x, f=f: (f(x, self.named(*spec)), x)[1])(array)

  def test_swizzled_weights_are_placed_whole(self):
    w = quantized(jp.NVFP4, 4, 24, K)
    prepared = jp.prepare_weights(w, jp.named_target("b200"))
    for spec in ((), ("b",)):
      placed = jp.shard(prepared, self.named(*spec))
      self.assert_each_device_dequantizes_its_part(w, placed, spec)

  def test_spec_needs_axes_of_a_mesh(self):
    w = quantized(jp.NVFP4, N, K)
    for f in (jp.shard, jp.shardings):
      with self.assertRaisesRegex(
        ValueError, f"^{f.__name__}: .*got 'a' in .*inside jax.set_mesh"
      ):
        f(w, P("a"))
      with (
        jax.set_mesh(self.mesh),
        self.assertRaisesRegex(
          ValueError, rf"^{f.__name__}: .*\('a', 'b'\), got 'c' in P\(None, 'c'"
        ),
      ):
        f(w, P(None, "c"))

  def test_trees_and_shardings_are_checked(self):
    w, named = quantized(jp.NVFP4, N, K), self.named("a")
    per_array = "^shard: .* is a prefix of"
    rows = (
      ({"a": w}, {"b": named}, ValueError, per_array),
      ({"a": w}, [named], ValueError, per_array),
      ({"bias": jnp.ones(4)}, self.named(None, "a"), TypeError,
       r"at most 1 .* of shape \(4,\)"),
      ({"a": "name"}, named, TypeError, "^shard: tree must .* got 'name'"),
      (named, jax.device_put(w), TypeError,
       "^shard: sharding must.*ArrayImpl"),
      (w, "b", TypeError, "^shard: sharding must be.*'b'"),
      ({"a": w, "b": [w[:5]]}, named, TypeError,
       r"^shard: \['b'\]\[0\]: dimension 0 .* got size 5"),
      ({"a": w, "b": [w[:5]]}, {"a": named, "b": named}, TypeError,
       r"^shard: \['b'\]\[0\]: dimension 0 .* got size 5"),
    )  # fmt: skip
    for tree, sharding, error, words in rows:
      with self.subTest(words), self.assertRaisesRegex(error, words):
        jp.shard(tree, sharding)
