# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Joining and splitting block-scaled arrays equals the same for their floats.

Nothing is quantized again, so all results are equal in all bits.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.testing import contract, folders

FORMATS = formats.FORMATS
B200, A100 = jp.named_target("b200"), jp.named_target("a100")


def quantized(
  format, *shape, seed=0, axis=-1, largest=1.0, batch_dims=0, global_scale=None
):
  """Returns what `jp.quantize` may return, by NumPy."""
  x = np.random.default_rng(seed).normal(size=shape) * largest
  if not format.has_global_scale:
    return contract.quantized(x, format, axis)
  if global_scale is None:
    dims = tuple(range(batch_dims, x.ndim))
    global_scale = np.abs(x).max(dims, keepdims=True) / (6 * 448)
  scale = np.float32(global_scale).reshape(np.shape(global_scale) or (1, 1))
  # `contract.quantized` has a global scale of 0.5.
  array = contract.quantized(x * 0.5 / scale, format, axis)
  return with_global_scale(array, jax.device_put(scale))


nvfp4 = functools.partial(quantized, jp.NVFP4)


def with_global_scale(x, scale):
  return jp.ScaledArray(x.values, x.scale, scale, x.format)


floats = contract.dequantized


def assert_indexed(x, *indices):
  """Checks that indexing x selects the same of its floats."""
  parts = jax.jit(lambda x: [x[index] for index in indices])(x)
  for index, part in zip(indices, parts, strict=True):
    np.testing.assert_array_equal(floats(part), floats(x)[index])


class IndexTest(parameterized.TestCase):
  @parameterized.parameters(
    (jp.MXFP8, False), (jp.NVFP4, False), (jp.NVFP4, True)
  )
  @pytest.mark.full
  def test_index_selects_the_same_floats(self, format, is_packed):
    x = quantized(format, 4, 5, 64, batch_dims=1)
    x = x.pack() if is_packed else x.unpack()
    expected = floats(x)
    for index in (
      2,
      -1,
      np.int32(1),
      np.int64(-4),
      np.uint8(3),
      np.array(-1),
      slice(1, 3),
      slice(None, None, -2),
      slice(np.int64(-9), np.int32(-1), np.int64(2)),
      (slice(None), 3),
      (slice(None), slice(1, 4), slice(None)),
      (..., slice(0, 2), slice(None)),
      (3, 0),
      ...,
      np.array([3, 0, 3]),
      np.array([[1, 2], [3, 0]]),
      (slice(None), np.array([4, 1])),
      (np.array([0, 3]), np.array([4, 1])),
      np.array([True, False, True, True]),
      (slice(None), np.array([True] * 4 + [False])),
      slice(2, 2),
    ):
      with self.subTest(str(index)):
        actual = x[index]
        self.assertEqual(actual.is_packed, x.is_packed)
        np.testing.assert_array_equal(floats(actual), expected[index])

  @parameterized.parameters(*reversed(FORMATS))
  @pytest.mark.sample(1)
  def test_indexed_array_keeps_its_only_global_scale(self, format):
    x = quantized(format, 4, 5, 64)
    assert_indexed(x, 2, slice(1, 3), np.array([3, 0]), (np.array([1]), 2))
    if format.has_global_scale:
      for index, shape in (
        (1, (1, 1)),
        (np.array([3, 0]), (1, 1, 1)),
        (np.array([[1, 2], [3, 0]]), (1, 1, 1, 1)),
      ):
        part = jax.eval_shape(lambda x, index=index: x[index], x)
        self.assertEqual(part.global_scale.shape, shape)

  def test_global_scales_of_every_shape(self):
    array = quantized(jp.NVFP4, 4, 5, 64)
    items = 2, slice(1, 3), (slice(None), 3)
    scales = [
      np.exp2(np.arange(np.prod(shape, dtype="i4"), dtype="f")).reshape(shape)
      for shape in ((), (1,), (1, 1, 1, 1), (4,), (4, 5), (1, 5, 1), (4, 5, 1))
    ]
    arrays = [with_global_scale(array, scale) for scale in scales]
    found = jax.jit(lambda x: [[a[i].global_scale for i in items] for a in x])
    for scale, parts in zip(scales, found(arrays), strict=True):
      rows = scale.reshape((*scale.shape, 1, 1, 1)[:3])
      whole = np.broadcast_to(rows, array.shape)
      for item, part in zip(items, parts, strict=True):
        expected = whole[item]
        part = np.broadcast_to(part, expected.shape)
        np.testing.assert_array_equal(part, expected, f"{scale.shape}[{item}]")
    assert_indexed(arrays[-1], *items)

  def test_blocks_along_another_axis(self):
    x = quantized(jp.NVFP4, 64, 4, 6, axis=0)
    assert_indexed(
      x, (slice(None), 2), (..., slice(0, 3)), (slice(0, 64), 1, 2)
    )

  def test_index_that_is_traced(self):
    x = quantized(jp.NVFP4, 4, 5, 64, batch_dims=1)
    expected = floats(x)
    for array in (x, jax.tree.map(np.asarray, x)):
      take = jax.jit(lambda i, array=array: jp.dequantize(array[i]))
      for index in (np.int32(3), np.array([1, 1, 0])):
        np.testing.assert_array_equal(take(index), expected[index])

  def test_layer_of_a_stack_has_its_number(self):
    x = quantized(jp.MXFP8, 4, 5, 64)
    indices = (0, 2, -1, np.int32(-4), jnp.int32(-2))
    read = jax.jit(lambda x: [x[index].layer_of()[1] for index in indices])
    self.assertEqual([int(i) for i in read(x)], [0, 2, 3, 0, 2])

  @parameterized.parameters(2, -1, np.int64(2))
  def test_index_of_a_symbolic_size(self, index):
    x = quantized(jp.NVFP4, 4, 5, 64, batch_dims=1)
    (size,) = jax.export.symbolic_shape("size")
    shapes = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), x
    )
    take = jax.jit(lambda x: jp.dequantize(x[index]))
    actual = jax.export.export(take)(shapes).call(x)
    np.testing.assert_array_equal(actual, floats(x)[index])

  def test_index_next_to_a_blocked_dimension_of_symbolic_size(self):
    x = floats(quantized(jp.MXFP8, 4, 5, 64))
    (k,) = jax.export.symbolic_shape("k")
    take = jax.jit(lambda x: jp.quantize(x, "mxfp8")[2, 1:].dequantize())
    shape = jax.ShapeDtypeStruct((4, 5, 32 * k), x.dtype)
    actual = jax.export.export(take)(shape).call(x)
    np.testing.assert_array_equal(actual, x[2, 1:])
    cut = lambda x: jp.quantize(x, "mxfp8")[2, :, :32]
    with self.assertRaisesRegex(TypeError, "dimension 2 .*taken whole"):
      jax.export.export(jax.jit(cut))(shape)

  def test_a_loop_ends(self):
    x = quantized(jp.NVFP4, 3, 5, 64, batch_dims=1)
    rows = [floats(row) for row in x]
    np.testing.assert_array_equal(np.stack(rows), floats(x))

  def test_weights_prepared_for_a_gpu(self):
    for target in (B200, A100):
      x = quantized(jp.NVFP4, 4, 5, 64, batch_dims=1)
      prepared = jp.prepare_weights(x, target)
      np.testing.assert_array_equal(floats(prepared), floats(x))
      assert_indexed(prepared, 2, slice(1, 3), np.array([3, 0]))

  @parameterized.named_parameters(
    ("blocks", (slice(None), slice(None), slice(0, 32)), TypeError,
     r"dimension 2 of shape \(4, 5, 64\).*got index slice\(0, 32.*quantize it"),
    ("blocked_int", (0, 0, 0), TypeError, "dimension 2.*got index 0"),
    ("bounds", 4, IndexError, r"4 is out of bounds for dimension 0.*\(4, 5"),
    ("low_bounds", (0, -6), IndexError, "-6 is out of bounds for dimension 1"),
    *(
      (name, index, IndexError, f"{index} is out of bounds for")
      for name, index in (
        ("numpy_bounds", np.int64(9)),
        ("numpy_unsigned_bounds", np.uint8(4)),
        ("numpy_low_bounds", np.int32(-5)),
        ("numpy_0d_bounds", np.array(4)),
      )
    ),
    ("numpy_0d_low_bounds", (..., np.array(-6), slice(None)), IndexError,
     "-6 is out of bounds for dimension 1"),
    ("many", (0, 0, slice(None), 0), IndexError, "3 other items for shape"),
    ("new_axis", None, TypeError, r"None, got None; .*call jaxplugin.stack"),
    ("new_axis_among_blocks", (0, 0, None), TypeError, "must not contain None"),
    ("many_new_axes", (0, None, 0, None), TypeError, "must not contain None"),
    ("name", "x", TypeError, "for dimension 0 'x'"),
    ("floats", np.ones(2), TypeError, "for dimension 0"),
    ("bool", True, TypeError, "for dimension 0 True"),
    ("numpy_bool", np.bool_(True), TypeError, r"for dimension 0 bool\(True\)"),
    ("bool_0d", np.array(True), TypeError, r"for dimension 0 bool\[\]"),
    ("mask", np.ones((4, 5), bool), TypeError, "for dimension 0"),
  )  # fmt: skip
  def test_unsupported_index_is_refused(self, index, error, message):
    with self.assertRaisesRegex(error, f"ScaledArray: .*{message}"):
      quantized(jp.NVFP4, 4, 5, 64)[index]

  def test_rows_of_swizzled_scales_are_refused(self):
    x = jp.prepare_weights(quantized(jp.NVFP4, 4, 5, 64), B200)
    with self.assertRaisesRegex(TypeError, "dimension 1.*unprepare_weights"):
      x[:, 2]


OF_LAYERS = np.array([[[0.5]], [[0.25]]], np.float32)


def joined_cases():
  """Returns arrays, an axis, and the joined global scale or its shape."""
  of_rows = OF_LAYERS[..., 0]
  rows = [
    nvfp4(2, 64, seed=i, batch_dims=1, global_scale=of_rows) for i in range(2)
  ]
  own, none = nvfp4(3, 64), with_global_scale(nvfp4(3, 64, seed=1), None)
  layers = [nvfp4(2, n, 64, batch_dims=1) for n in (3, 4)]
  stack = nvfp4(3, 64, batch_dims=1)
  equal = [nvfp4(n, 64, seed=n, global_scale=0.01) for n in (3, 5)]
  each = [with_global_scale(x, jnp.array(OF_LAYERS)) for x in layers]
  return {
    "equal numbers": (equal, 0, (1, 1)),
    "equal ones of layers": (each, 1, OF_LAYERS),
    "equal ones of rows, more rows": (rows, 0, np.tile(of_rows, (2, 1))),
    "equal ones of rows, longer rows": (rows, 1, of_rows),
    "one is missing": ([own, none], 0, (6, 1)),
    "both are missing": ([none, none], 0, None),
    "an array and itself": ([stack, stack], 0, (6, 1)),
    "those of other dimensions": (layers, 1, (2, 7, 1)),
  }


class ConcatenateTest(parameterized.TestCase):
  @parameterized.parameters(
    (jp.MXFP6_E2M3, 0, False),
    (jp.MXFP8, 0, False),
    (jp.NVFP4, 0, False),
    (jp.NVFP4, 1, True),
    (jp.MXFP4, -2, True),
  )
  @pytest.mark.sample(2)
  def test_concatenate_joins_the_floats(self, format, axis, jit):
    shapes = [[2, 3, 64], [2, 3, 64], [2, 3, 64]]
    for i, shape in enumerate(shapes):
      shape[axis] += i
    arrays = [
      quantized(format, *shape, seed=i, largest=10.0**i)
      for i, shape in enumerate(shapes)
    ]
    join = lambda *arrays: jp.concatenate(arrays, axis)
    joined = (jax.jit(join) if jit else join)(*arrays)
    expected = np.concatenate([floats(x) for x in arrays], axis)
    np.testing.assert_array_equal(floats(joined), expected)

  def test_global_scales_are_joined_unless_they_are_equal(self):
    for name, (arrays, axis, expected) in joined_cases().items():
      with self.subTest(name):
        joined = jp.concatenate(arrays, axis)
        np.testing.assert_array_equal(
          floats(joined), np.concatenate([floats(x) for x in arrays], axis)
        )
        scale = joined.global_scale
        if expected is None or isinstance(expected, tuple):
          self.assertEqual(None if scale is None else scale.shape, expected)
        else:
          np.testing.assert_array_equal(scale, expected)

  def test_traced_global_scale_of_several_arrays_stays_one(self):
    """All have one tracer."""
    for scale, axis in ((OF_LAYERS, 1), (OF_LAYERS[:1, 0], 0)):
      arrays = [nvfp4(*scale.shape[:-2], n, 64, seed=n) for n in (3, 5)]
      join = jax.jit(
        lambda scale, arrays, axis=axis: jp.concatenate(
          [with_global_scale(x, scale) for x in arrays], axis
        )
      )
      joined = join(scale, arrays)
      np.testing.assert_array_equal(joined.global_scale, scale)
      own = [floats(with_global_scale(x, scale)) for x in arrays]
      np.testing.assert_array_equal(floats(joined), np.concatenate(own, axis))

  @parameterized.parameters(*FORMATS)
  @pytest.mark.sample(2)
  def test_along_the_blocks(self, format):
    kwargs = {"global_scale": 0.01} if format.has_global_scale else {}
    arrays = [quantized(format, 3, k, seed=k, **kwargs) for k in (64, 32)]
    expected = np.concatenate([floats(x) for x in arrays], 1)
    for stored in (arrays, [arrays[0], arrays[1].unpack()]):
      joined = jp.concatenate(stored, -1)
      np.testing.assert_array_equal(floats(joined), expected)

  def test_weights_prepared_for_a_gpu(self):
    arrays = [quantized(jp.NVFP4, 128, 64, seed=i) for i in range(2)]
    expected = np.concatenate([floats(x) for x in arrays])
    for target in (B200, A100):
      prepared = [jp.prepare_weights(x, target) for x in arrays]
      joined = jp.concatenate(prepared)
      self.assertEqual(joined.scale_layout, prepared[0].scale_layout)
      np.testing.assert_array_equal(floats(joined), expected)
    small, whole = (
      jp.prepare_weights(x, B200) for x in (arrays[0][:5], arrays[1])
    )
    np.testing.assert_array_equal(
      floats(jp.concatenate([whole, small])),
      np.concatenate([floats(whole), floats(small)]),
    )
    with self.assertRaisesRegex(
      NotImplementedError, r"multiples of 128, got shapes.*\(5, 64\)"
    ):
      jp.concatenate([small, whole])

  def test_arrays_that_do_not_match_are_refused(self):
    rows = (
      ([nvfp4(3, 64, seed=i) for i in range(2)], 1, TypeError,
       "same global scale.*blocked axis 1.*same global_scale"),
      ([quantized(f, 3, 64) for f in (jp.NVFP4, jp.MXFP4)], 0, TypeError,
       "same format, got nvfp4 and mxfp4"),
      ([nvfp4(3, k) for k in (64, 32)], 0, TypeError,
       r"but in axis 0, got \(3, 64\) and \(3, 32\)"),
      ([nvfp4(64, 64, axis=a) for a in (0, 1)], 0, TypeError,
       "blocked along the same axis, got 0 and 1"),
      ([nvfp4(3, 64), np.ones((3, 64))], 0, TypeError,
       "must be ScaledArrays, got ndarray"),
      (nvfp4(3, 64), 0, TypeError, "sequence of ScaledArrays"),
      ([], 0, ValueError, "at least one element, got none"),
      ([nvfp4(3, 64)], 2, ValueError, "from -2 to 1 for rank 2, got 2"),
      (None, 0, TypeError, "must be a sequence .* got None"),
    )  # fmt: skip
    for arrays, axis, error, words in rows:
      with (
        self.subTest(words),
        self.assertRaisesRegex(error, f"^concatenate: .*{words}"),
      ):
        jp.concatenate(arrays, axis)

  def test_leaves_joined_by_themselves_are_refused_where_they_do_not_fit(self):
    # jnp.concatenate of each leaf joins the global scales of two weights.
    x, y = (quantized(jp.NVFP4, 3, 64, seed=i) for i in range(2))
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), x, y)
    for use in (
      jp.dequantize,
      lambda w: jp.block_scaled_dot(x, w),
      lambda w: w[0],
    ):
      with self.assertRaisesRegex(
        TypeError, r"global_scale.*float32\[2, 1\].*\(6, 64\).*concatenate"
      ):
        use(joined)


class StackTest(parameterized.TestCase):
  @parameterized.product(format=(jp.MXFP8, jp.NVFP4), axis=(0, 1, -1))
  @pytest.mark.sample(1)
  def test_stack_stacks_the_floats(self, format, axis):
    arrays = [
      quantized(format, 3, 64, seed=i, largest=10.0**i) for i in range(4)
    ]
    expected = np.stack([floats(x) for x in arrays], axis)
    np.testing.assert_array_equal(floats(jp.stack(arrays, axis)), expected)

  @parameterized.parameters(*FORMATS)
  @pytest.mark.sample(1)
  def test_tree_map_stacks_and_takes_apart(self, format):
    arrays = [
      quantized(format, 3, 64, seed=i, largest=10.0**i) for i in range(4)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    self.assertEqual(
      [x.shape for x in jax.tree.leaves(stacked)],
      [x.shape for x in jax.tree.leaves(jp.stack(arrays))],
    )
    expected = np.stack([floats(x) for x in arrays])
    np.testing.assert_array_equal(floats(stacked), expected)
    for i in range(4):
      one = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
      np.testing.assert_array_equal(floats(one), expected[i])

  def test_layouts_that_are_not_alike_are_packed(self):
    x = quantized(jp.NVFP4, 3, 64)
    arrays = [x, x.unpack(), jp.prepare_weights(x, A100), x.to_bytes()]
    stacked = jax.jit(jp.stack)(arrays)
    self.assertTrue(stacked.is_packed)
    np.testing.assert_array_equal(floats(stacked), np.stack([floats(x)] * 4))
    y = quantized(jp.MXFP8, 3, 64)
    alike = jax.eval_shape(lambda y: jp.stack([y.to_bytes()] * 2), y)
    self.assertTrue(alike.is_bytes)
    stacked = jax.jit(jp.concatenate)([y, y.to_bytes()])
    np.testing.assert_array_equal(floats(stacked), np.tile(floats(y), (2, 1)))

  def test_global_scales_of_earlier_versions(self):
    x = quantized(jp.NVFP4, 3, 64)
    old = jp.ScaledArray(x.values, x.scale, x.global_scale[0, 0], jp.NVFP4)
    for arrays in ((old, x), (old, old)):
      stacked = jp.stack(arrays)
      self.assertEqual(stacked.global_scale.shape, (2, 1, 1))
      np.testing.assert_array_equal(floats(stacked), np.stack([floats(x)] * 2))

  def test_weights_prepared_for_a_gpu(self):
    arrays = [quantized(jp.NVFP4, 5, 64, seed=i) for i in range(2)]
    for target, most in ((B200, 0), (A100, 1)):
      prepared = [jp.prepare_weights(x, target) for x in arrays]
      for axis in range(most + 1):
        np.testing.assert_array_equal(
          floats(jp.stack(prepared, axis)),
          np.stack([floats(x) for x in arrays], axis),
        )
      with self.assertRaisesRegex(
        NotImplementedError, f"at most {most} for.*got {most + 1}"
      ):
        jp.stack(prepared, most + 1)

  def test_other_shapes_are_refused(self):
    arrays = [quantized(jp.NVFP4, n, 64) for n in (3, 4)]
    with self.assertRaisesRegex(
      TypeError, r"^stack: .*same shape, got \(3, 64\) and \(4, 64\)"
    ):
      jp.stack(arrays)


class LegacyTest(parameterized.TestCase):
  """Files from the time when a global scale was f32[]."""

  def tree(self):
    """Returns a tree of today's arrays, and the same tree in the old form."""
    x = quantized(jp.NVFP4, 3, 64)
    today = {
      "w": x,
      "layers": jp.stack([x, x]).unpack(),
      "mx": quantized(jp.MXFP8, 3, 64),
    }
    then = {
      name: {
        "values": w.values,
        "scale": w.scale,
        "global_scale": w.global_scale,
      }
      for name, w in today.items()
    }
    then["w"]["global_scale"] = x.global_scale[0, 0]
    then["layers"]["global_scale"] = jnp.stack([x.global_scale[0, 0]] * 2)
    return today, then

  def test_checkpoints_are_restored(self):
    today, then = self.tree()
    path = folders.new(self) / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, then)
      checkpointer.wait_until_finished()
      target = jp.legacy_global_scales(jax.eval_shape(lambda: today))
      restored = checkpointer.restore(path, target)
    self.assertEqual(restored["w"].global_scale.shape, ())
    self.assertEqual(restored["layers"].global_scale.shape, (2,))
    for name, expected in today.items():
      actual = restored[name]
      self.assertEqual(actual.format, expected.format)
      np.testing.assert_array_equal(floats(actual), floats(expected))
      np.testing.assert_array_equal(
        jp.block_scaled_dot(actual, actual),
        jp.block_scaled_dot(expected, expected),
      )
    weights = (tree["layers"] for tree in (restored, today))
    results = [jp.ragged_dot(np.ones((3, 64)), w, [1, 2]) for w in weights]
    np.testing.assert_array_equal(*results)
    # The leaves can also be passed one array at a time, without a target.
    w = jp.ScaledArray(**then["w"], format="nvfp4")
    np.testing.assert_array_equal(floats(w), floats(today["w"]))

  def test_exported_functions_are_called(self):
    today, then = self.tree()
    old = jp.ScaledArray(**then["w"], format="nvfp4")
    dot = jax.jit(lambda x, w: jp.block_scaled_dot(x, w))
    data = jax.export.export(dot)(old, old).serialize()
    exported = jax.export.deserialize(data)
    args = jp.legacy_global_scales((today["w"], today["w"]))
    np.testing.assert_array_equal(
      exported.call(*args), dot(today["w"], today["w"])
    )

  def test_shapes_that_were_not_made_then_stay_right(self):
    x = quantized(jp.NVFP4, 4, 5, 64)
    for shape in ((1, 5, 1), (4, 5, 1), (1, 1, 1), (1,)):
      scales = np.exp2(np.arange(np.prod(shape))).reshape(shape).astype("f")
      own = jp.ScaledArray(x.values, x.scale, scales, jp.NVFP4)
      legacy = jp.legacy_global_scales(own)
      np.testing.assert_array_equal(floats(legacy), floats(own))


class DerivativeTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("concatenate", lambda a, b: jp.concatenate([a, b]), lambda a, b: [a, b]),
    (
      "stack_and_index",
      lambda a, b: jp.stack([a, b], 1)[..., 1, :],
      lambda a, b: [b],
    ),
  )
  @pytest.mark.sample(1)
  def test_straight_through_derivatives_pass(self, join, expected):
    rng = np.random.default_rng(0)
    x, y, g = (rng.normal(size=(6, 32)).astype(np.float32) for _ in range(3))

    def loss(x):
      x_q = jp.quantize(x, jp.NVFP4, derivative="straight_through")
      joined = jp.dequantize(join(jp.quantize(y, jp.NVFP4), x_q))
      return (joined * np.concatenate(expected(g, 2 * g))).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * g)
