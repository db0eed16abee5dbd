# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantize kernels' compiled PTX, executed, gives `jp.quantize`'s bits."""

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu.quantization import quantize_plans
from jaxplugin.lab.inspection.ptx import launching
from jaxplugin.testing import prologue_cases
from jaxplugin.testing.kernels import executed, quantize_cases

pytestmark = pytest.mark.lab

DTYPES = {
  "f32": np.dtype(np.float32),
  "bf16": np.dtype(ml_dtypes.bfloat16),
  "f16": np.dtype(np.float16),
}
FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "mxfp6_e2m3")
FEW = (
  ("sm_80", "mxfp8", "f32", "up"),
  ("sm_80", "mxfp4", "bf16", "up"),
  ("sm_90", "mxfp8", "bf16", "floor"),
  ("sm_90", "nvfp4", "f32", "up"),
  ("sm_120", "nvfp4", "bf16", "up"),
  ("sm_120", "mxfp4", "f32", "floor"),
  ("sm_100", "nvfp4", "f32", "up"),
)
ROWS, K = 24, 96
GIVEN_SCALE = {"global_scale": np.array([0.0123], np.float32)}


class Case(parameterized.TestCase):
  def data(self, dtype, seed):
    """All sizes, zeros of both signs, Inf, NaN, and a block of zeros."""
    rng = np.random.default_rng(seed)
    largest = min(float(ml_dtypes.finfo(dtype).maxexp) - 4, 40)
    exponent = rng.uniform(-largest, largest, (1, ROWS, K))
    x = (rng.normal(size=exponent.shape) * np.exp2(exponent)).astype(dtype)
    for value in (np.inf, -np.inf, np.nan, 0.0, -0.0):
      x.reshape(-1)[rng.integers(x.size)] = value
    x.reshape(-1)[:32] = 0
    return x

  def check(self, architecture, format, dtype, rounding, k_axis=2):
    x = self.data(DTYPES[dtype], len(self.id()))
    sizes = {"rows": ROWS, "k": K} if k_axis == 2 else {"rows": K, "k": ROWS}
    if k_axis == 1:
      x = np.concatenate([x, x, x, x], axis=1)  # k = 96
      sizes["k"] = x.shape[1]
    rows = quantize_cases.rows_of(
      **sizes,
      k_is_minor=k_axis == 2,
      format=format,
      scale_rounding=rounding,
      global_scale="computed" if format == "nvfp4" else "none",
    )
    got = executed.quantized(x, architecture, rows)
    values, scale = quantize_cases.expected(
      x, format, axis=k_axis, scale_rounding=rounding
    )
    if got["values"].shape != values.shape:  # FP4: k is minor
      values = values.swapaxes(1, 2)
    np.testing.assert_array_equal(got["scale"].reshape(scale.shape), scale)
    np.testing.assert_array_equal(got["values"], values)


class FewTest(Case):
  @parameterized.parameters(*FEW)
  def test_bits_are_those_of_jp_quantize(self, *case):
    self.check(*case)

  @parameterized.parameters(("sm_90", "mxfp8"), ("sm_100", "nvfp4"))
  def test_one_kernel_quantizes_any_m(self, architecture, format):
    rng = np.random.default_rng(5)
    given = GIVEN_SCALE if format == "nvfp4" else {}
    for m in (1, 17, 4096):
      x = rng.normal(size=(1, m, 64)).astype(DTYPES["bf16"])
      rows = quantize_cases.with_given_scale(m, 64, format)
      got = executed.quantized(x, architecture, rows, planned_m=16, **given)
      values, scale = quantize_cases.expected(x, format, **given)
      np.testing.assert_array_equal(got["values"], values)
      np.testing.assert_array_equal(got["scale"], scale)

  # What cuDNN multiplies: padded values, and scales in tiles of 128 x 4.
  @parameterized.parameters("mxfp8", "nvfp4", "mxfp8_e5m2")
  def test_padding_is_zero_and_scales_are_swizzled(self, format):
    x = self.data(DTYPES["bf16"], 7)
    given = GIVEN_SCALE if format == "nvfp4" else {}
    rows = quantize_cases.with_given_scale(
      ROWS, K, format, swizzled=True, pads_values=True
    )
    got = executed.quantized(x, "sm_100", rows, **given)
    values, scale = quantize_cases.expected(x, format, **given)
    padded = np.zeros((1, 128, values.shape[2]), np.uint8)
    padded[:, :ROWS] = values
    np.testing.assert_array_equal(got["values"], padded)
    columns = -(-scale.shape[2] // 4) * 4
    tiles = np.zeros(128 * columns, np.uint8)
    for (row, column), code in np.ndenumerate(scale[0]):
      place = row % 32 * 16 + row // 32 * 4 + column % 4
      tiles[column // 4 * 512 + place] = code
    np.testing.assert_array_equal(got["scale"].reshape(-1), tiles)


class PrologueTest(Case):
  @parameterized.parameters(
    ("sm_80", 4, "f32", "mxfp8"),
    ("sm_90", 1, "bf16", "mxfp8"),
    ("sm_90", 8, "bf16", "mxfp8"),
    ("sm_90", 1, "bf16", "nvfp4"),
    ("sm_100", 3, "f16", "nvfp4"),
    ("sm_120", 7, "bf16", "mxfp4"),
    ("sm_90", 1, "bf16", "mxfp8", 1),
    ("sm_80", 3, "f32", "nvfp4", 1),
    ("sm_90", 10, "bf16", "nvfp4"),
    ("sm_80", 11, "f32", "mxfp8", 1),
    ("sm_90", 12, "f16", "mxfp8", 1),
    ("sm_80", 13, "f32", "nvfp4"),
    ("sm_100", 14, "bf16", "mxfp8"),
  )
  def test_codes_are_those_of_the_f64_result(
    self, architecture, index, dtype, format, k_axis=2
  ):
    prologue = prologue_cases.CASES[index]
    shape = (1, ROWS, K) if k_axis == 2 else (1, K, ROWS)
    x, more = prologue_cases.operands(prologue, shape, DTYPES[dtype])
    arrays = {name: np.array(array) for name, array in more.items()}
    given, kind = {}, "none"
    if format == "nvfp4":
      kind = "given" if prologue.function == "layer_norm" else "computed"
    if kind == "given":
      given = GIVEN_SCALE
    rows = quantize_cases.rows_of(
      ROWS,
      K,
      format,
      k_is_minor=k_axis == 2,
      packed_in_place=True,
      global_scale=kind,
      prologue=prologue,
      dtype=DTYPES[dtype].name,
    )
    got = executed.quantized(np.array(x), architecture, rows, **arrays, **given)
    exact, total = prologue_cases.exact(prologue, x, more)
    values, scale = quantize_cases.expected(
      exact.astype(np.float32), format, axis=k_axis, **given
    )
    np.testing.assert_array_equal(got["scale"], scale)
    # A value next to a tie may have another code than its f64 result.
    self.assertLess(np.mean(got["values"] != values), 0.002)
    if total is not None:
      np.testing.assert_array_equal(got["total"].reshape(shape), total)

  @parameterized.parameters(0, 5, 8, 14, (1, False))
  def test_each_input_is_read_once(self, index, k_is_minor=True):
    prologue = prologue_cases.CASES[index]
    x, more = prologue_cases.operands(prologue, (1, 16, 256), DTYPES["bf16"])
    arrays = {name: np.array(a) for name, a in {"x": x, **more}.items()}
    rows = quantize_cases.rows_of(
      *((16, 256) if k_is_minor else (256, 16)),
      "mxfp8",
      k_is_minor=k_is_minor,
      prologue=prologue,
      dtype="bfloat16",
    )
    launch, *_ = quantize_plans.plan(rows, architectures.by_name("sm_90"))
    dtypes = tuple(arrays[name].dtype.name for name in launch.inputs)
    compiled = executed.compiled_quantize("sm_90", launch, dtypes)
    outputs, counts = launching.run(compiled, launch, arrays)
    read = sum(arrays[name].nbytes for name in {*launch.inputs})
    written = sum(array.nbytes for array in outputs.values())
    self.assertEqual(counts["global bytes loaded"], read)
    self.assertEqual(counts["global bytes stored"], written)


@pytest.mark.full
class ManyTest(Case):
  @parameterized.product(
    architecture=("sm_80", "sm_90", "sm_100", "sm_120"),
    format=FORMATS,
    dtype=(*DTYPES,),
  )
  def test_bits_are_those_of_jp_quantize(self, architecture, format, dtype):
    roundings = ("up",) if format == "nvfp4" else ("up", "floor")
    for rounding in roundings:
      self.check(architecture, format, dtype, rounding)

  @parameterized.product(
    architecture=("sm_80", "sm_90"), format=("mxfp8", "mxfp8_e5m2")
  )
  def test_blocks_along_columns(self, architecture, format):
    self.check(architecture, format, "f32", "up", k_axis=1)
