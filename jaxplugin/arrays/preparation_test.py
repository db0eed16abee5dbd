# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prepared weights keep their values in all uses of a `ScaledArray`."""

import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import NamedSharding, PartitionSpec

import jaxplugin as jp
from jaxplugin.arrays import interleaving, preparation
from jaxplugin.core import formats
from jaxplugin.core import targets as target_lib
from jaxplugin.jaxext import jax_private
from jaxplugin.testing import contract, installed

FP4 = (jp.MXFP4, jp.NVFP4)
TARGETS = ("cpu", "a100", "h100", "b200", "mi300x")
CPU = target_lib.named_target("cpu")
H100 = target_lib.named_target("h100")
B200 = target_lib.named_target("b200", cudnn="9.13")

# For each of 16 FP4 values the numbers of its four bits, sign first, in a
# unit's 64 bits. They follow from the description in `interleaving`.
BITS = (
  (15, 8, 7, 6),
  (31, 24, 23, 22),
  (11, 4, 3, 2),
  (27, 20, 19, 18),
  (21, 14, 13, 12),
  (5, 30, 29, 28),
  (47, 40, 39, 38),
  (63, 56, 55, 54),
  (44, 37, 36, 35),
  (60, 53, 52, 51),
  (41, 34, 33, 32),
  (57, 50, 49, 48),
  (16, 9, 43, 42),
  (0, 25, 59, 58),
  (17, 10, 46, 45),
  (1, 26, 62, 61),
)


def weight(format, shape=(33, 96), seed=0):
  x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return contract.quantized(x, format)


def asks_for_huge_pages(place: int) -> bool:
  """Returns whether the mapping around an address has MADV_HUGEPAGE."""
  is_inside = False
  for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
    if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
      is_inside = int(found[1], 16) <= place < int(found[2], 16)
    elif is_inside and line.startswith("VmFlags:"):
      return "hg" in line.split()
  return False


def stack_of(format):
  x = np.random.default_rng(0).normal(size=(3, 96, 96)).astype(np.float32)
  return jp.quantize(x, format, batch_dims=1)


def codes(array):
  """Returns uint8[..., k] with an FP4 code per element, from ml_dtypes."""
  return np.asarray(array.unpack().values).view(np.uint8)


def scanned(x, w):
  step = lambda x, w: (jp.block_scaled_dot(x, w), None)
  return jax.lax.scan(step, x, w)[0]


class InterleavingTest(parameterized.TestCase):
  def test_each_bit_goes_to_its_own_place(self):
    self.assertLen({bit for bits in BITS for bit in bits}, 64)
    for value, bits in enumerate(BITS):
      for i, bit in enumerate(bits):
        packed = np.zeros(8, np.uint8)
        packed[value // 2] = 1 << (3 - i) << 4 * (value % 2)
        words = np.asarray(interleaving.interleave(packed))
        self.assertEqual(words.astype("<u4").view("<u8")[0], 1 << bit)

  def test_round_trip_of_random_bytes(self):
    packed = np.random.default_rng(0).integers(0, 256, (2, 3, 40), np.uint8)
    words = interleaving.interleave(packed)
    self.assertEqual((words.shape, words.dtype), ((2, 3, 10), np.uint32))
    np.testing.assert_array_equal(interleaving.deinterleave(words), packed)

  def test_bytes_are_those_of_the_words(self):
    words = np.array([[0x04030201, 0xDDCCBBAA]], np.uint32)
    data = interleaving.to_bytes(words)
    np.testing.assert_array_equal(data, words.astype("<u4").view(np.uint8))
    np.testing.assert_array_equal(interleaving.from_bytes(data), words)

  @parameterized.parameters(
    (interleaving.interleave, np.zeros((2, 12), np.uint8), "multiple of 16"),
    (interleaving.interleave, np.zeros((2, 8), np.int8), "must be uint8"),
    (interleaving.deinterleave, np.zeros((2, 3), np.uint32), "must be even"),
    (interleaving.deinterleave, np.zeros((2, 4), np.uint8), "must be uint32"),
  )
  def test_wrong_arrays_are_refused(self, function, array, message):
    with self.assertRaisesRegex(TypeError, message):
      function(array)


class ArrayTest(parameterized.TestCase):
  @parameterized.product(format=formats.KNOWN, name=("h100", "b200"))
  @pytest.mark.sample(3)
  def test_shape_format_and_numbers_stay(self, format, name):
    w = weight(format, (2, 33, 96))
    prepared = jp.prepare_weights(w, target_lib.named_target(name))
    self.assertEqual(prepared.shape, w.shape)
    self.assertEqual(prepared.format, format)
    self.assertEqual(prepared.ndim, 3)
    self.assertEqual(prepared.axis, 2)
    np.testing.assert_array_equal(jp.dequantize(prepared), jp.dequantize(w))
    back = jp.unprepare_weights(prepared)
    self.assertEqual(back.scale_layout, "linear")
    np.testing.assert_array_equal(codes_or_bytes(back), codes_or_bytes(w))
    np.testing.assert_array_equal(
      np.asarray(back.scale).view(np.uint8), np.asarray(w.scale).view(np.uint8)
    )

  @parameterized.parameters(
    *(("nvfp4", -1, name, "interleaved") for name in ("a100", "l40s", "h200")),
    *(("nvfp4", -1, name, "swizzled") for name in ("b200", "rtx5090")),
    *(("nvfp4", -1, name, "none") for name in ("mi300x", "mi355x", "cpu")),
    ("mxfp8", -1, "h100", "none"),
    *(
      (format, 0, name, "none")  # blocks along another axis
      for format in ("mxfp4", "nvfp4")
      for name in ("h100", "b200")
    ),
  )
  def test_preparation_is_the_targets(self, format, axis, name, expected):
    quantize = functools.partial(jp.quantize, format=format, axis=axis)
    w = jax.eval_shape(quantize, jax.ShapeDtypeStruct((64, 96), jnp.float32))
    target = target_lib.named_target(name)
    self.assertEqual(preparation.preparation(w, target), expected)

  @parameterized.parameters(*FP4)
  @pytest.mark.sample(1)
  def test_may_be_prepared_again_and_for_another_target(self, format):
    w = weight(format)
    for targets in itertools.product((H100, B200, CPU), repeat=2):
      prepared = functools.reduce(jp.prepare_weights, targets, w)
      once = jp.prepare_weights(w, targets[-1])
      self.assertEqual(prepared.scale_layout, once.scale_layout)
      self.assertEqual(prepared.is_interleaved, once.is_interleaved)
      np.testing.assert_array_equal(
        codes_or_bytes(prepared), codes_or_bytes(once)
      )

  def test_default_target_is_that_of_use_target(self):
    with jp.use_target(H100):
      self.assertTrue(jp.prepare_weights(weight(jp.MXFP4)).is_interleaved)
    self.assertFalse(jp.prepare_weights(weight(jp.MXFP4)).is_interleaved)

  def test_bytes_and_text_tell_of_it(self):
    w = weight(jp.MXFP4).pack()
    prepared = jp.prepare_weights(w, H100)
    self.assertEqual(prepared.nbytes, w.nbytes)
    self.assertIn("uint32[33, 12]", repr(prepared))
    self.assertEqual(prepared.pack().dtype, np.uint8)
    self.assertEqual(prepared.unpack().dtype, formats.E2M1)

  def test_words_of_fp8_or_swizzled_rank_1_are_refused(self):
    w = weight(jp.MXFP8)
    words = np.zeros((33, 12), np.uint32)
    with self.assertRaisesRegex(TypeError, "values must be float8_e4m3fn"):
      jp.ScaledArray(words, w.scale, None, jp.MXFP8)
    with self.assertRaisesRegex(TypeError, "logical"):
      jp.ScaledArray(words[:, :-1], weight(jp.MXFP4).scale, None, jp.MXFP4)

  @parameterized.parameters(*TARGETS)
  @pytest.mark.sample(2)
  def test_trees_of_parameters(self, name):
    target = target_lib.named_target(name)
    w, stack = weight(jp.NVFP4), weight(jp.MXFP8, (2, 33, 96))
    params = {
      "layers": [{"kernel": w, "bias": np.ones(33, np.float32)}, (stack, None)],
      "norm": jnp.ones(96),
      "name": "model",
      "step": 3,
    }
    prepared = jp.prepare_weights(params, target)
    for i, array in ((0, w), (1, stack)):
      actual = prepared["layers"][i]
      actual = actual["kernel"] if i == 0 else actual[0]
      alone = jp.prepare_weights(array, target)
      self.assertEqual(jax.tree.structure(actual), jax.tree.structure(alone))
      for a, b in zip(*map(jax.tree.leaves, (actual, alone)), strict=True):
        self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      np.testing.assert_array_equal(jp.dequantize(actual), jp.dequantize(array))
    self.assertIs(prepared["layers"][0]["bias"], params["layers"][0]["bias"])
    self.assertIs(prepared["norm"], params["norm"])
    self.assertEqual((prepared["name"], prepared["step"]), ("model", 3))
    self.assertIsNone(prepared["layers"][1][1])
    back = jp.unprepare_weights(prepared)
    self.assertEqual(back["layers"][1][0].dtype, formats.E4M3)
    self.assertEqual(back["layers"][0]["kernel"].unpack().dtype, formats.E2M1)
    self.assertIs(back["norm"], params["norm"])

  def test_target_must_be_one(self):
    with self.assertRaisesRegex(TypeError, "must be a jp.Target or None"):
      jp.prepare_weights(weight(jp.MXFP4), "h100")


def codes_or_bytes(array):
  if array.format.is_fp4:
    return codes(array)
  return np.asarray(array.values).view(np.uint8)


class CpuTest(parameterized.TestCase):
  """For CPUs, stacks become bytes and matrices are packed."""

  @parameterized.parameters(*formats.KNOWN)
  @pytest.mark.sample(2)
  def test_stacks_are_bytes_and_matrices_what_the_kernels_read(self, format):
    w, stack = weight(format), weight(format, (3, 33, 96))
    prepared = jp.prepare_weights(w, CPU)
    self.assertFalse(prepared.is_bytes)
    self.assertEqual(prepared.is_packed, format.is_fp4)
    self.assertIs(prepared, w)
    prepared = jp.prepare_weights(w.unpack(), CPU)
    self.assertEqual(prepared.is_packed, format.is_fp4)
    prepared = jp.prepare_weights(stack, CPU)
    self.assertTrue(prepared.is_bytes)
    self.assertEqual(
      (prepared.values.dtype, prepared.scale.dtype), (np.uint8,) * 2
    )
    self.assertEqual((prepared.shape, prepared.axis), ((3, 33, 96), 2))
    self.assertEqual(prepared.nbytes, stack.nbytes)
    self.assertEqual(prepared.is_packed, format.is_fp4)
    self.assertIs(jp.prepare_weights(prepared, CPU), prepared)
    usual = prepared.to_floats()
    self.assertIs(usual.to_floats(), usual)
    contract.assert_same_bits(usual, stack.pack())
    self.assertEqual(prepared.unpack().to_floats().dtype, format.array_dtype)
    np.testing.assert_array_equal(jp.dequantize(prepared), jp.dequantize(stack))

  @parameterized.parameters(*formats.FORMATS)
  @pytest.mark.sample(1)
  def test_bytes_are_taken_from_a_tree_and_not_from_the_constructor(
    self, format
  ):
    """The constructor refuses raw bytes, which a checkpoint may have."""
    stack = stack_of(format)
    prepared = jp.prepare_weights(stack, CPU)
    for given in (prepared, jax.tree.map(np.asarray, prepared)):
      self.assertTrue(given.is_bytes)
      with self.assertRaisesRegex(TypeError, "got uint8; view it as float8_"):
        jp.ScaledArray(given.values, given.scale, given.global_scale, format)
    leaves, structure = jax.tree.flatten(prepared)
    for again in (
      jax.tree.unflatten(structure, map(np.asarray, leaves)),
      jax.device_put(prepared),
      jax.jit(lambda x: x)(prepared),
      jax.lax.map(lambda x: x, prepared),
      jax.vmap(lambda x: x)(prepared),
    ):
      self.assertTrue(again.is_bytes)
      self.assertEqual(again.shape, stack.shape)
      np.testing.assert_array_equal(jp.dequantize(again), jp.dequantize(stack))

  @parameterized.parameters(*formats.FORMATS)
  @pytest.mark.sample(1)
  def test_a_scan_slices_bytes_and_nothing_wider(self, format):
    def program(w):
      lowered = jax.jit(scanned).lower(np.ones((1, 96), np.float32), w)
      return jax_private.optimized_hlo(lowered.compile())

    stack = stack_of(format)
    wide = r"(f16|f4e2m1fn)\[3,96,\d+\]"
    self.assertNotRegex(program(jp.prepare_weights(stack, CPU)), wide)
    # Without it this XLA converts to a wider type.
    self.assertRegex(program(stack.unpack()), wide)


@functools.cache
def large_weight(format):
  columns = 8192 if format.is_fp4 else 4096
  x = np.random.default_rng(0).normal(size=(2048, columns))
  return jp.quantize(x.astype(np.float32), format)


class HugePagesTest(parameterized.TestCase):
  """Weights of 4 MiB or more in all are copied."""

  def setUp(self):
    super().setUp()
    self.target = target_lib.detect_target("cpu")
    if self.target.cpu_kernels is None:
      self.skipTest("the kernels for CPUs are not built")

  def put(self, format):
    """Returns a weight of 8 MiB that `quantize` did not make."""
    made = large_weight(format)
    return jax.tree.map(lambda x: jax.device_put(np.array(x)), made)

  @parameterized.parameters(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_large_values_are_copied_and_the_same(self, format):
    w = self.put(format)
    prepared = jp.prepare_weights(w, self.target)
    where = lambda x: x.values.unsafe_buffer_pointer()
    self.assertNotEqual(where(prepared), where(w))
    self.assertEqual(jax.tree.structure(prepared), jax.tree.structure(w.pack()))
    np.testing.assert_array_equal(codes_or_bytes(prepared), codes_or_bytes(w))
    x = np.ones((1, w.shape[1]), np.float32)
    np.testing.assert_array_equal(
      jp.block_scaled_dot(x, prepared), jp.block_scaled_dot(x, w)
    )

  def test_small_arrays_and_other_targets_return_the_argument(self):
    small = weight(jp.MXFP8)
    self.assertIs(jp.prepare_weights(small, self.target).values, small.values)
    w = self.put(jp.MXFP8)
    named = jp.prepare_weights(w, CPU)
    self.assertIs(named.values, w.values)
    self.assertIs(jp.prepare_weights(w, H100).values, w.values)

  def test_weights_of_a_tree_share_one_block_of_huge_pages(self):
    ones = np.ones(8)
    tree = {"norm": ones}
    for i in range(9):
      made = weight(jp.INT8_32, (1024, 513), seed=i)
      tree[f"layer{i}"] = jax.tree.map(np.array, made)
    prepared = jp.prepare_weights(tree, self.target)
    self.assertIs(prepared["norm"], ones)
    arrays = jax.tree.leaves({**prepared, "norm": None})
    for given, got in zip(
      jax.tree.leaves({**tree, "norm": None}), arrays, strict=True
    ):
      np.testing.assert_array_equal(got, given)
    places = [x.unsafe_buffer_pointer() for x in arrays]
    ends = [place + x.nbytes for place, x in zip(places, arrays, strict=True)]
    self.assertEqual({place % 64 for place in places}, {0})
    gaps = [b - a for a, b in zip(ends, places[1:], strict=False)]
    self.assertBetween(min(gaps), 0, 63)
    self.assertLess(max(gaps), 64)
    if pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists():
      self.assertTrue(asks_for_huge_pages(places[0]))

  def test_copies_stay_on_their_device(self):
    device = jax.devices("cpu")[-1]
    given = self.put(jp.MXFP8)
    with jax.default_device(device):
      uncommitted = self.put(jp.MXFP8)
    for w in (given, uncommitted, jax.device_put(given, device)):
      prepared = jp.prepare_weights(w, self.target)
      self.assertEqual(prepared.values.sharding, w.values.sharding)
      self.assertEqual(prepared.values.committed, w.values.committed)

  def test_copies_can_be_donated(self):
    w = self.put(jp.MXFP8)
    changed = jax.jit(lambda x: x.to_bytes(), donate_argnums=0)
    got = changed(jp.prepare_weights(w, self.target))
    np.testing.assert_array_equal(codes_or_bytes(got), codes_or_bytes(w))

  def test_while_tracing_nothing_is_copied(self):
    prepare = functools.partial(jp.prepare_weights, target=self.target)
    w = self.put(jp.MXFP8)
    jaxpr = jax.make_jaxpr(prepare)(w)
    self.assertEmpty(jaxpr.eqns)
    self.assertEqual(jax.eval_shape(prepare, w).shape, w.shape)


class DotTest(parameterized.TestCase):
  """On CPUs every call restores the order of interleaved values."""

  @parameterized.product(format=formats.FORMATS, target=(CPU, H100, B200))
  @pytest.mark.sample(4)
  def test_stacks_have_the_bits_of_the_usual_order(self, format, target):
    x = np.random.default_rng(3).normal(size=(2, 96)).astype(np.float32)
    stack = stack_of(format)
    prepared = jp.prepare_weights(stack, target)
    numbers = (((0, 2), (0, 2)), ((), ()))
    x3 = jp.quantize(x[None].repeat(3, 0), format)
    functions = [
      scanned,
      lambda x, w: jp.block_scaled_dot(x, jax.tree.map(lambda a: a[1], w)),
      lambda _, w: jp.block_scaled_dot(x3, w),
      jax.vmap(jp.block_scaled_dot, (None, 0)),
      lambda x, w: jax.vmap(jp.block_scaled_dot, (0, None))(x[None], w[0]),
    ]
    if not format.has_global_scale:  # one for each layer
      functions.append(
        lambda _, w: jp.block_scaled_dot(x3, w, dimension_numbers=numbers)
      )
    run = jax.jit(lambda x, w: [function(x, w) for function in functions])
    for found, expected in zip(run(x, prepared), run(x, stack), strict=True):
      np.testing.assert_array_equal(found, expected)

  def test_contracting_another_dimension_is_refused(self):
    w = jp.prepare_weights(weight(jp.MXFP4, (32, 96)), H100)
    with self.assertRaisesRegex(TypeError, "blocked along a contracting dim"):
      jp.block_scaled_dot(
        np.ones((4, 32), np.float32),
        w,
        dimension_numbers=(((1,), (0,)), ((), ())),
      )

  def test_raw_words_are_no_operand(self):
    w = jp.prepare_weights(weight(jp.MXFP4), H100)
    with self.assertRaisesRegex(TypeError, "is not a block format"):
      jp.block_scaled_dot(np.ones((4, 96), np.float32), w.values, None, w.scale)

  def test_export_puts_values_back_in_order(self):
    w = jp.prepare_weights(weight(jp.NVFP4), H100)
    x = np.ones((3, 96), np.float32)
    exported = jax.export.export(jax.jit(jp.block_scaled_dot))(x, w)
    called = jax.export.deserialize(exported.serialize()).call(x, w)
    expected = jp.block_scaled_dot(x, w, implementation="xla")
    np.testing.assert_array_equal(called, expected)


class ShardingTest(parameterized.TestCase):
  @parameterized.parameters(("x", None), (None, "x"))
  @pytest.mark.sample(1)
  def test_rows_or_k_may_be_sharded(self, *axes):
    if len(jax.devices()) < 2:
      self.skipTest("needs two devices")
    # On explicit axes the packed words would be all-gathered.
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto)
    w = weight(jp.NVFP4, (64, 128))
    x = np.random.default_rng(1).integers(-4, 5, (3, 128)).astype(np.float32)
    expected = jp.block_scaled_dot(x, w, implementation="xla")
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    prepared = jp.prepare_weights(w, H100)
    prepared = jp.ScaledArray(
      jax.device_put(prepared.values, sharding),
      jax.device_put(prepared.scale, sharding),
      prepared.global_scale,
      jp.NVFP4,
    )
    dot = jax.jit(lambda x, w: jp.block_scaled_dot(x, w, implementation="xla"))
    result = dot(x, prepared)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    text = dot.lower(x, prepared).compile().as_text()
    self.assertNotIn("all-gather", text)

  def test_preparing_keeps_a_sharding_of_rows(self):
    if len(jax.devices()) < 2:
      self.skipTest("needs two devices")
    mesh = jax.make_mesh((2,), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    w = weight(jp.MXFP4, (64, 128))
    w = jp.ScaledArray(
      jax.device_put(w.values, rows),
      jax.device_put(w.scale, rows),
      None,
      w.format,
    )
    values = jp.prepare_weights(w, H100).values
    self.assertTrue(values.sharding.is_equivalent_to(rows, 2))


class ExplainTest(absltest.TestCase):
  def notes(self, w, target, m=4, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct((m, w.shape[-1]), dtype)
    (dot,) = jp.explain(jp.block_scaled_dot, x, w, target=target)
    return dot.decision.implementation, " ".join(dot.decision.notes)

  def test_notes_say_whether_the_backend_reads_prepared_values(self):
    w = jp.prepare_weights(weight(jp.NVFP4, (64, 256)), H100)
    implementation, notes = self.notes(w, H100)
    self.assertEqual(implementation, "triton")
    self.assertIn("rhs: prepared for triton, which reads that order", notes)
    self.assertIn("nvfp4_interleaved", notes)
    for target in (B200, CPU, target_lib.named_target("mi300x")):
      _, notes = self.notes(w, target)
      self.assertIn("every call restores the order of the values", notes)
      self.assertNotIn("_interleaved", notes)

  def test_unprepared_weights_have_no_note(self):
    _, notes = self.notes(weight(jp.NVFP4, (64, 256)), H100)
    self.assertNotIn("prepared", notes)


@installed.needs("jax_cuda13_plugin")
class OptimizedTest(parameterized.TestCase):
  def compiled(self, prepared_for, target):
    from jaxplugin.lab.compilation import deviceless

    w = jax.eval_shape(
      lambda x: jp.prepare_weights(jp.quantize(x, jp.NVFP4), prepared_for),
      jax.ShapeDtypeStruct((512, 2048), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((4, 2048), jnp.bfloat16)
    dot = functools.partial(
      jp.block_scaled_dot, preferred_element_type=jnp.bfloat16
    )
    return deviceless.compile(dot, x, w, target=target).as_text()

  def test_prepared_weight_goes_into_the_kernel_as_it_is(self):
    text = self.compiled(H100, H100)
    self.assertIn("triton_kernel_call", text)
    self.assertRegex(text, r"custom-call\(.*u32\[512,256\]")
    self.assertNotIn("shift-right", text)

  @pytest.mark.full
  def test_weight_prepared_for_another_target_is_shifted(self):
    self.assertIn("shift-right", self.compiled(H100, B200))
