# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul kernels' compiled PTX, executed, is within the contract.

Each block's bytes outside of its arrays, shared memory and registers are
undefined, and using one is a fault; so are races and missing fences.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from absl.testing import parameterized

from jaxplugin.kernels import architectures, launching
from jaxplugin.kernels.gpu import configs, tiles_by_rule
from jaxplugin.kernels.gpu.ragged import plans as ragged_plans
from jaxplugin.testing import contract
from jaxplugin.testing.dot_suite import ragged_suite
from jaxplugin.testing.kernels import executed, executed_cases, gpu_operands

pytestmark = pytest.mark.lab

# Neither m nor n is a multiple of a tile, nor k of one's k; several steps.
SMALL = {"m": 5, "n": 72, "k": 544}
MIDDLE = {"m": 70, "n": 136, "k": 160}
# Sizes of sm_100's kernels, and of those with the conversion of FP4.
SHORT = {"m": 5, "n": 72, "k": 288}
WIDE = {"m": 70, "n": 72, "k": 288}
CASES = (
  ("sm_80", "bf16", "nvfp4", SMALL, {}),
  ("sm_80", "bf16", "mxfp4", SMALL, {"interleaved": True}),
  ("sm_80", "mxfp8", "mxfp8", SMALL, {}),
  ("sm_80", "nvfp4", "nvfp4", MIDDLE, {}),
  ("sm_89", "bf16", "mxfp8", SMALL, {}),
  ("sm_90", "bf16", "nvfp4", SMALL, {}),
  ("sm_90", "bf16", "mxfp4", SMALL, {"interleaved": True}),
  ("sm_90", "mxfp8", "mxfp8", MIDDLE, {}),
  ("sm_90", "bf16", "nvfp4", MIDDLE, {}),
  ("sm_120", "mxfp8", "mxfp8", MIDDLE, {}),
  ("sm_120", "nvfp4", "nvfp4", MIDDLE, {}),
  ("sm_120", "mxfp4", "mxfp4", MIDDLE, {}),
  ("sm_120", "bf16", "mxfp4", SMALL, {}),
  # Scales multiply sums of steps or, if there is one for a row, all of them.
  ("sm_80", "e4m3_f32_128", "e4m3_f32_128", MIDDLE, {}),
  ("sm_80", "bf16", "int4_f16_32", SMALL, {}),
  ("sm_80", "int8_f32_544", "int8_f32_544", SMALL, {}),
  ("sm_80", "int8_q6_e8m0_32", "int8_q6_e8m0_32", MIDDLE, {}),
  ("sm_90", "e4m3_f32_128", "e4m3_f32_128", MIDDLE, {}),
  ("sm_90", "e4m3_f32_544", "e4m3_f32_128", SMALL, {}),
  ("sm_90", "bf16", "int8_f16_32", SMALL, {}),
  ("sm_90", "bf16", "int8_f16_32", MIDDLE, {}),
  ("sm_90", "int8_f32_544", "int8_f32_32", SMALL, {}),
  ("sm_90", "bf16", "int4_bf16_128", SMALL, {}),
  ("sm_90", "bf16", "int8_q6_e8m0_32", SMALL, {}),
  ("sm_100", "mxfp8", "mxfp8", WIDE, {}),
  ("sm_100", "mxfp8", "mxfp4", SHORT, {}),
  ("sm_100", "mxfp4", "mxfp4", SHORT, {}),
  ("sm_100", "nvfp4", "nvfp4", WIDE, {}),
  ("sm_100", "bf16", "nvfp4", SHORT, {}),
  ("sm_100", "bf16", "mxfp4", WIDE, {}),
  ("sm_100", "bf16", "mxfp8", SHORT, {}),
  ("sm_100", "f16", "nvfp4", SHORT, {}),
  ("sm_100", "e4m3_f32_128", "e4m3_f32_128", WIDE, {}),
  ("sm_100", "bf16", "int4_f16_32", SHORT, {}),
  ("sm_100", "bf16", "int4_f16_128", SHORT, {}),
  ("sm_100", "int8_f32_288", "int8_f32_288", SHORT, {}),
)
# Parts of the names of instructions that read block scales.
SCALED = ".block_scale."
TCGEN05 = "tcgen05.mma.cta_group::1.kind::"
TCGEN05_KINDS = {
  ("mxfp8", "mxfp8"): "mxf8f6f4.block_scale.block32",
  ("mxfp8", "mxfp4"): "mxf8f6f4.block_scale.block32",
  ("mxfp4", "mxfp4"): "mxf4.block_scale.block32",
  ("nvfp4", "nvfp4"): "mxf4nvf4.block_scale.block16",
}
# Architectures without tensor memory.
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_120")
PAIRS = (
  ("bf16", "nvfp4"),
  ("bf16", "mxfp4"),
  ("bf16", "mxfp8"),
  ("f32", "mxfp8_e5m2"),
  ("f16", "nvfp4"),
  ("mxfp8", "mxfp8"),
  ("mxfp4", "mxfp4"),
  ("nvfp4", "nvfp4"),
  ("mxfp8", "mxfp4"),
  ("mxfp8", "nvfp4"),
  ("bf16", "mxfp6_e2m3"),
  ("bf16", "e4m3_f32_128"),
  ("e4m3_f32_128", "e4m3_f32_128"),
  ("bf16", "int4_f16_32"),
  ("f32", "int4_bf16_128"),
  ("int8_f16_32", "int8_f16_32"),
)
TCGEN05_PAIRS = (
  *TCGEN05_KINDS,
  ("bf16", "nvfp4"),
  ("bf16", "mxfp4"),
  ("bf16", "mxfp8"),
  ("f16", "nvfp4"),
  ("f32", "mxfp8_e5m2"),
  ("bf16", "mxfp6_e2m3"),
  ("mxfp8", "nvfp4"),
  ("mxfp8_e5m2", "mxfp8"),
  ("mxfp4", "mxfp8"),
)
NEW_PTXAS = architectures.E2M1_CONVERSION_PTXAS
OLD_PTXAS = (13, 1, 115)
CONVERSION = "cvt.rn.bf16x2.e2m1x2"


class DefaultConfigTest(executed_cases.Case):
  @parameterized.parameters(*CASES)
  def test_product(self, architecture, lhs, rhs, sizes, storage):
    operands = self.make(lhs, rhs, **sizes, **storage)
    product = self.check(architecture, *operands)
    ptx = product.compiled(product.launches[0]).assembly
    kind = TCGEN05_KINDS.get((lhs, rhs), "f16")
    has_tcgen05 = architecture == "sm_100"
    is_native = kind != "f16" if has_tcgen05 else lhs == rhs
    is_native &= architecture in ("sm_100", "sm_120")
    self.assertEqual("wgmma.mma_async" in ptx, architecture == "sm_90")
    self.assertEqual(f"{TCGEN05}{kind} " in ptx, has_tcgen05)
    self.assertEqual(SCALED in ptx, is_native)
    self.assertEqual(product.config.path == "native", is_native)

  @parameterized.parameters(
    ("sm_80", "mxfp8", "mxfp8", 64, (1, 17, 64)),
    ("sm_90", "bf16", "nvfp4", 16, (1, 16)),
    ("sm_90", "bf16", "nvfp4", 4096, (1, 17, 4096)),
    ("sm_100", "mxfp8", "mxfp8", 256, (1, 17, 250)),
  )
  def test_one_kernel_computes_any_m(self, architecture, lhs, rhs, planned, ms):
    kernels = set()
    for m in ms:
      operands = self.make(lhs, rhs, m=m, n=24, k=288)
      product = executed.product(architecture, *operands)
      product = product.with_planned_m(planned)
      config = tiles_by_rule.default_config(
        product.shape,
        architectures.by_name(architecture),
        core_count=executed.CORES[architecture],
      )
      product = dataclasses.replace(product, config=config)
      result, _ = product.run()
      exact, magnitude = contract.dot(*(x.exact for x in operands))
      bound = contract.truncated_bound(288) * magnitude
      contract.assert_within(result, exact, bound, result.dtype)
      kernels.update(product.launches)
    self.assertLen(kernels, len(product.launches))

  @parameterized.parameters(
    ("sm_80", "mxfp8", "mxfp8", 64, False, 768, (1, 17, 4096)),
    ("sm_90", "bf16", "nvfp4", 96, False, 768, (1, 17)),
    ("sm_80", "f32", "mxfp4", 64, True, 192, (17,)),
    ("sm_80", "bf16", "mxfp4", 1024, False, 16, (1, 16)),
  )
  def test_one_kernel_computes_groups_of_any_m(
    self, architecture, lhs, rhs, k, is_across, planned, ms
  ):
    groups, n = 3, 32
    kernels = set()
    for m in ms:
      weight = (k, n) if is_across else (n, k)
      left, right = (
        gpu_operands.make_operand(self.rng, format, shape)
        for format, shape in ((lhs, (1, m, k)), (rhs, (groups, *weight)))
      )
      left, right = executed.dense(left), executed.dense(right)
      sizes = np.array([m // 3, 0, m - m // 3 - m // 5], np.int32)
      shape = gpu_operands.shape_of(
        left, right, gpu_operands.Epilogue(), "f32", None
      )
      shape = ragged_plans.RaggedShape(
        **vars(shape) | {"n": n}, groups=groups, is_across=is_across
      )
      config = ragged_plans.default_config(
        dataclasses.replace(shape, m=planned, reads_m=True),
        architectures.by_name(architecture),
        core_count=executed.CORES[architecture],
      )
      product = executed.Product(
        architecture=architecture,
        shape=shape,
        config=config,
        arrays={
          **gpu_operands.arrays_of(left, right, gpu_operands.Epilogue(), None),
          "group_sizes": sizes,
        },
      ).with_planned_m(planned)
      result, _ = product.run()
      exact, magnitude = ragged_suite.oracle(
        left.exact[0],
        right.exact.swapaxes(1, 2) if is_across else right.exact,
        sizes,
      )
      bound = contract.truncated_bound(k) * magnitude
      contract.assert_within(result, exact, bound, result.dtype)
      kernels.update(product.launches)
    self.assertLen(kernels, len(product.launches))

  @parameterized.parameters(
    ("sm_80", "bf16", 2048), ("sm_90", "bf16", 2048), ("sm_100", "mxfp8", 1024)
  )
  def test_sums_are_split_and_added(self, architecture, lhs, k):
    operands = self.make(lhs, "mxfp8", m=16, n=64, k=k)
    product = self.check(architecture, *operands)
    self.assertLen(product.launches, 2)
    self.assertGreater(product.config.split_k, 1)

  @parameterized.parameters(
    ("sm_80", "f32", "upcast", 32, 544, 0x38),
    ("sm_80", "f16", "upcast", 32, 544, 0x38),
    ("sm_90", "f32", "upcast", 32, 544, 0x38),
    ("sm_90", "f32", "small_m", 128, 544, 0x38),
    # Negative products: an instruction that subtracts their lower pieces from
    # the large sum loses almost one unit in the last place.
    ("sm_80", "f32", "upcast", 128, 96, 0xB8),
    ("sm_90", "f32", "small_m", 128, 96, 0xB8),
  )
  def test_large_sum_is_not_truncated_for_each_piece(
    self, architecture, lhs, path, block_k, k, code
  ):
    # The first product is 2^15, and f32 has a spacing of 2^-8 there. The other
    # products of a matrix instruction sum to about 0.75 of the spacing, so an
    # instruction that added them to the large sum would discard all of them.
    x = self.rng.uniform(0, 1.5 * 2.0**-12, (1, 5, k))
    x[:, :, 0] = 2.0**15
    x = x.astype(gpu_operands.DTYPES[lhs])
    weights = np.full((1, 72, k), code, np.uint8)
    weights[:, :, 0] = 0x38
    scale = np.full((1, 72, k // 32), 127, np.uint8)
    self.check(
      architecture,
      executed.dense(gpu_operands.store_operand(lhs, x, None)),
      executed.dense(gpu_operands.store_operand("mxfp8", weights, scale)),
      truncates=False,
      config=configs.MatmulConfig(
        path=path, block_m=16, block_n=64, block_k=block_k, swap=True
      ),
    )

  @parameterized.parameters("sm_80", "sm_90")
  def test_batch_of_operands_with_room_between_rows(self, architecture):
    make = gpu_operands.make_operand
    lhs = make(self.rng, "mxfp8", (2, 3, 160))
    rhs = make(self.rng, "nvfp4", (2, 40, 160), swizzled=True)
    self.check(architecture, lhs, rhs)

  @parameterized.parameters(
    ("sm_80", "bf16", "mxfp8", (20, 40, 104), (True, False)),
    ("sm_100", "mxfp8", "mxfp8", (20, 40, 128), (False, False)),
  )
  def test_k_that_is_not_minor(self, architecture, lhs, rhs, sizes, minor):
    m, n, k = sizes
    make = gpu_operands.make_operand
    self.check(
      architecture,
      make(self.rng, lhs, (1, m, k), k_is_minor=minor[0]),
      make(self.rng, rhs, (1, n, k), k_is_minor=minor[1]),
    )

  @parameterized.parameters(
    ("sm_80", "bf16", "relu", "bf16"),
    ("sm_90", "bf16", "silu", "f16"),
    ("sm_90", "bf16", "gelu", "f32"),
    ("sm_100", "mxfp8", "relu", "bf16"),
  )
  def test_epilogue(self, architecture, lhs, activation, out_dtype):
    operands = self.make(lhs, "mxfp8", m=5, n=72, k=160)
    self.check_epilogue(architecture, *operands, activation, out_dtype)

  @parameterized.parameters(
    ("sm_80", "bf16", "nvfp4", 5, "upcast"),
    ("sm_90", "bf16", "mxfp4", 5, "small_m"),
    ("sm_120", "mxfp8", "mxfp8", 70, "native"),
  )
  def test_layer_of_stacked_weights_has_the_bits_of_the_layer_alone(
    self, architecture, lhs, rhs, m, path
  ):
    n, k, layer = 72, 160, 2
    x = executed.dense(gpu_operands.make_operand(self.rng, lhs, (1, m, k)))
    stack = gpu_operands.make_operand(self.rng, rhs, (layer + 1, n, k))
    stack = executed.dense(stack)
    alone = dataclasses.replace(
      stack,
      values=stack.values[layer:].copy(),
      scale=stack.scale[layer:].copy(),
      exact=stack.exact[layer:],
    )
    of_stack = executed.product(architecture, x, stack, layer=layer)
    of_alone = executed.product(architecture, x, alone, config=of_stack.config)
    self.assertEqual(of_stack.config.path, path)
    result, _ = of_stack.run()
    exact, magnitude = contract.dot(x.exact, alone.exact)
    bound = contract.DOT_BOUND * magnitude
    contract.assert_within(result, exact, bound, result.dtype)
    np.testing.assert_array_equal(result, of_alone.run()[0])

  @parameterized.product(
    architecture=("sm_89", "sm_90"),
    formats=(
      ("e4m3_f32_128", "e4m3_f32_128"),
      ("e4m3_f32_576", "e4m3_f32_576"),
      ("e4m3_e8m0_128", "e4m3_e8m0_128"),
    ),
    rows_per_scale=(1, 128),
  )
  def test_sums_of_fp8_instructions_are_within_their_bound(
    self, architecture, formats, rows_per_scale
  ):
    make = gpu_operands.make_operand
    lhs = make(self.rng, formats[0], (1, 70, 576))
    rhs = make(
      self.rng, formats[1], (1, 136, 576), rows_per_scale=rows_per_scale
    )
    product = executed.product(architecture, lhs, rhs, may_round_sums=True)
    self.assertEqual(product.config.path, "fp8")
    result, _ = product.run()
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    bound = (contract.FP8_SUM_BOUND + contract.DOT_BOUND) * magnitude
    contract.assert_within(result, exact, bound, result.dtype)
    # The model does round.
    error = np.abs(result - exact) / magnitude
    self.assertGreater(error.max(), contract.DOT_BOUND)

  @parameterized.parameters(
    ("sm_80", "int8_f32_160", "int8_f32_160", 5),
    ("sm_80", "int8_f32_160", "int8_bf16_128", 70),
    ("sm_89", "int8_f16_32", "int8_f32_32", 70),
    ("sm_90", "int8_f32_160", "int8_f32_160", 70),
    ("sm_90", "int8_f32_160", "int8_bf16_128", 5),
    ("sm_90", "int8_f16_32", "int8_f32_32", 70),
  )
  def test_int8_instructions_sum_exactly(self, architecture, left, right, m):
    lhs, rhs = self.make(left, right, m=m, n=136, k=160)
    product = self.check(architecture, lhs, rhs)
    self.assertEqual(product.config.path, "int8")
    ptx = product.compiled(product.launches[0]).assembly
    self.assertIn(".s32.s8.s8", ptx)

  def test_conflicts_of_banks_are_counted(self):
    lhs, rhs = self.make("bf16", "mxfp4", **SMALL, interleaved=True)
    _, counts = executed.product("sm_80", lhs, rhs).run()
    # The decoded operand changes its layout through shared memory.
    least = counts["st.shared least wavefronts"]
    self.assertGreater(counts["st.shared wavefronts"], 1.5 * least)
    least = counts["ldmatrix least wavefronts"]
    self.assertEqual(counts["ldmatrix wavefronts"], least)


class ConversionTest(executed_cases.Case):
  """Kernels that convert FP4 by an instruction of a new ptxas."""

  @parameterized.parameters(
    ("sm_100", "bf16", "mxfp4", SHORT, "small_m"),
    ("sm_100", "f16", "nvfp4", SHORT, "small_m"),
    ("sm_100", "bf16", "nvfp4", MIDDLE, "upcast"),
    ("sm_120", "bf16", "mxfp4", SHORT, "upcast"),
    ("sm_120", "bf16", "nvfp4", MIDDLE, "upcast"),
    ("sm_120", "mxfp8", "mxfp4", MIDDLE, "upcast"),
    ("sm_120", "nvfp4", "mxfp8", SHORT, "upcast"),
  )
  def test_product(self, architecture, lhs, rhs, sizes, path):
    operands = self.make(lhs, rhs, **sizes)
    product = self.check(architecture, *operands, ptxas_version=NEW_PTXAS)
    launch = product.launches[0]
    self.assertEqual(product.config.path, path)
    self.assertIn(CONVERSION, product.compiled(launch).assembly)
    self.assertEqual(launch.ptx_version, launching.E2M1_CONVERSION_PTX_VERSION)

  @parameterized.parameters("mxfp4", "nvfp4")
  def test_sums_in_the_same_order_have_the_same_bits(self, format):
    lhs, rhs = self.make("bf16", format, **SHORT)
    results = [
      executed.product("sm_120", lhs, rhs, ptxas_version=version).run()[0]
      for version in (None, NEW_PTXAS)
    ]
    np.testing.assert_array_equal(*results)

  @parameterized.parameters("sm_100", "sm_120")
  def test_older_and_unknown_ptxas_get_the_same_kernel(self, architecture):
    lhs, rhs = self.make("bf16", "nvfp4", **SHORT)
    old, unknown = (
      executed.product(architecture, lhs, rhs, ptxas_version=version)
      for version in (OLD_PTXAS, None)
    )
    self.assertEqual(old.launches, unknown.launches)
    for launch in old.launches:
      self.assertEqual(launch.ptx_version, launching.PTX_VERSION)
      self.assertNotIn(CONVERSION, old.compiled(launch).assembly)

  @parameterized.parameters(
    ("sm_90", "bf16", "nvfp4", False),
    ("sm_80", "bf16", "mxfp4", True),
    ("sm_120", "nvfp4", "nvfp4", False),
    ("sm_120", "bf16", "mxfp8", False),
  )
  def test_what_decodes_no_fp4_is_the_same_for_all(
    self, architecture, lhs, rhs, interleaved
  ):
    operands = self.make(lhs, rhs, **SHORT, interleaved=interleaved)
    old, new = (
      executed.product(architecture, *operands, ptxas_version=version)
      for version in (None, NEW_PTXAS)
    )
    self.assertEqual(old.launches, new.launches)


@pytest.mark.full
class Tcgen05Test(executed_cases.Case):
  """More kernels of sm_100, whose products are `tcgen05.mma`."""

  def test_tile_of_all_columns(self):
    # Scale factors of 256 columns take eight columns of tensor memory.
    operands = self.make("mxfp8", "mxfp8", m=130, n=300, k=160)
    product = self.check("sm_100", *operands)
    self.assertEqual(product.config.block_n, 256)

  def test_batch_and_swizzled_scale(self):
    make = gpu_operands.make_operand
    lhs = make(self.rng, "nvfp4", (2, 3, 160))
    rhs = make(self.rng, "nvfp4", (2, 40, 160), swizzled=True)
    self.check("sm_100", lhs, rhs)


@pytest.mark.full
class FuzzTest(executed_cases.Case):
  @parameterized.parameters(
    *itertools.product(ARCHITECTURES, PAIRS),
    *(("sm_100", pair) for pair in TCGEN05_PAIRS),
  )
  def test_random_products(self, architecture, pair):
    self.rng = np.random.default_rng(
      [*map(ord, "".join((architecture, *pair)))]
    )
    self.check_random(architecture, *pair)

  @parameterized.product(
    architecture=("sm_80", "sm_90"),
    path=("upcast", "small_m"),
    tile=((16, 64, 128), (32, 128, 128)),
    split_k=(1, 2),
  )
  def test_other_configs(self, architecture, path, tile, split_k):
    lhs, rhs = self.make("bf16", "nvfp4", m=20, n=100, k=608)
    config = configs.MatmulConfig(
      path=path,
      **dict(zip(("block_m", "block_n", "block_k"), tile, strict=True)),
      split_k=split_k,
    )
    for num_stages in (1, 4):
      self.check(
        architecture,
        lhs,
        rhs,
        config=dataclasses.replace(config, num_stages=num_stages),
      )
