# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul kernels, run by the interpreter, agree with the f64 oracle."""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs

from jaxplugin.core import formats
from jaxplugin.testing import contract
from jaxplugin.testing.kernels import gpu_operands, matmul_shapes

BLOCK_FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
PLAIN = tuple(configs.PLAIN_BYTES)
FORMATS = BLOCK_FORMATS + PLAIN
PAIRS = tuple(
  (lhs, rhs)
  for lhs, rhs in itertools.product(FORMATS, FORMATS)
  if lhs in BLOCK_FORMATS or rhs in BLOCK_FORMATS
)
NATIVE_PAIRS = tuple(
  (lhs, rhs)
  for lhs, rhs in itertools.product(BLOCK_FORMATS, BLOCK_FORMATS)
  if (lhs == "nvfp4") == (rhs == "nvfp4")
)
SMALL_M_PAIRS = tuple(itertools.product(FORMATS, BLOCK_FORMATS))
MXFP6_PAIRS = (
  ("mxfp6_e2m3", "mxfp6_e2m3"),
  ("mxfp6_e3m2", "mxfp6_e3m2"),
  ("mxfp6_e3m2", "mxfp6_e2m3"),
  ("bf16", "mxfp6_e2m3"),
  ("f32", "mxfp6_e3m2"),
  ("mxfp8", "mxfp6_e2m3"),
  ("mxfp6_e2m3", "nvfp4"),
  ("mxfp6_e3m2", "mxfp4"),
)

MXFP4_PAIR = ("mxfp4", "mxfp4")
# Formats whose scales multiply sums of steps or, with as many values a scale as
# k has, the sum over k; and integers whose scales multiply values.
INTEGER_K = 104
INTEGER_PAIRS = (
  ("int8_f16_32", "int8_f16_32"),
  ("bf16", "int4_f16_32"),
  ("f32", "int8_f16_32"),
  ("f16", "int4_bf16_64"),
  ("e4m3_f32_32", "e4m3_f32_96"),
  ("int8_f32_104", "int8_f32_104"),
  ("int8_f32_104", "e4m3_f32_32"),
  ("e5m2_f32_64", "e4m3_bf16_104"),
  ("int8_q6_e8m0_32", "int8_q6_e8m0_32"),
  ("int8_q6_e8m0_32", "int4_e8m0_32"),
  ("nvfp4", "int4_f16_32"),
  ("e2m1_f32_32", "e2m1_e4m3_104"),
  ("e2m3_f32_64", "int8_e4m3_32"),
  ("mxfp8", "e4m3_e8m0_104"),
)
SQUARE_PAIRS = (
  ("e4m3_f32_64", "e4m3_f32_64"),
  ("int8_bf16_64", "e5m2_e4m3_64"),
)
SMALL_M_K = 200
SMALL_M_INTEGER_PAIRS = (
  ("bf16", "int4_f16_128"),
  ("e4m3_f32_128", "e4m3_f32_128"),
  ("f32", "int8_f32_200"),
  ("int8_f32_200", "e4m3_f32_128"),
  ("bf16", "int8_q6_e8m0_32"),
  ("mxfp8", "int4_e4m3_16"),
  ("f16", "e2m1_f32_128"),
)

replace = dataclasses.replace

# Neither m, n nor k is a multiple of a tile, nor k of a scale block.
TAILS = {"batch": 1, "m": 19, "n": 35, "k": 104}

UPCAST, NATIVE = matmul_shapes.UPCAST, matmul_shapes.NATIVE
SMALL_M, PATHS = matmul_shapes.SMALL_M, matmul_shapes.PATHS
SWAPPED = replace(UPCAST, block_k=32, swap=True)
NATIVE_SWAPPED = replace(NATIVE, block_m=32, block_n=16, block_k=64, swap=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A product, and the config that computes it.

  Attributes:
    is_exact: Whether operands are small integers, whose sums are exact.
      Otherwise the contract bounds the error.
    lhs_storage: Options of `gpu_operands.make_operand`.
    rhs_storage: Options of `gpu_operands.make_operand`.
    architecture: What the kernels are planned for, if it matters.
  """

  config: configs.MatmulConfig
  lhs: str = "mxfp8"
  rhs: str = "mxfp4"
  batch: int = 1
  m: int = 19
  n: int = 35
  k: int = 104
  is_exact: bool = False
  lhs_storage: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  rhs_storage: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  architecture: str = "sm_80"


def cases(configs, pairs=(("mxfp8", "mxfp4"),), **fields):
  return [
    Case(config=config, lhs=lhs, rhs=rhs, **fields)
    for config, (lhs, rhs) in itertools.product(configs, pairs)
  ]


# For each path a GPU whose views of the values that path uses.
DESCRIBING = {"upcast": "sm_90", "native": "sm_100"}
DESCRIBED_PAIRS = {
  "upcast": (
    ("mxfp8", "mxfp8", 112), ("mxfp8_e5m2", "bf16", 112), ("f32", "mxfp8", 112),
    ("mxfp4", "nvfp4", 96), ("mxfp8", "mxfp4", 96), ("f16", "nvfp4", 96),
  ),
  "native": (
    ("mxfp8", "mxfp8", 112), ("mxfp8_e5m2", "mxfp8", 112),
    ("mxfp4", "mxfp4", 96), ("nvfp4", "nvfp4", 96),
  ),
}  # fmt: skip


def described(path):
  return replace(PATHS[path], use_descriptors=True)


def of_splits(counts):
  return [
    replace(config, split_k=count)
    for config, count in itertools.product(PATHS.values(), counts)
  ]


ROWS_MINOR = {"k_is_minor": False}
SWIZZLED = {"swizzled": True}
INTERLEAVED = {"interleaved": True}
SQUARE = {"rows_per_scale": 64}
PLAIN_BY_BLOCK = tuple((lhs, "nvfp4") for lhs in PLAIN)
MXFP6_BY_ITSELF = MXFP6_PAIRS[:2]
# Pairs whose k is not minor.
TURNED_PAIRS = (
  ("mxfp8", "mxfp8_e5m2"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp8")
)  # fmt: skip
# By claim. `make test` runs the first row of each claim and a sample of others.
CASES = {
  "upcast": cases([UPCAST], PAIRS),
  "upcast_swapped_on_integers": cases([SWAPPED], PAIRS, is_exact=True),
  "native": cases([NATIVE_SWAPPED], NATIVE_PAIRS[1:] + NATIVE_PAIRS[:1]),
  "native_on_integers": cases([NATIVE], NATIVE_PAIRS, is_exact=True),
  "small_m": cases([SMALL_M], SMALL_M_PAIRS, m=5, k=200),
  "small_m_on_integers": cases([SMALL_M],
    [("bf16", rhs) for rhs in BLOCK_FORMATS], batch=2, m=1, n=33, k=264,
    is_exact=True),
  # k is a multiple of 8, as words of FP4 need, and not of a scale block.
  "mxfp6": cases([UPCAST, SWAPPED, SMALL_M], MXFP6_PAIRS, batch=2, m=5, k=200),
  "mxfp6_on_integers": cases([SWAPPED, UPCAST, SMALL_M], MXFP6_PAIRS, batch=2,
    m=5, k=200, is_exact=True),
  "mxfp6_whose_k_is_not_minor": cases([UPCAST], MXFP6_BY_ITSELF,
    lhs_storage=ROWS_MINOR, rhs_storage=ROWS_MINOR),
  "mxfp6_with_swizzled_scales": cases([UPCAST], MXFP6_BY_ITSELF,
    lhs_storage=SWIZZLED, rhs_storage=SWIZZLED),
  "scales_of_sums": cases([SWAPPED, replace(UPCAST, block_k=32, split_k=2)],
    INTEGER_PAIRS, batch=2, k=INTEGER_K),
  "scales_of_sums_on_integers": cases([replace(UPCAST, block_k=32), SWAPPED],
    INTEGER_PAIRS, k=INTEGER_K, is_exact=True),
  "scales_of_sums_whose_k_is_not_minor": cases([UPCAST],
    [("int8_f16_64", "e4m3_f32_128"), ("bf16", "int4_f16_64")],
    lhs_storage=ROWS_MINOR, rhs_storage=ROWS_MINOR),
  "scales_of_square_blocks": cases(
    [replace(UPCAST, split_k=2), replace(SWAPPED, block_k=64)], SQUARE_PAIRS,
    batch=2, m=70, n=70, k=136, lhs_storage=SQUARE, rhs_storage=SQUARE),
  "scale_of_square_blocks_as_long_as_k": cases([UPCAST, SWAPPED],
    [("int8_f32_64", "e4m3_bf16_64")], m=70, n=140, k=64, is_exact=True,
    lhs_storage=SQUARE, rhs_storage=SQUARE),
  "scales_of_square_blocks_whose_k_is_not_minor": cases([UPCAST],
    [("bf16", "e4m3_f32_64")], n=140, k=200, rhs_storage=SQUARE | ROWS_MINOR),
  "scales_of_sums_small_m": cases([SMALL_M], SMALL_M_INTEGER_PAIRS, m=5,
    k=SMALL_M_K),
  "scales_of_sums_small_m_on_integers": cases([replace(SMALL_M, split_k=3)],
    SMALL_M_INTEGER_PAIRS, m=5, k=SMALL_M_K, is_exact=True),
  "any_size": [
    Case(config=config, m=m, n=n, k=k)
    for m, n, k in (
      *((1, 1, 32), (1, 33, 128), (17, 1, 160), (16, 32, 256), (3, 5, 8)),
    )
    for config in PATHS.values()
  ],
  "batch": cases(of_splits((1, 2)), [("mxfp8", "mxfp8")], batch=3),
  # With 5, some split has no k at all.
  "split_k": cases(of_splits((5, 2, 3)), [MXFP4_PAIR], k=280),
  # The first split has two tiles, others have one. No tile is masked.
  "split_of_whole_tiles_with_one_to_spare": [
    Case(config=config, k=(config.split_k + 1) * config.block_k)
    for config in of_splits((2, 3))
  ],
  # The last step of k overlaps the one before, and adds nothing twice.
  "overlapping_last_step": [
    case
    for config in of_splits((1, 2, 3))
    for case in cases(
      [config], [("mxfp8", "mxfp4"), MXFP4_PAIR],
      k=3 * config.block_k + 32, is_exact=True,
    )
  ],
  # The interpreter refuses two programs that write one element.
  "each_tile_by_one_program": cases(
    [replace(UPCAST, group_m=count, block_n=16) for count in (3, 1, 2, 8)],
    [("bf16", "mxfp8")], m=70, n=40, k=32),
  "empty_k": cases(PATHS.values(), [("mxfp8", "mxfp8")], m=3, n=5, k=0,
    is_exact=True),
  "rhs_whose_k_is_not_minor": cases([UPCAST, NATIVE], TURNED_PAIRS,
    rhs_storage=ROWS_MINOR),
  "operands_whose_k_is_not_minor": cases([NATIVE, UPCAST], TURNED_PAIRS,
    lhs_storage=ROWS_MINOR, rhs_storage=ROWS_MINOR),
  "plain_lhs_whose_k_is_not_minor": cases([UPCAST, SWAPPED], PLAIN_BY_BLOCK,
    lhs_storage=ROWS_MINOR),
  # Rows have whole 16 bytes, as descriptors need.
  "descriptors": [
    Case(config=described(path), lhs=lhs, rhs=rhs, k=k, batch=2) for path,
    pairs in DESCRIBED_PAIRS.items() for lhs, rhs, k in pairs],
  "descriptors_swapped_and_split": [
    Case(
      config=replace(described(path), swap=True, split_k=3),
      lhs=pair, rhs=pair, k=k, m=7, n=33,
    )
    for path, pair, k in (
      ("upcast", "mxfp8", 112), ("upcast", "mxfp4", 96), ("native", "nvfp4", 96)
    )
  ],
  # The only row of lhs has 52 bytes and is followed by poison.
  "descriptors_of_sizes_of_one": cases(
    [described("upcast"), described("native")], [MXFP4_PAIR], m=1, n=1),
  "descriptors_of_interleaved_values": [
    Case(
      config=described("upcast"), lhs="bf16", rhs="nvfp4", batch=2, k=96,
      rhs_storage=INTERLEAVED,
    )
  ],
  "both_operands_interleaved": cases([UPCAST, SMALL_M],
    [MXFP4_PAIR, ("nvfp4", "nvfp4")], m=5, n=20, k=144, is_exact=True,
    lhs_storage=INTERLEAVED, rhs_storage=INTERLEAVED),
  # More than one tile of 128 rows and of 4 columns, in both operands.
  "swizzled_scales_of_several_tiles": cases(
    [replace(config, block_m=64, block_n=64) for config in PATHS.values()],
    [(format, format) for format in BLOCK_FORMATS], batch=2, m=130, n=140,
    k=168, lhs_storage=SWIZZLED, rhs_storage=SWIZZLED),
  # The interpreter's sums have the bits of f32.
  "fp8_instructions_sum_each_block": cases(
    [replace(UPCAST, path="fp8", block_k=128, split_k=s) for s in (1, 2)],
    [("e4m3_f32_128", "e4m3_f32_256"), ("e4m3_f32_328", "e4m3_f32_328")],
    batch=2, k=328, is_exact=True, architecture="sm_90"),
  "int8_instructions_sum_exactly": [
    case
    for lhs, rhs, block_k in (
      ("int8_f32_328", "int8_f32_328", 128),
      ("int8_f32_328", "int8_f16_128", 128),
      ("int8_bf16_32", "int8_f32_64", 32),
    )
    for split_k, swap in ((1, False), (2, True))
    for case in cases(
      [replace(UPCAST, path="int8", block_k=block_k, split_k=split_k,
               swap=swap)],
      [(lhs, rhs)], batch=2, k=328, is_exact=True, architecture="sm_90",
    )
  ],
}  # fmt: skip


class MatmulTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(len(self.id()))

  def make(self, lhs, rhs, *, batch, m, n, k, integers=False, **storage):
    lhs_storage = storage.pop("lhs_storage", storage)
    rhs_storage = storage.pop("rhs_storage", storage)
    return (
      gpu_operands.make_operand(
        self.rng, lhs, (batch, m, k), integers=integers, **lhs_storage
      ),
      gpu_operands.make_operand(
        self.rng, rhs, (batch, n, k), integers=integers, **rhs_storage
      ),
    )

  def check(self, lhs, rhs, config, *, is_exact=False, **options):
    """Checks a result against the contract's bound, or for equality."""
    result = gpu_operands.run(lhs, rhs, config, **options)
    exact, magnitude = contract.dot(lhs.exact, rhs.exact)
    contract.assert_dot(
      result, exact, magnitude, result.dtype, integers=is_exact
    )
    return result

  def check_exact(self, lhs, rhs, config, **options):
    self.check(lhs, rhs, config, is_exact=True, **options)


class CaseTest(MatmulTest):
  """Each row of `CASES`; all operands lie in poison."""

  def check_case(self, case):
    operands = self.make(
      case.lhs, case.rhs, batch=case.batch, m=case.m, n=case.n, k=case.k,
      integers=case.is_exact, lhs_storage=case.lhs_storage,
      rhs_storage=case.rhs_storage,
    )  # fmt: skip
    config = case.config
    options = {"is_exact": case.is_exact, "architecture": case.architecture}
    if not config.use_descriptors:
      self.check(*operands, config, **options)
      return
    # Descriptors load the tiles that threads load.
    options["architecture"] = DESCRIBING[config.path]
    result = self.check(*operands, config, **options)
    by_threads = replace(config, use_descriptors=False)
    expected = self.check(*operands, by_threads, **options)
    np.testing.assert_array_equal(
      result.view(np.uint32), expected.view(np.uint32)
    )

  @parameterized.named_parameters(
    (claim, cases[0]) for claim, cases in CASES.items()
  )
  def test_first_row_of(self, case):
    self.check_case(case)

  @parameterized.named_parameters(
    (f"{claim}_{i}", case)
    for claim, cases in CASES.items()
    for i, case in enumerate(cases[1:], 1)
  )
  @pytest.mark.sample(16)
  def test_row_of(self, case):
    self.check_case(case)

  @parameterized.product(
    config=(*PATHS, "split", "descriptors"),
    layer=(0, 2),
    swizzled=(False, True),
  )
  @pytest.mark.sample(1)
  def test_layer_of_a_stack_has_the_bits_of_the_layer_alone(
    self, config, layer, swizzled
  ):
    configs = PATHS | {
      "split": replace(UPCAST, block_k=32, split_k=2),
      "descriptors": replace(UPCAST, use_descriptors=True),
    }
    m, n, k = 19, 35, 128 if config == "descriptors" else 104
    lhs_format, format = "f32", "mxfp4"
    if config == "native":
      lhs_format = format = "mxfp8"
    make = gpu_operands.make_operand
    lhs = make(self.rng, lhs_format, (1, m, k))
    stack = make(self.rng, format, (3, n, k), swizzled=swizzled)
    alone = replace(
      stack,
      **{
        name: getattr(stack, name)[layer : layer + 1]
        for name in ("values", "scale", "exact")
      },
    )
    results = [
      gpu_operands.run(
        lhs, rhs, configs[config], layer=of, architecture="sm_90"
      )
      for rhs, of in ((stack, layer), (alone, None))
    ]
    self.assertEqual(results[0].shape, (1, m, n))
    np.testing.assert_array_equal(*results)

  @parameterized.parameters(
    # Few programs compute all tiles of more than 16 rows.
    ("upcast", 1, "bf16", "nvfp4", (1, 17, 70)),
    ("upcast", 3, "mxfp8", "mxfp4", (1, 40)),
    ("small_m", 2, "f32", "mxfp8", (3, 33)),
    ("native", 1, "mxfp8", "mxfp8", (2, 33)),
    ("int8", 1, "int8_f32_104", "int8_f32_104", (5, 33)),
  )
  def test_kernels_that_read_m_compute_any_m(self, path, split, lhs, rhs, ms):
    config = PATHS.get(path) or replace(UPCAST, path="int8")
    config = replace(config, split_k=split, group_m=2)
    for m in ms:
      operands = self.make(
        lhs, rhs, batch=1, m=m, n=35, k=104, integers=path != "int8"
      )
      epilogue = gpu_operands.Epilogue(
        bias=np.arange(35, dtype=np.float32),
        residual=self.rng.integers(-9, 9, (1, m, 35)).astype(np.float32),
      )
      result = gpu_operands.run(
        *operands,
        config,
        epilogue=epilogue,
        planned_m=16 if m <= 16 else 4096,
      )
      expected, bound = gpu_operands.expected(*operands, epilogue)
      contract.assert_within(result, expected, bound, result.dtype)


class FormatPairTest(MatmulTest):
  @parameterized.product(
    config=(UPCAST, SWAPPED, SMALL_M),
    pair=(("bf16", "mxfp4"), ("f32", "nvfp4"), ("mxfp8", "nvfp4")),
  )
  @pytest.mark.sample(1)
  def test_interleaved_values_give_the_bits_of_others(self, config, pair):
    lhs, rhs = pair
    batch, m, n, k = 2, 3, 35, 208  # neither is a multiple of a tile
    state = self.rng.bit_generator.state
    lhs_operand, usual = self.make(lhs, rhs, batch=batch, m=m, n=n, k=k)
    self.rng.bit_generator.state = state
    storage = {"lhs_storage": {}, "rhs_storage": {"interleaved": True}}
    _, interleaved = self.make(lhs, rhs, batch=batch, m=m, n=n, k=k, **storage)
    expected = gpu_operands.run(lhs_operand, usual, config)
    result = gpu_operands.run(lhs_operand, interleaved, config)
    np.testing.assert_array_equal(usual.exact, interleaved.exact)
    if config.path == "small_m":  # which has another order of k for each
      self.check(lhs_operand, interleaved, config)
    else:
      np.testing.assert_array_equal(result, expected)

  # Those of sm_80 read bytes and multiply in bf16.
  @parameterized.parameters(
    # By pointers to E4M3.
    (UPCAST, "mxfp8", "mxfp8", "sm_90"),
    (UPCAST, "f32", "mxfp8", "sm_90"),
    (NATIVE, "mxfp8", "mxfp4", "sm_90"),
    (SMALL_M, "mxfp8", "mxfp8", "sm_90"),
    # By products in f32.
    (SWAPPED, "bf16", "mxfp4", "gfx942", "gfx950"),
    (SWAPPED, "bf16", "nvfp4", "gfx942", "gfx950"),
    (SWAPPED, "mxfp8", "mxfp4", "gfx942", "gfx950"),
    (SWAPPED, "nvfp4", "nvfp4", "gfx942", "gfx950"),
    (SWAPPED, "bf16", "mxfp6_e2m3", "gfx942", "gfx950"),
    (SWAPPED, "mxfp8", "mxfp8_e5m2", "gfx942", "gfx950"),
  )
  @pytest.mark.sample(2)
  def test_other_architectures_give_the_same_bits(
    self, config, lhs, rhs, *names
  ):
    operands = self.make(lhs, rhs, **TAILS)
    expected = gpu_operands.run(*operands, config, architecture="sm_80")
    for name in names:
      found = gpu_operands.run(*operands, config, architecture=name)
      np.testing.assert_array_equal(found, expected)


class ShapeTest(MatmulTest):
  @parameterized.parameters("upcast", "small_m")
  def test_infinity_that_two_steps_have_is_added_once(self, path):
    config = PATHS[path]
    k = config.block_k + 32
    lhs, rhs = self.make("f32", "mxfp8", batch=1, m=3, n=8, k=k, integers=True)
    # In the last step's k, and before what is its own.
    lhs.values[0, 1, 40] = np.inf
    result = gpu_operands.run(lhs, rhs, config)
    value = rhs.exact[0, :, 40]
    expected = np.where(value > 0, np.inf, np.where(value < 0, -np.inf, np.nan))
    np.testing.assert_array_equal(result[0, 1], expected)
    self.assertTrue(np.isfinite(result[0, [0, 2]]).all())

  @parameterized.product(
    (
      *({"path": path, "format": "mxfp8"} for path in PATHS),
      *({"path": path, "format": "mxfp4"} for path in PATHS),
      {"path": "upcast", "format": "mxfp6_e3m2"},
    ),
    # The one loads scales a step ahead in these tiles, the other does not.
    architecture=("sm_80", "gfx942"),
    own=(32, 96),
  )
  @pytest.mark.sample(1)
  def test_infinity_by_a_scale_that_two_steps_have_is_added_once(
    self, path, format, architecture, own
  ):
    # The last step has `own` k, and others that the one before had.
    config = replace(PATHS[path], block_k=128)
    k = 2 * config.block_k + own
    lhs_format = format if path == "native" else "bf16"
    lhs, _ = self.make(
      lhs_format, format, batch=1, m=3, n=1, k=k, integers=True
    )
    # In row i, one k of block i has 4 times 2^127, which is beyond f32.
    blocks = k // 32
    values = np.ones((1, blocks, k)).astype(
      formats.by_name(format).values_dtype
    )
    scale = np.full((1, blocks, blocks), 127, np.uint8)
    for block in range(blocks):
      values[0, block, 32 * block : 32 * (block + 1)] = 0
      values[0, block, 32 * block + 7] = 4
      scale[0, block, block] = 254
    rhs = gpu_operands.store_operand(format, values.view(np.uint8), scale)
    result = gpu_operands.run(lhs, rhs, config, architecture=architecture)
    with np.errstate(over="ignore", invalid="ignore"):
      in_f32 = rhs.exact.astype(np.float32).astype(np.float64)
      expected = np.einsum("bmk,bnk->bmn", lhs.exact, in_f32)
    self.assertTrue(np.isinf(expected).any())
    np.testing.assert_array_equal(result, expected)

  @parameterized.parameters(
    {"rows": 3, "stride": 2**30 + 64},  # within a tile
    {"rows": 18, "stride": 2**27 + 64},  # of a tile's first row
  )
  @pytest.mark.sample(1)
  def test_offsets_beyond_32_bits(self, rows, stride):
    k = 64
    base = np.zeros((rows - 1) * stride + k, np.uint8)
    codes = self.rng.integers(0, 0x70, (1, rows, k), np.uint8)
    far = np.lib.stride_tricks.as_strided(base, codes.shape, (0, stride, 1))
    far[...] = codes
    scale = np.full((1, rows, 2), 127, np.uint8)
    near = gpu_operands.store_operand("mxfp8", codes, scale)
    rhs = dataclasses.replace(
      near,
      values=far,
      kind=dataclasses.replace(near.kind, strides=(0, stride, 1)),
    )
    lhs = gpu_operands.make_operand(self.rng, "bf16", (1, 2, k))
    self.check(lhs, rhs, replace(UPCAST, block_n=16))


class EpilogueTest(MatmulTest):
  def epilogue(self, *, m, n, batch, activation, with_all, dtype):
    if not with_all:
      return gpu_operands.Epilogue(activation=activation)
    dtype = gpu_operands.DTYPES[dtype]
    return gpu_operands.Epilogue(
      global_scale=np.array(0.37, np.float32),
      bias=self.rng.normal(size=n).astype(dtype),
      activation=activation,
      residual=self.rng.normal(size=(batch, m, n)).astype(dtype),
    )

  @parameterized.product(
    activation=configs.ACTIVATIONS,
    with_all=(False, True),
    split_k=(1, 2),
    out_dtype=("f32", "bf16", "f16"),
  )
  @pytest.mark.sample(1)
  def test_epilogue(self, activation, with_all, split_k, out_dtype):
    sizes = {**TAILS, "batch": 2, "m": 5}
    lhs, rhs = self.make("f16", "nvfp4", **sizes)
    # So that activations see both of their sides, and f16 holds the result.
    lhs.values[...] *= np.float16(2**-8)
    lhs.exact[...] = lhs.values
    epilogue = self.epilogue(
      m=5,
      n=sizes["n"],
      batch=2,
      activation=activation,
      with_all=with_all,
      dtype=out_dtype,
    )
    result = gpu_operands.run(
      lhs,
      rhs,
      replace(UPCAST, split_k=split_k),
      epilogue=epilogue,
      out_dtype=out_dtype,
    )
    exact, bound = gpu_operands.expected(lhs, rhs, epilogue)
    contract.assert_within(result, exact, bound, gpu_operands.DTYPES[out_dtype])

  @parameterized.product(
    given=(
      *("global_scale", "global_scale_in_two", "two_global_scales"),
      *("bias", "residual"),
    ),
    path=("native", "small_m"),
  )
  @pytest.mark.sample(5)
  def test_each_part_alone(self, given, path):
    lhs, rhs = self.make("mxfp8", "mxfp8", **TAILS, integers=True)
    m, n = TAILS["m"], TAILS["n"]
    parts = {
      "global_scale": np.array(-0.5, np.float32),
      "bias": self.rng.integers(-9, 9, n).astype(np.float32),
      "residual": self.rng.integers(-9, 9, (1, m, n)).astype(np.float32),
    }
    exact = contract.dot(lhs.exact, rhs.exact)[0]
    given_too = {}
    if given == "two_global_scales":
      given = "global_scale"
      parts[given] = np.array(-(2.0**-101), np.float32)
      given_too["second_global_scale"] = np.array(2.0**100, np.float32)
    if given == "global_scale_in_two":
      given = "global_scale"
      parts[given] = np.array([-(2.0**-101), 2.0**100], np.float32)
    if given == "global_scale":
      exact = exact * -0.5
    else:
      exact = exact + parts[given]
    result = gpu_operands.run(
      lhs,
      rhs,
      PATHS[path],
      epilogue=gpu_operands.Epilogue(**{given: parts[given]}, **given_too),
    )
    contract.assert_exact(result, exact, result.dtype)


class ExtremeTest(MatmulTest):
  """The corners of the numerical contract."""

  def operand(self, format, value, scale, *, rows=2, k=64):
    """Rows of one code under one scale code."""
    vec_size = formats.by_name(format).block_size
    values = np.full((1, rows, k), value, np.uint8)
    return gpu_operands.store_operand(
      format, values, np.full((1, rows, k // vec_size), scale, np.uint8)
    )

  @parameterized.product(
    path=("upcast", "small_m"),
    case=(
      ("mxfp8", 0x7E, 0, 2.0**100),
      ("mxfp8_e5m2", 0x7B, 0, 2.0**100),
      ("mxfp4", 0x7, 0, 2.0**100),
      # E2M1's 0.5 under the largest E8M0, 2^127, in sums that f32 holds.
      ("mxfp4", 0x1, 254, 2.0**-100),
    ),
  )
  @pytest.mark.sample(4)
  def test_scale_bytes_are_2_to_the_minus_127_to_127(self, path, case):
    format, code, scale, number = case
    rhs = self.operand(format, code, scale, k=128)
    numbers = np.full((1, 1, 128), number, np.float32)
    lhs = gpu_operands.store_operand("f32", numbers, None)
    result = self.check(lhs, rhs, PATHS[path], is_exact=True)
    self.assertGreater(result.min(), 0)

  @parameterized.product(path=tuple(PATHS), format=BLOCK_FORMATS, code=(0, 1))
  @pytest.mark.sample(1)
  def test_nan_scale_makes_its_block_nan(self, path, format, code):
    # Whether the values are 0, or all positive: infinity would not turn NaN.
    lhs_format = format if path == "native" else "mxfp8"
    lhs = self.operand(lhs_format, 1, 0x38, rows=3, k=128)
    rhs = self.operand(format, code, 0x38, rows=4, k=128)
    nan = formats.E8M0_NAN
    if format == "nvfp4":
      nan = formats.NVFP4.scale_encoding.nan_code
    rhs.scale[0, 2, 1] = nan
    result = np.isnan(gpu_operands.run(lhs, rhs, PATHS[path]))
    expected = np.broadcast_to([False, False, True, False], result.shape)
    np.testing.assert_array_equal(result, expected)

  @parameterized.product(
    format=("e4m3_f32_128", "int8_bf16_200", "int4_f16_128"),
    path=("upcast", "small_m"),
  )
  def test_nan_scale_of_sums_makes_its_block_nan(self, format, path):
    lhs, rhs = self.make("bf16", format, batch=1, m=2, n=4, k=200)
    rhs.values[0, 1] = 0
    rhs.scale[0, 1:3, -1] = np.nan
    rhs.scale[0, 3, -1] = np.inf
    result = gpu_operands.run(lhs, rhs, PATHS[path])
    self.assertTrue(np.isfinite(result[..., 0]).all())
    self.assertTrue(np.isnan(result[..., 1:3]).all())
    self.assertFalse(np.isfinite(result[..., 3]).any())

  @parameterized.product(
    exponents=((-100, -10), (100, -120), (-130, 100), (90, 20)),
    path=("upcast", "small_m"),
  )
  def test_extreme_scales_of_sums(self, exponents, path):
    # Only the result must be in the range of f32, not the product of scales.
    lhs, rhs = self.make(
      "e4m3_f32_128", "e4m3_f32_128", batch=1, m=3, n=4, k=200, integers=True
    )
    for operand, exponent in zip((lhs, rhs), exponents, strict=True):
      operand.scale[...] *= np.float32(2.0**exponent)
      operand.exact[...] *= 2.0**exponent
    self.check_exact(lhs, rhs, PATHS[path])

  @parameterized.parameters("bf16", "f16", "f32")
  def test_infinity_of_e5m2_times_a_number_is_infinite(self, plain):
    # 1.0 leaves no lower pieces, and infinity times those would be NaN.
    one = np.ones((1, 2, 32), gpu_operands.DTYPES[plain])
    lhs = gpu_operands.store_operand(plain, one, None)
    rhs = self.operand("mxfp8_e5m2", 0x3C, 127, k=32)
    rhs.values[0, 0, 3] = 0x7C
    rhs.values[0, 1, 3] = 0xFC
    result = gpu_operands.run(lhs, rhs, UPCAST)
    expected = np.broadcast_to([np.inf, -np.inf], result.shape)
    np.testing.assert_array_equal(result, expected)

  def test_infinite_and_large_numbers_of_f32(self):
    values = np.ones((1, 3, 32), np.float32)
    values[0, 0, 5] = np.inf
    values[0, 1, 5] = np.finfo(np.float32).max  # rounds to infinity in bf16
    lhs = gpu_operands.store_operand("f32", values, None)
    rhs = self.operand("mxfp8", 0x30, 127, rows=1, k=32)  # 0.5
    result = gpu_operands.run(lhs, rhs, UPCAST)[0, :, 0]
    exact = np.float32(values.astype(np.float64).sum(-1)[0] / 2)
    np.testing.assert_array_equal(result, exact)
