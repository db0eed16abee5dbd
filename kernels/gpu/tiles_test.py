# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 32 bits, in every place where the matmul kernels form one.

One program far from the first runs on arrays of a few KiB: its first access
beyond 2^31 is refused, and the text has its place. An offset in 32 bits would
have wrapped around, by 2^32 elements.
"""

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import block_scaled_matmul, configs, matmul_plans

from jaxplugin.kernels import architectures, formats
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import matmul_shapes

ARRAY_BYTES = 1 << 16
# A place is relative to the nearest array; all tested places are this close.
SLACK_BYTES = 1 << 20
# Twice this, of the third batch or split, is beyond 31 bits; it is not.
STRIDE = 2**30 + 64
HALF = 2**31  # the least that 32 bits with a sign do not hold

CONFIGS = matmul_shapes.PATHS
DTYPES = {
  "u8": np.uint8,
  "u32": np.uint32,
  "f32": np.float32,
  "e4m3": ml_dtypes.float8_e4m3fn,
}
ARCHITECTURE = architectures.by_name("sm_100")

setUpModule = interpret.skip_unless_supported


def kind(format="mxfp8", strides=(0, 0, 1), scale_strides=(0, 0, 1)):
  """An operand whose batches and rows are the same bytes by default."""
  return configs.OperandKind(
    format=format, strides=strides, scale_strides=scale_strides
  )


def make_shape(*, batch=1, m=16, n=32, k=128, lhs=None, rhs=None, **options):
  return configs.MatmulShape(
    batch=batch, m=m, n=n, k=k, lhs=lhs or kind(), rhs=rhs or kind(), **options
  )


class OffsetTest(parameterized.TestCase):
  def far_access(self, shape, config, program):
    """("reads" or "writes", byte) of what one program of the matmul does."""
    launch = matmul_plans.plan(shape, config, ARCHITECTURE)[0]
    views = {"residual": "f32", **dict(launch.views)}
    inputs = [
      np.zeros(ARRAY_BYTES, np.uint8).view(DTYPES[views.get(name, "u8")])
      for name in launch.inputs
    ]
    out = np.zeros(ARRAY_BYTES // 4, launch.outputs[0].dtype)
    with self.assertRaises(interpret.InterpretError) as caught:
      interpret.launch(
        block_scaled_matmul.KERNELS[launch.kernel],
        launch.grid,
        *inputs,
        out,
        programs=[(program, 0, 0)],
        **dict(launch.constexprs),
      )
    found = re.search(r"(reads|writes) at byte (-?\d+)", str(caught.exception))
    self.assertIsNotNone(found, caught.exception)
    return found[1], int(found[2])

  def check(self, access, verb, byte):
    self.assertEqual(access[0], verb)
    self.assertGreaterEqual(byte, HALF)
    self.assertLess(abs(access[1] - byte), SLACK_BYTES, (access, byte))

  @parameterized.parameters(
    *itertools.product(
      CONFIGS, ("lhs", "lhs_scale", "rhs", "rhs_scale"), (STRIDE,)
    ),
    ("small_m", "rhs", 4 * STRIDE, "mxfp4"),  # in words
  )
  def test_batch(self, path, name, stride, *format):
    side, _, scale = name.partition("_")
    strides = {"scale_strides" if scale else "strides": (stride, 0, 1)}
    shape = make_shape(batch=3, **{side: kind(*format, **strides)})
    access = self.far_access(shape, CONFIGS[path], program=2)
    self.check(access, "reads", 2 * stride)

  @parameterized.product(path=tuple(CONFIGS), name=("rhs", "rhs_scale"))
  def test_row(self, path, name):
    # As many rows that their last tile's offset is 2^31.
    rows, row_stride = 2**24, 128
    scale = name == "rhs_scale"
    strides = {"scale_strides" if scale else "strides": (0, row_stride, 1)}
    config = CONFIGS[path]
    shape = make_shape(n=rows + config.block_n, rhs=kind(**strides))
    access = self.far_access(shape, config, program=rows // config.block_n)
    self.check(access, "reads", rows * row_stride)

  @parameterized.product(
    path=("upcast", "native"), name=("lhs", "lhs_scale", "rhs", "rhs_scale")
  )
  def test_k_that_is_not_minor(self, path, name):
    side, _, scale = name.partition("_")
    k_stride = 2**23
    per_index = 32 if scale else 1
    strides = {"scale_strides" if scale else "strides": (0, 1, k_stride)}
    # The last of three splits starts at k.
    k = 512 * per_index
    config = dataclasses.replace(CONFIGS[path], split_k=3)
    shape = make_shape(k=3 * k // 2, **{side: kind(**strides)})
    access = self.far_access(shape, config, program=2)
    self.check(access, "reads", 512 * k_stride)

  @parameterized.product(block_rows=(32, 128), side=("lhs", "rhs"))
  def test_row_tile_of_a_swizzled_scale(self, block_rows, side):
    tile_stride, tile = 2**20, 2**11
    config = dataclasses.replace(
      CONFIGS["native"], block_m=block_rows, block_n=block_rows
    )
    rows = (tile + 1) * formats.SCALE_TILE_ROWS
    sizes = {"m": block_rows, "n": block_rows}
    sizes["m" if side == "lhs" else "n"] = rows
    swizzled = kind(scale_strides=(0, tile_stride))
    shape = make_shape(**sizes, **{side: swizzled})
    program = tile * formats.SCALE_TILE_ROWS // block_rows
    access = self.far_access(shape, config, program)
    self.check(access, "reads", tile * tile_stride)

  @parameterized.product(
    block_rows=(32, 128), format=("mxfp8", "nvfp4"), side=("lhs", "rhs")
  )
  def test_column_tile_of_a_swizzled_scale(self, block_rows, format, side):
    vec_size = formats.by_name(format).block_size
    config = dataclasses.replace(
      CONFIGS["native"], block_m=block_rows, block_n=block_rows, split_k=2
    )
    swizzled = kind(format, strides=(0, 0, 0), scale_strides=(0, 512))
    linear = kind(format, strides=(0, 0, 0), scale_strides=(0, 0, 0))
    sides = {"lhs": linear, "rhs": linear, side: swizzled}
    # The second half of k starts at the scale's column 2^24: four take 512 B.
    shape = make_shape(m=block_rows, n=block_rows, k=2**25 * vec_size, **sides)
    access = self.far_access(shape, config, program=1)
    self.check(access, "reads", 2**24 // 4 * 512)

  @parameterized.product(
    path=tuple(CONFIGS), has_residual=(False, True), planes=("batch", "split")
  )
  @pytest.mark.sample(11)
  def test_plane_of_the_result(self, path, has_residual, planes):
    m, n = 2**15, 2**15 + 64
    config = CONFIGS[path]
    is_split = planes == "split"
    if is_split:
      config = dataclasses.replace(config, split_k=3)
    shape = make_shape(
      batch=1 if is_split else 3, m=m, n=n, k=384, has_residual=has_residual
    )
    program = 2 * configs.cdiv(m, config.block_m) * (n // config.block_n)
    access = self.far_access(shape, config, program)
    verb = "reads" if has_residual and not is_split else "writes"
    self.check(access, verb, 4 * 2 * m * n)


class ReduceTest(parameterized.TestCase):
  def launch(self, grid, workspace, out, *, m, splits, **options):
    interpret.launch(
      block_scaled_matmul.reduce_kernel,
      grid,
      *[workspace] * 9,
      out,
      scale=None,
      amax=None,
      TILING=configs.Tiling(
        shape=make_shape(m=m, n=1),
        config=dataclasses.replace(CONFIGS["upcast"], split_k=splits),
      ),
      BLOCK=1024,
      RESULT=None,
      **options,
    )

  def test_elements(self):
    out = np.zeros(1024, np.float32)
    workspace = np.zeros(1024, np.float32)
    program = HALF // 1024
    with self.assertRaisesRegex(interpret.InterpretError, "reads at") as caught:
      self.launch(
        program + 1,
        workspace,
        out,
        m=HALF + 1024,
        splits=2,
        programs=[(program, 0, 0)],
      )
    byte = int(re.search(r"at byte (-?\d+)", str(caught.exception))[1])
    self.assertLess(abs(byte - 4 * HALF), SLACK_BYTES)

  def test_planes(self):
    # The kernel reads all planes, so all must be allocated. Bytes that are
    # never touched use only address space.
    base = np.zeros(2 * STRIDE + 1024, np.uint8)
    planes = np.lib.stride_tricks.as_strided(base, (3, 1024), (STRIDE, 1))
    planes[...] = np.random.default_rng(0).integers(0, 85, planes.shape)
    out = np.zeros(1024, np.float32)
    options = {"programs": [(0, 0, 0)], "check_races": False}
    self.launch(1, planes, out, m=STRIDE, splits=3, **options)
    np.testing.assert_array_equal(out, planes.sum(0))
