# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (modules in the text)
"""Rewritten modules compute the results of their calls on this CPU."""

import io

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jaxlib.mlir import ir

import jaxplugin as jp
from jaxplugin.dot import reference
from jaxplugin.testing import contract, installed, written_modules

DOT = "__op$block_scaled_dot"
SWIZZLED_DOT = "__cudnn$blockScaledDot"
CPU = jp.named_target("cpu")
PAIRS = (
  (jp.MXFP8, jp.MXFP8),
  (jp.MXFP8, jp.MXFP8_E5M2),
  (jp.NVFP4, jp.NVFP4),
  (jp.MXFP4, jp.MXFP8),
)


def cpu_targets():
  """Returns a CPU without C++ kernels, and this CPU, which may have them."""
  return {"named": CPU, "local": jp.detect_target("cpu")}


def operand(rng, format, shape, *, storage="raw", integers=False, dtype=None):
  case = contract.OperandCase(
    format=format,
    dtype=np.dtype(dtype or format.values_dtype),
    shape=shape,
    axis=len(shape) - 1,
    storage=storage,
    unpadded=tuple(range(len(shape) - 2)),
  )
  return contract.make_operand(rng, case, integers=integers)


def sides(lhs, rhs, batch=(), *, rows=5, k=96, dtype=None, **options):
  """Returns random operands of a dot of these formats."""
  rng = np.random.default_rng(0)
  return (
    operand(rng, lhs, (*batch, rows, k), **options),
    operand(rng, rhs, (*batch, 7, k), dtype=dtype, **options),
  )


def leaves(side):
  """Returns values and scale of an operand, in any storage."""
  if isinstance(side.operand, jp.ScaledArray):
    return side.operand.values, side.operand.scale
  return side.operand, side.scale


def dot_module(lhs, rhs, dtype, *, global_scale=None, attributes="", name=DOT):
  """Returns the module of one dot, its arrays, and the result's shape."""
  (lhs_values, lhs_scale), (rhs_values, rhs_scale) = leaves(lhs), leaves(rhs)
  arrays = [lhs_values, rhs_values, lhs_scale]
  arrays += [x for x in (rhs_scale, global_scale) if x is not None]
  shape = (*lhs_values.shape[:-1], rhs_values.shape[-2])
  results = [written_modules.array(shape, dtype)]
  if name == SWIZZLED_DOT:
    results.append(written_modules.array((0,), np.uint8))
  text = written_modules.call_module(name, arrays, results, attributes)
  return text, arrays


class DotNumericsTest(parameterized.TestCase):
  def check(self, module, arrays, exact, magnitude, dtype, *, is_exact=False):
    """Runs a module that is rewritten for each CPU target."""
    for name, target in cpu_targets().items():
      rewritten = jp.rewrite(module, target)
      for call in (DOT, SWIZZLED_DOT, "xla.scaled_dot"):
        self.assertNotIn(call, rewritten)
      with self.subTest(name):
        result, *_ = written_modules.run(rewritten, *arrays)
        if is_exact:
          contract.assert_exact(result, exact, np.dtype(dtype))
        else:
          bound = contract.DOT_BOUND * magnitude
          contract.assert_within(result, exact, bound, np.dtype(dtype))

  def check_dot(
    self, lhs, rhs, dtype=np.float32, *, factor=1, is_exact=False, **options
  ):
    module, arrays = dot_module(lhs, rhs, np.dtype(dtype), **options)
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    exact *= factor
    self.check(module, arrays, exact, magnitude, dtype, is_exact=is_exact)

  @parameterized.product(pair=PAIRS, batch=((), (2,)))
  @pytest.mark.sample(1)
  def test_four_operands(self, pair, batch):
    self.check_dot(*sides(*pair, batch))

  @parameterized.parameters("float32", "bfloat16", "float16")
  @pytest.mark.sample(1)
  def test_integers_are_exact_in_every_result_dtype(self, dtype):
    both = sides(jp.MXFP8, jp.MXFP8_E5M2, integers=True)
    self.check_dot(*both, dtype, is_exact=True)

  @parameterized.parameters("float32", "bfloat16")
  def test_three_operands_take_a_plain_rhs(self, dtype):
    lhs, rhs = sides(jp.NVFP4, None, dtype=dtype)
    self.assertIsNone(rhs.scale)
    self.check_dot(lhs, rhs)

  @parameterized.parameters("float32", "bfloat16", "float16")
  @pytest.mark.sample(1)
  def test_fifth_operand_multiplies(self, dtype):
    self.check_dot(
      *sides(jp.NVFP4, jp.NVFP4, k=48, integers=True),
      dtype,
      factor=0.375,
      is_exact=True,
      global_scale=np.asarray(0.375, dtype),
    )

  @parameterized.product(pair=PAIRS[:3], batch=((), (2,)))
  @pytest.mark.sample(1)
  def test_garbage_in_padded_scales_never_matters(self, pair, batch):
    size = written_modules.block_size(f"\\22{pair[0].block_size}\\22")
    self.check_dot(*sides(*pair, batch, storage="padded"), attributes=size)

  def test_more_rows_of_scale_need_no_block_size(self):
    lhs, rhs = sides(jp.MXFP8, jp.MXFP8, k=64)
    module, arrays = dot_module(lhs, rhs, np.float32)
    arrays[2] = np.pad(np.asarray(arrays[2]).view(np.uint8), ((0, 3), (0, 0)))
    arrays[2] = arrays[2].view(ml_dtypes.float8_e8m0fnu)
    module = module.replace("tensor<5x2xf8E8M0FNU>", "tensor<8x2xf8E8M0FNU>")
    self.check(module, arrays, *contract.dot(lhs.exact, rhs.exact), np.float32)

  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4), batch=((), (2,)), rows=(5, 128)
  )
  @pytest.mark.sample(1)
  def test_swizzled_scales(self, format, batch, rows):
    both = sides(format, format, batch, rows=rows, storage="swizzled")
    self.check_dot(*both, name=SWIZZLED_DOT)

  def test_blocks_of_no_format_are_served(self):
    # E4M3 values with an E4M3 scale for 24 values, which XLA supports too.
    rng = np.random.default_rng(7)
    values = [
      reference.finite_codes(rng, (n, 48), np.dtype(jnp.float8_e4m3fn))
      for n in (5, 7)
    ]
    scale = [
      reference.finite_codes(rng, (n, 2), np.dtype(jnp.float8_e4m3fn))
      for n in (5, 7)
    ]
    exact = [
      v.astype(np.float64) * np.repeat(s.astype(np.float64), 24, -1)
      for v, s in zip(values, scale, strict=True)
    ]
    arrays = [*values, *scale]
    result = written_modules.array((5, 7), np.float32)
    module = written_modules.call_module(DOT, arrays, [result])
    self.check(module, arrays, *contract.dot(*exact), np.float32)

  @parameterized.parameters(
    ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "bfloat16")
  )
  @pytest.mark.sample(1)
  def test_composite_of_jax(self, lhs_dtype, rhs_dtype):
    rng = np.random.default_rng(8)
    formats = {"float8_e4m3fn": jp.MXFP8, "float8_e5m2": jp.MXFP8_E5M2}
    lhs = operand(rng, formats[lhs_dtype], (2, 5, 64))
    rhs = operand(
      rng, formats.get(rhs_dtype), (2, 7, 64), dtype=np.dtype(rhs_dtype)
    )
    (lhs_values, lhs_scale), (rhs_values, rhs_scale) = leaves(lhs), leaves(rhs)

    def function(lhs, rhs, lhs_scale, rhs_scale):
      return lax.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
      )

    arrays = (lhs_values, rhs_values, lhs_scale, rhs_scale)
    lowered = jax.jit(function).lower(*arrays)
    self.assertIn("xla.scaled_dot", lowered.as_text())
    self.check(
      lowered.as_text(),
      [x for x in arrays if x is not None],
      *contract.dot(lhs.exact, rhs.exact, (((2,), (2,)), ((0,), (0,)))),
      np.float32,
    )


class QuantizeNumericsTest(parameterized.TestCase):
  def quantize(self, x, values_dtype, scale_dtype, block, **options):
    scale_shape = (*x.shape[:-1], x.shape[-1] // block)
    results = [
      written_modules.array(x.shape, values_dtype),
      written_modules.array(scale_shape, scale_dtype),
    ]
    module = written_modules.call_module("__op$quantize", [x], results)
    return written_modules.run(jp.rewrite(module, CPU, **options), x)

  def sample(self, dtype=np.float32):
    x = np.random.default_rng(0).normal(size=(5, 96)) * 100
    x[2] = 0
    return x.astype(dtype)

  @parameterized.product(
    values_dtype=("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    scale_rounding=("up", "floor"),
    dtype=("float32", "bfloat16", "float16"),
  )
  @pytest.mark.sample(1)
  def test_mx_scale_is_a_power_of_two(
    self, values_dtype, scale_rounding, dtype
  ):
    x = self.sample(np.dtype(dtype))
    largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float4_e2m1fn": 6}
    largest = largest[values_dtype]
    blocks = x.astype(np.float64).reshape(5, 3, 32)
    amax = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
      exponent = (
        np.ceil(np.log2(amax / largest))
        if scale_rounding == "up"
        else np.floor(np.log2(amax)) - np.floor(np.log2(largest))
      )
    exponent = np.where(amax == 0, -127, exponent)
    values, scale = self.quantize(
      x, values_dtype, "float8_e8m0fnu", 32, scale_rounding=scale_rounding
    )
    np.testing.assert_array_equal(scale.view(np.uint8), exponent + 127)
    expected = np.clip(blocks / np.exp2(exponent)[..., None], -largest, largest)
    expected = expected.astype(np.float32).astype(np.dtype(values_dtype))
    np.testing.assert_array_equal(
      values.astype(np.float32), expected.reshape(x.shape).astype(np.float32)
    )

  def test_nvfp4_leaves_all_to_the_block_scale(self):
    x = self.sample()
    values, scale = self.quantize(
      x,
      "float4_e2m1fn",
      "float8_e4m3fn",
      16,
      scale_rounding="floor",  # for E8M0 scales of other calls
    )
    blocks = x.astype(np.float64).reshape(5, 6, 16)
    expected_scale = written_modules.e4m3_scale(np.abs(blocks).max(-1) / 6)
    np.testing.assert_array_equal(
      scale.view(np.uint8), expected_scale.view(np.uint8)
    )
    divisor = expected_scale.astype(np.float64)[..., None]
    expected = blocks / np.where(divisor == 0, 1, divisor)
    expected = np.clip(expected, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(
      values.astype(np.float32), expected.reshape(x.shape).astype(np.float32)
    )

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP8_E5M2, jp.MXFP4, jp.NVFP4),
    dtype=("float32", "bfloat16"),
  )
  @pytest.mark.sample(1)
  def test_dequantize_multiplies_and_rounds_once(self, format, dtype):
    side = operand(np.random.default_rng(1), format, (2, 5, 96))
    values, scale = leaves(side)
    result = written_modules.array((2, 5, 96), dtype)
    module = written_modules.call_module(
      "__op$dequantize", [values, scale], [result]
    )
    rewritten = jp.rewrite(module, CPU)
    (actual,) = written_modules.run(rewritten, values, scale)
    contract.assert_exact(actual, side.exact, np.dtype(dtype))

  def test_quantize_dot_and_dequantize_of_hlo_run_together(self):
    hlo = """HloModule chain

ENTRY main {
  x = f32[5,96]{0,1} parameter(0)
  w = f32[7,96]{1,0} parameter(1)
  xq = (f8e4m3fn[5,96]{1,0}, f8e8m0fnu[5,3]{1,0}) custom-call(x), custom_call_target="__op$quantize"
  xv = f8e4m3fn[5,96]{1,0} get-tuple-element(xq), index=0
  xs = f8e8m0fnu[5,3]{1,0} get-tuple-element(xq), index=1
  wq = (f8e4m3fn[7,96]{1,0}, f8e8m0fnu[7,3]{1,0}) custom-call(w), custom_call_target="__op$quantize"
  wv = f8e4m3fn[7,96]{1,0} get-tuple-element(wq), index=0
  ws = f8e8m0fnu[7,3]{1,0} get-tuple-element(wq), index=1
  d = f32[5,7]{1,0} custom-call(xv, wv, xs, ws), custom_call_target="__op$block_scaled_dot"
  f = f32[5,96]{1,0} custom-call(xv, xs), custom_call_target="__op$dequantize"
  ROOT out = (f32[5,7]{1,0}, f32[5,96]{1,0}) tuple(d, f)
}
"""
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-6, 7, (n, 96)).astype(np.float32) for n in (5, 7))
    rewritten = jp.rewrite(hlo, CPU)
    self.assertNotIn("custom_call", rewritten)
    # Integers up to 6 are exact in MXFP8.
    product, values = written_modules.run(rewritten, x, w)
    np.testing.assert_array_equal(product, x @ w.T)
    np.testing.assert_array_equal(values, x)


class FormsTest(parameterized.TestCase):
  """Every form of a module can be rewritten."""

  def setUp(self):
    super().setUp()
    both = sides(jp.MXFP8, jp.MXFP8, k=64, integers=True)
    (lhs, lhs_scale), (rhs, rhs_scale) = map(leaves, both)
    self.arrays = (lhs, rhs, lhs_scale, rhs_scale)
    self.exact, _ = contract.dot(*(side.exact for side in both))

    def function(lhs, rhs, lhs_scale, rhs_scale):
      return lax.scaled_dot(
        lhs,
        rhs.T,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale.T,
        preferred_element_type=jnp.float32,
      )

    self.function = jax.jit(function)
    self.lowered = self.function.lower(*self.arrays)
    self.text = self.lowered.as_text()

  def check(self, module):
    (result,) = written_modules.run(module, *self.arrays)
    contract.assert_exact(result, self.exact, np.dtype(np.float32))

  def test_each_form_gives_its_form_and_is_kept(self):
    bytecode, module = io.BytesIO(), self.lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(bytecode)
    hlo = self.lowered.compiler_ir("hlo").as_hlo_text()
    self.assertStartsWith(hlo, "HloModule")
    for name, given, kind in (
      ("text", self.text, str),
      ("hlo", hlo, str),
      ("bytecode", bytecode.getvalue(), bytes),
      ("what lower returns", self.lowered, ir.Module),
      ("object", module, ir.Module),
    ):
      with self.subTest(name):
        rewritten = jp.rewrite(given, CPU)
        self.assertIsInstance(rewritten, kind)
        if kind is bytes:
          self.assertStartsWith(rewritten, b"ML\xefR\rMLIR")
        else:
          rewritten = str(rewritten)
          self.assertIn("func.func", rewritten)
          self.assertNotIn("composite", rewritten)
        self.check(rewritten)
    self.assertEqual(self.lowered.as_text(), self.text)
    self.assertIn("composite", str(module))

  def test_exported_stays_one_that_can_be_called_and_serialized(self):
    exported = jax.export.export(self.function)(*self.arrays)
    rewritten = jp.rewrite(exported, CPU)
    self.assertIsInstance(rewritten, jax.export.Exported)
    self.assertNotIn("stablehlo.composite", rewritten.mlir_module())
    self.assertIn("stablehlo.composite", exported.mlir_module())
    header = exported.mlir_module_serialized.split(b"\0")[0]
    self.assertStartsWith(rewritten.mlir_module_serialized, header)
    again = jax.export.deserialize(rewritten.serialize())
    result = jax.jit(again.call)(*self.arrays)
    contract.assert_exact(result, self.exact, np.dtype(np.float32))

  @parameterized.parameters(("cuda",), ("cpu", "cuda"))
  def test_exported_for_other_platforms_is_refused(self, *platforms):
    exported = jax.export.export(jax.jit(jnp.sin), platforms=platforms)(1.0)
    with self.assertRaisesRegex(
      ValueError, "only the target's platform, 'cpu'"
    ):
      jp.rewrite(exported, CPU)

  def test_cpu_kernels_are_refused_for_a_gpu(self):
    module = written_modules.cpu_module()
    self.assertEqual(jp.rewrite(module, CPU), module)
    for function in (
      lambda: jp.rewrite(module, jp.named_target("h100")),
      lambda: jp.explain(module, target=jp.named_target("h100")),
    ):
      with self.assertRaisesRegex(jp.ModuleError, "jaxplugin_dequantize"):
        function()

  @parameterized.parameters("cpu", "h200", "b300", "mi300x")
  def test_triton_kernels_for_another_device_are_refused(self, name):
    module = written_modules.triton_module(b".version 8.8\n.target sm_100a\n")
    self.assertEqual(jp.rewrite(module, jp.named_target("b200")), module)
    target = jp.named_target(name)
    kernel = (
      ", which that" if name == "cpu" else ", a kernel for sm_100a, which"
    )
    for function in (
      lambda: jp.rewrite(module, target),
      lambda: jp.explain(module, target=target),
    ):
      with self.assertRaisesRegex(
        jp.ModuleError,
        f"of {name}, got a custom call of triton_kernel_call_ffi at"
        f" <str>:3:10{kernel} .*Or rewrite a module that still has",
      ):
        function()

  @installed.needs("jax_triton")
  def test_kernels_of_an_export_for_several_platforms_are_explained(self):
    targets = jp.detect_target("cpu"), jp.named_target("b200")
    export = jp.export(lambda x: jp.quantize(x, "mxfp8"), target=targets)
    exported = export(jnp.ones((4, 64)))
    for target in targets:
      explained = str(jp.explain(exported, target=target))
      self.assertIn("custom calls of triton_kernel_call_ffi", explained)
    with self.assertRaisesRegex(jp.ModuleError, "a kernel for sm_100a, which"):
      jp.explain(exported, target=jp.named_target("h200"))

  @parameterized.parameters(
    (jp.detect_target("cpu"), r"detect_target\('cpu'\)\).*\(\). Or rewrite"),
    (jp.named_target("mi300x"), r"named_target\('mi300x.*\(\). Or rewrite"),
    (jp.named_target("h200"), r"\('h200'\).*\(\). Or run .*--target h200`. Or"),
  )
  def test_remedy_names_a_device_that_exists(self, target, remedy):
    module = written_modules.triton_module(b"\n.target sm_100a\n")
    with self.assertRaisesRegex(jp.ModuleError, remedy):
      jp.rewrite(module, target)

  @parameterized.parameters("h200", "mi300x")
  def test_triton_kernel_without_an_architecture_is_a_warning(self, name):
    module = written_modules.triton_module(b"/tmp/kernel.hsaco")
    with self.assertWarnsRegex(
      jp.RewriteWarning, f"for {name} .*got .*_ffi at <str>:3:10, whose payload"
    ) as caught:
      self.assertEqual(
        jp.rewrite(module, jp.named_target(name), strict=True), module
      )
    self.assertEqual(caught.filename, __file__)

  def test_anything_else_is_refused(self):
    with self.assertRaisesRegex(TypeError, "target must be a jp.Target.*'cpu'"):
      jp.rewrite(self.text, "cpu")
    with self.assertRaisesRegex(ValueError, "implementation.*'cutlass'"):
      jp.rewrite(self.text, CPU, implementation="cutlass")
    with self.assertRaisesRegex(ValueError, "scale_rounding.*'nearest'"):
      jp.rewrite(self.text, CPU, scale_rounding="nearest")
