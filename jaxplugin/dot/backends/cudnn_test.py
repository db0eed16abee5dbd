# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cudnn implementation's numbers, with the two custom calls emulated.

No GPU is needed. The tests cover everything around the calls (layouts,
merged dimensions, padding, swizzling, where the global scale goes), against
NumPy code that takes the calls' operands as XLA and cuDNN document them and
refuses what they refuse. That XLA takes the calls is tested in hlo_tests/.
"""

from __future__ import annotations

import collections
import functools
import json
import re
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jaxplugin as jp
from jaxplugin.core import formats, targets
from jaxplugin.dot.backends import cudnn
from jaxplugin.quantization import quantize_primitive
from jaxplugin.runtime import lowering
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import suite

KINDS = (
  (jp.MXFP8, jp.MXFP8),
  (jp.MXFP8, jp.MXFP8_E5M2),
  (jp.MXFP8_E5M2, jp.MXFP8),
  (jp.NVFP4, jp.NVFP4),
)
TYPES = {(formats.E4M3, formats.E8M0): 32, (formats.E5M2, formats.E8M0): 32}
TYPES |= {(formats.E2M1, formats.E4M3): 16}
ROWS, COLUMNS = 128, 4  # of a tile of scales
CPU = targets.named_target("cpu")
B200 = targets.named_target("b200", cudnn="9.13")
SWIZZLED = {"scale_layout": "swizzled_128x4"}


def round_up(size, multiple):
  return -(-size // multiple) * multiple


def decode_scale(scale):
  """f64, exact: XLA's threads, which callbacks run on, flush f32 subnormals."""
  if scale.dtype != formats.E8M0:
    return scale.astype(np.float64)
  code = scale.view(np.uint8).astype(np.int32)
  return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))


def emulated_ffi_call(
  target, result, *, custom_call_api_version, legacy_backend_config=None
):
  """`jax.ffi.ffi_call` of the two custom calls, on the CPU."""
  assert custom_call_api_version == 1
  if target == "__op$block_scaled_dot":
    block_size = None
    if legacy_backend_config:
      config = json.loads(legacy_backend_config)
      block_size = config["block_scaled_dot_backend_config"]["block_size"]
    compute = functools.partial(xla_dot, block_size)
  else:
    assert target == "__cudnn$blockScaledDot", target
    result, workspace = result
    assert workspace.shape == (0,), workspace
    compute = cudnn_dot

  def function(*args):
    dtypes = [np.dtype(x.dtype) for x in args]
    assert dtypes[4:] in ([], [np.dtype(result.dtype)]), dtypes
    # FP4 has no NumPy layout that a callback may rely on: bytes.
    args = [
      x
      if x.dtype in (np.float32, jnp.bfloat16, jnp.float16)
      else x.astype(jnp.float32)
      if x.dtype == formats.E2M1
      else jax.lax.bitcast_convert_type(x, jnp.uint8)
      for x in args
    ]

    def on_host(*args):
      args = [np.asarray(x) for x in args]
      arrays = [
        x.astype(d) if d == formats.E2M1 else x.view(d)
        for x, d in zip(args, dtypes, strict=True)
      ]
      out = compute(*arrays)
      assert out.shape == result.shape, (out.shape, result.shape)
      with np.errstate(over="ignore"):
        return out.astype(np.float32).astype(result.dtype)

    out = jax.pure_callback(
      on_host, jax.ShapeDtypeStruct(result.shape, result.dtype), *args
    )
    return out if compute is not cudnn_dot else (out, jnp.zeros(0, jnp.uint8))

  return function


def xla_dot(block_size, lhs, rhs, lhs_scale, rhs_scale, *global_scale):
  """Computes `__op$block_scaled_dot` as XLA's rewriter: pad, swizzle, call.

  Rows of values and scales are padded to 128 and columns of scales to 4, each
  only as far as they are not there already.
  """
  padded = []
  for values, scale in ((lhs, lhs_scale), (rhs, rhs_scale)):
    assert values.ndim == scale.ndim and values.ndim in (2, 3)
    rows, k = values.shape[-2:]
    if block_size is None:
      assert k % scale.shape[-1] == 0, (values.shape, scale.shape)
    block = k // scale.shape[-1] if block_size is None else block_size
    assert TYPES[values.dtype, scale.dtype] == block, block
    assert k <= scale.shape[-1] * block and rows <= scale.shape[-2]
    more = [(0, 0)] * values.ndim
    more[-2] = (0, round_up(rows, ROWS) - rows)
    values = np.pad(values.astype(np.float64), more).astype(values.dtype)
    more[-2] = (0, round_up(rows, ROWS) - scale.shape[-2])
    more[-1] = (0, round_up(scale.shape[-1], COLUMNS) - scale.shape[-1])
    scale = np.pad(scale.view(np.uint8), more).view(scale.dtype)
    padded += [values, contract.swizzle(scale)]
  lhs_values, lhs_scale, rhs_values, rhs_scale = padded
  out = cudnn_dot(lhs_values, rhs_values, lhs_scale, rhs_scale, *global_scale)
  return out[..., : lhs.shape[-2], : rhs.shape[-2]]


def cudnn_dot(lhs, rhs, lhs_scale, rhs_scale, *global_scale):
  """`__cudnn$blockScaledDot`: tiles of swizzled scales, k read to a tile's end.

  The last tile's scales multiply zeros where k ends before it, so a NaN among
  them shows.
  """
  sides = []
  for values, scale in ((lhs, lhs_scale), (rhs, rhs_scale)):
    block = TYPES[values.dtype, scale.dtype]
    rows, k = values.shape[-2:]
    assert rows % ROWS == 0 and k % block == 0, values.shape
    columns = round_up(k // block, COLUMNS)
    assert scale.shape == (*values.shape[:-2], rows, columns), scale.shape
    row, column = np.indices((rows, columns))
    tile = row // ROWS * (columns // COLUMNS) + column // COLUMNS
    offset = row % 32 * 16 + row % ROWS // 32 * 4 + column % COLUMNS
    flat = scale.reshape(*scale.shape[:-2], rows * columns)
    linear = decode_scale(flat[..., tile * 512 + offset])
    more = [(0, 0)] * (values.ndim - 1) + [(0, columns * block - k)]
    values = np.pad(values.astype(np.float64), more)
    with np.errstate(invalid="ignore"):
      sides.append(values * np.repeat(linear, block, -1))
  with np.errstate(invalid="ignore"):
    out = sides[0] @ np.swapaxes(sides[1], -1, -2)
    out = out.astype(np.float32).astype(np.float64)
    return out * global_scale[0].astype(np.float64) if global_scale else out


def emulate(test, ffi_call=emulated_ffi_call):
  """Has a test's calls run on the CPU."""
  test.enter_context(mock.patch.object(jax.ffi, "ffi_call", ffi_call))
  by_override = lambda override, _: override or CPU
  test.enter_context(mock.patch.object(lowering, "resolve_target", by_override))


@pytest.mark.sample(1)
class CudnnDotTest(suite.DotSuite):
  """The contract's suite, on cuDNN 9.13; a call that it refuses goes to xla."""

  implementation = "cudnn"
  kinds = KINDS
  cases_per_test = 8
  keeps_global_scale_f32 = False
  target = B200
  calls: ClassVar = collections.Counter()

  def setUp(self):
    super().setUp()
    emulate(self, self.counting_ffi_call)

  def counting_ffi_call(self, name, *args, **kwargs):
    self.calls[name] += 1
    return emulated_ffi_call(name, *args, **kwargs)

  def dot(self, *args, **kwargs):
    with jp.use_target(self.target):
      try:
        return jp.block_scaled_dot(*args, implementation="cudnn", **kwargs)
      except NotImplementedError as error:
        if not re.search(
          "supports mxfp8 pairs|E5M2 by E5M2|needs both operands quantized"
          "|needs k divisible by|needs sizes of at least 1",
          str(error),
        ):
          raise
    return jp.block_scaled_dot(*args, implementation="xla", **kwargs)

  def results_of(self, functions, *arguments):
    for name, dot in functions.items():
      options = dot.keywords
      if options["dimension_numbers"] is None and options["block_size"] is None:
        before = self.calls.total()
        jax.jit(dot).lower(*arguments[0][name])
        with self.subTest(name):
          self.assertGreater(self.calls.total(), before, "went to xla")
    return super().results_of(functions, *arguments)


@pytest.mark.sample(1)
class Cudnn912DotTest(CudnnDotTest):
  """The tests of global scales where it is a multiply after the call."""

  target = targets.named_target("b200", cudnn="9.12")
  keeps_global_scale_f32 = True


for _name in dir(Cudnn912DotTest):
  if _name.startswith("test") and not re.search("global|rounded", _name):
    setattr(Cudnn912DotTest, _name, None)


class EmittedTest(parameterized.TestCase):
  """Which call, and with which operands."""

  def lowered(self, *args, **kwargs):
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    dot = functools.partial(jp.block_scaled_dot, **kwargs)
    with jp.use_target(B200):
      traced = jax.jit(dot).trace(*specs)
      return traced.lower(lowering_platforms=("cuda",)).as_text()

  def operand(self, format, *shape, storage="swizzled"):
    case = contract.operand_case(format, *shape, storage=storage)
    return contract.make_operand(np.random.default_rng(0), case, integers=True)

  def test_swizzled_scale_is_passed_on_untouched(self):
    lhs, rhs = (self.operand(jp.MXFP8, rows, 128) for rows in (128, 256))
    text = self.lowered(lhs.operand, rhs.operand)
    self.assertIn("@__cudnn$blockScaledDot(", text)
    self.assertNotIn("__op$block_scaled_dot", text)
    for operation in ("transpose", "pad", "select", "slice"):
      self.assertNotIn(f"stablehlo.{operation}", text)

  def test_scale_of_rows_that_merge_in_whole_tiles_stays_swizzled(self):
    numbers = (((2,), (1,)), ((), ()))
    rhs = self.operand(jp.MXFP8, 256, 128, storage="scaled_array")
    for rows, name in (
      (128, "@__cudnn$blockScaledDot("),
      (64, "@__op$block_scaled_dot("),
    ):
      lhs = self.operand(jp.MXFP8, 3, rows, 128)
      text = self.lowered(lhs.operand, rhs.operand, dimension_numbers=numbers)
      self.assertIn(name, text)

  def test_padded_scale_gives_the_block_size(self):
    lhs, rhs = (
      self.operand(jp.NVFP4, rows, 96, storage="raw") for rows in (100, 50)
    )
    lower = functools.partial(self.lowered, lhs.operand, rhs.operand)
    text = lower(jnp.zeros((128, 8), formats.E4M3), rhs.scale, block_size=16)
    self.assertIn("16", text.split("block_size")[1][:12])
    text = lower(lhs.scale, rhs.scale, block_size=16)
    self.assertNotIn("block_size", text)

  def test_export_chooses_what_can_be_loaded_elsewhere(self):
    lhs, rhs = (self.operand(jp.MXFP8, rows, 128) for rows in (128, 256))
    with jp.use_target(B200):
      exported = jax.export.export(
        jax.jit(lambda x, w: jp.block_scaled_dot(x, w)), platforms=("cuda",)
      )(lhs.operand, rhs.operand)
    self.assertNotIn("block_scaled_dot(", exported.mlir_module())
    self.assertIn("dot_general", exported.mlir_module())


class RequantizedTest(parameterized.TestCase):
  """A program that quantizes an operand writes the layout of the call."""

  def setUp(self):
    super().setUp()
    self.calls, self.written = [], []
    real = quantize_primitive.quantize_in_whole_tiles

    def by_operations(x, global_scale, format, target):
      self.calls.append((x.shape, target))
      written = real(x, global_scale, format, CPU)
      self.written.append(tuple(array.shape for array in written))
      return written

    emulate(self)
    self.enter_context(
      mock.patch.object(
        quantize_primitive, "quantize_in_whole_tiles", by_operations
      )
    )

  def weight(self, format, n, k):
    w = np.random.default_rng(1).normal(size=(n, k)).astype(np.float32)
    w_q = contract.quantized(w, format)
    scale = jax.device_put(contract.swizzle(np.asarray(w_q.scale)))
    return jp.ScaledArray(
      w_q.values, scale, w_q.global_scale, format, **SWIZZLED
    )

  def x(self, *shape):
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    x.reshape(-1, shape[-1])[-1, 3] = np.nan
    return jnp.asarray(x)

  def dot(self, x_q, w, **kwargs):
    with jp.use_target(B200):
      return jp.block_scaled_dot(x_q, w, implementation="cudnn", **kwargs)

  def quantize(self, x, format, **kwargs):
    with jp.use_target(CPU):
      return jp.quantize(x, format, **kwargs)

  def assert_as_given(self, f, x, format, w, **kwargs):
    """`f` of x has the bits that it has of codes which nobody knows of."""
    given = self.quantize(x, format, **kwargs)
    del self.calls[:]
    expected = jax.jit(self.dot)(given, w)
    self.assertEmpty(self.calls)
    actual = jax.jit(f)(x, w)
    np.testing.assert_array_equal(
      np.asarray(actual).view(np.uint32), np.asarray(expected).view(np.uint32)
    )

  @parameterized.product(
    format=(jp.MXFP8, jp.MXFP8_E5M2, jp.NVFP4),
    shape=((5, 96), (128, 64), (130, 96), (3, 7, 64)),
  )
  @pytest.mark.sample(1)
  def test_bits_are_those_of_codes_that_are_given(self, format, shape):
    w_format = jp.NVFP4 if format == jp.NVFP4 else jp.MXFP8
    w = self.weight(w_format, 40, shape[-1])
    f = lambda x, w: self.dot(self.quantize(x, format), w)
    self.assert_as_given(f, self.x(*shape), format, w)
    (call,) = self.calls
    rows = int(np.prod(shape[:-1]))
    self.assertEqual(call, ((rows, shape[-1]), B200))

  @parameterized.product(
    format=(jp.MXFP8, jp.NVFP4), shape=((5, 96), (128, 64), (130, 96))
  )
  @pytest.mark.sample(1)
  def test_result_is_of_the_rows_and_columns_that_were_given(
    self, format, shape
  ):
    # Integers whose quantization, products and sums are all exact: the result
    # is NumPy's, whichever of a tile's rows and columns are cut off.
    rng = np.random.default_rng(0)
    values = (-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6)
    x, w = (rng.choice(values, (rows, shape[1])) for rows in (shape[0], 40))
    x[:, ::16] = w[:, ::16] = 6
    one = {"global_scale": 1.0} if format == jp.NVFP4 else {}
    w_q = self.quantize(w.astype(np.float32), format, **SWIZZLED, **one)
    f = lambda x, w: self.dot(self.quantize(x, format, **one), w)
    out = jax.jit(f)(x.astype(np.float32), w_q)
    np.testing.assert_array_equal(out, x @ w.T)
    columns = round_up(shape[1] // format.block_size, COLUMNS)
    rows = round_up(shape[0], ROWS)
    self.assertEqual(self.written, [((rows, shape[1]), (rows, columns))])

  @parameterized.parameters(jp.MXFP8, jp.NVFP4)
  @pytest.mark.sample(1)
  def test_swizzled_codes_are_padded_too(self, format):
    w = self.weight(format, 40, 96)
    f = lambda x, w: self.dot(self.quantize(x, format, **SWIZZLED), w)
    self.assert_as_given(f, self.x(5, 96), format, w, **SWIZZLED)
    self.assertLen(self.calls, 1)

  @parameterized.named_parameters(
    ("rounded_down", {"scale_rounding": "floor"}, (5, 96)),
    ("large", {}, (2**16, 64)),
  )
  @pytest.mark.full
  def test_what_no_kernel_is_quicker_for_is_read_as_it_is(self, kwargs, shape):
    w = self.weight(jp.MXFP8, 40, shape[1])
    f = lambda x, w: self.dot(self.quantize(x, jp.MXFP8, **kwargs), w)
    self.assert_as_given(f, self.x(*shape), jp.MXFP8, w, **kwargs)
    self.assertEmpty(self.calls)

  def test_linear_scale_of_the_other_side_leaves_both_to_xla(self):
    w = self.quantize(self.x(40, 96), jp.MXFP8)
    f = lambda x, w: self.dot(self.quantize(x, jp.MXFP8), w)
    self.assert_as_given(f, self.x(5, 96), jp.MXFP8, w)
    self.assertEmpty(self.calls)

  def test_other_arrays_in_place_of_those_quantized_count(self):
    w = self.weight(jp.NVFP4, 40, 96)

    def f(x, w):
      x_q = self.quantize(x, jp.NVFP4)
      x_q.global_scale = 2 * x_q.global_scale
      return self.dot(x_q, w) / 2

    self.assert_as_given(f, self.x(5, 96), jp.NVFP4, w)
    self.assertEmpty(self.calls)

  def test_derivatives_do_not_ask_for_that_of_x(self):
    w, x = self.weight(jp.NVFP4, 40, 96), np.asarray(self.x(5, 96))[:4]
    residual = np.ones((4, 40), np.float32)

    def f(x, residual):
      x_q = self.quantize(jax.lax.stop_gradient(x), jp.NVFP4)
      return self.dot(x_q, w, residual=residual * residual)

    out, tangent = jax.jit(
      lambda *args: jax.jvp(f, args, (np.ones_like(x), 3 * residual))
    )(x, residual)
    self.assertLen(self.calls, 1)
    np.testing.assert_array_equal(tangent, np.full((4, 40), 6))
    np.testing.assert_array_equal(
      out, self.dot(self.quantize(x, jp.NVFP4), w, residual=residual)
    )

  def test_under_vmap_rows_are_those_of_each(self):
    w, x = self.weight(jp.MXFP8, 40, 96), self.x(3, 5, 96)
    each = lambda x: self.dot(self.quantize(x, jp.MXFP8), w)
    out = jax.jit(jax.vmap(each))(x)
    expected = [jax.jit(each)(y) for y in np.asarray(x)]
    np.testing.assert_array_equal(out, expected)


class MaskTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_columns_beyond_k_are_zero(self, is_swizzled):
    columns = 5  # of two tiles of 4
    codes = np.random.default_rng(0).integers(1, 256, (2, 2 * ROWS, 8))
    scale = codes.astype(np.uint8)
    expected = np.where(np.arange(8) < columns, scale, 0)
    if is_swizzled:
      scale, expected = map(contract.swizzle, (scale, expected))
    masked = cudnn._mask_columns(scale, columns, is_swizzled)
    np.testing.assert_array_equal(masked, expected)


class CallTest(absltest.TestCase):
  """The emulation refuses what the calls do."""

  def test_emulation_refuses_wrong_operands(self):
    values = np.zeros((128, 64), formats.E4M3)
    scale = np.zeros((128, 4), np.uint8).view(formats.E8M0)
    cudnn_dot(values, values, scale, scale)
    for bad in (scale[:, :2], scale[:64]):
      with self.assertRaises(AssertionError):
        cudnn_dot(values, values, bad, scale)
    with self.assertRaises(AssertionError):
      cudnn_dot(values[:100], values, scale, scale)

  def test_emulated_padding_that_is_nan_shows(self):
    values = np.zeros((128, 64), formats.E4M3)
    scale = np.zeros((128, 4), np.uint8)
    linear = scale.copy()
    linear[:, 2:] = 0xFF
    poisoned = contract.swizzle(linear.view(formats.E8M0))
    clean = scale.view(formats.E8M0)
    self.assertTrue(np.isnan(cudnn_dot(values, values, poisoned, clean)).all())
