# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every value code under every scale code, by the compiled PTX of decoders."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized

from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import configs, decode, matmul_plans
from jaxplugin.lab.inspection import compile as kernel_compile
from jaxplugin.lab.inspection.ptx import launching
from jaxplugin.testing.kernels import gpu_operands

pytestmark = pytest.mark.lab

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = 64
K = 64
CONVERSION = "cvt.rn.bf16x2.e2m1x2"


@triton.jit
def dequantize_kernel(
  codes,
  scale,
  out,
  OPERAND: tl.constexpr,
  DECODING: tl.constexpr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
):
  """out[rows, K] of codes under scale codes, ROWS rows a program."""
  columns: tl.constexpr = K // OPERAND.values_per_element
  blocks: tl.constexpr = K // OPERAND.values_per_scale
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
  code = tl.load(codes + rows * columns + tl.arange(0, columns)[None, :])
  factor = tl.load(scale + rows * blocks + tl.arange(0, blocks)[None, :])
  values = decode.dequantize(code, factor, OPERAND, DECODING)
  tl.store(out + rows * K + tl.arange(0, K)[None, :], values)


@triton.jit
def values_kernel(codes, out, OPERAND: tl.constexpr, DECODING: tl.constexpr):
  """out[64, 64] = bf16 of codes[64, 64]."""
  offsets = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
  values = decode.values_to_bf16(tl.load(codes + offsets), OPERAND, DECODING)
  tl.store(out + offsets, values)


@functools.cache
def compiled(architecture, name, interleaved, ptxas_version=None):
  target = dataclasses.replace(
    architectures.by_name(architecture), ptxas_version=ptxas_version
  )
  operand = configs.operand(name, ROWS, K, interleaved=interleaved)
  shape = configs.MatmulShape(
    batch=1, m=ROWS, n=ROWS, k=K, lhs=operand, rhs=operand
  )
  config = configs.MatmulConfig(
    path="upcast", block_m=64, block_n=64, block_k=64
  )
  (launch,) = matmul_plans.plan(shape, config, target)
  tiling = dict(launch.constexprs)["TILING"]
  types = matmul_plans.signature(launch, shape)
  kernel = kernel_compile.compile_kernel(
    dequantize_kernel,
    {"codes": types["lhs"], "scale": types["lhs_scale"], "out": "*bf16"},
    {
      "OPERAND": tiling.shape.rhs,
      "DECODING": tiling.decoding,
      "ROWS": ROWS,
      "K": K,
    },
    target,
  )
  return tiling.shape.rhs, kernel


def every_code_under_every_scale(name):
  """(value codes[rows, K], scale codes[rows, blocks]), their dtypes uint8."""
  format = formats.by_name(name)
  count = 1 << format.value_bits
  blocks = K // format.block_size
  codes = np.arange(count, dtype=np.uint8)
  scale = np.arange(256, dtype=np.uint8)
  of_scale = np.resize(codes, max(count, format.block_size))
  pieces = of_scale.reshape(-1, format.block_size)
  values = np.tile(pieces, (256, 1)).reshape(-1, K)
  scales = np.repeat(scale, len(pieces)).reshape(-1, blocks)
  return values, scales


def exactly(name, codes, scale):
  format = formats.by_name(name)
  factor = scale.view(format.scale_dtype).astype(np.float64)
  values = codes.view(format.values_dtype).astype(np.float64)
  return values * np.repeat(factor, format.block_size, axis=1)


class DecodeKernelsTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (architecture, name, False)
      for architecture in ("sm_80", "sm_90", "sm_120")
      for name in ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
    ),
    ("sm_80", "nvfp4", True),
    ("sm_90", "nvfp4", True),
    ("sm_90", "mxfp4", True),
  )
  def test_has_the_bits_of(self, architecture, name, interleaved):
    kernel = self.assert_exact(name, *compiled(architecture, name, interleaved))
    self.assertNotIn(CONVERSION, kernel.assembly)

  @parameterized.product(
    architecture=("sm_100", "sm_103", "sm_120", "sm_121"),
    name=("mxfp4", "nvfp4"),
  )
  def test_conversion_has_the_bits_of(self, architecture, name):
    kernel = self.assert_exact(
      name,
      *compiled(architecture, name, False, architectures.E2M1_CONVERSION_PTXAS),
    )
    self.assertIn(CONVERSION, kernel.assembly)

  @parameterized.product(
    architecture=("sm_80", "sm_90"),
    reads_words=(False, True),
    format_and_unit=(("int8_f32_64", 1.0), ("int8_q6_e8m0_32", 2.0**-6)),
  )
  def test_every_code_of_8_bit_integers(
    self, architecture, reads_words, format_and_unit
  ):
    format, unit = format_and_unit
    decoding = configs.Decoding(has_ptx=True, reads_words=reads_words)
    kernel = kernel_compile.compile_kernel(
      values_kernel,
      {"codes": "*u8", "out": "*bf16"},
      {"OPERAND": configs.operand(format, 64, 64), "DECODING": decoding},
      architectures.by_name(architecture),
    )
    codes = np.arange(4096).astype(np.uint8).reshape(64, 64)
    done = launching.launch(
      kernel.assembly,
      [codes, np.zeros(codes.shape, BF16)],
      grid=1,
      shared_memory_bytes=kernel.shared_memory_bytes,
    )
    self.assertIn("0x437F437F", kernel.assembly)
    np.testing.assert_array_equal(
      done.arrays[-1].astype(np.float64), codes.view(np.int8) * unit
    )

  def assert_exact(self, name, operand, kernel):
    interleaved = operand.is_interleaved
    codes, scale = every_code_under_every_scale(name)
    stored = codes
    if interleaved:
      stored = gpu_operands.interleave(codes)
    elif operand.is_packed:
      stored = codes[:, 0::2] | codes[:, 1::2] << 4
    done = launching.launch(
      kernel.assembly,
      [stored, scale, np.zeros(codes.shape, BF16)],
      grid=len(codes) // ROWS,
      shared_memory_bytes=kernel.shared_memory_bytes,
    )
    self.assertEqual(kernel.spill_bytes, 0)
    expected = exactly(name, codes, scale)
    with np.errstate(over="ignore"):
      expected = np.ldexp(expected, -operand.missing_exponent).astype(BF16)
    np.testing.assert_array_equal(
      done.arrays[-1].astype(np.float64), expected.astype(np.float64)
    )
    return kernel
