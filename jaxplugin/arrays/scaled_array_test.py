# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ScaledArray` as a pytree, its layouts, and its errors."""

import copy
import pickle
import warnings

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.testing import contract, folders

pytestmark = pytest.mark.smoke

FORMATS = formats.FORMATS
FP4 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
assert_same_bits = contract.assert_same_bits


def random_bytes(shape, high=256, seed=0):
  return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint8)


def example(format, shape=(3, 64), seed=0):
  """Returns a `ScaledArray` of random bits, with NaN codes, -0 and byte 0."""
  *lead, k = shape
  codes = random_bytes(shape, 2**format.value_bits, seed)
  scale = random_bytes((*lead, k // format.block_size), seed=seed + 1)
  return jp.ScaledArray(
    jnp.asarray(codes.view(format.array_dtype)),
    jnp.asarray(scale.view(format.scale_dtype)),
    jnp.float32(0.37) if format.has_global_scale else None,
    format,
  )


# Functions that return the array that they get.
IDENTITIES = {
  "jit": jax.jit(lambda x: x),
  "flatten": lambda x: jax.tree.unflatten(*jax.tree.flatten(x)[::-1]),
  "pickle": lambda x: pickle.loads(pickle.dumps(x)),
  "copy": copy.copy,
  "deepcopy": copy.deepcopy,
}


class PytreeTest(parameterized.TestCase):
  @parameterized.product(format=FORMATS, name=tuple(IDENTITIES))
  def test_identity_returns_the_same_bits(self, format, name):
    x = example(format)
    assert_same_bits(IDENTITIES[name](x), x)

  def test_format_and_layout_are_static_under_jit(self):
    traced = []
    f = jax.jit(lambda x: traced.append(x.format) or x.scale)
    for format in (jp.MXFP8, jp.MXFP4, jp.MXFP8):
      f(example(format))
    self.assertEqual(traced, [jp.MXFP8, jp.MXFP4])

  @parameterized.parameters(*FORMATS)
  def test_vmap_gives_each_its_own(self, format):
    x = example(format, (4, 3, 64))
    if format.has_global_scale:
      x = jp.ScaledArray(x.values, x.scale, jnp.arange(4.0) + 0.5, format)
    shapes = []
    mapped = jax.vmap(lambda x: shapes.append((x.shape, x.axis)) or x)(x)
    self.assertEqual(shapes, [((3, 64), 1)])
    assert_same_bits(mapped, x)

  @parameterized.parameters(((5, 1, 1),), ((5,),))
  def test_global_scales_of_leading_dimensions_are_taken(self, shape):
    # `vmap` of `quantize` made f32[5] in version 0.1; checkpoints have it.
    # Amax 2688 * 2^i, so that global scale i is 2^i.
    x = np.ones((5, 2, 32), np.float32) * 2688
    x *= 2.0 ** np.arange(5)[:, None, None]
    made = jax.vmap(lambda x: jp.quantize(x, jp.NVFP4))(x)
    scales = np.asarray(made.global_scale)
    np.testing.assert_array_equal(scales[:, 0, 0], 2.0 ** np.arange(5))
    given = jp.ScaledArray(
      made.values, made.scale, scales.reshape(shape), jp.NVFP4
    )
    for array in (made, given):
      for f in (jp.dequantize, jax.vmap(jp.dequantize)):
        np.testing.assert_array_equal(f(array), x)

  def test_stacked_global_scale_as_long_as_k_is_not_taken_for_a_row(self):
    x = np.ones((32, 32), np.float32) * 2688 * 2.0 ** np.arange(32)[:, None]
    stacked = jax.vmap(lambda x: jp.quantize(x, jp.NVFP4))(x)
    np.testing.assert_array_equal(jp.dequantize(stacked), x)

  def test_leaves_may_be_anything(self):
    x = example(jp.NVFP4)
    spec = PartitionSpec("x", None)
    for leaf in (None, spec, 3, "text", object(), (1, 2)):
      mapped = jax.tree.map(lambda _, leaf=leaf: leaf, x)
      self.assertIs(mapped.values, leaf)
      self.assertIs(mapped.global_scale, leaf)
      self.assertEqual(mapped.format, jp.NVFP4)
      repr(mapped)
      self.assertFalse(hasattr(mapped, "shape"))
      weight = jp.QuantizedWeight(x, x.shape, (1,))
      self.assertIn(
        repr(mapped),
        repr(weight.tree_unflatten(weight.tree_flatten()[1], (mapped,))),
      )

  def test_a_part_of_an_array_is_refused(self):
    x = example(jp.NVFP4)
    leaves, tree = jax.tree.flatten(x)
    part = tree.unflatten([leaves[0], None, leaves[2]])
    with self.assertRaisesRegex(AttributeError, "be arrays, got .*scale=None"):
      jp.linear(np.ones((2, x.shape[1]), np.float32), part)
    with self.assertRaisesRegex(TypeError, "of arrays, got .*scale=None"):
      jp.dequantize(part)
    # Constructors get trees of placeholders too.
    jp.ScaledArray(leaves[0], None, None, jp.NVFP4)

  def test_array_of_specs_can_be_built_by_hand(self):
    spec = PartitionSpec("x", None)
    specs = jp.ScaledArray(spec, spec, None, jp.MXFP8)
    self.assertEqual(
      jax.tree.structure(specs), jax.tree.structure(example(jp.MXFP8))
    )

  def test_eval_shape_and_structs_keep_the_format(self):
    x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)
    shapes = jax.eval_shape(lambda x: jp.quantize(x, jp.NVFP4), x)
    self.assertEqual(shapes.shape, (2, 64))
    self.assertEqual(shapes.scale.shape, (2, 4))
    self.assertEqual(shapes.scale.dtype, E4M3)

  def test_tree_paths_name_the_fields_and_a_missing_one_is_no_leaf(self):
    for format, expected in (
      (jp.NVFP4, ["['w'].values", "['w'].scale", "['w'].global_scale"]),
      (jp.MXFP8, ["['w'].values", "['w'].scale"]),
    ):
      paths = jax.tree.leaves_with_path({"w": example(format)})
      self.assertEqual(
        [jax.tree_util.keystr(path) for path, _ in paths], expected
      )

  def test_different_formats_do_not_mix_in_tree_map(self):
    with self.assertRaises(ValueError):
      jax.tree.map(lambda a, b: a, example(jp.MXFP8), example(jp.NVFP4))

  @parameterized.parameters(*FORMATS)
  def test_device_put_with_shardings_keeps_the_bits(self, format):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    x = example(format)
    rows = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: rows if leaf.ndim else whole, x)
    placed = jax.device_put(x, shardings)
    assert_same_bits(placed, x)
    self.assertEqual(placed.values.sharding, rows)
    self.assertEqual(placed.scale.sharding, rows)

  def test_orbax_checkpoint_restores_the_bits(self):
    tree = {format.name: example(format) for format in FORMATS}
    tree["packed"] = example(jp.NVFP4).pack()
    path = folders.new(self) / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, tree)
      checkpointer.wait_until_finished()
      target = jax.eval_shape(lambda: tree)
      restored = checkpointer.restore(path, target)
    assert_same_bits(restored, tree)

  @parameterized.parameters(jp.MXFP6_E3M2, *FORMATS)
  @pytest.mark.sample(2)
  def test_exported_function_takes_and_returns_it(self, format):
    x = example(format)

    def f(x):
      return x, jp.dequantize(x)

    exported = jax.export.export(jax.jit(f))(x)
    loaded = jax.export.deserialize(exported.serialize())
    echoed, restored = loaded.call(x)
    assert_same_bits(echoed, x)
    # Exported modules are portable, so they flush subnormals like XLA:CPU.
    with jp.use_target(jp.named_target("cpu")):
      _, expected = jax.jit(f)(x)
    np.testing.assert_array_equal(restored, expected)

  def test_format_of_a_user_is_exported_with_its_fields(self):
    format = contract.block_format("wide", formats.E4M3, formats.E8M0, 64)
    x = example(format)
    data = jax.export.export(jax.jit(lambda x: x))(x).serialize()
    restored = jax.export.deserialize(data).call(x)
    self.assertEqual(restored.format, format)
    assert_same_bits(restored, x)


class PropertiesTest(parameterized.TestCase):
  @parameterized.product(
    format=FORMATS, axis=(0, 1, 2), is_packed=(False, True)
  )
  def test_axis_and_logical_shape_are_found_from_the_shapes(
    self, format, axis, is_packed
  ):
    is_packed = is_packed and format.is_fp4
    sizes = np.full((3, 3), [32, 64, 96])  # logical, of the scale, packed
    sizes[1, axis] //= format.block_size
    sizes[2, axis] //= 2
    shape, scale_shape, packed_shape = (tuple(map(int, row)) for row in sizes)
    values = struct(shape, format.values_dtype)
    if is_packed:
      values = struct(packed_shape, np.uint8)
    scale = struct(scale_shape, format.scale_dtype)
    x = jp.ScaledArray(values, scale, None, format)
    self.assertEqual((x.axis, x.shape, x.ndim), (axis, shape, 3))
    self.assertEqual((x.is_packed, x.dtype), (is_packed, values.dtype))

  @parameterized.product(shape=((1, 6), (6, 1), (4, 6), (1, 2), (0, 6)))
  def test_shapes_with_a_scale_for_each_stored_value_are_those_of_rows(
    self, shape
  ):
    for is_packed in (False, True):
      format = contract.block_format(
        "int4_in_short_blocks", formats.INT4, np.float32, 2 if is_packed else 1
      )
      values = struct(shape, np.uint8 if is_packed else formats.INT4)
      x = jp.ScaledArray(values, struct(shape, np.float32), None, format)
      rows, columns = shape
      self.assertEqual(x.axis, 1)
      self.assertEqual(x.shape, (rows, columns * format.block_size))

  @parameterized.parameters(
    # 3 * 64 values: bytes of the values, of the scales, of the global scale.
    (jp.MXFP8, 192 + 6 + 0),
    (jp.MXFP8_E5M2, 192 + 6 + 0),
    (jp.MXFP6_E2M3, 192 + 6 + 0),
    (jp.MXFP4, 96 + 6 + 0),
    (jp.NVFP4, 96 + 12 + 4),
  )
  def test_nbytes_counts_fp4_as_half_a_byte(self, format, nbytes):
    x = example(format)
    self.assertEqual(x.nbytes, nbytes)
    self.assertEqual(x.pack().nbytes, nbytes)

  def test_repr_names_format_dtypes_and_shapes(self):
    text = repr(example(jp.NVFP4).pack())
    for part in ("nvfp4", "uint8[3, 32]", "float8_e4m3fn[3, 4]", "float32[]"):
      self.assertIn(part, text)

  @parameterized.parameters(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP6_E2M3)
  def test_fp8_and_fp6_are_never_packed(self, format):
    x = example(format)
    self.assertIs(x.pack(), x)
    self.assertIs(x.unpack(), x)


class PackTest(parameterized.TestCase):
  def test_every_byte_holds_the_first_value_in_its_low_nibble(self):
    packed = np.arange(256, dtype=np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(512)
    unpacked = jp.unpack_fp4(jnp.asarray(packed))
    np.testing.assert_array_equal(np.asarray(unpacked).view(np.uint8), nibbles)
    shape = jax.export.symbolic_shape("size")
    exported = jax.export.export(jax.jit(jp.unpack_fp4))(struct(shape, "uint8"))
    unpacked = np.asarray(exported.call(packed))
    np.testing.assert_array_equal(unpacked.view(np.uint8), nibbles)
    again = jp.pack_fp4(jnp.asarray(nibbles.view(FP4)))
    np.testing.assert_array_equal(again, packed)

  def test_bytes_with_a_scale_each_are_refused_unless_in_rows(self):
    format = contract.block_format("int4_per_2", formats.INT4, np.float32, 2)
    x = jp.quantize(jnp.arange(32.0).reshape(4, 8), format)
    assert_same_bits(x.pack().unpack(), x)
    with self.assertRaisesRegex(
      NotImplementedError,
      r"pack: .* got .*int4\[8, 4\].* dimension 0; transpose",
    ):
      x.T.pack()

  def test_constants_of_a_program_are_unpacked_alike(self):
    """XLA folds the unpacking of a constant."""
    codes = random_bytes((64, 128), 16)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    zeros = np.zeros((64, 128), np.float32)
    got = jax.jit(lambda x: x + jp.unpack_fp4(packed).astype(x.dtype))(zeros)
    np.testing.assert_array_equal(got, codes.view(FP4).astype(np.float32))

  def test_any_axis_against_numpy(self):
    codes = random_bytes((4, 6, 10), 16)
    axes = (0, 1, 2, -1, -2, -3)

    @jax.jit
    def run(values):
      packed = [jp.pack_fp4(values, axis=axis) for axis in axes]
      return packed, [
        jp.unpack_fp4(x, axis=axis)
        for x, axis in zip(packed, axes, strict=True)
      ]

    values = codes.view(FP4)
    for axis, packed, unpacked in zip(
      axes, *run(jnp.asarray(values)), strict=True
    ):
      assert_same_bits(packed, contract.pack(values, axis))
      assert_same_bits(unpacked, values)
    without_jit = jp.pack_fp4(jnp.asarray(values), axis=0)
    assert_same_bits(without_jit, contract.pack(values, 0))
    assert_same_bits(jp.unpack_fp4(without_jit, axis=0), values)


class SwizzleTest(absltest.TestCase):
  """By the formula of PTX ISA, tcgen05 scale factors "1X"."""

  def test_swizzle_follows_the_formula_and_unswizzle_is_its_inverse(self):
    shapes = (1, 1), (128, 4), (129, 5), (127, 3), (131, 17), (300, 8), (32, 4)
    shapes += (33, 9), (70, 5), (3, 131, 7), (2, 1, 3, 131, 7)
    scales = [
      random_bytes(shape, 255).view((np.uint8, E4M3, E8M0)[i % 3])
      for i, shape in enumerate(shapes)
    ]
    swizzled = jax.jit(lambda x: [jp.swizzle_scale(each) for each in x])(scales)
    # Padding of zeros, where the formula's has NaN, which the inverse ignores.
    padded = [contract.swizzle(x) for x in scales]
    for x, tiles in zip(padded, swizzled, strict=True):
      bits = x.view(np.uint8)
      expected = np.where(bits == 0xFF, np.uint8(0), bits)
      assert_same_bits(tiles, expected.view(x.dtype))
    sizes = [shape[-2:] for shape in shapes]
    invert = jax.jit(lambda x: list(map(jp.unswizzle_scale, x, sizes)))
    assert_same_bits(invert(padded), scales)


def struct(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype)


def array(values, scale, format, *, global_scale=None, **options):
  """Returns a call that makes a `ScaledArray` of (dtype, *shape) pairs."""
  values, scale = (struct(shape, dtype) for dtype, *shape in (values, scale))
  return lambda: jp.ScaledArray(values, scale, global_scale, format, **options)


def nvfp4(*shape, dtype=jnp.float32):
  """Returns `array` with a global scale of a shape."""
  return array(
    (FP4, 4, 64), (E4M3, 4, 4), jp.NVFP4, global_scale=struct(shape, dtype)
  )


SWIZZLED = {"scale_layout": "swizzled_128x4"}
# (call, error, words of the message)
# fmt: off
ERRORS = (
  # dtypes
  (array((jnp.int8, 4, 64), (E8M0, 4, 2), jp.MXFP8), TypeError,
   "mxfp8 values must be float8_e4m3fn, got int8"),
  (array((jnp.uint8, 4, 64), (E8M0, 4, 2), jp.MXFP8), TypeError,
   "mxfp8 values must be float8_e4m3fn, got uint8; view it as float8_e4m3fn"),
  (array((E4M3, 4, 64), (E4M3, 4, 4), jp.NVFP4), TypeError,
   "nvfp4 values must be float4_e2m1fn or uint8, got float8_e4m3fn"),
  (array((ml_dtypes.float6_e2m3fn, 4, 64), (E8M0, 4, 2), jp.MXFP6_E2M3),
   TypeError, r"must be uint8, got float6.*view it as uint8: array.view\(np"),
  (array((FP4, 4, 64), (E8M0, 4, 4), jp.NVFP4), TypeError,
   "nvfp4 scale must be float8_e4m3fn, got float8_e8m0fnu"),
  (array((jnp.uint8, 4, 32), (jnp.uint8, 4, 4), jp.NVFP4), TypeError,
   r"nvfp4 scale must be float8_e4m3fn, got uint8; view it as "
   r"float8_e4m3fn: array.view\(jnp.float8_e4m3fn\)"),
  (array((jnp.uint8, 4, 32), (jnp.uint8, 4, 2), jp.MXFP4), TypeError,
   "mxfp4 scale must be float8_e8m0fnu, got uint8; view it as"),
  (array((E4M3, 4, 64), (jnp.uint8, 4, 2), jp.MXFP8), TypeError,
   "mxfp8 scale must be float8_e8m0fnu, got uint8"),
  # shapes
  (array((E4M3, 4, 64), (E8M0, 2), jp.MXFP8), TypeError,
   r"rank of values.*\(4, 64\).*\(2,\)"),
  (array((E4M3,), (E8M0,), jp.MXFP8), TypeError,
   r"rank of values \(at least 1\), got values \(\) and scale \(\)"),
  (array((E4M3, 4, 64), (E8M0, 4, 1), jp.MXFP8), TypeError,
   r"divided by 32.*\(4, 64\) and scale \(4, 1\)"),
  (array((FP4, 4, 64), (E4M3, 4, 2), jp.NVFP4), TypeError,
   r"divided by 16.*\(4, 64\) and scale \(4, 2\)"),
  # Four codes of 6 bits in three bytes.
  (array((jnp.uint8, 4, 48), (E8M0, 4, 2), jp.MXFP6_E3M2), TypeError,
   r"divided by 32.*\(4, 48\)"),
  (array((E4M3, 64, 64), (E8M0, 2, 2), jp.MXFP8), TypeError,
   r"one axis divided by 32.*\(64, 64\) and scale \(2, 2\)"),
  (array((E4M3, 4, 64), (E8M0, 4, 64), jp.MXFP8), TypeError,
   r"divided by 32.*\(4, 64\) and scale \(4, 64\)"),
  (array((jnp.uint8, 4, 32), (E4M3, 4, 2), jp.NVFP4), TypeError,
   r"logical shape \(4, 64\) and scale \(4, 2\)"),
  (array((E4M3, 3, 64), (E8M0, 3, 2), jp.MXFP8, **SWIZZLED), TypeError,
   r"padded to 128 x 4.*\(3, 64\) and scale \(3, 2\)"),
  (array((E4M3, 64), (E8M0, 2), jp.MXFP8, **SWIZZLED), TypeError,
   r"\(64,\).*\(2,\)"),
  # global scales
  (nvfp4(dtype=jnp.bfloat16), TypeError,
   "global_scale must be float32.*got bfloat16"),
  (nvfp4(7), TypeError, r"global_scale.*float32\[7\].*\(4, 64\)"),
  (nvfp4(4, 64), TypeError,
   r"1 along the blocked.*got float32\[4, 64\].*dimension 1"),
  (array((FP4, 4, 3, 64), (E4M3, 4, 3, 4), jp.NVFP4,
         global_scale=struct((2, 1, 1), jnp.float32)), TypeError,
   r"float32\[2, 1, 1\].*\(4, 3, 64\)"),
  # A number has no dtype. The tree must not count as one of placeholders.
  *(
    (array((FP4, 4, 64), (E8M0, 4, 4), jp.NVFP4, global_scale=number),
     TypeError, "")
    for number in (0.5, 2)
  ),
  *(
    (array((E4M3, 4, 64), (E8M0, 4, 2), jp.MXFP8, **{name: leaf}),
     TypeError, rf"{name} must be an array or None, got .?{leaf}")
    for name in ("global_scale", "offset", "surrogate")
    for leaf in (True, "x", 1j)
  ),
  *(
    (array((E4M3, 4, 64), (E8M0, 4, 2), jp.MXFP8, global_scale=number),
     ValueError, "global_scale must be finite in float32, got")
    for number in (1e300, 10**400, float("nan"))
  ),
  (lambda: jp.QuantizedWeight(jp.quantize(np.ones((4, 64)), "mxfp8"),
                              (64.0, 4), (0,)),
   TypeError, "kernel_shape must be a tuple of integers, got .64.0, 4."),
  (lambda: jp.QuantizedWeight(jp.quantize(np.ones((4, 64)), "mxfp8"),
                              (64, 4), (0,), "int8"),
   TypeError, "must be the floating dtype of the kernel, got 'int8'"),
  # formats and layouts
  (array((E4M3, 4, 64), (E8M0, 4, 2), E4M3), TypeError,
   r"format must be a BlockFormat.*nvfp4.*\), got .*float8_e4m3fn"),
  (array((E4M3, 4, 64), (E8M0, 4, 2), "mxfp7"), ValueError,
   "'mxfp7'.*mxfp8, .*nvfp4"),
  (array((E4M3, 3, 64), (E8M0, 3, 2), jp.MXFP8, scale_layout="blocked"),
   ValueError, "scale_layout.*linear.*swizzled_128x4.*'blocked'"),
)
FUNCTION_ERRORS = (
  (lambda: jp.pack_fp4(np.zeros((4, 7), FP4)), TypeError,
   r"axis 1 must be even.*\(4, 7\)"),
  (lambda: jp.pack_fp4(np.zeros((5, 8), FP4), axis=-2), TypeError,
   r"axis 0 must be even.*\(5, 8\)"),
  (lambda: jp.pack_fp4(np.zeros((4, 8), jnp.uint8)), TypeError,
   "must be float4_e2m1fn or int4, got uint8"),
  (lambda: jp.unpack_fp4(np.zeros((4, 8), jnp.int8)), TypeError,
   "must be uint8, got int8"),
  (lambda: jp.pack_fp4(np.zeros((4, 8), FP4), axis=2), ValueError,
   "^pack_fp4: axis .*rank 2, got 2"),
  (lambda: jp.unpack_fp4(np.zeros((4, 8), jnp.uint8), axis=-3), ValueError,
   "unpack_fp4: axis .*rank 2, got -3"),
  (lambda: jp.swizzle_scale(np.zeros(4, jnp.uint8)), TypeError,
   r"swizzle_scale: .*rank 2.*\(4,\)"),
  (lambda: jp.unswizzle_scale(np.zeros(512, jnp.uint8), (1, 4)), TypeError,
   r"unswizzle_scale: .*\(512,\)"),
  (lambda: jp.unswizzle_scale(np.zeros((128, 4), jnp.uint8), 4), TypeError,
   r"shape must be \(rows, columns\) .* got 4"),
  (lambda: jp.unswizzle_scale(np.zeros((128, 4), jnp.uint8), (200, 5)),
   TypeError, r"\(200, 5\) swizzles to \(256, 8\), got \(128, 4\)"),
  *(
    (lambda dtype=dtype: jp.swizzle_scale(np.zeros((8, 4), dtype)), TypeError,
     f"swizzle_scale: .*{jnp.dtype(dtype).name}")
    for dtype in (jnp.float32, jnp.bfloat16, FP4)
  ),
)
# fmt: on


class AsArrayTest(parameterized.TestCase):
  @parameterized.parameters(None, AxisType.Auto, AxisType.Explicit)
  def test_numpy_arrays_are_placed_as_jax_numpy_places_them(self, kind):
    if kind is not None:
      mesh = jax.make_mesh((1,), ("a",), axis_types=(kind,))
      self.enterContext(jax.set_mesh(mesh))
    for x in (np.ones((3, 5)), np.arange(6)[::2], np.ones((), ">f4")):
      found = scaled_array.as_array("f", "x", x)
      expected = jnp.asarray(x.astype(x.dtype.newbyteorder("=")))
      np.testing.assert_array_equal(found, expected, strict=True)
      for name in ("aval", "sharding", "committed", "weak_type"):
        self.assertEqual(getattr(found, name), getattr(expected, name))

  def test_later_changes_of_a_numpy_array_have_no_effect(self):
    given = np.zeros(4096 + 16, np.float32)
    x = given[-given.ctypes.data % 64 // 4 :][:4096]  # JAX could share it
    found = scaled_array.as_array("f", "x", x)
    x[:] = 1
    np.testing.assert_array_equal(found, 0)


class ValidationTest(parameterized.TestCase):
  @parameterized.parameters(
    (ERRORS, "(ScaledArray|QuantizedWeight): .*"), (FUNCTION_ERRORS, "")
  )
  def test_bad_argument_is_named_with_its_value(self, errors, name):
    for call, error, words in errors:
      with self.subTest(words), self.assertRaisesRegex(error, name + words):
        call()

  def test_format_may_be_given_by_its_name(self):
    leaves = (struct((4, 64), E4M3), struct((4, 2), E8M0), None)
    self.assertEqual(jp.ScaledArray(*leaves, "mxfp8").format, jp.MXFP8)

  @parameterized.parameters(
    (0, 64, 1), (64, 0, 0), (64, 0, 1), (0, 64, 0), (0, 0, 1)
  )
  def test_size_zero_is_a_size(self, rows, columns, axis):
    scale_shape = [rows, columns]
    scale_shape[axis] //= 32
    x = jp.ScaledArray(
      struct((rows, columns), E4M3), struct(scale_shape, E8M0), None, jp.MXFP8
    )
    self.assertEqual(x.shape, (rows, columns))
    self.assertEqual(x.axis, axis)

  @parameterized.parameters(
    # The largest scales of: a tensor with its own global scale; one whose
    # global scale comes from another layer, up to 1.7 times as large; a tensor
    # of ones without a global scale.
    (448.0, True), (256.0, True), (240.0, False), (1 / 6, False), (0.0, False),
  )  # fmt: skip
  def test_forgotten_global_scale_is_warned_of(self, largest, is_forgotten):
    scale = np.full((4, 4), largest / 4, E4M3)
    scale[2, 1] = largest
    scale[3, 3] = np.nan
    values = np.zeros((4, 64), FP4)
    for own in (scale, jnp.asarray(scale)):
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jp.ScaledArray(values, own, None, jp.NVFP4)
        self.assertLen(caught, int(is_forgotten))
        jp.ScaledArray(values, own, 1.0, jp.NVFP4)
        jp.ScaledArray(values, own, jnp.float32(0.5), jp.NVFP4)
        self.assertLen(caught, int(is_forgotten))
    if is_forgotten:
      (warning,) = caught
      self.assertIs(warning.category, jp.GlobalScaleWarning)
      self.assertEqual(warning.filename, __file__)
      self.assertRegex(
        str(warning.message), f"nvfp4.*reach {largest:g}.*global_scale=1.0"
      )

  def test_results_of_quantize_warn_of_nothing(self):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      x = jp.quantize(np.full((4, 64), 1e6, np.float32), jp.NVFP4)
      self.assertEqual(np.asarray(x.scale, np.float32).max(), 448)
      jp.block_scaled_dot(jax.tree.map(lambda leaf: leaf[:2], x), x)
      x = jp.ScaledArray(x.values, x.scale, x.global_scale, jp.NVFP4)
      jax.jit(lambda x: jp.ScaledArray(x.values, x.scale, None, jp.NVFP4))(x)

  def test_arrays_like_it_need_a_dtype(self):
    x_q = example(jp.MXFP8)
    for f in (
      lambda: jnp.zeros_like(x_q),
      lambda: jnp.ones_like(x_q),
      lambda: jnp.full_like(x_q, 2),
    ):
      with self.assertRaisesRegex(TypeError, r"need.* plain array.*dequantize"):
        f()
    zeros = jnp.zeros_like(x_q, jnp.float32)
    np.testing.assert_array_equal(zeros, np.zeros(x_q.shape, np.float32))
    self.assertIn(x_q, [x_q])
    self.assertEqual(jax.tree.structure(x_q), jax.tree.structure(x_q))

  def test_numpy_arrays_are_accepted(self):
    x = example(jp.NVFP4)
    y = jp.ScaledArray(
      np.asarray(x.values), np.asarray(x.scale), np.float32(0.37), jp.NVFP4
    )
    np.testing.assert_array_equal(jp.dequantize(y), jp.dequantize(x))
