# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cuTile kernel's own source on NumPy arrays, against float64.

The tests check its tiles, tails, the layout of scales, the order of programs
and the epilogue. They do not check the code that cuTile's compiler generates.
"""

import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.cutile import plans

from jaxplugin.kernels import architectures
from jaxplugin.testing import contract
from jaxplugin.testing.interpreter import tile_language
from jaxplugin.testing.kernels import gpu_operands, matmul_shapes

NAN = 255  # of E8M0
F32, BF16 = gpu_operands.DTYPES["f32"], gpu_operands.DTYPES["bf16"]
NOTHING = gpu_operands.Epilogue()


def operands(lhs, rhs, m, n, k, *, batch=1, integers=False):
  """Random operands whose bytes of scales beyond k are 0, as `plans` has it."""
  rng = np.random.default_rng(0)
  made = [
    gpu_operands.make_operand(
      rng, format, (batch, rows, k), integers=integers, swizzled=True
    )
    for format, rows in ((lhs, m), (rhs, n))
  ]
  for x in made:
    columns = -(-k // x.kind.values_per_scale) % 4
    if columns:
      _tiles(x)[:, :, -1, ..., columns:] = 0
  return made


def _tiles(operand):
  """Scales as [batch, tile of rows, tile of columns, row % 32, row / 32, 4]."""
  batch, rows, columns = operand.scale.shape
  return operand.scale.reshape(batch, rows // 128, columns // 4, 32, 4, 4)


def run(
  lhs, rhs, epilogue=NOTHING, out_dtype="f32", *, name="sm_100", config=None
):
  """The product that the kernel's source computes."""
  shape = gpu_operands.shape_of(lhs, rhs, epilogue, out_dtype, None)
  target = architectures.by_name(name)
  config = config or plans.default_config(shape, target)
  residual = epilogue.residual
  launch = plans.plan(
    shape,
    config,
    target,
    residual_dtype="float32" if residual is None else residual.dtype.name,
  )
  arrays = gpu_operands.arrays_of(lhs, rhs, epilogue, None)
  return tile_language.run(launch, arrays)


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
  def test_product_of(self, *formats):
    # Tails of every dimension: no multiple of a tile, k of two tiles and more.
    lhs, rhs = operands(*formats, 133, 70, 288)
    expected = gpu_operands.expected(lhs, rhs, NOTHING)
    contract.assert_within(run(lhs, rhs), *expected, F32)

  @parameterized.parameters(
    ("sm_100", plans.TileConfig(block_m=256, block_n=128, block_k=256,
                                num_ctas=2)),
    ("sm_103", plans.TileConfig(block_m=128, block_n=256, block_k=128)),
    ("sm_120", plans.TileConfig(block_m=128, block_n=128, block_k=128,
                                group_m=1)),
  )  # fmt: skip
  @pytest.mark.lab
  def test_batches_of_tiles_in_groups(self, name, config):
    lhs, rhs = operands("mxfp4", "mxfp4", 700, 400, 96, batch=2)
    expected = gpu_operands.expected(lhs, rhs, NOTHING)
    found = run(lhs, rhs, name=name, config=config)
    contract.assert_within(found, *expected, F32)

  def test_two_rows_of_tiles_come_before_the_next_column(self):
    # 5 x 3 tiles in groups of two rows; the last group has one row.
    of_program = tile_language.kernels()._tile_of_program
    tiles = [of_program(i, 637, 384, 128, 128, 2) for i in range(16)]
    self.assertEqual(tiles[:4], [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
    self.assertEqual(tiles[11:15], [(0, 3, 2), (0, 4, 0), (0, 4, 1), (0, 4, 2)])
    self.assertEqual(tiles[15], (1, 0, 0))

  @parameterized.parameters("none", "relu", "gelu", "silu")
  def test_epilogue_is_in_order_and_f32(self, activation):
    lhs, rhs = operands("mxfp8", "mxfp8", 65, 96, 64, integers=True)
    rng = np.random.default_rng(1)
    epilogue = gpu_operands.Epilogue(
      global_scale=np.float32([3.0, 2.0**-9]),
      bias=rng.normal(size=96).astype(np.float32),
      activation=activation,
      residual=rng.normal(size=(1, 65, 96)).astype(BF16),
    )
    expected = gpu_operands.expected(lhs, rhs, epilogue)
    found = run(lhs, rhs, epilogue, "bf16")
    contract.assert_within(found, *expected, BF16)

  @parameterized.parameters("relu", "none")
  def test_nan_scale_is_of_its_row_alone(self, activation):
    lhs, rhs = operands("mxfp4", "mxfp4", 130, 64, 64)
    # Row 129 of the second tile, its second block: NaN where values are 0 too.
    _tiles(lhs)[0, 1, 0, 1, 0, 1] = NAN
    lhs.values[0, 129] = 0
    out = run(lhs, rhs, gpu_operands.Epilogue(activation=activation))
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
