# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cuTile kernel's own source on NumPy arrays, against float64.

The tests check its tiles, tails, the layout of scales, the order of programs
and the epilogue. They do not check the code that cuTile's compiler generates.
"""

import functools
import pathlib

import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.cutile import plans

from jaxplugin.kernels import architectures
from jaxplugin.testing.interpreter import tile_language
from jaxplugin.testing.kernels import matmul_shapes

KERNEL = pathlib.Path(plans.__file__).with_name("matmul_kernel.py")
VALUES = {
  "mxfp8": ml_dtypes.float8_e4m3fn,
  "mxfp8_e5m2": ml_dtypes.float8_e5m2,
  "mxfp4": ml_dtypes.float4_e2m1fn,
  "nvfp4": ml_dtypes.float4_e2m1fn,
}
NAN = 255  # of E8M0
# Sums of a hundred products of f32, and one rounding to bf16.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8}


@functools.cache
def kernel():
  return tile_language.load_kernel(KERNEL).block_scaled_matmul


def operand(rng, format, batch, rows, k):
  """(what it stands for in f64, values, swizzled scales as bytes)."""
  dtype = np.dtype(VALUES[format])
  block = 16 if format == "nvfp4" else 32
  values = rng.normal(size=(batch, rows, k)).astype(np.float32).astype(dtype)
  columns = -(-k // block)
  if format == "nvfp4":
    scale = rng.uniform(0.5, 2, (batch, rows, columns)).astype(np.float32)
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
  else:
    code = rng.integers(123, 131, (batch, rows, columns)).astype(np.uint8)
    scale = code.view(ml_dtypes.float8_e8m0fnu)
  exact = values.astype(np.float64)
  exact *= np.repeat(scale.astype(np.float64), block, axis=2)[:, :, :k]
  stored = values
  if dtype == ml_dtypes.float4_e2m1fn:
    codes = values.view(np.uint8)
    stored = codes[..., 0::2] | codes[..., 1::2] << 4
  return exact, stored, swizzled(scale.view(np.uint8))


def swizzled(code):
  """Byte by byte, after the PTX ISA; rows that pad are NaN, columns 0."""
  batch, rows, columns = code.shape
  row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
  out = np.full((batch, row_tiles, column_tiles, 512), NAN, np.uint8)
  for row in range(row_tiles * 128):
    for column in range(column_tiles * 4):
      offset = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
      place = (slice(None), row // 128, column // 4, offset)
      if column >= columns:
        out[place] = 0
      elif row < rows:
        out[place] = code[:, row, column]
  return out.reshape(batch, row_tiles, column_tiles, 32, 16)


def run(shape, arrays, config=None, architecture="sm_100", residual="float32"):
  target = architectures.by_name(architecture)
  config = config or plans.default_config(shape, target)
  launch = plans.plan(shape, config, target, residual_dtype=residual)
  out = np.full(launch.output.shape, np.nan, launch.output.dtype)
  given = []
  for argument in launch.arguments:
    if isinstance(argument, plans.Argument):
      array = out if argument.name == "out" else arrays[argument.name]
      assert array.shape == argument.shape, (argument, array.shape)
      assert array.dtype == argument.dtype, (argument, array.dtype)
      argument = array
    given.append(argument)
  tile_language.launch(kernel(), launch.grid, given)
  return out


def product(lhs, rhs, m, n, k, *, batch=1, seed=0, **options):
  """(shape, arrays, exact product without the epilogue)."""
  rng = np.random.default_rng(seed)
  a, lhs_values, lhs_scale = operand(rng, lhs, batch, m, k)
  b, rhs_values, rhs_scale = operand(rng, rhs, batch, n, k)
  shape = matmul_shapes.product(lhs, rhs, m, n, k, batch=batch, **options)
  arrays = {
    "lhs": lhs_values,
    "lhs_scale": lhs_scale,
    "rhs": rhs_values,
    "rhs_scale": rhs_scale,
  }
  return shape, arrays, a @ b.transpose(0, 2, 1)


class KernelTest(parameterized.TestCase):
  @parameterized.parameters(
    ("mxfp8", "mxfp8"),
    ("mxfp8_e5m2", "mxfp8_e5m2"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp4"),
    ("mxfp4", "mxfp8_e5m2"),
  )
  @pytest.mark.sample(2)
  def test_product_of(self, lhs, rhs):
    # Tails of every dimension: no multiple of a tile, k of two tiles and more.
    shape, arrays, exact = product(lhs, rhs, 133, 70, 288)
    out = run(shape, arrays)
    np.testing.assert_allclose(
      out, exact, rtol=0, atol=TOLERANCE["float32"] * np.abs(exact).max()
    )

  @parameterized.parameters(
    ("sm_100", plans.TileConfig(block_m=256, block_n=128, block_k=256,
                                num_ctas=2)),
    ("sm_103", plans.TileConfig(block_m=128, block_n=256, block_k=128)),
    ("sm_120", plans.TileConfig(block_m=128, block_n=128, block_k=128,
                                group_m=1)),
  )  # fmt: skip
  @pytest.mark.lab
  def test_batches_of_tiles_in_groups(self, architecture, config):
    shape, arrays, exact = product("mxfp4", "mxfp4", 700, 400, 96, batch=2)
    out = run(shape, arrays, config, architecture)
    np.testing.assert_allclose(
      out, exact, rtol=0, atol=TOLERANCE["float32"] * np.abs(exact).max()
    )

  def test_programs_are_numbered_as_plans_say(self):
    config = plans.TileConfig(block_m=128, block_n=128, block_k=128, group_m=2)
    m, n = 5 * 128 - 3, 3 * 128
    tiles = [plans.tile_of_program(i, m, n, config) for i in range(2 * 15)]
    self.assertLen(set(tiles), 30)
    self.assertEqual(tiles[:4], [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
    self.assertEqual(tiles[12:16][:3], [(0, 4, 0), (0, 4, 1), (0, 4, 2)])
    self.assertEqual(tiles[15], (1, 0, 0))
    module = tile_language.load_kernel(KERNEL)
    for i, tile in enumerate(tiles):
      found = module._tile_of_program(i, m, n, 128, 128, 2)
      self.assertEqual(found, tile)

  @parameterized.parameters("none", "relu", "gelu", "silu")
  def test_epilogue_is_in_order_and_f32(self, activation):
    shape, arrays, exact = product(
      *("mxfp8", "mxfp8", 65, 96, 64),
      out_dtype="bf16",
      has_global_scale=True,
      has_global_power=True,
      has_bias=True,
      activation=activation,
      has_residual=True,
    )
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(1, 1, 96)).astype(np.float32)
    residual = rng.normal(size=exact.shape).astype(ml_dtypes.bfloat16)
    arrays["global_scale"] = np.float32([3.0, 2.0**-7])
    arrays["bias"], arrays["residual"] = bias, residual
    out = run(shape, arrays, residual="bfloat16")
    x = exact * 3 * 2.0**-7 + bias
    cubic = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    expected = {
      "none": x,
      "relu": np.maximum(x, 0),
      "gelu": x / 2 * (1 + np.tanh(cubic)),
      "silu": x / (1 + np.exp(-x)),
    }[activation] + residual.astype(np.float64)
    np.testing.assert_allclose(
      out.astype(np.float64), expected, rtol=TOLERANCE["bfloat16"], atol=1e-5
    )

  @parameterized.parameters("relu", "none")
  def test_nan_scale_is_of_its_row_alone(self, activation):
    shape, arrays, _ = product(
      "mxfp4", "mxfp4", 130, 64, 64, activation=activation
    )
    # Row 129 of the second tile, its second block: NaN where values are 0 too.
    arrays["lhs_scale"][0, 1, 0, 1, 1] = NAN
    arrays["lhs"][0, 129] = 0
    out = run(shape, arrays)
    self.assertTrue(np.isnan(out[0, 129]).all())
    self.assertTrue(np.isfinite(out[0, :129]).all())


class ShapeErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ("sm_90", "mxfp8", "mxfp8", "needs sm_100, sm_103, sm_120, got sm_90"),
    ("sm_121", "mxfp8", "mxfp8", "got sm_121"),
    ("sm_100", "bf16", "mxfp4", "needs both .* quantized, got bf16 x mxfp4"),
    ("sm_100", "mxfp6_e2m3", "mxfp8", "multiplies FP8 and FP4, got mxfp6_e2m3"),
    ("sm_100", "nvfp4", "mxfp4", "one kind of scale, got nvfp4 x mxfp4"),
    (
      "sm_120",
      "mxfp8",
      "mxfp8_e5m2",
      "no FP8 type contains both E4M3 and E5M2",
    ),
  )
  def test_refuses(self, architecture, lhs, rhs, reason):
    shape = matmul_shapes.product(lhs, rhs)
    target = architectures.by_name(architecture)
    self.assertRegex(plans.shape_error(shape, target), reason)
    with self.assertRaisesRegex(ValueError, reason):
      plans.default_config(shape, target)

  def test_sizes_beyond_32_bits_are_told_with_the_array(self):
    target = architectures.by_name("sm_100")
    at = matmul_shapes.product(m=2**20, n=2**11 - 1, k=32)
    self.assertIsNone(plans.shape_error(at, target))
    beyond = matmul_shapes.product(m=2**20, n=2**11, k=32)
    self.assertRegex(
      plans.shape_error(beyond, target), r"out of shape .* needs 2147483648"
    )

  @parameterized.parameters(
    ("sm_100", {"block_m": 128, "num_ctas": 2}, "128 for each of one or two"),
    ("sm_100", {"block_m": 512, "num_ctas": 4}, "one or two CTAs, got 512 and"),
    ("sm_120", {"num_ctas": 2}, "sm_120 has no pairs of CTAs"),
    ("sm_120", {"block_m": 256, "block_n": 256}, "131072 bytes .* has 101376"),
    ("sm_100", {"block_k": 64}, "block_k must be a multiple of 128, got 64"),
    ("sm_100", {"block_n": 64}, "multiples of 128, got 128x64x128"),
    ("sm_100", {"block_n": 384}, "powers of two"),
  )
  def test_config_is_refused(self, architecture, changes, reason):
    sizes = {"block_m": 128, "block_n": 128, "block_k": 128, **changes}
    config = plans.TileConfig(**sizes)
    target = architectures.by_name(architecture)
    with self.assertRaisesRegex(ValueError, reason):
      plans.plan(matmul_shapes.product(), config, target)

  def test_rows_of_part_of_16_bytes_are_refused_and_padded_k_helps(self):
    target = architectures.by_name("sm_100")
    config = plans.default_config(matmul_shapes.product(), target)
    with self.assertRaisesRegex(ValueError, "got k=40; pad k"):
      plans.plan(matmul_shapes.product(k=40), config, target)
    self.assertEqual(plans.padded_k(40, is_packed=False), 48)
    self.assertEqual(plans.padded_k(40, is_packed=True), 64)
    plans.plan(matmul_shapes.product(k=48), config, target)

  @parameterized.parameters(*plans.ARCHITECTURES)
  def test_candidates_hold_and_have_the_default_among_them(self, architecture):
    target = architectures.by_name(architecture)
    for lhs, rhs in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")):
      for m in (16, 4096):
        shape = matmul_shapes.product(lhs, rhs, m=m)
        found = list(plans.candidates(shape, target))
        self.assertIn(plans.default_config(shape, target), found)
        self.assertLen(set(found), len(found))
        for config in found:
          plans.plan(shape, config, target)


if __name__ == "__main__":
  absltest.main()
