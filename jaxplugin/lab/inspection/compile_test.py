# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of kernels that are compiled for absent GPUs."""

import functools
import os
import pathlib
import tempfile
from unittest import mock

import pytest
import triton
import triton.language as tl
from absl.testing import parameterized

from jaxplugin.lab.inspection import compile as kernel_compile

pytestmark = pytest.mark.lab

NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
AMD = ("gfx942", "gfx950", "gfx1250")
TILE = 64


@triton.jit
def _vector_kernel(out, x, size, BLOCK: tl.constexpr):
  place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  inside = place < size
  tl.store(out + place, tl.load(x + place, mask=inside) + 1, mask=inside)


@triton.jit
def _dot_kernel(out, lhs, rhs, m, n, k, TILE: tl.constexpr):
  row = tl.program_id(0) * TILE + tl.arange(0, TILE)
  column = tl.program_id(1) * TILE + tl.arange(0, TILE)
  inner = tl.arange(0, TILE)
  acc = tl.zeros((TILE, TILE), tl.float32)
  for start in range(0, k, TILE):
    a = tl.load(lhs + row[:, None] * k + (start + inner)[None, :])
    b = tl.load(rhs + column[None, :] * k + (start + inner)[:, None])
    acc = tl.dot(a, b, acc)
  tl.store(out + row[:, None] * n + column[None, :], acc)


@triton.jit
def _scaled_dot_kernel(
  out, lhs, lhs_scale, rhs, rhs_scale, n, k,
  TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
  row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  column = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
  inner = tl.arange(0, TILE_K)
  block = tl.arange(0, TILE_K // 32)
  acc = tl.zeros((TILE_M, TILE_M), tl.float32)
  for start in range(0, k, TILE_K):
    a = tl.load(lhs + row[:, None] * k + (start + inner)[None, :])
    b = tl.load(rhs + column[None, :] * k + (start + inner)[:, None])
    places = (start // 32 + block)[None, :]
    a_scale = tl.load(lhs_scale + row[:, None] * (k // 32) + places)
    b_scale = tl.load(rhs_scale + column[:, None] * (k // 32) + places)
    acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", acc)
  tl.store(out + row[:, None] * n + column[None, :], acc)


@triton.jit
def _normalize_kernel(out, x, SIZE: tl.constexpr):
  """Every value lives until the sum is known."""
  place = tl.arange(0, SIZE)
  value = tl.load(x + place)
  tl.store(out + place, value / tl.sum(value, axis=0))


@functools.cache
def compiled_dot(target):
  return kernel_compile.compile_kernel(
    _dot_kernel,
    {
      "out": "*fp32", "lhs": "*bf16", "rhs": "*bf16",
      "m": "i32", "n": "i32", "k": "i32",
    },
    {"TILE": TILE},
    target,
    divisible_by_16=["out", "lhs", "rhs", "n", "k"],
  )  # fmt: skip


@functools.cache
def compiled_scaled_dot(target, tile_m=128, tile_k=128):
  return kernel_compile.compile_kernel(
    _scaled_dot_kernel,
    {
      "out": "*fp32", "lhs": "*fp8e4nv", "lhs_scale": "*u8",
      "rhs": "*fp8e4nv", "rhs_scale": "*u8", "n": "i32", "k": "i32",
    },
    {"TILE_M": tile_m, "TILE_K": tile_k},
    target,
    divisible_by_16=["out", "lhs", "lhs_scale", "rhs", "rhs_scale", "n", "k"],
  )  # fmt: skip


def compile_vector(target, dtype="fp32", **options):
  return kernel_compile.compile_kernel(
    _vector_kernel,
    {"out": f"*{dtype}", "x": f"*{dtype}", "size": "i32"},
    {"BLOCK": 1024},
    target,
    **options,
  )


class VectorKernelTest(parameterized.TestCase):
  @parameterized.parameters(*NVIDIA, *AMD)
  def test_small_kernel_compiles_for(self, target):
    compiled = compile_vector(target)
    self.assertEqual(compiled.name, "_vector_kernel")
    self.assertEqual(compiled.architecture.name, target)
    self.assertBetween(compiled.registers, 8, 40)
    self.assertEqual(compiled.spill_bytes, 0)
    self.assertEqual(compiled.matrix_instructions, {})
    self.assertIsNone(compiled.main_loop)
    self.assertIsNone(compiled.limit_error)
    if target in NVIDIA:
      self.assertIn(f".target {target}", compiled.assembly)
      self.assertRegex(compiled.disassembly, r"STG\.E")
    else:
      self.assertIn(target, compiled.assembly)
    self.assertEqual(compiled.binary[:4], b"\x7fELF")

  # 8 values a thread: two loads of 16 bytes of f32, one of bf16.
  # Unaligned pointers make narrow loads.
  @parameterized.parameters(
    ("sm_90", "fp32", {128: 2}, {32: 8}),
    ("sm_90", "bf16", {128: 1}, {16: 8}),
    ("gfx942", "fp32", {128: 1}, {32: 4}),  # 256 threads
    ("gfx942", "bf16", {64: 1}, {16: 4}),
  )
  def test_load_widths_of(self, target, dtype, aligned, unaligned):
    for names, wanted in ((["out", "x", "size"], aligned), ([], unaligned)):
      compiled = compile_vector(target, dtype, divisible_by_16=names)
      self.assertEqual(compiled.global_load_bits, wanted)

  def test_options_are_passed_on(self):
    compiled = compile_vector("sm_90", num_warps=8)
    self.assertEqual(compiled.num_warps, 8)
    self.assertIn(".reqntid 256", compiled.assembly)


class MatrixInstructionTest(parameterized.TestCase):
  # The main loop multiplies a tile of 64 x 64 x 64. wgmma and tcgen05 do the
  # work of a whole block, mma.sync that of one of four warps.
  @parameterized.parameters(
    ("sm_80", r"mma\.sync.*m16n8k16.*f32\.bf16\.bf16\.f32", "HMMA",
     64**3 // (16 * 8 * 16) // 4),
    ("sm_90", r"wgmma\.mma_async.*m64n64k16\.f32\.bf16\.bf16", "HGMMA",
     64**3 // (64 * 64 * 16)),
    ("sm_100", r"tcgen05\.mma.*kind::f16", "UTCHMMA", 64**3 // (64 * 64 * 16)),
    ("gfx942", r"v_mfma_f32_\w+bf16", "v_mfma_f32", None),
    ("gfx1250", r"v_wmma_f32_\w+bf16", "v_wmma_f32", None),
  )  # fmt: skip
  def test_dot_of_bf16_uses(self, target, assembly, machine, count):
    compiled = compiled_dot(target)
    (instruction,) = compiled.matrix_instructions
    self.assertRegex(instruction, assembly)
    (instruction,) = compiled.main_loop.matrix_instructions
    self.assertStartsWith(instruction, machine)
    if count is not None:
      self.assertEqual(compiled.main_loop.matrix_count, count)

  def test_tensor_memory_holds_the_accumulator(self):
    # 128 lanes x 128 columns of f32, and the scales, to a power of two.
    columns = compiled_scaled_dot("sm_100").tensor_memory_columns
    self.assertEqual(columns, 256)
    self.assertEqual(compiled_dot("sm_90").tensor_memory_columns, 0)


class LimitTest(parameterized.TestCase):
  def test_shared_memory_beyond_the_target_is_an_error_with_the_numbers(self):
    compiled = compiled_scaled_dot("gfx942", 128, 128)
    self.assertGreater(compiled.shared_memory_bytes, 64 << 10)
    self.assertEqual(
      compiled.limit_error,
      f"_scaled_dot_kernel needs {compiled.shared_memory_bytes} bytes of shared"
      " memory, gfx942 has 65536",
    )
    self.assertIsNone(compiled_scaled_dot("gfx942", 64, 64).limit_error)

  # 128 values a thread, and more than a thread has registers.
  @parameterized.parameters(
    ("sm_90", 32 * 128, 32 * 512), ("gfx942", 64 * 128, 64 * 512)
  )
  def test_spills_are_seen(self, target, small, large):
    def spill_bytes(size):
      return kernel_compile.compile_kernel(
        _normalize_kernel,
        {"out": "*fp32", "x": "*fp32"},
        {"SIZE": size},
        target,
        num_warps=1,
      ).spill_bytes

    self.assertEqual(spill_bytes(small), 0)
    self.assertGreater(spill_bytes(large), 128)


class ErrorTest(parameterized.TestCase):
  def test_unknown_architecture_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "'sm_75'.*sm_80, sm_89.*gfx1250"):
      compile_vector("sm_75")

  def test_arguments_that_do_not_fit_the_kernel_are_named(self):
    with self.assertRaisesRegex(
      TypeError, r"missing: \['size'\], unknown: \['sise'\].*: \['BLOCK'\]"
    ):
      kernel_compile.compile_kernel(
        _vector_kernel,
        {"out": "*fp32", "x": "*fp32", "sise": "i32", "BLOCK": "i32"},
        {"BLOCK": 4},
        "sm_90",
      )

  def test_kernel_that_does_not_compile_says_for_which_architecture(self):
    with self.assertRaisesRegex(
      kernel_compile.CompileError,
      "(?s)_scaled_dot_kernel does not compile for sm_80 .*fp8e4nv",
    ):
      compiled_scaled_dot("sm_80")


class FileTest(parameterized.TestCase):
  @parameterized.parameters(
    ("sm_90", {"ptx", "sass", "cubin"}), ("gfx942", {"amdgcn", "hsaco"})
  )
  def test_write_leaves_every_form(self, target, suffixes):
    compiled = compile_vector(target)
    with tempfile.TemporaryDirectory() as directory:
      paths = compiled.write(pathlib.Path(directory) / "new")
      self.assertEqual({path.suffix[1:] for path in paths}, suffixes)
      for path in paths:
        self.assertStartsWith(path.name, f"_vector_kernel.{target}.")
        self.assertNotEmpty(path.read_bytes())
      self.assertEqual(paths[-1].read_bytes(), compiled.binary)

  def test_compiles_where_jax_triton_emptied_the_cache_directory(self):
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=""):
      self.assertIn("_vector_kernel", compile_vector("sm_80").assembly)
