# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats with a codebook, against NumPy and bitsandbytes' algorithm."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.dot.backends import cpu
from jaxplugin.runtime import cpu_library
from jaxplugin.testing import contract

# bitsandbytes' fp4: not in order, and with a zero of each sign.
FP4 = tuple(
  float(np.float32(x) / np.float32(12))
  for sign in (1, -1)
  for x in sign * np.array([0, 0.0625, 8, 12, 4, 6, 2, 3])
)
BNB_FP4 = dataclasses.replace(jp.NF4, name="bnb_fp4", codebook=FP4)
NEEDS_KERNELS = absltest.skipIf(
  jp.detect_target("cpu").cpu_kernels is None, "needs the CPU kernels"
)
# The codebook of GGUF's IQ4_NL (`kvalues_iq4nl` in ggml-common.h).
IQ4 = contract.block_format(
  "iq4",
  ml_dtypes.int4,
  np.float16,
  32,
  codebook=(
    *(-127, -104, -83, -65, -49, -35, -22, -10),
    *(1, 13, 25, 38, 53, 69, 89, 113),
  ),
)
F32_MAX = np.finfo(np.float32).max
F32_TINY = np.finfo(np.float32).tiny
F32_EPSILON = 2.0**-24


def odd_numbers(n, k):
  """Returns f32[n, k], n > 6, with special first rows."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, k)) * np.exp(2 * rng.normal(size=(n, k)))
  x = x.astype(np.float32)
  x[0] = 0
  x[1] = np.sign(x[1]) * F32_MAX
  x[2] *= 1e-37
  x[3, -1] = np.nan
  x[4, 0] = -np.inf
  x[5] *= np.float32(1e38) / np.abs(x[5]).max()  # 1 / scale is subnormal
  return x


@np.errstate(all="ignore")
def by_bitsandbytes(x, codebook):
  """Returns codes and absmax of f32[n, k], as `quantize_4bit` computes them.

  `_get_4bit_quantize_bounds` and `quantize_4bit` of bitsandbytes 0.50.2,
  backends/default/ops.py, for blocks of 64: torch.bucketize is searchsorted.
  """
  code = np.asarray(codebook, np.float32)
  order = np.argsort(code, kind="stable")
  bounds = (code[order[:-1]] + code[order[1:]]) / np.float32(2)
  blocks = x.reshape(len(x), -1, 64)
  absmax = np.abs(blocks).max(-1)
  inverse = np.float32(1) / np.maximum(absmax, np.float32(1e-38))
  scaled = np.clip(blocks * inverse[..., None], -1, 1)
  found = np.searchsorted(bounds, scaled.astype(np.float32), side="left")
  return order[found].reshape(x.shape), absmax


class CodebookTest(parameterized.TestCase):
  @parameterized.parameters(jp.NF4, BNB_FP4)
  def test_bits_are_those_of_bitsandbytes(self, format):
    x = odd_numbers(40, 192)
    # Ties: each midpoint of two entries, in a block whose absmax is 1.
    entries = np.sort(np.asarray(format.codebook, np.float32))
    x[6] = 0
    x[6, :15] = (entries[1:] + entries[:-1]) / np.float32(2)
    x[6, 15] = -1
    codes, absmax = by_bitsandbytes(x, format.codebook)
    found = jp.quantize(x, format)
    is_bad = ~np.isfinite(absmax)
    np.testing.assert_array_equal(np.isnan(found.scale), is_bad)
    # jaxplugin treats f32 subnormals as 0.
    absmax = np.where(absmax < F32_TINY, np.float32(0), absmax)
    np.testing.assert_array_equal(
      np.asarray(found.scale)[~is_bad], absmax[~is_bad]
    )
    stored = np.asarray(found.unpack().values).astype(int) + 8
    is_exact = np.repeat(~is_bad & (absmax > 0), 64, -1)
    is_exact &= (np.abs(x) >= F32_TINY) | (x == 0)
    np.testing.assert_array_equal(stored[is_exact], codes[is_exact])

  def test_nearest_entry_is_found(self):
    formats = jp.NF4, BNB_FP4, IQ4
    x = odd_numbers(40, 192)[6:]

    @jax.jit
    def run(x):
      arrays = [jp.quantize(x, format) for format in formats]
      return [(array.scale, array.dequantize()) for array in arrays]

    for format, (scale, values) in zip(formats, run(x), strict=True):
      with self.subTest(format.name):
        size, entries = format.block_size, np.asarray(format.codebook)
        amax = np.abs(x.reshape(len(x), -1, size)).max(-1)
        largest = np.float32(np.abs(entries).max())
        expected = (amax / largest).astype(format.scale_dtype)
        np.testing.assert_array_equal(scale, expected)
        scale = np.repeat(np.asarray(scale, np.float64), size, -1)
        error = np.abs(x[..., None] - scale[..., None] * entries)
        got = np.abs(np.asarray(values, np.float64) - x)
        # The quotient of f32 may fall on the other side of a midpoint.
        slack = 4 * F32_EPSILON * scale * np.abs(entries).max()
        np.testing.assert_array_less(got - error.min(-1), slack)

  @parameterized.parameters(jp.NF4, BNB_FP4, IQ4)
  def test_dequantize_is_entry_times_scale(self, format):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (6, 192))
    codes[0, :16] = np.arange(16)
    blocks = 192 // format.block_size
    scale = rng.uniform(-2, 2, (6, blocks)).astype(format.scale_dtype)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8) ^ 0x88
    array = jp.ScaledArray(packed, scale, None, format)
    entries = np.asarray(format.codebook, np.float32)[codes]
    factors = np.repeat(scale.astype(np.float32), format.block_size, -1)
    expected = entries * factors
    np.testing.assert_array_equal(array.dequantize(), expected)
    np.testing.assert_array_equal(
      array.unpack().T.dequantize(), np.transpose(expected)
    )
    np.testing.assert_array_equal(
      reference.oracle_dequantize(packed, scale, format),
      entries.astype(np.float64) * factors,
    )

  def test_other_axes_and_short_blocks_have_the_same_bits(self):
    @jax.jit
    def run(x):
      columns, again = jp.quantize_both(x, "nf4", axes=(0, 2))
      self.assertEqual(columns.axis, 0)
      turned = jp.quantize(x.transpose(0, 2, 1), "nf4", axis=1)
      layers = jp.stack([jp.quantize(layer, "nf4") for layer in x])
      rows = jp.quantize(x, "nf4")
      with_zeros = jp.quantize(jnp.pad(x, [(0, 0), (0, 0), (0, 56)]), "nf4")
      same = again, layers, turned.transpose(0, 2, 1), rows
      floats = with_zeros.dequantize()[..., :200], rows.dequantize()
      return [array.unpack() for array in same], floats

    (*others, rows), floats = run(odd_numbers(20, 200)[6:].reshape(2, 7, 200))
    for other in others:
      jax.tree.map(np.testing.assert_array_equal, other, rows)
    np.testing.assert_array_equal(*floats)

  def test_exported_program_keeps_the_codebook(self):
    w = jp.quantize(odd_numbers(20, 64)[6:], BNB_FP4)
    exported = jax.export.export(jax.jit(jp.dequantize))(w)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(w), w.dequantize())

  @parameterized.parameters(
    (dict(codebook=4), TypeError, "sequence of 16 floats, got 4"),
    (dict(codebook="sixteen"), TypeError, "sequence of 16 floats, got 'six"),
    (dict(codebook=FP4[:15]), ValueError, r"16 finite .*-0\.16\d+\] for f"),
    (dict(codebook=(0.1, *FP4[1:])), ValueError, r"f32 holds, .* got \[0\.1"),
    (dict(codebook=(np.inf, *FP4[1:])), ValueError, r"finite.*got \[inf"),
    (dict(codebook=(F32_MAX, *FP4[1:])), ValueError, r"magnitude from 2"),
    (dict(codebook=(F32_TINY / 2, *FP4[1:])), ValueError, r"magnitude from 2"),
    (dict(codebook=("a", *FP4[1:])), TypeError, "sequence of 16 floats"),
    (dict(codebook=(1e39, *FP4[1:])), ValueError, r"f32.*got \[1e\+39"),
    (dict(codebook=(0,) * 16), ValueError, "not all of them 0"),
    (dict(values_dtype=np.int8), ValueError, "None unless values are int4"),
    (dict(fraction_bits=1), ValueError, "without fraction_bits"),
    (dict(offset_dtype=np.int8), ValueError, "and offset_dtype, with"),
    (dict(scale_dtype=ml_dtypes.float8_e8m0fnu), ValueError, "float16 scales"),
    (dict(block_rows=64), ValueError, "block_rows must be 1"),
  )  # fmt: skip
  def test_bad_format_is_refused(self, fields, error, message):
    given = {
      f.name: getattr(jp.NF4, f.name) for f in dataclasses.fields(jp.NF4)
    }
    with self.assertRaisesRegex(error, f"^BlockFormat: .*{message}"):
      jp.BlockFormat(**(given | {"name": "f"} | fields))

  @parameterized.parameters(
    (dict(key=jax.random.key(0)), "key must be None for nf4"),
    (dict(scale_rounding="ggml"), "offset or a codebook, got 'ggml' for nf4"),
    (dict(scale_rounding="floor"), "got 'floor' for nf4"),
    (dict(global_scale=2.0), "global_scale"),
  )
  def test_bad_argument_of_quantize_is_named(self, options, message):
    with self.assertRaisesRegex((TypeError, ValueError), message):
      jp.quantize(jnp.ones((2, 64)), "nf4", **options)

  def test_training_refuses_it(self):
    with self.assertRaisesRegex(
      NotImplementedError, "rhs_format must have no codebook, got nf4. Pass int"
    ):
      jp.dot_general("mxfp8", "nf4")
    with self.assertRaisesRegex(
      NotImplementedError, "quantize_dots: .* must have no codebook, got nf4"
    ):
      jp.quantize_dots(lambda x: x, "nf4")


def changed(format, **changes):
  return dataclasses.replace(format, name="f", **changes)


def random_weight(rng, format, n, k):
  """Returns an array of random codes and scales; `quantize` compiles longer."""
  blocks = -(-k // format.along(k).block_size)
  values = rng.integers(0, 256, (n, k // 2), np.uint8)
  scale = rng.uniform(-2, 2, (n, blocks)).astype(format.scale_dtype)
  values, scale = jax.device_put((values, scale))
  return jp.ScaledArray(values, scale, None, format)


@NEEDS_KERNELS
class CodebookKernelsTest(parameterized.TestCase):
  def assert_within(self, got, x, w, **options):
    w = reference.oracle_dequantize(w.values, w.scale, w.format)
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
      error = np.abs(np.asarray(got, np.float64) - x @ w.T)
      bound = reference.ERROR_BOUND * (np.abs(x) @ np.abs(w).T)
    is_right = (error <= bound) | (np.isnan(error) & np.isnan(bound))
    self.assertTrue(is_right.all(), f"{error} for {bound}")

  @parameterized.parameters(
    jp.NF4,
    IQ4,
    changed(IQ4, scale_dtype=np.float32),
    changed(jp.NF4, block_size=16, scale_dtype=ml_dtypes.bfloat16),
    changed(jp.NF4, block_size=512),
    changed(jp.NF4, block_size=1024),
    changed(jp.NF4, block_size=48),
    changed(jp.NF4, block_size=0),
    BNB_FP4,
  )
  def test_rows_of_any_number_and_dtype_have_the_error_bound(self, format):
    rng = np.random.default_rng(5)
    given = [
      (
        rng.normal(size=(m, k)).astype(dtype),
        random_weight(rng, format, n, k),
      )
      for n, k, m, dtype in (
        (40, 576, 1, jnp.float32),
        (40, 576, 4, jnp.bfloat16),
        (40, 576, 5, jnp.float16),
        (40, 576, 9, jnp.bfloat16),
        (9, 1088, 12, jnp.float32),
        (3, 34, 2, jnp.float32),
        (70, 10000, 3, jnp.float32),
      )
    ]
    dot = functools.partial(jp.block_scaled_dot, implementation="cpu")
    run = jax.jit(lambda given: [(dot(x, w), dot(w, x)) for x, w in given])
    for (x, w), (got, turned) in zip(given, run(given), strict=True):
      with self.subTest(f"{x.shape} {w.shape} {x.dtype}"):
        self.assert_within(got, x, w)
        self.assert_within(np.transpose(turned), x, w)

  def test_scales_that_are_extreme_or_nan(self):
    codes = np.random.default_rng(6).integers(0, 256, (8, 96), np.uint8)
    scale = np.ones((8, 3), np.float32)
    scale[0, 1], scale[1, 0], scale[2, 2], scale[3] = np.nan, 1e30, 1e-30, 0
    scale[4] = (1e35, 1, 1e-35)
    codes[5] = 0  # an entry that is not 0
    scale[5] = 1e25
    w = jp.ScaledArray(codes, scale, None, jp.NF4)
    x = jax.device_put(np.random.default_rng(7).normal(size=(3, 192)))
    self.assert_within(jp.block_scaled_dot(x, w, implementation="cpu"), x, w)

  def test_mxfp8_rows_and_an_epilogue(self):
    rng = np.random.default_rng(8)
    w = jp.quantize(rng.normal(size=(48, 224)).astype(np.float32), "nf4")
    for rows in (2, 20):
      x = jp.quantize(rng.normal(size=(rows, 224)).astype(np.float32), "mxfp8")
      dot = lambda name, x=x: jp.block_scaled_dot(
        *(x, w),
        bias=jnp.ones(48),
        activation="relu",
        implementation=name,
      )
      np.testing.assert_allclose(dot("cpu"), dot("xla"), rtol=1e-4, atol=1e-4)

  @parameterized.parameters(
    ("baseline", ("f32",)),
    ("avx2", ("float_avx2", "few_rows_avx2")),
    ("amx_bf16",
      ("float_avx2", "few_rows_avx2", "few_rows_avx512", "float_avx512")),
    ("neon_i8mm", ("f32",)),
  )  # fmt: skip
  def test_engines_that_multiply_in_float32_decode_codebooks(self, isa, names):
    for operands in (
      (np.dtype(np.float32), jp.NF4),
      (np.dtype(ml_dtypes.bfloat16), changed(jp.NF4, block_size=32)),
      (IQ4, jp.MXFP8),
    ):
      dot = cpu_library.dot_numbers(isa, operands, (3, 64, 64))
      found = [
        cpu_library.engine_name(number)
        for number in range(1, len(cpu.ENGINES))
        if not cpu_library.dot_config_error(dot, (number, 0, 0, 0))
      ]
      self.assertCountEqual(found, names)
      rule = cpu_library.engine_name(cpu_library.dot_engine(dot))
      self.assertIn(rule, names)

  def test_layer_of_a_stack_is_read_in_place(self):
    stack = jp.quantize(np.ones((3, 32, 64), np.float32), "nf4")
    f = jax.jit(lambda x, i: jp.linear(x, stack, layer=i))
    text = f.lower(jnp.ones((2, 64)), 1).as_text()
    self.assertIn("jaxplugin_ragged_dot", text)

  @parameterized.parameters(
    (jp.NF4, False, "reads values without a codebook, got nf4"),
    (changed(jp.NF4, codebook=(2.0**-17, *jp.NF4.codebook[1:])), True,
      "codebooks of 0 and 1.5.*e-05 to 65536.0, got f"),
  )  # fmt: skip
  def test_refusal_has_the_reason(self, format, is_dot, reason):
    found = cpu_library.format_refusal(format, 64, reads_codebooks=is_dot)
    self.assertRegex(found, reason)

  def test_two_codebooks_are_refused(self):
    w = jp.quantize(jnp.ones((64, 64)), "nf4")
    text = jp.explain(jp.block_scaled_dot, w, w).details()
    self.assertIn("a codebook of one operand, got nf4 x nf4", text)


class CodebookDotTest(parameterized.TestCase):
  def test_dot_has_the_error_bound(self):
    rng = np.random.default_rng(2)
    n, k = 24, 224  # the last block of NF4 is short
    normal = lambda rows: rng.normal(size=(rows, k)).astype(np.float32)
    lhs_of = {
      None: normal,
      jp.MXFP8: lambda rows: contract.quantized(normal(rows), jp.MXFP8),
      jp.NF4: lambda rows: random_weight(rng, jp.NF4, rows, k),
    }
    pairs = [
      (lhs_of[lhs](rows), random_weight(rng, format, n, k))
      for lhs, format in (
        *((None, jp.NF4), (jp.MXFP8, jp.NF4)),
        *((jp.NF4, jp.NF4), (None, IQ4)),
      )
      for rows in (1, 5, 40)
    ]
    run = jax.jit(lambda pairs: [jp.block_scaled_dot(*pair) for pair in pairs])
    for got, pair in zip(run(pairs), pairs, strict=True):
      x, w = (
        reference.oracle_dequantize(a.values, a.scale, a.format)
        if isinstance(a, jp.ScaledArray)
        else a.astype(np.float64)
        for a in pair
      )
      bound = reference.ERROR_BOUND * (np.abs(x) @ np.abs(w).T)
      np.testing.assert_array_less(np.abs(got - x @ w.T), bound)

  def test_linear_layers_and_ragged_dot_are_dots(self):
    rng = np.random.default_rng(3)
    w = rng.normal(size=(3, 32, 128)).astype(np.float32)
    stack = jp.quantize(w, "nf4")
    x = jax.device_put(rng.normal(size=(9, 128)))
    exact = np.asarray(x, np.float64) @ np.asarray(
      reference.oracle_dequantize(stack.values, stack.scale, jp.NF4)
    ).transpose(0, 2, 1)
    size = 128 * F32_EPSILON * np.abs(x).max() * np.abs(w).max() * 16
    layer = jax.jit(lambda x, i: jp.linear(x, stack, layer=i))(x, 2)
    np.testing.assert_allclose(layer, exact[2], rtol=0, atol=size)
    sizes = jnp.asarray([4, 0, 5])
    for guard in (jp.debug_checks(False), jp.debug_checks()):
      with guard:
        ragged = jp.ragged_dot(x, stack, sizes)
      expected = np.concatenate([exact[0, :4], exact[2, 4:]])
      np.testing.assert_allclose(ragged, expected, rtol=0, atol=size)

  def test_gradient_of_rows_is_that_of_the_dequantized_weight(self):
    w = jp.quantize(odd_numbers(20, 128)[6:], "nf4")
    x = jnp.linspace(-1, 1, 3 * 128).reshape(3, 128)
    got = jax.grad(lambda x: jp.linear(x, w).sum())(x)
    expected = np.asarray(w.dequantize(), np.float64).sum(0)
    np.testing.assert_allclose(got, np.tile(expected, (3, 1)), rtol=1e-5)

  def test_model_accepts_the_weight(self):
    w = np.random.default_rng(4).normal(size=(128, 64)).astype(np.float32)
    params, _ = jp.quantize_params({"kernel": w}, "nf4")
    x = jnp.ones((4, 128))
    f = jax.jit(jp.accept_quantized(lambda params, x: x @ params["kernel"]))
    exact = np.asarray(params["kernel"].dequantize(), np.float64)
    bound = reference.ERROR_BOUND * np.abs(exact).sum(0)
    error = np.abs(f(params, x) - np.asarray(x) @ exact)
    np.testing.assert_array_less(error, np.tile(bound, (4, 1)))
    self.assertIn("nf4", str(jp.explain(f, params, x)))

  def test_kernels_say_why_they_do_not_read_it(self):
    w, x = jp.quantize(jnp.ones((64, 64)), "nf4"), jnp.ones((4, 64))
    for name in ("h100", "b200"):
      target = jp.named_target(name)
      found = jp.explain(jp.linear, x, w, target=target).details()
      self.assertIn("without a codebook, with E8M0", found)
      self.assertIn("got nf4", found)
