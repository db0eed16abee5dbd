# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize` as a function: its axis, dtypes, sizes, rounding and errors.

`quantize`, `quantize_both` and `dequantize` under vmap, grad, scan and others.
api_bits_test.py compares the values with NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing import quantization_lowerings as lowerings
from jaxplugin.testing.oracles import quantization_oracle as oracle

MXFP8, MXFP4, NVFP4 = formats.MXFP8, formats.MXFP4, formats.NVFP4


class QuantizeTest(parameterized.TestCase):
  @parameterized.parameters(*formats.FORMATS)
  def test_zeros_keep_their_sign(self, format):
    x = np.zeros((3, format.block_size), np.float32)
    x[0, ::2] = -0.0
    x[1, 1::2] = -0.0
    x[1, 0] = 3  # zeros beside something larger
    result = oracle.jitted(format)(x)
    values = np.asarray(result.unpack().values).astype(np.float32)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(x))
    restored = np.asarray(oracle.dequantize(result))
    np.testing.assert_array_equal(np.signbit(restored), np.signbit(x))

  @parameterized.product(format=formats.FORMATS, axis=(0, 1, -1, -3))
  @pytest.mark.sample(6)
  def test_any_axis_is_the_last_axis_of_the_moved_array(self, format, axis):
    x = oracle.random_f32(14, (64, 32, 96), 4)
    codes, scale, *global_scale = oracle.reference(
      np.moveaxis(x, axis, -1), format
    )
    result = oracle.jitted(format, axis=axis)(x)
    oracle.assert_codes(
      result,
      np.moveaxis(codes, -1, axis),
      np.moveaxis(scale, -1, axis),
      *global_scale,
    )
    self.assertEqual(result.axis, axis % 3)
    self.assertEqual(result.shape, x.shape)

  @parameterized.parameters(
    (MXFP8, {}, True),
    (MXFP8, {"scale_rounding": "floor"}, False),
    (MXFP8, {"axis": 0}, False),
    (MXFP8, {"key": jax.random.key(0)}, False),
  )
  def test_trace_has_the_array_that_plain_codes_are_of(
    self, format, arguments, is_known
  ):
    def quantize(x):
      found = quantization.quantize(x, format, **arguments)
      self.assertEqual(found.quantized_from() is not None, is_known)

    jax.eval_shape(quantize, jax.ShapeDtypeStruct((64, 64), jnp.float32))

  @parameterized.parameters(
    *((format, "up", False) for format in formats.FORMATS),
    (MXFP8, "floor", False),
    (MXFP8, "up", True),
    (NVFP4, "up", True),
  )
  def test_jit_and_eager_agree_bitwise(
    self, format, scale_rounding, stochastic
  ):
    x = oracle.special_blocks(format.block_size)
    key = jax.random.key(0) if stochastic else None
    compiled = oracle.jitted(format, scale_rounding)(x, key=key)
    with jax.disable_jit():  # one operation at a time
      eager = quantization.quantize(
        x, format, scale_rounding=scale_rounding, key=key
      )
    oracle.assert_same(compiled, eager)

  @parameterized.parameters(*formats.FORMATS)
  def test_f64_is_rounded_to_f32_first(self, format):
    x = oracle.random_f32(15, (64, 32), 5).astype(np.float64) * (1 + 2.0**-30)
    with jax.enable_x64(True):
      self.assertEqual(jnp.asarray(x).dtype, np.float64)
      wide = oracle.jitted(format)(x)
    oracle.assert_codes(wide, *oracle.reference(x.astype(np.float32), format))

  @parameterized.parameters(*formats.FORMATS)
  def test_enabling_x64_changes_no_bit(self, format):
    x = oracle.special_blocks(format.block_size)
    with jax.enable_x64(True):
      result = oracle.jitted(format)(x)
      restored = oracle.dequantize(result)
    oracle.assert_codes(result, *oracle.reference(x, format))
    self.assertEqual(restored.dtype, np.float32)

  @parameterized.parameters(MXFP4, NVFP4)
  @pytest.mark.sample(1)
  def test_size_zero_in_any_dimension_gives_an_empty_array(self, format):
    rows = (
      *(((0, 64), 1), ((64, 0), 0), ((64, 0), 1)),
      *(((0,), 0), ((0, 64), 0), ((0, 0, 3), 1)),
    )

    @jax.jit
    def run():
      arrays = [
        quantization.quantize(jnp.zeros(shape), format, axis=axis)
        for shape, axis in rows
      ]
      return [(array, quantization.dequantize(array)) for array in arrays]

    for row, results in zip(rows, run(), strict=True):
      for result in results:
        self.assertEqual(result.shape, row[0], row)

  def test_result_has_the_dtypes_and_shapes_of_the_format(self):
    for format in formats.FORMATS:
      result = oracle.jitted(format)(jnp.ones((2, 3, 64)))
      self.assertEqual(result.shape, (2, 3, 64))
      if format.is_fp4:
        self.assertEqual(result.values.dtype, np.uint8)
        self.assertEqual(result.values.shape, (2, 3, 32))
        result = quantization.quantize(
          jnp.ones((2, 3, 64)), format, packed=False
        )
      self.assertEqual(result.values.dtype, format.values_dtype)
      self.assertEqual(result.values.shape, (2, 3, 64))
      self.assertEqual(result.scale.dtype, format.scale_dtype)
      self.assertEqual(result.scale.shape, (2, 3, 64 // format.block_size))
      self.assertEqual(result.scale_layout, "linear")
      if format is NVFP4:
        self.assertEqual(result.global_scale.shape, (1, 1, 1))
      else:
        self.assertIsNone(result.global_scale)


class BatchDimsTest(parameterized.TestCase):
  """Leading dimensions that get a global scale each."""

  def stack(self, *lead):
    x = np.random.default_rng(24).normal(size=(*lead, 3, 64))
    scales = np.exp2(np.arange(np.prod(lead))).reshape(*lead, 1, 1)
    return (x * scales).astype(np.float32)

  @parameterized.product(
    lead=((4,), (2, 3), (1,)), axis=(-1, -2), jit=(False, True)
  )
  @pytest.mark.sample(2)
  def test_each_tensor_has_the_bits_that_it_has_alone(self, lead, axis, jit):
    # In a jitted function all at once, else one after the other.
    x = np.pad(self.stack(*lead), [(0, 0)] * len(lead) + [(0, 13), (0, 0)])
    quantize = functools.partial(
      quantization.quantize, format=NVFP4, axis=axis, batch_dims=len(lead)
    )
    stacked = (jax.jit(quantize) if jit else quantize)(x)
    self.assertEqual(stacked.global_scale.shape, (*lead, 1, 1))
    for i in np.ndindex(lead):
      alone = quantization.quantize(x[i], NVFP4, axis=axis)
      actual = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
      self.assertEqual(actual.global_scale.shape, (1, 1))
      oracle.assert_same(actual, alone)

  @parameterized.parameters(MXFP8, MXFP4)
  def test_batch_dims_change_nothing_without_global_scales(self, format):
    x = self.stack(4)
    expected = quantization.quantize(x, format)
    oracle.assert_same(quantization.quantize(x, format, batch_dims=1), expected)

  def test_each_tensor_draws_random_bits_of_its_own(self):
    x = np.full((2, 4, 512), 1.25, np.float32)  # between 1 and 1.5
    x[..., 0] = 6
    codes = oracle.as_codes(
      quantization.quantize(
        x, NVFP4, global_scale=1.0, key=jax.random.key(0), batch_dims=1
      ).values
    )
    self.assertTrue((codes[0] != codes[1]).any())

  @parameterized.parameters((3,), (3, 1, 1))
  def test_global_scales_may_be_given_one_each(self, *shape):
    x, given = self.stack(3), np.float32([0.5, 2, 3])
    stacked = quantization.quantize(
      x, NVFP4, global_scale=given.reshape(shape), batch_dims=1
    )
    for i in range(3):
      actual = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
      oracle.assert_same(
        actual, quantization.quantize(x[i], NVFP4, global_scale=given[i])
      )


def q(*shape, format=MXFP8, dtype=jnp.float32, **options):
  """Returns a call of `quantize`."""
  return lambda: quantization.quantize(np.ones(shape, dtype), format, **options)


def symbolic(format):
  """Returns a call of `quantize` along a dimension of symbolic size."""
  shape = (2, *jax.export.symbolic_shape("k"))
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  return lambda: jax.eval_shape(
    functools.partial(quantization.quantize, format=format), x
  )


def both(*shape, format=MXFP8, dtype=jnp.float32, **options):
  """Returns a call of `quantize_both`."""
  return lambda: quantization.quantize_both(
    np.ones(shape, dtype), format, **options
  )


def back(dtype):
  """Returns a call of `dequantize`."""
  return lambda: quantization.dequantize(
    quantization.quantize(jnp.ones((2, 32)), MXFP8), dtype
  )


TILES = {"format": NVFP4, "scale_layout": "swizzled_128x4"}
STACK = {"format": NVFP4, "batch_dims": 1}
UNQUANTIZED = formats.UnquantizedFormat(
  name="bf16 + f32 per 32",
  values_dtype=formats.BF16,
  scale_dtype=np.dtype(np.float32),
  block_size=32,
)
NO_FLOAT = "x must be float32.*"
NO_FORMAT = "must be a BlockFormat.*mxfp8, .*nvfp4.*got.*int8"
# (call, error, words of the message)
# fmt: off
ERRORS = (
  (q(2, 40), TypeError, "quantize: .*axis 1.*multiple of 32.*got 40.*Pad x"),
  (q(33, 64, axis=0), TypeError,
   r"axis 0.*multiple of 32 for MXFP8.*got 33 in shape \(33, 64\)"),
  (q(2, 24, format=NVFP4), TypeError, "multiple of 16 for NVFP4.*got 24"),
  (lambda: jax.jit(q(2, 40)).trace(), TypeError, "got 40"),
  (symbolic("fp8_1x128"), TypeError, "quantize: .*multiple of 128 .*got k in"),
  (symbolic("int8_32"), TypeError, "quantize: .*multiple of 32 .*got k in"),
  (symbolic("int8_row"), NotImplementedError,
   "int8_row: .*static, got k. Pass a format with blocks"),
  (q(2, 64, axis=2), ValueError, "quantize: .*rank 2, got 2"),
  (q(2, 64, axis=-3), ValueError, "quantize: .*rank 2, got -3"),
  (q(2, 64, axis="k"), TypeError, "integer, got 'k'"),
  (q(2, 64, axis=(0, 1)), TypeError, r"integer, got \(0, 1\)"),
  (q(2, 64, axis=None), TypeError, "integer, got None"),
  (q(2, 64, axis=1.0), TypeError, "integer, got 1.0"),
  (q(), TypeError, "quantize: .*x must have rank 1 or more"),
  (q(2, 40, pad="up"), TypeError, "pad must be True or False"),
  (q(2, 64, scale_rounding="nearest"), ValueError,
   "scale_rounding.*up.*floor.*'nearest'"),
  (q(2, 64, format=NVFP4, scale_rounding="floor"), ValueError,
   "^quantize: scale_rounding must be \"up\" unless .*E8M0.*'floor' for nvfp4,"
   ".*leave scale_rounding out"),
  (q(2, 64, global_scale=2.5), ValueError,
   "^quantize: .*must be None for mxfp8.*got 2.5"),
  *(
    (q(2, 32, format=NVFP4, global_scale=g), ValueError,
     f"positive and finite, got {g}")
    for g in (0.0, -1.5, np.inf, np.nan)
  ),
  (q(2, 32, format=NVFP4, global_scale=jnp.ones(3)), ValueError,
   r"one float32, got float32\[3\]"),
  *(
    (q(2, 32, dtype=dtype), TypeError,
     rf"quantize: .*{NO_FLOAT}{jnp.dtype(dtype).name}\[2,32\]")
    for dtype in (jnp.int32, jnp.int8, jnp.bool_, jnp.float8_e4m3fn)
  ),
  (lambda: quantization.quantize(q(2, 32, format=MXFP4)(), MXFP8), TypeError,
   "quantize: .*ScaledArray.mxfp4.*use it without quantizing"),
  *(
    (call(32, 32, format=format), error, f"{name}: .*{words}")
    for call, name in ((q, "quantize"), (both, "quantize_both"))
    for format, error, words in (
      ("int8", ValueError, "unknown block format 'int8'.*mxfp8, .*nvfp4"),
      (np.int8, TypeError, NO_FORMAT),
      (UNQUANTIZED, TypeError, "quantize to, got bf16 . f32 per 32"),
    )
  ),
  # Stacks of arrays.
  *(
    (q(64, 2, 32, format=NVFP4, batch_dims=given), ValueError,
     f"quantize: .*less than x's rank 3, got {given!r}")
    for given in (3, -1, "1")
  ),
  (q(64, 2, 32, **STACK, axis=0), ValueError,
   "quantize: .*axis must not be among.*got axis 0 and batch_dims 1; pass"),
  (q(64, 2, 32, **STACK, global_scale=np.ones(3, "f4")), ValueError,
   r"quantize: .*leading dimensions \(64,\) of x, got float32\[3\]"),
  (q(64, 2, 32, **STACK, global_scale=np.arange(64.0)), ValueError,
   "quantize: .*positive and finite, got 0.0"),
  # Packed values and tiles of scales.
  *(
    (call(32, 64, packed=True), ValueError,
     f"^{name}: packed must be .*mxfp8 .float8_e4m3fn")
    for call, name in ((q, "quantize"), (both, "quantize_both"))
  ),
  (q(32, 64, format=formats.MXFP6_E2M3, packed=True), ValueError,
   "packed must be False or None unless the format has 4-bit values"),
  (q(32, 64, format=NVFP4, packed="yes"), ValueError,
   "True, False or None, got 'yes'"),
  (both(32, 64, format=NVFP4, packed="yes"), ValueError,
   "True, False or None, got 'yes'"),
  (q(4, 64, format=NVFP4, scale_layout="swizzled"), ValueError,
   "^quantize: .*linear.*got 'swizzled'"),
  (q(64, 64, **TILES, axis=0), ValueError,
   "^quantize: .*last axis, got axis 0, rank 2 and batch_dims=0; leave"),
  (q(64, **TILES), ValueError,
   "^quantize: .*rank 2 or more.*got axis 0, rank 1 and batch_dims=0"),
  (q(4, 64, **TILES, batch_dims=1), ValueError,
   "^quantize: .*rank 2 or more.*got axis 1, rank 2 and batch_dims=1"),
  (q(4, 64, format="int8_32", scale_layout="swizzled_128x4"), ValueError,
   "^quantize: .*for int8_32, .*got 'swizzled_128x4'; leave"),
  # Two axes.
  (both(64), TypeError, "^quantize_both: .*rank 2 or more, got rank 1"),
  (both(), TypeError, "^quantize_both: .*rank 1 or more, got a scalar"),
  (both(40, 64), TypeError, "size of axis 0 .* 32 for MXFP8, got 40 in"),
  (both(64, 40), TypeError, "size of axis 1 .* 32 for MXFP8, got 40 in"),
  (both(64, 64, axes=(1, -1)), ValueError, r"different axes, got \(1, -1\)"),
  (both(64, 64, axes=(0,)), ValueError, r"two different axes, got \(0,\)"),
  (both(64, 64, axes=1), ValueError, "two different axes, got 1"),
  (both(64, 64, axes=(0, 2)), ValueError, "rank 2, got 2"),
  (both(64, 64, scale_rounding="down"), ValueError,
   "^quantize_both: .*up.*floor.*'down'"),
  (both(64, 64, format=NVFP4, scale_rounding="floor"), ValueError,
   "^quantize_both: .*E8M0.*'floor' for nvfp4"),
  (both(64, 64, global_scale=2.0), ValueError,
   "^quantize_both: .*must be None for mxfp8.*got 2.0"),
  (both(64, 64, format=NVFP4, global_scale=-1.0), ValueError,
   "^quantize_both: .*positive and finite, got -1.0"),
  (both(64, 64, format="mx8"), ValueError, "'mx8'; known formats: mxfp8,"),
  (both(32, 32, dtype=jnp.int32), TypeError, "^quantize_both: x .*int32"),
  # The dtype of the result.
  (lambda: quantization.dequantize(np.ones((2, 32))), TypeError,
   r"must be a ScaledArray.*float64\[2, 32\]"),
  *(
    (call, TypeError, "^dequantize: dtype must be float32, bfloat16, float16 "
     f"or float64, got {shown}$")
    for dtype, shown in (
      ("int32", "int32"), (bool, "bool"), (jnp.complex64, "complex64"),
      (jnp.float8_e4m3fn, "float8_e4m3fn"), (">f4", ">f4"), ("foo", "'foo'"),
      (None, "None"), (3, "3"),
    )
    for call in (back(dtype), jax.jit(back(dtype)).trace)
  ),
)
# fmt: on


class ArgumentsTest(parameterized.TestCase):
  def test_bad_argument_is_named_with_its_value(self):
    for call, error, words in ERRORS:
      for run in (call, lambda call=call: jax.eval_shape(call)):
        with (
          self.subTest(words),
          self.assertRaisesRegex(error, words) as caught,
        ):
          run()
        self.assertIs(type(caught.exception), error)

  def test_format_may_be_given_by_its_name(self):
    x = np.random.default_rng(3).normal(size=(32, 32)).astype(np.float32)
    for name, format in (("nvfp4", NVFP4), ("MXFP8", MXFP8)):
      for quantize in (quantization.quantize, quantization.quantize_both):
        by_name, by_format = quantize(x, name), quantize(x, format)
        self.assertEqual(
          jax.tree.structure(by_name), jax.tree.structure(by_format)
        )
        jax.tree.map(
          np.testing.assert_array_equal,
          jax.tree.leaves(by_name),
          jax.tree.leaves(by_format),
        )

  @parameterized.parameters("float32", "bfloat16", "float16", "float64")
  def test_dequantize_gives_each_float_dtype(self, dtype):
    x = quantization.quantize(jnp.ones((2, 32)), MXFP8)
    with jax.enable_x64(True):
      for given in (dtype, jnp.dtype(dtype), jnp.dtype(dtype).type):
        result = quantization.dequantize(x, given)
        self.assertEqual(result.dtype.name, dtype)
        np.testing.assert_array_equal(result.astype(np.float32), 1.0)


class IdempotenceTest(parameterized.TestCase):
  """quantize(dequantize(.)) if f32 holds every dequantized value."""

  def blocks(self, format):
    """bf16 blocks, all mantissas, of amax in [2^-80, 2^126)."""
    binade = 2**7
    magnitudes = range((127 - 80) * binade, (127 + 126) * binade)
    return oracle.every_value(ml_dtypes.bfloat16, format.block_size, magnitudes)

  @parameterized.product(
    format=oracle.MX_FORMATS, scale_rounding=oracle.ROUNDINGS
  )
  @pytest.mark.sample(7)
  def test_dequantized_values_are_bitwise_stable(self, format, scale_rounding):
    f = oracle.jitted(format, scale_rounding)
    once = np.asarray(oracle.dequantize(f(self.blocks(format))))
    twice = np.asarray(oracle.dequantize(f(once)))
    self.assertTrue(np.isfinite(once).all())
    np.testing.assert_array_equal(twice.view(np.int32), once.view(np.int32))

  @parameterized.parameters(*oracle.MX_FORMATS)
  def test_floor_codes_are_bitwise_stable(self, format):
    f = oracle.jitted(format, "floor")
    once = f(self.blocks(format))
    oracle.assert_same(f(oracle.dequantize(once)), once)

  def test_nvfp4_block_with_a_subnormal_scale_need_not_be_stable(self):
    # By hand, in units of 2^-9: amax / 6 = 1.5 rounds to 2 (ties to even),
    # 9 / 2 = 4.5 to 4; then 8 / 6 rounds to 1, and 8 / 1 saturates at 6.
    x = jnp.zeros(16, jnp.float32).at[0].set(9 * 2.0**-9)
    once = oracle.jitted(NVFP4)(x, np.float32(1))
    twice = oracle.jitted(NVFP4)(oracle.dequantize(once), np.float32(1))
    self.assertEqual(float(oracle.dequantize(once)[0]), 8 * 2.0**-9)
    self.assertEqual(float(oracle.dequantize(twice)[0]), 6 * 2.0**-9)


X = lowerings.X
# Functions of an array and a format, and arguments of `quantize`.
QUANTIZERS = (quantization.quantize, quantization.quantize_both)


def both_of(format):
  """Returns a function that dequantizes both results of `quantize_both`."""
  return lambda x: [
    quantization.dequantize(q) for q in quantization.quantize_both(x, format)
  ]


class BatchingTest(parameterized.TestCase):
  def assert_same(self, actual, entries):
    """Leaves with the mapped dimension first equal those of each entry."""
    expected = jax.tree.map(lambda *a: np.stack(a), *entries)
    contract.assert_same_bits(actual, expected)

  @parameterized.product(
    format=formats.FORMATS,
    in_axis=(0, 1, 2, -1),
    arguments=({"axis": 0}, {"axis": -1}, {"axes": (-1, -2)}),
  )
  @pytest.mark.sample(6)
  def test_vmap_of_quantize_is_quantize_of_each(
    self, format, in_axis, arguments
  ):
    x = np.random.default_rng(14).normal(size=(64, 32, 96)).astype(np.float32)
    function = QUANTIZERS["axes" in arguments]
    quantize = lambda x: function(x, format, **arguments)
    actual = jax.vmap(quantize, in_axes=in_axis)(x)
    self.assert_same(actual, [quantize(a) for a in np.moveaxis(x, in_axis, 0)])

  def test_entries_that_share_a_key_have_the_bits_of_each_alone(self):
    x, key = X[:2], jax.random.key(0)
    quantize = lambda x: quantization.quantize(x, MXFP8, key=key)
    self.assert_same(jax.vmap(quantize)(x), [quantize(a) for a in x])

  @parameterized.product(
    in_axes=((0, None), (None, 0), (0, 0), (1, 0)), function=QUANTIZERS
  )
  @pytest.mark.sample(4)
  def test_vmap_over_a_given_global_scale(self, in_axes, function):
    x, g = X.reshape(4, 4, 16, 8), np.float32([1, 0.1, 3, 1e-3])
    x, (x_axis, scale_axis) = np.tile(x, (1, 1, 1, 2)), in_axes
    quantize = lambda x, g: function(x, NVFP4, global_scale=g)
    args = (x, g if scale_axis == 0 else g[1])
    actual = jax.vmap(quantize, in_axes=in_axes)(*args)
    entry = lambda a, d, i: a if d is None else np.take(a, i, d)
    self.assert_same(
      actual,
      [
        quantize(entry(args[0], x_axis, i), entry(args[1], scale_axis, i))
        for i in range(4)
      ],
    )

  @parameterized.product(
    format=formats.FORMATS,
    in_axes=(
      (0, 0, None),
      (0, None, None),
      (None, 0, None),
      (None, None, 0),
      (1, 0, 0),
      (0, 2, None),
      (2, 1, 0),
    ),
  )
  @pytest.mark.sample(11)
  def test_vmap_of_dequantize_is_dequantize_of_each(self, format, in_axes):
    q = quantization.quantize(X[:3, :3, :], format)
    g = np.float32([0.3, 7, 1e-3])
    full = (np.asarray(q.values), np.asarray(q.scale), g)
    args = [
      a[0] if d is None else np.moveaxis(a, 0, d)
      for a, d in zip(full, in_axes, strict=True)
    ]
    dequantize = lambda v, s, g: quantization.dequantize(
      scaled_array.ScaledArray(v, s, g, format)
    )
    actual = jax.vmap(dequantize, in_axes=in_axes)(*args)
    entries = [
      [a[0] if d is None else a[i] for a, d in zip(full, in_axes, strict=True)]
      for i in range(3)
    ]
    self.assert_same(actual, [dequantize(*entry) for entry in entries])

  @parameterized.parameters(MXFP8, NVFP4)
  @pytest.mark.sample(1)
  def test_vmap_of_vmap_is_each_alone(self, format):
    function = lowerings.round_trip(format)
    x = X.transpose(2, 1, 0)
    actual = jax.vmap(jax.vmap(function, in_axes=1), in_axes=2)(x)
    expected = [[function(row) for row in rows] for rows in X]
    np.testing.assert_array_equal(actual, expected)

  def test_each_vmap_may_map_the_global_scale_or_not(self):
    q = quantization.quantize(X[:3, :3, :], NVFP4)
    g = np.float32([0.3, 7, 1e-3])
    dequantize = lambda v, s, g: quantization.dequantize(
      scaled_array.ScaledArray(v, s, g, NVFP4)
    )
    values, scale = jnp.stack([q.values] * 2), jnp.stack([q.scale] * 2)
    once = jax.vmap(dequantize)
    twice = jax.vmap(once, in_axes=(0, 0, None))(values, scale, g)
    self.assert_same(twice, [once(q.values, q.scale, g)] * 2)

  @lowerings.needs_library
  def test_vmap_keeps_to_the_kernels_unless_each_entry_has_a_global_scale(self):
    for format, expected in ((MXFP8, (1, 1)), (MXFP4, (1, 1)), (NVFP4, (0, 1))):
      found = lowerings.calls(jax.vmap(lowerings.round_trip(format)), X)
      self.assertEqual(found, expected, format)
    given = lambda x: quantization.quantize(x, NVFP4, global_scale=0.1)
    self.assertEqual(lowerings.calls(jax.vmap(given), X), (1, 0))


class GradientTest(parameterized.TestCase):
  """As of the operations, which jax.jvp sees without kernels."""

  @parameterized.parameters(*formats.FORMATS)
  @pytest.mark.sample(2)
  def test_gradient_by_the_global_scale_is_the_sum_without_it(self, format):
    q = quantization.quantize(X, format)
    weight = np.random.default_rng(15).integers(-3, 4, X.shape)

    def function(g):
      x = scaled_array.ScaledArray(q.values, q.scale, g, format)
      return (quantization.dequantize(x) * weight).sum()

    bare = scaled_array.ScaledArray(q.values, q.scale, None, format)
    expected = (np.asarray(quantization.dequantize(bare), float) * weight).sum()

    def derivatives(g):
      _, tangent = jax.jvp(function, (g,), (jnp.float32(2),))
      return jax.grad(function)(g), tangent

    results = jax.jit(derivatives)(np.float32(0.7))
    np.testing.assert_allclose(results, (expected, 2 * expected), rtol=1e-4)
    by_operations = jax.jit(lowerings.by_operations(derivatives))
    contract.assert_same_bits(results, by_operations(np.float32(0.7)))

  def test_straight_through_has_a_gradient_by_the_global_scale(self):
    x = X
    q = quantization.quantize(x, NVFP4)

    def function(g):
      return quantization.dequantize(
        scaled_array.ScaledArray(q.values, q.scale, g, NVFP4, surrogate=x)
      ).sum()

    g = jnp.float32(0.7)
    np.testing.assert_allclose(
      jax.grad(function)(g), function(g) / g, rtol=1e-4
    )

  def test_gradient_under_remat_and_scan(self):
    q = quantization.quantize(X, NVFP4)

    @jax.checkpoint
    def step(g, x):
      array = scaled_array.ScaledArray(x.values, x.scale, g, NVFP4)
      return g * 1.5, jnp.tanh(quantization.dequantize(array)).sum()

    leaves = scaled_array.ScaledArray(q.values, q.scale, None, NVFP4)
    scanned = lambda g: jax.lax.scan(step, g, leaves)[1].sum()

    def unrolled(g):
      total = 0.0
      for i in range(X.shape[0]):
        x = scaled_array.ScaledArray(q.values[i], q.scale[i], g, NVFP4)
        total += jnp.tanh(quantization.dequantize(x)).sum()
        g = g * 1.5
      return total

    g = q.global_scale
    np.testing.assert_allclose(
      jax.jit(jax.grad(scanned))(g),
      lowerings.by_operations(jax.jit(jax.grad(unrolled)))(g),
      rtol=1e-4,
    )


class TransformTest(parameterized.TestCase):
  @parameterized.parameters(*formats.FORMATS)
  def test_scan_is_each_step_alone(self, format):
    function = lowerings.round_trip(format)
    _, actual = jax.lax.scan(lambda c, x: (c, function(x)), 0, X)
    np.testing.assert_array_equal(actual, np.stack([function(x) for x in X]))

  @parameterized.product(format=formats.FORMATS, function=QUANTIZERS)
  @pytest.mark.sample(4)
  def test_eval_shape_is_that_of_the_result(self, format, function):
    for dtype in ("float32", "bfloat16"):
      x = X.reshape(32, 64).astype(dtype)
      quantize = lambda x: function(x, format)
      expected = quantize(x)
      shapes = jax.eval_shape(quantize, x)
      self.assertEqual(
        [(a.shape, a.dtype) for a in jax.tree.leaves(shapes)],
        [(a.shape, a.dtype) for a in jax.tree.leaves(expected)],
      )

  @parameterized.product(
    format=formats.FORMATS, round_trip=(lowerings.round_trip, both_of)
  )
  @pytest.mark.sample(5)
  def test_disabled_jit_and_no_tracing_give_the_same_bits(
    self, format, round_trip
  ):
    x, function = jnp.asarray(X.reshape(32, 64)), round_trip(format)
    expected = function(x)
    with jax.no_tracing():  # a second eager call
      contract.assert_same_bits(function(x), expected)
    with jax.disable_jit():
      contract.assert_same_bits(function(x), expected)

  def test_call_without_use_for_its_results_is_dropped(self):
    compiled = jax.jit(
      lambda x: (lowerings.round_trip(MXFP8)(x), x + 1)[1]
    ).lower(X)
    self.assertEqual(lowerings.kernel_calls(compiled.as_text()), (0, 0))
