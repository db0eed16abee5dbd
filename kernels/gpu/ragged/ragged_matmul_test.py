# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ragged kernels, run by the interpreter, agree with the f64 oracle."""

import dataclasses
import re

import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu import block_scaled_matmul, configs
from jaxplugin.kernels.gpu.ragged import plans, ragged_matmul

from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import gpu_operands, matmul_shapes

UPCAST, NATIVE = matmul_shapes.UPCAST, matmul_shapes.NATIVE
SMALL_M = matmul_shapes.SMALL_M
SWAPPED = dataclasses.replace(UPCAST, swap=True, block_k=32, group_m=2)
ACROSS = dataclasses.replace(UPCAST, block_n=64, block_k=32)
# FP4 is converted by an instruction.
CONVERTING = dataclasses.replace(
  architectures.by_name("sm_120"),
  ptxas_version=architectures.E2M1_CONVERSION_PTXAS,
)
LARGEST = 2**31 - 1

setUpModule = interpret.skip_unless_supported


def make_shape(lhs, rhs, **options):
  """Returns the shape of operands lhs (1, m, k) and rhs (groups, n, k)."""
  _, m, k = lhs.exact.shape
  groups, n, _ = rhs.exact.shape
  if options.get("is_across"):
    n = rhs.exact.shape[2]
  fields = {"batch": 1, "out_dtype": "f32"}
  fields |= {"groups": groups, "m": m, "n": n, "k": k}
  fields |= {"lhs": lhs.kind, "rhs": rhs.kind} | options
  return plans.RaggedShape(**fields)


def run(
  lhs,
  rhs,
  sizes,
  config,
  *,
  shape=None,
  programs=None,
  architecture=matmul_shapes.SM_90,
  planned_m=None,
  **arrays,
):
  """Runs the kernels and returns out; `arrays` are those of the epilogue.

  With planned_m, kernels read m. If they are for any m, there are 7 programs.
  """
  shape = shape or make_shape(lhs, rhs)
  m = shape.m
  if planned_m is not None:
    shape = dataclasses.replace(shape, m=planned_m, reads_m=True)
    arrays["m"] = np.array([m], np.int32)
  arrays |= {"lhs": lhs.values, "lhs_scale": lhs.scale}
  arrays |= {"rhs": rhs.values, "rhs_scale": rhs.scale}
  arrays["group_sizes"] = np.array(sizes, np.int32)
  launches = [
    dataclasses.replace(
      launch.with_size(m),
      grid=min(launch.grid, 7) if shape.is_for_any_m else launch.grid,
    )
    for launch in plans.plan(shape, config, architecture)
  ]
  return gpu_operands.run_launches(
    block_scaled_matmul.KERNELS,
    launches,
    arrays,
    programs=programs,
  )["out"]


@triton.jit
def _probe_kernel(group_sizes, of_tiles, of_rows, TILING: tl.constexpr):
  """Writes the group and rows of each tile, and the group of each row."""
  pid = tl.program_id(0)
  m: tl.constexpr = TILING.shape.m
  group, row, end = ragged_matmul.rows_of_tile(group_sizes, pid, m, TILING)
  tl.store(of_tiles + 3 * pid, group)
  tl.store(of_tiles + 3 * pid + 1, row)
  tl.store(of_tiles + 3 * pid + 2, end)
  if pid < m:
    group = ragged_matmul.group_of_row(group_sizes, pid, m, TILING)
    tl.store(of_rows + pid, group)


class ScheduleTest(parameterized.TestCase):
  """Each row of each group is in one tile, whatever the sizes."""

  def tiling(self, groups, m, block_m):
    shape = matmul_shapes.product("bf16", "mxfp8", m, 32, 32, groups=groups)
    config = dataclasses.replace(UPCAST, block_m=block_m)
    return plans.RaggedTiling(shape=shape, config=config)

  def check(self, sizes, m, block_m):
    groups = len(sizes)
    tiling = self.tiling(groups, m, block_m)
    of_tiles = np.full((max(tiling.tiles_m, m), 3), -1, np.int32)
    of_rows = np.full(m, -1, np.int32)
    interpret.launch(
      _probe_kernel, len(of_tiles), sizes, of_tiles, of_rows, TILING=tiling
    )
    expected = ragged_suite.group_of_rows(np.clip(sizes, 0, m), m)
    expected = np.where(expected < 0, groups, expected)
    np.testing.assert_array_equal(of_rows, expected)
    covered = np.full(m, -1)
    for i, (group, row, end) in enumerate(of_tiles):
      end = min(end, row + block_m)
      if row >= end:
        continue
      self.assertLess(i, tiling.tiles_m)
      self.assertTrue((covered[row:end] == -1).all())
      covered[row:end] = group
      # As few tiles as there can be.
      first = int(np.argmax(expected == group))
      self.assertEqual((row - first) % block_m, 0)
    np.testing.assert_array_equal(covered, expected)

  @parameterized.parameters((16, 1), (16, 3), (32, 5), (16, 8))
  @pytest.mark.sample(2)
  def test_random_sizes(self, block_m, groups):
    rng = np.random.default_rng(groups)
    for kind in range(6):
      for m in (1, 21):
        self.check(ragged_suite.random_sizes(rng, groups, m, kind), m, block_m)

  @parameterized.parameters(
    [[LARGEST, LARGEST, 3]],
    [[3, -1, LARGEST, LARGEST, LARGEST]],
    [[-LARGEST - 1, 2, 9, 20]],
    [[21, 0, 1]],
  )
  def test_sizes_that_do_not_fit(self, sizes):
    self.check(np.array(sizes, np.int32), 20, 16)

  def test_bound_of_tiles_is_reached_and_never_passed(self):
    for block_m, groups, m in ((2, 2, 5), (2, 3, 6), (4, 3, 9), (4, 2, 2)):
      most = 0
      for cut in np.ndindex(*(m + 1,) * groups):
        if sum(cut) <= m:
          sizes = (*cut, m - sum(cut))
          most = max(most, sum(-(-size // block_m) for size in sizes))
      self.assertEqual(self.tiling(groups, m, block_m).tiles_m, most)


class RaggedTest(parameterized.TestCase):
  """Operands lie in poison, and no size is a multiple of a tile's."""

  SIZES = (3, 0, 18, 5)
  M, N, K = 29, 35, 104

  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(len(self.id()))

  def make(self, lhs, rhs, *, n=N, k=K, groups=len(SIZES), **storage):
    make = gpu_operands.make_operand
    storage = {"integers": True} | storage
    return (
      make(self.rng, lhs, (1, self.M, k), integers=storage["integers"]),
      make(self.rng, rhs, (groups, n, k), **storage),
    )

  def check(
    self, lhs, rhs, config, *, sizes=SIZES, is_across=False, bound=0, **options
  ):
    """Checks a product; with a bound, in units of the magnitudes' sums."""
    shape = make_shape(lhs, rhs, is_across=is_across)
    result = run(lhs, rhs, sizes, config, shape=shape, **options)
    weight = rhs.exact.transpose(0, 2, 1) if is_across else rhs.exact
    exact, magnitude = ragged_suite.oracle(
      lhs.exact[0], weight, np.array(sizes)
    )
    if bound:
      contract.assert_within(result, exact, bound * magnitude, result.dtype)
    else:
      contract.assert_exact(result, exact, result.dtype)

  @parameterized.product(
    pair=(
      *((UPCAST, "bf16", "mxfp4"), (SWAPPED, "f32", "nvfp4")),
      *((UPCAST, "mxfp8", "mxfp8_e5m2"), (SWAPPED, "f16", "mxfp6_e2m3")),
      *((SMALL_M, "bf16", "mxfp4"), (SMALL_M, "f32", "mxfp8")),
      *((SMALL_M, "nvfp4", "nvfp4"), (NATIVE, "mxfp8", "mxfp4")),
      (NATIVE, "nvfp4", "nvfp4"),
      *(
        (SWAPPED, "e4m3_f32_32", "int4_f16_32"),
        (SMALL_M, "bf16", "int8_f32_104"),
      ),
    ),
    split_k=(1, 3),
  )
  @pytest.mark.sample(2)
  def test_exact_on_integers(self, pair, split_k):
    config, lhs, rhs = pair
    config = dataclasses.replace(config, split_k=split_k)
    self.check(*self.make(lhs, rhs), config)

  @parameterized.parameters(
    (UPCAST, 1, "bf16", "mxfp4", 1024),
    (SMALL_M, 1, "mxfp8", "nvfp4", 64),
    (SWAPPED, 1, "f32", "nvfp4", 1024),
    (SMALL_M, 3, "bf16", "mxfp4", 64),
    (UPCAST, 3, "bf16", "mxfp8", 64),
    (ACROSS, 2, "f32", "nvfp4", 64),
    (ACROSS, 1, "f32", "mxfp4", 1024),
  )
  @pytest.mark.sample(3)
  def test_kernels_that_read_m(self, config, split_k, lhs, rhs, planned_m):
    config = dataclasses.replace(config, split_k=split_k)
    is_across = config.block_n == ACROSS.block_n
    lhs, rhs = self.make(lhs, rhs)
    if is_across:
      lhs = gpu_operands.make_operand(
        self.rng, "f32", (1, self.M, self.N), integers=True
      )
    # Many programs add the parts of a split k.
    for sizes in (self.SIZES, (29, 0, 0, 0), (0, 0, 0, 1))[::split_k]:
      self.check(
        lhs,
        rhs,
        config,
        sizes=sizes,
        is_across=is_across,
        planned_m=planned_m,
      )

  @parameterized.parameters(
    (UPCAST, "mxfp8"), (SMALL_M, "mxfp4"), (NATIVE, "nvfp4")
  )
  @pytest.mark.sample(1)
  def test_rows_have_the_bits_of_a_dense_product(self, config, format):
    lhs, rhs = self.make("mxfp8", format, integers=False)
    if config.path == "native":
      lhs, rhs = self.make(format, format, integers=False)
    actual = run(lhs, rhs, self.SIZES, config)
    start = 0
    for group, size in enumerate(self.SIZES):
      if size:
        rows, weight = (
          dataclasses.replace(
            x, **{name: getattr(x, name)[part] for name in arrays}
          )
          for x, part, arrays in (
            (lhs, np.s_[:, start : start + size], ("values", "scale", "exact")),
            (rhs, np.s_[group : group + 1], ("values", "scale", "exact")),
          )
        )
        (expected,) = gpu_operands.run(
          rows, weight, config, architecture="sm_90"
        )
        np.testing.assert_array_equal(actual[start : start + size], expected)
      start += size

  @parameterized.product(split_k=(1, 2), format=("mxfp4", "nvfp4", "mxfp8"))
  @pytest.mark.sample(2)
  def test_across_the_blocks(self, split_k, format):
    # k of the product is the weight's n.
    _, rhs = self.make("f32", format, n=77)
    lhs = gpu_operands.make_operand(
      self.rng, "f32", (1, self.M, 77), integers=True
    )
    config = dataclasses.replace(ACROSS, split_k=split_k)
    self.check(lhs, rhs, config, is_across=True)

  @parameterized.product(
    config=(UPCAST, SWAPPED, SMALL_M, ACROSS), format=("mxfp4", "nvfp4")
  )
  @pytest.mark.sample(4)  # each config
  def test_converted_weights(self, config, format):
    is_across = config is ACROSS
    _, rhs = self.make("bf16", format)
    lhs = gpu_operands.make_operand(
      self.rng, "bf16", (1, self.M, (self.K, self.N)[is_across]), integers=True
    )
    shape = make_shape(lhs, rhs, is_across=is_across)
    (launch,) = plans.plan(shape, config, CONVERTING)
    self.assertEqual(launch.ptx_version, 92)
    self.assertTrue(dict(launch.constexprs)["TILING"].rhs.operand.is_converted)
    self.check(lhs, rhs, config, is_across=is_across, architecture=CONVERTING)

  @parameterized.parameters(UPCAST, SMALL_M, ACROSS)
  @pytest.mark.sample(1)
  def test_interleaved_weights(self, config):
    lhs, rhs = self.make("bf16", "mxfp4", n=48, k=96, interleaved=True)
    if config is ACROSS:
      lhs = gpu_operands.make_operand(self.rng, "bf16", (1, self.M, 48))
      self.check(lhs, rhs, config, is_across=True, bound=contract.DOT_BOUND)
    else:
      self.check(lhs, rhs, config)

  @parameterized.product(
    config=(UPCAST, NATIVE), block_n=(32, 128), format=("mxfp8", "nvfp4")
  )
  @pytest.mark.sample(2)
  def test_swizzled_scales_of_weights(self, config, block_n, format):
    config = dataclasses.replace(config, block_n=block_n, block_k=128)
    operands = self.make(format, format, n=140, k=168, swizzled=True)
    lhs = gpu_operands.make_operand(
      self.rng, format, (1, self.M, 168), integers=True
    )
    self.check(lhs, operands[1], config)

  @parameterized.parameters(UPCAST, NATIVE)
  @pytest.mark.sample(1)
  def test_swizzled_scales_of_two_halves(self, config):
    # Of 256 rows, which are whole tiles of the scale; 100 of them have none.
    config = dataclasses.replace(config, block_n=128, block_k=128)
    _, rhs = self.make("mxfp8", "mxfp8", n=156, k=256, swizzled=True)
    lhs = gpu_operands.make_operand(
      self.rng, "mxfp8", (1, self.M, 256), integers=True
    )
    lhs.scale[...] = 127 - 6
    lhs.exact[...] = lhs.values.view(formats.E4M3).astype(np.float64) / 64
    shape = make_shape(lhs, rhs, activation="swiglu")
    result = run(lhs, rhs, self.SIZES, config, shape=shape)
    sums, _ = ragged_suite.oracle(lhs.exact[0], rhs.exact, np.array(self.SIZES))
    expected = ragged_suite.activate(sums, "swiglu")
    bound = 64 * 2.0**-24 * (1 + np.abs(sums).max()) ** 2 + 0 * expected
    contract.assert_within(result, expected, bound, result.dtype)

  def test_padding_of_a_swizzled_scale_is_added_to_nothing(self):
    # Across the blocks rows of the scale are added up, and padding is NaN.
    _, rhs = self.make("f32", "mxfp8", n=77, k=128, swizzled=True)
    lhs = gpu_operands.make_operand(
      self.rng, "bf16", (1, self.M, 77), integers=True
    )
    config = dataclasses.replace(ACROSS, block_n=128, block_k=128)
    self.check(lhs, rhs, config, is_across=True)

  def test_weights_of_groups_without_rows_are_never_read(self):
    # They are not there: reading one is an error of the interpreter.
    lhs, rhs = self.make("bf16", "mxfp8")
    self.check(lhs, rhs, UPCAST, sizes=(20, 0, 0, 0))
    alone = dataclasses.replace(
      rhs, values=rhs.values[:1].copy(), scale=rhs.scale[:1].copy()
    )
    strides = tuple(s // alone.values.itemsize for s in alone.values.strides)
    kind = dataclasses.replace(
      rhs.kind, strides=strides, scale_strides=alone.scale.strides
    )
    alone = dataclasses.replace(alone, kind=kind)
    self.check(lhs, alone, UPCAST, sizes=(20, 0, 0, 0))
    with self.assertRaisesRegex(interpret.InterpretError, "rhs"):
      run(lhs, alone, (19, 1, 0, 0), UPCAST)

  @parameterized.product(
    activation=(*plans.GATED, *configs.ACTIVATIONS),
    split_k=(1, 2),
    config=(UPCAST, SMALL_M),
  )
  @pytest.mark.sample(3)
  def test_epilogue(self, activation, split_k, config):
    n, of_group = 70, split_k == 1
    lhs, rhs = self.make("bf16", "mxfp4", n=n)
    lhs.values[...] = lhs.values * np.float32(2**-6)
    lhs.exact[...] = lhs.values.astype(np.float64)
    groups = len(self.SIZES)
    scale = self.rng.normal(size=(groups, 2) if of_group else 2)
    scale = scale.astype(np.float32)
    bias = self.rng.normal(size=(groups, n)).astype(np.float32)
    shape = make_shape(
      lhs,
      rhs,
      activation=activation,
      has_bias=True,
      has_global_scale=True,
      has_global_power=True,
      has_scale_of_group=of_group,
    )
    config = dataclasses.replace(config, split_k=split_k)
    arrays = {"bias": bias, "global_scale": scale}
    result = run(lhs, rhs, self.SIZES, config, shape=shape, **arrays)
    sizes = np.array(self.SIZES)
    of_row = ragged_suite.group_of_rows(sizes, self.M)
    sums, _ = ragged_suite.oracle(lhs.exact[0], rhs.exact, sizes)
    factor = np.prod(scale.astype(np.float64), axis=-1)
    if of_group:
      factor = factor[of_row][:, None]
    before = sums * factor + bias[of_row]
    name = None if activation == "none" else activation
    expected = np.where(
      (of_row >= 0)[:, None], ragged_suite.activate(before, name), 0
    )
    # Roundings of f32, of sums and exponentials, of a product of two of them.
    limit = 64 * 2.0**-24 * (1 + np.abs(before).max()) ** 2
    bound = np.where((of_row >= 0)[:, None], limit, 0) + 0 * expected
    contract.assert_within(result, expected, bound, result.dtype)

  def test_gates_far_below_zero_keep_only_nan(self):
    lhs, rhs = self.make("bf16", "mxfp8", n=6)
    rhs.scale[2, 3, 0] = formats.E8M0_NAN
    for activation, gates, column in (
      ("swiglu", np.s_[:3], 0),
      ("swigluoai", np.s_[::2], 1),
    ):
      shape = make_shape(lhs, rhs, activation=activation, has_bias=True)
      bias = np.zeros((len(self.SIZES), 6), np.float32)
      bias[:, gates] = -1e5
      result = run(lhs, rhs, self.SIZES, UPCAST, shape=shape, bias=bias)
      expected = np.zeros_like(result)
      expected[3:21, column] = np.nan
      np.testing.assert_array_equal(result, expected)

  @parameterized.parameters("values", "scale")
  def test_offsets_of_groups_beyond_32_bits(self, what):
    lhs, rhs = self.make("bf16", "mxfp8")
    stride = 2**30 + 64
    name = "strides" if what == "values" else "scale_strides"
    kind = dataclasses.replace(
      rhs.kind, **{name: (stride, *getattr(rhs.kind, name)[1:])}
    )
    far = dataclasses.replace(rhs, kind=kind)
    # In 32 bits it would have wrapped around.
    with self.assertRaises(interpret.InterpretError) as caught:
      run(lhs, far, (0, 0, 0, 20), UPCAST)
    found = re.search(r"reads at byte (\d+)", str(caught.exception))
    self.assertIsNotNone(found, caught.exception)
    self.assertLess(abs(int(found[1]) - 3 * stride), 2**20)
