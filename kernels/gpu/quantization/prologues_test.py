# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels quantize a norm or an activation that is near its f64 result."""

import itertools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import (
  prologues,
  quantize_config,
  quantize_plans,
)
from jaxplugin.kernels.gpu.quantization import quantize_tiles as tiles

import jaxplugin as jp
from jaxplugin.arrays import layouts
from jaxplugin.testing import prologue_cases
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import quantize_cases

BF16 = quantize_cases.BF16
expected = quantize_cases.expected
setUpModule = interpret.skip_unless_supported

# No kernel computes the gradient of interleaved halves.
SUPPORTED = tuple(
  p
  for p in prologue_cases.ALL
  if not (p.gradient and p.halves == "interleaved")
)
# 16 roundings, of numbers that are not larger than the largest result.
RELATIVE = 16 * 2.0**-24
# Errors of e^z, and roundings of a quotient and of products.
ULPS = 4
# The exponent z of a sigmoid is rounded, and e^z has |z| times this error.
ULPS_OF_EXPONENT = 2
# The sigmoid is 0 below this number.
LEAST = 2.0**-125
# With these limits, rows of 1056 features are long, and have three parts.
LONG_ROWS = {"_MAX_WARPS": 1, "_LONG_ROW_TILE": 512}


@triton.jit
def store_result(
  x,
  other,
  weight,
  bias,
  cotangent,
  y,
  total,
  y_strides: tl.constexpr,
  TILE: tl.constexpr,
  QUANTIZED: tl.constexpr,
):
  """Stores what `quantize` with the same arguments quantizes."""
  place = tiles.of_program(TILE)
  operands = (x, other, weight, bias, cotangent, total)
  tile, _ = prologues.load(operands, place, TILE, QUANTIZED)
  row, column, inside = tiles.positions(place, TILE)
  pointers = y + place[0] * y_strides[0]
  pointers += row[:, None] * y_strides[1] + column[None, :] * y_strides[2]
  tl.store(pointers, tile, mask=inside)


def described(prologue, shape, *, dtype, format="mxfp8", axis=2, **fields):
  """Returns the description of an array that is quantized along `axis`."""
  batch, rows, k = shape if axis == 2 else (shape[0], shape[2], shape[1])
  prologue = (
    prologue.with_statistics() if prologue.is_norm_gradient else prologue
  )
  return quantize_cases.rows_of(
    rows,
    k,
    format,
    batch=batch,
    k_is_minor=axis == 2,
    packed_in_place=True,
    prologue=prologue,
    dtype=np.dtype(dtype).name,
    **fields,
  )


def computed(rows, arrays, shape):
  """Returns the f32 result of a prologue."""
  *before, launch = quantize_plans.plan(rows, quantize_cases.SM_90)
  arrays = quantize_cases.run(before, **arrays)
  constants = dict(launch.constexprs)
  x, _, _, *operands = [arrays.get(name) for name in launch.inputs[:7]]
  y = np.full(shape, np.nan, np.float32)
  interpret.launch(
    store_result,
    launch.grid,
    x,
    *operands,
    y,
    np.empty_like(x) if rows.prologue.returns_sum else None,
    TILE=constants["TILE"],
    QUANTIZED=constants["QUANTIZED"],
    y_strides=rows.layout(rows.k)[1],
  )
  return y


def results_of(prologue):
  """Returns which result besides the codes a kernel has."""
  has_sums = prologue.gradient is not None
  return {"returns_amax": not has_sums, "sums_columns": has_sums}


def check_sums(found, y, prologue, arrays):
  """Checks sums of columns. Each addition rounds once."""
  roundings = 0
  if prologue.is_norm_gradient:
    y, roundings = prologue_cases.summed(prologue, arrays["x"], arrays), ULPS
  rows = y.reshape(-1, y.shape[-1]).astype(np.float64)
  got = found["sums"].sum(0, dtype=np.float64)
  bound = (len(rows) + roundings) * 2.0**-24 * np.abs(rows).sum(0)
  with np.errstate(invalid="ignore"):
    error = np.abs(got - rows.sum(0))
  is_finite = np.isfinite(rows).all(0)
  np.testing.assert_array_equal(np.isfinite(got), is_finite)
  np.testing.assert_array_less(error[is_finite], bound[is_finite] + 1e-30)


def arrays_of(prologue, shape, dtype):
  """Returns x with a row of zeros and special values, and its operands."""
  x, more = prologue_cases.operands(prologue, shape, dtype)
  arrays = {name: np.array(array) for name, array in {"x": x, **more}.items()}
  arrays["x"][0, 1] = 0
  arrays["x"][0, 2:, 7] = [np.nan, np.inf, -np.inf] + [0.0] * (shape[1] - 5)
  if prologue.is_norm_gradient:
    arrays["statistics"] = prologue_cases.statistics(prologue, arrays)
  return arrays


class CodesTest(parameterized.TestCase):
  def check(self, prologue, shape, dtype, axis=2, **fields):
    arrays = arrays_of(prologue, shape, dtype)
    one = None
    if fields.get("global_scale") == "given":
      one = arrays["global_scale"] = np.array([0.02], np.float32)
    rows = described(prologue, shape, dtype=dtype, axis=axis, **fields)
    y = computed(rows, arrays, shape)
    exact, _ = prologue_cases.exact(prologue, arrays["x"], arrays)
    is_finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(y), is_finite)
    exact = exact[is_finite]
    near = RELATIVE * np.abs(exact).max()
    self.assertLess(np.abs(y[is_finite] - exact).max(), near)
    found = quantize_cases.run(
      quantize_plans.plan(rows, quantize_cases.SM_90), **arrays
    )
    if rows.returns_amax:
      self.assertEqual(found["amax"].max(), np.abs(y[is_finite]).max())
    if rows.sums_columns:
      check_sums(found, y, prologue, arrays)
    values, scale = expected(y, rows.format, axis=axis, global_scale=one)
    if rows.swizzled:
      scale = np.asarray(layouts.swizzle_scale(jnp.asarray(scale)))
      np.testing.assert_array_equal(found["values"][:, shape[1] :], 0)
    np.testing.assert_array_equal(found["scale"], scale)
    np.testing.assert_array_equal(found["values"][:, : values.shape[1]], values)
    if rows.global_scale == "computed":
      quantized = jp.quantize(jnp.asarray(y), "nvfp4")
      self.assertEqual(found["global_scale"], quantized.global_scale)
    if prologue.is_norm_gradient:
      np.testing.assert_array_equal(
        found["total"].reshape(shape).astype(np.float32),
        y.astype(dtype).astype(np.float32),
      )
    elif "residual" in arrays:
      total = arrays["x"].astype(np.float32) + arrays["residual"]
      total = total.astype(dtype).astype(np.float32)
      np.testing.assert_array_equal(
        found["total"].reshape(shape).astype(np.float32), total
      )
    return arrays, y

  # The leg `test` has each prologue in this test or the next one.
  @parameterized.parameters(*SUPPORTED)
  @pytest.mark.sample(14)
  def test_codes_are_those_of_the_result(self, prologue):
    # Each function with its operands computes a global scale once.
    kind = "given" if prologue in SUPPORTED[::3] else "computed"
    self.check(
      prologue,
      (2, 6, 96 if prologue.gradient_of_halves else 288),
      BF16,
      format="nvfp4",
      global_scale=kind,
      **results_of(prologue),
    )

  # A norm with its residual, halves, activations with a bias, and gradients.
  @parameterized.parameters(*SUPPORTED[1::4])
  def test_swizzled_codes_are_padded_with_zeros(self, prologue):
    self.check(
      prologue,
      (1, 5, 64 if prologue.gradient_of_halves else 96),
      np.float16,
      format="mxfp4",
      swizzled=True,
      pads_values=True,
    )

  @parameterized.parameters(*SUPPORTED[1:], SUPPORTED[0])
  @pytest.mark.sample(14)
  def test_codes_along_rows_are_those_of_the_result(self, prologue):
    # A NaN of a norm is in all blocks of its 32 rows.
    columns = 128 if prologue.gradient_of_halves else 70
    shape = (2, 64 if prologue.is_norm else 32, columns)
    results = results_of(prologue)
    arrays, y = self.check(prologue, shape, np.float32, axis=1, **results)
    matrices = quantize_config.Matrices(
      batch=2,
      rows=shape[1],
      columns=columns,
      k=columns // 32 * 32 + 32,
      k_t=shape[1] + 32,
      is_transposed=False,
      format="mxfp8",
      prologue=described(prologue, shape, dtype=np.float32).prologue,
      **results,
    )
    launches = quantize_plans.plan(matrices, quantize_cases.SM_90)
    found = quantize_cases.run(launches, **arrays)
    if matrices.sums_columns:
      check_sums(found, y, prologue, arrays)
    else:
      largest = np.abs(y[np.isfinite(y)]).max()
      self.assertEqual(found["amax"].max(), largest)
    end = matrices.k - columns
    for axis, suffix, padding in ((2, "", (0, end)), (1, "_t", (32, 0))):
      padded = np.pad(y, [(0, 0), *((0, n) for n in padding)])
      values, scale = expected(padded, "mxfp8", axis=axis)
      np.testing.assert_array_equal(found[f"values{suffix}"], values)
      np.testing.assert_array_equal(found[f"scale{suffix}"], scale)

  @parameterized.parameters(*prologue_cases.CASES[1:4])
  def test_codes_of_long_rows_are_those_of_the_result(self, prologue):
    with mock.patch.multiple(quantize_config, **LONG_ROWS):
      self.check(
        prologue,
        (1, 5, 1056),
        BF16,
        format="nvfp4",
        global_scale="computed",
        returns_amax=True,
      )


class PlanTest(parameterized.TestCase):
  @parameterized.parameters(
    (96, (32, 128), 4), (4096, (1, 4096), 4), (16384, (1, 16384), 16)
  )
  def test_both_kernels_of_a_norm_have_tiles_of_whole_rows(
    self, k, tile, num_warps
  ):
    prologue = prologue_cases.Prologue(function="rms_norm")
    rows = described(
      prologue,
      (1, 2**15, k),
      dtype=BF16,
      format="nvfp4",
      global_scale="computed",
    )
    for launch in quantize_plans.plan(rows, quantize_cases.SM_90):
      found = dict(launch.constexprs)["TILE"]
      self.assertEqual((found.block_m, found.block_k), tile)
      self.assertEqual(launch.num_warps, num_warps)

  @parameterized.parameters(
    (96, (32, 128), 4), (16384, (1, 16384), 16), (2**17, (1, 4096), 4)
  )
  def test_statistics_have_the_tiles_of_one_pass(self, k, tile, num_warps):
    # Longer rows are in parts.
    prologue = prologue_cases.CASES[1]
    matrices = quantize_config.Matrices(
      batch=3,
      rows=2**15,
      columns=k,
      k=k,
      k_t=2**15,
      is_transposed=False,
      format="mxfp8",
      prologue=prologue,
    )
    launch, second = quantize_plans.plan(matrices, quantize_cases.SM_90)
    found = dict(launch.constexprs)["TILE"]
    self.assertEqual((found.block_m, found.block_k), tile)
    self.assertEqual(launch.num_warps, num_warps)
    self.assertEqual(launch.grid * tile[0], 3 * 2**15)
    self.assertEqual(launch.inputs, ("x", "residual"))
    self.assertNotIn("x", second.inputs)
    self.assertNotIn("residual", second.inputs)


class AccuracyTest(parameterized.TestCase):
  def errors(self, prologue, axis=2, limits=(), **arrays):
    """Returns the kernel's result, the exact one, and the error."""
    shape = arrays["x"].shape
    rows = described(prologue, shape, dtype=np.float32, axis=axis)
    with mock.patch.dict(vars(quantize_config), limits):
      y = computed(rows, arrays, shape)
    with np.errstate(over="ignore"):
      exact, _ = prologue_cases.exact(prologue, arrays["x"], arrays)
    return y, exact, np.abs(y - exact)

  @parameterized.parameters(
    ("silu_and_mul", lambda gate: 0 * gate),
    ("swigluoai", lambda gate: 1.702 * gate),
    ("gelu_and_mul", lambda gate: 1.5957691 * (gate + 0.044715 * gate**3)),
    ("exact_gelu_and_mul", lambda gate: gate**2 / 2),
  )
  def test_gated_activations_are_within_ulps(self, function, exponent):
    gate = np.linspace(-100, 100, 2**14, dtype=np.float32).reshape(1, 16, -1)
    up = np.random.default_rng(0).normal(size=gate.shape).astype(np.float32)
    prologue = prologue_cases.Prologue(function=function, operands=("up",))
    y, exact, error = self.errors(prologue, x=gate, up=up)
    ulps = ULPS + ULPS_OF_EXPONENT * np.abs(exponent(gate))
    bound = ulps * np.spacing(np.abs(exact).astype(np.float32))
    bound += np.abs(gate * (np.abs(up) + 1)) * LEAST
    self.assertLessEqual(np.max(error - bound), 0)
    np.testing.assert_array_equal(np.signbit(y), np.signbit(exact))

  @parameterized.product(
    function=("rms_norm", "layer_norm"),
    # Epsilon, axis, features and limits.
    row=(
      *itertools.product((0.0, 1e-35, 1e-6), (2, 1), (96,), ({},)),
      (1e-35, 2, 1056, LONG_ROWS),
    ),
  )
  def test_squares_beyond_f32_do_not_count(self, function, row):
    epsilon, axis, k, limits = row
    x = np.random.default_rng(0).normal(size=(1, 7, k)).astype(np.float32)
    x[..., : k // 2] *= np.float32(2.0**-30)
    most = 1e37 if k < 100 else 1e35  # the sum of a row must be in range
    x[0] *= np.float32([1e30, 1e-30, 1e-37, 1e-18, 2.0**40, most, 0])[:, None]
    x = x[:, : 7 if epsilon else 6]
    prologue = prologue_cases.Prologue(function=function, epsilon=epsilon)
    _, exact, error = self.errors(prologue, axis, limits, x=x)
    largest = np.abs(exact).max(-1, keepdims=True)
    self.assertLessEqual(np.max(error - RELATIVE * largest), 0)

  @parameterized.product(
    function=("rms_norm", "layer_norm"),
    # Axis, features and limits.
    row=((2, 5000, {}), (1, 1200, {}), (2, 3000, LONG_ROWS)),
  )
  def test_norms_are_within_ulps(self, function, row):
    axis, k, limits = row
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3, k)).astype(np.float32) + 20
    prologue = prologue_cases.Prologue(
      function=function, operands=("weight",), epsilon=1e-5
    )
    weight = rng.normal(size=k).astype(np.float32)
    _, exact, error = self.errors(prologue, axis, limits, x=x, weight=weight)
    largest = np.abs(exact)
    if function == "layer_norm":  # The mean is rounded, and subtracted.
      largest = np.abs(exact) + np.abs(20 * weight)
    bound = ULPS * np.spacing(largest.astype(np.float32))
    self.assertLessEqual(np.max(error - bound), 0)
