# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The interpreter computes what the kernels say, and sees wrong accesses."""

import os
import subprocess
import sys
import unittest
import unittest.mock

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from absl.testing import parameterized
from triton import knobs

from jaxplugin.lab.inspection import compile as kernel_compile
from jaxplugin.testing.interpreter import interpret

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FACTOR = tl.constexpr(3)

setUpModule = interpret.skip_unless_supported


@triton.jit
def _twice(x):
  return x + x


@triton.jit
def _scale_kernel(out, x, size, factor, BLOCK: tl.constexpr):
  place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  inside = place < size
  value = tl.load(x + place, mask=inside, other=0.0)
  tl.store(out + place, _twice(value) * factor * FACTOR, mask=inside)


@triton.jit
def _number_kernel(out):
  number = tl.program_id(0)
  tl.store(out + number, number)


@triton.jit
def _cast_kernel(out, x, SIZE: tl.constexpr):
  place = tl.arange(0, SIZE)
  value = tl.load(x + place).to(out.dtype.element_ty)
  tl.store(out + place, value)


@triton.jit
def _arithmetic_kernel(out, x, y, SIZE: tl.constexpr):
  place = tl.arange(0, SIZE)
  a = tl.load(x + place)
  b = tl.load(y + place)
  tl.store(out + place, -(a + b) * b)


@triton.jit
def _copy_kernel(
  out, x, rows, columns, out_stride, x_stride, OFFSET: tl.constexpr
):
  row = tl.program_id(0).to(tl.int64)
  place = tl.arange(0, 16)
  value = tl.load(x + OFFSET + row * x_stride + place, mask=place < columns)
  tl.store(out + row * out_stride + place, value, mask=place < columns)


@triton.jit
def _everyone_stores_kernel(out):
  tl.store(out, 1.0)


@triton.jit
def _reads_neighbor_kernel(out):
  program = tl.program_id(0)
  tl.store(out + program, 1.0)
  tl.load(out + (program + 1) % tl.num_programs(0) * 0)


@triton.jit
def _atomic_kernel(out):
  tl.atomic_add(out, 1)


@triton.jit
def _float_at_byte_kernel(out, x, BYTE: tl.constexpr):
  pointer = x.to(tl.pointer_type(tl.uint8), bitcast=True) + BYTE
  tl.store(out, tl.load(pointer.to(tl.pointer_type(tl.float32), bitcast=True)))


class ResultTest(parameterized.TestCase):
  @parameterized.parameters(np.float32, np.float16, BF16)
  def test_kernel_and_its_helpers_compute_on_arrays_in_place(self, dtype):
    x = np.arange(100).astype(dtype)
    out = np.full(100, 7, dtype)
    interpret.launch(_scale_kernel, 4, out, x, 100, 0.5, BLOCK=32)
    np.testing.assert_array_equal(
      out.astype(np.float64), (3.0 * x.astype(np.float64)).astype(dtype)
    )

  @parameterized.parameters(BF16, E4M3, E5M2)
  def test_casts_round_to_nearest_even_and_saturate_fp8(self, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4096).astype(np.float32) * 500
    x[:6] = [np.inf, -np.inf, np.nan, 1e9, 0.0, -0.0]
    largest = float(ml_dtypes.finfo(dtype).max)
    wanted = x
    if dtype != BF16:
      wanted = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
    out = np.zeros(x.size, dtype)
    interpret.launch(_cast_kernel, 1, out, x, SIZE=x.size)
    np.testing.assert_array_equal(
      out.view(f"u{dtype.itemsize}"),
      wanted.astype(dtype).view(f"u{dtype.itemsize}"),
    )

  @parameterized.parameters(BF16, E4M3, E5M2)
  def test_every_code_of_a_small_type_widens_exactly(self, dtype):
    bits = 8 * dtype.itemsize
    x = np.arange(2**bits, dtype=f"uint{bits}").view(dtype)
    out = np.zeros(x.size, np.float32)
    interpret.launch(_cast_kernel, 1, out, x, SIZE=x.size)
    np.testing.assert_array_equal(out, x.astype(np.float32))

  def test_bf16_arithmetic_works_on_values_and_rounds_each_result(self):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 256)).astype(BF16)
    out = np.zeros(256, BF16)
    interpret.launch(_arithmetic_kernel, 1, out, x, y, SIZE=256)
    total = (x.astype(np.float32) + y.astype(np.float32)).astype(BF16)
    wanted = (-total.astype(np.float32) * y.astype(np.float32)).astype(BF16)
    np.testing.assert_array_equal(out.view(np.uint16), wanted.view(np.uint16))

  def test_kernel_of_a_closure_sees_its_variables(self):
    added = tl.constexpr(4)

    @triton.jit
    def kernel(out):
      tl.store(out, added)

    out = np.zeros(1, np.float32)
    interpret.launch(kernel, 1, out)
    self.assertEqual(out[0], 4)


class StridesTest(parameterized.TestCase):
  def test_strided_arrays_keep_what_lies_between_their_elements(self):
    base = np.full((6, 20), -1, np.float32)
    out = base[::2, :9]
    x = np.arange(60, dtype=np.float32).reshape(3, 20)[:, :9]
    interpret.launch(_copy_kernel, 3, out, x, 3, 9, 40, 20, OFFSET=0)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(base[1::2], -1)
    np.testing.assert_array_equal(base[:, 9:], -1)


class AccessTest(parameterized.TestCase):
  def launch_copy(self, out, x, columns, offset=0):
    interpret.launch(
      _copy_kernel, out.shape[0], out, x, out.shape[0], columns,
      out.strides[0] // out.itemsize, x.strides[0] // x.itemsize, OFFSET=offset,
    )  # fmt: skip

  def test_read_past_the_end_says_program_place_and_array(self):
    x = np.zeros((3, 8), np.float32)
    with self.assertRaisesRegex(
      interpret.InterpretError,
      r"_copy_kernel, program \(2, 0, 0\) of \(3, 1, 1\): reads at byte 96"
      r" counted from the first element of x \(float32\[3, 8\]",
    ):
      self.launch_copy(np.zeros((3, 16), np.float32), x, 9)

  @parameterized.parameters(-1, -(10**6), 10**6, 2**40)
  def test_read_elsewhere_is_seen(self, offset):
    x = np.zeros((1, 8), np.float32)
    with self.assertRaisesRegex(
      interpret.InterpretError, r"reads at byte -?\d+ .*no element lies"
    ):
      self.launch_copy(np.zeros((1, 16), np.float32), x, 8, offset=offset)

  def test_write_past_the_end_is_seen_and_leaves_the_array_alone(self):
    out = np.full((1, 8), 5, np.float32)
    with self.assertRaisesRegex(
      interpret.InterpretError, r"writes at byte 32 .* of out"
    ):
      interpret.launch(
        _copy_kernel, 1, out, np.zeros((1, 9), np.float32), 1, 9, 8, 9, OFFSET=0
      )
    np.testing.assert_array_equal(out, 5)

  def test_access_between_the_elements_of_a_strided_array_is_seen(self):
    x = np.zeros((3, 20), np.float32)[:, :9]
    out = np.zeros((3, 16), np.float32)
    self.launch_copy(out, x, 9)
    with self.assertRaisesRegex(interpret.InterpretError, "reads at byte 36"):
      self.launch_copy(out, x, 10)

  def test_write_to_a_read_only_array_is_seen(self):
    out = np.zeros((3, 16), np.float32)
    out.flags.writeable = False
    with self.assertRaisesRegex(interpret.InterpretError, "out, which is read"):
      self.launch_copy(out, np.zeros((3, 16), np.float32), 16)

  def test_two_programs_that_write_one_element_are_seen(self):
    with self.assertRaisesRegex(
      interpret.InterpretError,
      r"program \(1, 0, 0\) .* byte 0 of out, which program \(0, 0, 0\) wrote",
    ):
      interpret.launch(_everyone_stores_kernel, 2, np.zeros(1, np.float32))

  def test_read_of_what_another_program_wrote_is_seen(self):
    with self.assertRaisesRegex(
      interpret.InterpretError,
      r"reads byte 0 of out, which program \(0, 0, 0\)",
    ):
      interpret.launch(_reads_neighbor_kernel, 2, np.zeros(2, np.float32))

  def test_programs_may_be_chosen(self):
    out = np.zeros(5, np.int32)
    interpret.launch(_number_kernel, 5, out, programs=[(3, 0, 0), (1, 0, 0)])
    np.testing.assert_array_equal(out, [0, 1, 0, 3, 0])

  def test_atomics_of_several_programs_need_race_checks_off(self):
    out = np.zeros(1, np.int32)
    with self.assertRaises(interpret.InterpretError):
      interpret.launch(_atomic_kernel, 5, out)
    interpret.launch(_atomic_kernel, 5, out, check_races=False)
    self.assertEqual(out[0], 5)

  @parameterized.parameters(
    (1, "byte 1 of x, which is not aligned to 4 bytes"),
    (4, "reads byte 4 of x$"),
  )
  def test_read_must_be_aligned_and_end_in_the_array(self, byte, message):
    out, x = np.zeros(1, np.float32), np.zeros(6, np.uint8)
    with self.assertRaisesRegex(interpret.InterpretError, message):
      interpret.launch(_float_at_byte_kernel, 1, out, x, BYTE=byte)

  def test_empty_array_allows_no_access(self):
    with self.assertRaisesRegex(interpret.InterpretError, r"float32\[0\]"):
      interpret.launch(_everyone_stores_kernel, 1, np.zeros(0, np.float32))


class ArgumentTest(parameterized.TestCase):
  def test_dtypes_without_a_pointer_are_refused_with_the_remedy(self):
    for dtype in (ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn):
      with self.assertRaisesRegex(
        TypeError, f"out has dtype {np.dtype(dtype).name}.*uint8 view"
      ):
        interpret.launch(_everyone_stores_kernel, 1, np.zeros(1, dtype))

  def test_what_is_no_argument_is_refused(self):
    with self.assertRaisesRegex(TypeError, "out must be a NumPy array.*'x'"):
      interpret.launch(_everyone_stores_kernel, 1, "x")
    with self.assertRaisesRegex(TypeError, "missing a required argument: 'x'"):
      interpret.launch(_float_at_byte_kernel, 1, np.zeros(1))
    with self.assertRaisesRegex(TypeError, "BLOK"):
      interpret.launch(_everyone_stores_kernel, 1, np.zeros(1), BLOK=3)
    with self.assertRaisesRegex(TypeError, "@triton.jit"):
      interpret.launch(_everyone_stores_kernel.fn, 1, np.zeros(1))

  @parameterized.parameters(0, ((1, 2, 3, 4),), ((1, 0),), 1.0)
  def test_grid_that_is_none_is_refused(self, grid):
    with self.assertRaisesRegex(TypeError, "grid must be"):
      interpret.launch(_everyone_stores_kernel, grid, np.zeros(1))

  @parameterized.parameters("3.6.0", "3.8.1+git12ab")
  def test_triton_that_is_too_old_is_refused(self, version):
    with (
      unittest.mock.patch.object(triton, "__version__", version),
      self.assertRaisesRegex(
        interpret.InterpretError, f"3.9 or newer, got {version[:5]}"
      ),
    ):
      interpret.launch(_everyone_stores_kernel, 1, np.zeros(1))

  def test_negative_strides_are_refused(self):
    with self.assertRaisesRegex(TypeError, r"out has byte strides \(-4,\)"):
      interpret.launch(
        _everyone_stores_kernel, 1, np.zeros(4, np.float32)[::-1]
      )


class ProcessTest(parameterized.TestCase):
  def test_kernel_still_compiles_after_it_was_interpreted(self):
    out = np.zeros(4, np.float32)
    interpret.launch(_scale_kernel, 1, out, out.copy(), 4, 2.0, BLOCK=4)
    with self.assertRaises(interpret.InterpretError):
      interpret.launch(_scale_kernel, 1, out, out.copy(), 9, 2.0, BLOCK=16)
    signature = {"out": "*fp32", "x": "*fp32", "size": "i32", "factor": "fp32"}
    compiled = kernel_compile.compile_kernel(
      _scale_kernel, signature, {"BLOCK": 128}, "sm_90"
    )
    self.assertIn(".visible .entry _scale_kernel", compiled.assembly)

  def test_environment_and_knob_are_left_alone(self):
    self.assertNotIn("TRITON_INTERPRET", os.environ)
    interpret.launch(_everyone_stores_kernel, 1, np.zeros(1, np.float32))
    self.assertNotIn("TRITON_INTERPRET", os.environ)
    self.assertFalse(knobs.runtime.interpret)

  def test_error_of_a_kernel_passes_through_with_the_program(self):
    @triton.jit
    def kernel(out):
      tl.static_assert(tl.program_id(0) < 1, "too far")

    with self.assertRaisesRegex(AssertionError, "too far") as caught:
      interpret.launch(kernel, 2, np.zeros(1))
    self.assertEqual(
      caught.exception.__notes__,
      ["in program (1, 0, 0) of (2, 1, 1) of kernel"],
    )

  def test_launch_works_where_the_environment_asks_for_interpretation(self):
    code = (
      "import numpy as np\n"
      "from jaxplugin.kernels.gpu.quantization import global_scales\n"
      "from jaxplugin.kernels.gpu.quantization import quantize_config\n"
      "from jaxplugin.testing.interpreter import interpret\n"
      "x = np.full((1, 1, 16), -1.5, np.float32)\n"
      "out = np.zeros(1, np.uint32)\n"
      "rows = quantize_config.Rows(batch=1, rows=1, k=16, k_is_minor=True,"
      " format='nvfp4')\n"
      "made = quantize_config.measured(rows, rows.options)\n"
      "tile = quantize_config.Tile(rows=1, columns=16, strides=(16, 16, 1),"
      " block_m=1, block_k=16, covered_rows=1, covered_columns=16)\n"
      "interpret.launch(global_scales.finite_amax, 1, x, x, x, x, x, out, 1, 1,"
      " TILE=tile, QUANTIZED=made, ROW=0, QUANTIZED_T=None)\n"
      "assert out.view(np.float32)[0] == 1.5, out\n"
    )
    subprocess.run(
      [sys.executable, "-c", code],
      check=True,
      env={**os.environ, "TRITON_INTERPRET": "1"},
    )
