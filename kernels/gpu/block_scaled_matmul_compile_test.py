# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled code of the matmul kernels, with the configs that rules choose.

The table next to this file has the instructions of each main loop. After an
intended change, write it again with

  python kernels/gpu/block_scaled_matmul_compile_test.py --regenerate
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import sys

import pytest
import triton
import triton.language as tl
from absl.testing import absltest, parameterized
from jaxplugin.kernels.gpu import (
  configs,
  constraints,
  matmul_plans,
  tiles_by_rule,
)

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import compile, machine_code
from jaxplugin.testing.kernels import machine_claims, matmul_shapes

pytestmark = pytest.mark.lab

TABLE = pathlib.Path(__file__).with_suffix(".json")
# How far a figure may grow before it is a regression.
TOLERANCE = 1.05
GROWING = (
  "registers",
  "shared_memory_bytes",
  "loop_instructions",
  "instructions_per_matrix_instruction",
  # From the model in `inspection/simulation.py`.
  "simulated_cycles_a_step",
)
# Instructions between a load into registers and its use: one that is nearer has
# warps wait for memory in each step. The table has those that there are.
NEAR = 100
VECTOR_LOAD_BITS = 128
# Instructions that change memory and read it: PTX ISA, "atom" and "red"; AMD's.
ATOMIC = r"\b(atom|red)\.|\b(global|buffer|flat)_atomic"

CORE_COUNTS = {
  "sm_80": 108,
  "sm_89": 142,
  "sm_90": 132,
  "sm_100": 148,
  "sm_103": 160,
  "sm_120": 170,
  "sm_121": 48,
  "gfx942": 304,
  "gfx950": 256,
  "gfx1250": 256,
}


product = functools.partial(
  matmul_shapes.product, n=4096, k=4096, out_dtype="bf16"
)
# Also split it is too long for ptxas to unroll the loop away.
LONG_K = 65536
EVERYTHING = {
  "has_global_scale": True,
  "has_bias": True,
  "activation": "gelu",
  "has_residual": True,
}
PRODUCTS = {
  "mxfp8": product("mxfp8", "mxfp8", m=4096),
  "nvfp4": product("nvfp4", "nvfp4", m=4096, **EVERYTHING),
  "bf16_mxfp4": product("bf16", "mxfp4", m=4096),
  "mxfp8_decode": product("mxfp8", "mxfp8", m=16, k=LONG_K),
  "bf16_nvfp4_decode": product("bf16", "nvfp4", m=1, k=LONG_K),
  "bf16_mxfp4_decode": product("bf16", "mxfp4", m=1, k=LONG_K),
  "f32_mxfp4": product("f32", "mxfp4", m=48),
  "tails_k_major": product(
    "mxfp8", "mxfp8_e5m2", m=1000, n=2000, k=4080, k_is_minor=False
  ),
}
# Weights that `prepare_weights` interleaved, for the GPUs that it does so for.
PACKED_FORMATS = ("mxfp4", "nvfp4")
INTERLEAVED = {
  f"bf16_{format}_{name}_interleaved": product(
    "bf16", format, interleaved=True, **sizes
  )
  for format in PACKED_FORMATS
  for name, sizes in (
    ("decode", {"m": 1, "k": LONG_K}),
    ("prefill", {"m": 4096}),
  )
}
INTERLEAVING = ("sm_80", "sm_89", "sm_90")
PRODUCTS |= INTERLEAVED
# Values by TMA descriptors, which no default has.
DESCRIBED = {
  "mxfp8_tma": PRODUCTS["mxfp8"],
  "nvfp4_tma": PRODUCTS["nvfp4"],
  "bf16_mxfp4_tma": PRODUCTS["bf16_mxfp4"],
}
DESCRIBING = ("sm_90", "sm_100", "sm_103", "sm_120")
PRODUCTS |= DESCRIBED
# Scales as tensor memory takes them: with tiles of 128 rows of both operands,
# and as the default for large m has them, 256 of rhs.
SWIZZLED = {
  f"{format}_swizzled{suffix}": product(format, format, m=m, swizzled=True)
  for format in ("mxfp8", "mxfp4", "nvfp4")
  for suffix, m in (("_128", 128), ("", 4096))
}
SWIZZLING = {
  key: ("sm_100",) if key.endswith("_128") else ("sm_100", "sm_103")
  for key in SWIZZLED
}
PRODUCTS |= SWIZZLED
# Other pairs for the block-scaled instruction; FP4 alone is above for sm_100.
FP4_PAIRS = {
  "mxfp4": product("mxfp4", "mxfp4", m=4096),
  "mxfp8_mxfp4": product("mxfp8", "mxfp4", m=4096),
}
MULTIPLYING_FP4 = {
  "mxfp4": ("sm_120", "gfx950"),
  "mxfp8_mxfp4": ("sm_100", "sm_120", "gfx950"),
}
PRODUCTS |= FP4_PAIRS
# Six bits, which are decoded everywhere.
MXFP6 = {
  "bf16_mxfp6": product("bf16", "mxfp6_e2m3", m=4096),
  "mxfp6": product("mxfp6_e3m2", "mxfp6_e3m2", m=4096),
}
DECODING_FP6 = ("sm_80", "sm_90", "sm_100", "gfx950")
PRODUCTS |= MXFP6
# Matmuls of a server that decodes for many users at once.
SERVING = {
  f"{lhs}_{rhs}_{m}": product(lhs, rhs, m=m, n=8192, k=8192)
  for lhs, rhs in (("bf16", "nvfp4"), ("bf16", "mxfp8"), ("mxfp8", "mxfp4"))
  for m in (16, 32, 64)
}
PRODUCTS |= SERVING
# Layers of gpt-oss, whose k is 22 and a half steps of 128.
HALF_STEPS = {
  f"bf16_mxfp4_2880_{m}": product("bf16", "mxfp4", m=m, n=2880, k=2880)
  for m in (1, 64)
}
HALVING = ("sm_80", "sm_90")
PRODUCTS |= HALF_STEPS
# Formats of checkpoints, whose scales multiply sums over blocks.
CHECKPOINTS = {
  "e4m3_f32_128": product("e4m3_f32_128", "e4m3_f32_128", m=4096),
  **{
    f"bf16_{format}_decode": product("bf16", format, m=1, k=LONG_K)
    for format in ("e4m3_f32_128", "int4_f16_32", "int4_f16_128")
  },
}
# Tiles of 32 k have at most 16 bytes a thread.
SHORT = ("bf16_int4_f16_32_decode",)
SUMMING = ("sm_80", "sm_90", "sm_100", "gfx942")
PRODUCTS |= CHECKPOINTS
# Weights that are converted by an instruction, where ptxas is new.
CONVERTED = {
  f"{key}_converted": PRODUCTS[key]
  for key in ("bf16_mxfp4_decode", "bf16_nvfp4_decode", "bf16_mxfp4")
}
CONVERTING = ("sm_100", "sm_103", "sm_120", "sm_121")
PRODUCTS |= CONVERTED
# Instructions of a thread for each value: a conversion and a multiplication of
# two values, and all others.
CONVERTED_INSTRUCTIONS = {
  "sm_100": 2.2,
  "sm_103": 2.2,
  "sm_120": 2.94,
  "sm_121": 2.94,
}
CASES = [
  {"testcase_name": f"{name}_{key}", "name": name, "key": key}
  for name in architectures.ARCHITECTURES
  for key in PRODUCTS
  if (key not in INTERLEAVED or name in INTERLEAVING)
  and (key not in DESCRIBED or name in DESCRIBING)
  and (key not in SWIZZLED or name in SWIZZLING[key])
  and (key not in FP4_PAIRS or name in MULTIPLYING_FP4[key])
  and (key not in MXFP6 or name in DECODING_FP6)
  and (key not in SERVING or name == "sm_90")
  and (key not in HALF_STEPS or name in HALVING)
  and (key not in CHECKPOINTS or name in SUMMING)
  and (key not in CONVERTED or name in CONVERTING)
]
# Instructions of a main loop for each value of the weight: with interleaved
# values at most this share of those with values in their usual order.
INTERLEAVED_SHARE = {"sm_80": 0.75, "sm_89": 0.85, "sm_90": 0.85}


@triton.jit
def _count_kernel(out):
  tl.atomic_add(out + tl.program_id(0) % 2, 1)


@functools.cache
def compiled(name, key):
  """(matmul launch, config, what the kernel compiles to)."""
  shape = PRODUCTS[key]
  architecture = architectures.by_name(name)
  if key in CONVERTED:
    architecture = dataclasses.replace(
      architecture, ptxas_version=architectures.E2M1_CONVERSION_PTXAS
    )
  config = tiles_by_rule.default_config(
    shape,
    architecture,
    core_count=CORE_COUNTS[name],
    use_descriptors=key in DESCRIBED,
  )
  launch = matmul_plans.plan(shape, config, architecture)[0]
  return launch, config, compile.compile_matmul(launch, shape, architecture)


def instructions_per_rhs_value(name, key):
  """Instructions of a thread's main loop for each value of rhs it decodes."""
  launch, config, kernel = compiled(name, key)
  threads = launch.num_warps * kernel.architecture.warp_size
  instructions = kernel.main_loop.instructions * threads
  return instructions / (config.block_n * config.block_k)


def table_entry(name, key):
  launch, _, kernel = compiled(name, key)
  entry = {
    "kernel": launch.name,
    "registers": kernel.registers,
    "shared_memory_bytes": kernel.shared_memory_bytes,
    "resident_blocks": kernel.resident_blocks,
    "loop_instructions": kernel.main_loop.instructions,
    "matrix_instructions": dict(kernel.main_loop.matrix_instructions),
    "instructions_per_matrix_instruction": round(
      kernel.main_loop.instructions / kernel.main_loop.matrix_count, 1
    ),
  }
  if near_loads(kernel):
    entry["near_loads"] = near_loads(kernel)
  if kernel.simulated is not None:
    products = dict(launch.constexprs)["TILING"].products_of_step
    cycles = kernel.simulated.cycles_of(products)
    entry["simulated_cycles_a_step"] = round(cycles)
  if "decode" in key:  # whose loops are not unrolled
    per_value = instructions_per_rhs_value(name, key)
    entry["instructions_per_rhs_value"] = round(per_value, 2)
  return entry


def near_loads(kernel):
  """Distances of the main loop's loads that are `NEAR` their use, in order."""
  distances = kernel.main_loop.load_distances()
  return sorted(distance for distance in distances if distance < NEAR)


def value_loads(name, key):
  """{bits: number} of loads that the values need, and a residual's.

  Of each copy of the main loop's, which the pipeline repeats for each stage.
  Tiles of fewer than 16 bytes a thread are left out.
  """
  launch, config, kernel = compiled(name, key)
  shape = PRODUCTS[key]
  threads = launch.num_warps * kernel.architecture.warp_size
  needed = collections.Counter()
  left = shape.rhs if config.swap else shape.lhs
  sides = ((shape.lhs, config.block_m), (shape.rhs, config.block_n))
  for kind, rows in sides:
    tile_bits = rows * config.block_k * kind.bits // threads
    bits = VECTOR_LOAD_BITS
    if tile_bits < bits:
      continue
    if name == "sm_90" and config.path == "upcast" and kind is left:
      # The operand is decoded in registers for wgmma, in groups of eight values
      # of k, except for FP4 whose scales are loaded a step ahead.
      tiling = dict(launch.constexprs)["TILING"]
      tile = tiling.rhs if config.swap else tiling.lhs
      is_whole = kind.is_packed and tile.scale_is_ahead
      bits = 128 if kind.is_interleaved or is_whole else 8 * kind.bits
    elif config.path == "native" and kind.bits < max(
      shape.lhs.bits, shape.rhs.bits
    ):
      # Tensor memory's form of FP4 beside FP8 has 8 bytes of every 16.
      bits = 64 if kernel.architecture.tensor_memory_columns else bits
    needed[bits] += config.num_stages * tile_bits // bits
  if shape.has_residual:  # of f32
    elements = config.block_m * config.block_n // threads
    needed[VECTOR_LOAD_BITS] += 32 * elements // VECTOR_LOAD_BITS
  return needed


def regenerate():
  table = {
    "triton": triton.__version__,
    "loops": {
      name: {
        case["key"]: table_entry(name, case["key"])
        for case in CASES
        if case["name"] == name
      }
      for name in architectures.ARCHITECTURES
    },
  }
  TABLE.write_text(json.dumps(table, indent=1) + "\n")


class CompileTest(parameterized.TestCase):
  @parameterized.named_parameters(CASES)
  def test_default_config_fits_and_spills_nothing(self, name, key):
    launch, config, kernel = compiled(name, key)
    self.assertIsNone(kernel.limit_error)
    self.assertEqual(kernel.spill_bytes, 0)
    self.assertLessEqual(
      kernel.shared_memory_bytes,
      constraints.shared_memory_bound(
        config, PRODUCTS[key], kernel.architecture
      ),
    )
    self.assertIn(launch.name, kernel.assembly)

  @parameterized.named_parameters(CASES)
  def test_machine_code_is_made_of_what_is_claimed(self, name, key):
    # After ptxas, and for the whole kernel: a product that is emulated fails.
    _, config, kernel = compiled(name, key)
    shape = PRODUCTS[key]
    kind = machine_claims.kind(name, shape.lhs.format, shape.rhs.format)
    self.assertEqual(
      machine_claims.broken(name, kind, kernel.machine_instructions), ""
    )
    # The plan is native exactly if the table says so.
    is_native = kind != machine_claims.UPCAST
    self.assertEqual(config.path == "native", is_native, kind)

  @parameterized.named_parameters(
    case for case in CASES if case["key"] not in (*DESCRIBED, *SHORT)
  )
  def test_tiles_of_16_bytes_a_thread_are_loaded_by_128_bits(self, name, key):
    # But for those that `value_loads` says otherwise of.
    _, _, kernel = compiled(name, key)
    needed = value_loads(name, key)
    self.assertNotEmpty(needed)
    for bits, count in needed.items():
      self.assertGreaterEqual(kernel.global_load_bits.get(bits, 0), count, bits)
    self.assertEqual(kernel.tensor_copies, 0)

  @parameterized.named_parameters(CASES)
  def test_nothing_is_atomic(self, name, key):
    # Results would depend on the order in which programs come.
    self.assertNotRegex(compiled(name, key)[2].assembly, ATOMIC)

  @parameterized.named_parameters(
    case for case in CASES if case["key"] in SWIZZLED
  )
  def test_swizzled_scales_are_copied_to_tensor_memory(self, name, key):
    _, config, kernel = compiled(name, key)
    self.assertIn("tcgen05.cp.", kernel.assembly)
    # Out of registers come the accumulator's zeros; where a tile has 256 rows
    # one scale too, though swizzled.
    by_threads = 1 if config.block_n == 128 else 2
    self.assertEqual(config.block_n == 128, key.endswith("_128"))
    self.assertLessEqual(kernel.assembly.count("tcgen05.st."), by_threads)

  @parameterized.named_parameters(
    case for case in CASES if case["key"] in DESCRIBED
  )
  def test_values_are_copied_by_tma(self, name, key):
    launch, _, kernel = compiled(name, key)
    self.assertEndsWith(launch.name, "_tma")
    entry = re.search(r"\.entry [^)]*\)", kernel.assembly)[0]
    # PTX ISA, "Tensor-map": 128 bytes, aligned to 64. One of lhs, one of rhs.
    parameters = re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", entry)
    self.assertLen(parameters, 2)
    self.assertGreaterEqual(kernel.tensor_copies, 2)
    copy = "cp.async.bulk.tensor.3d.shared"
    self.assertEqual(kernel.assembly.count(copy), kernel.tensor_copies)
    # These loads are those of scales and of the epilogue.
    loads = sum(kernel.global_load_bits.values())
    _, _, by_threads = compiled(name, key.removesuffix("_tma"))
    self.assertLess(loads, sum(by_threads.global_load_bits.values()))

  @parameterized.named_parameters(CASES)
  def test_figures_of_the_table_have_not_grown(self, name, key):
    table = json.loads(TABLE.read_text())
    if table["triton"] != triton.__version__:
      self.skipTest(
        f"the table is of triton {table['triton']}, installed is"
        f" {triton.__version__}"
      )
    entry = table["loops"][name][key]
    actual = table_entry(name, key)
    for same in ("kernel", "matrix_instructions"):
      self.assertEqual(actual[same], entry[same])
    for figure in GROWING:
      if figure in entry:
        limit = TOLERANCE * entry[figure]
        self.assertLessEqual(actual[figure], limit, figure)
    self.assertGreaterEqual(actual["resident_blocks"], entry["resident_blocks"])
    near = (actual.get("near_loads", []), entry.get("near_loads", []))
    self.assertLessEqual(*map(len, near), near)

  @parameterized.product(name=INTERLEAVING, format=PACKED_FORMATS)
  def test_interleaved_values_take_fewer_instructions(self, name, format):
    key = f"bf16_{format}_decode"
    usual = instructions_per_rhs_value(name, key)
    interleaved = instructions_per_rhs_value(name, f"{key}_interleaved")
    self.assertLessEqual(interleaved, INTERLEAVED_SHARE[name] * usual)

  @parameterized.product(name=CONVERTING, format=PACKED_FORMATS)
  def test_converted_values_take_few_instructions(self, name, format):
    key = f"bf16_{format}_decode_converted"
    found = instructions_per_rhs_value(name, key)
    self.assertLessEqual(found, CONVERTED_INSTRUCTIONS[name])

  @parameterized.parameters(*PACKED_FORMATS)
  def test_values_converted_to_f32_take_few_instructions(self, format):
    key = f"bf16_{format}_decode"
    launch, config, kernel = compiled("gfx950", key)
    # A half for each value, in each copy of the loop: LLVM leaves none out.
    threads = launch.num_warps * kernel.architecture.warp_size
    pairs = config.block_n * config.block_k // threads // 2
    count = kernel.assembly.count("v_cvt_scalef32_pk_f32_fp4")
    self.assertGreaterEqual(count, pairs)
    self.assertEqual(count % pairs, 0)
    self.assertLessEqual(instructions_per_rhs_value("gfx950", key), 4.15)

  @parameterized.parameters(
    ("e4m3_f32_128", 1, 0.6),
    ("e4m3_f32_128", 128, 0.8),
    ("e4m3_e8m0_128", 128, 0.78),
  )
  def test_fp8_instructions_are_busy(self, format, rows_per_scale, least):
    architecture = architectures.by_name("sm_90")
    sizes = {"n": 8192, "k": 8192}
    rhs = configs.operand(
      format, *sizes.values(), rows_per_scale=rows_per_scale
    )
    shape = dataclasses.replace(
      product(format, format, m=8192, **sizes, may_round_sums=True), rhs=rhs
    )
    config = tiles_by_rule.default_config(shape, architecture, core_count=132)
    launch = matmul_plans.plan(shape, config, architecture)[0]
    kernel = compile.compile_matmul(launch, shape, architecture)
    self.assertEqual(kernel.spill_bytes, 0)
    self.assertGreaterEqual(kernel.simulated.matrix_share, least)

  @parameterized.parameters(*architectures.ARCHITECTURES)
  def test_reduction_compiles(self, name):
    architecture = architectures.by_name(name)
    shape = product("bf16", "nvfp4", m=3, **EVERYTHING)
    config = tiles_by_rule.default_config(
      shape, architecture, core_count=CORE_COUNTS[name]
    )
    launches = matmul_plans.plan(shape, config, architecture)
    self.assertLen(launches, 2)
    kernel = compile.compile_matmul(launches[1], shape, architecture)
    self.assertIsNone(kernel.limit_error)
    self.assertEqual(kernel.spill_bytes, 0)
    self.assertIn("block_scaled_reduce_split", kernel.assembly)
    self.assertNotRegex(kernel.assembly, ATOMIC)

  @parameterized.parameters("gfx942", "gfx950")
  def test_f32_products_keep_subnormals(self, name):
    # E2M1's 0.5 is decoded as one. LLVM, "AMDGPU usage": 3 flushes none.
    _, _, kernel = compiled(name, "bf16_mxfp4_decode")
    self.assertIn(".amdhsa_float_denorm_mode_32 3", kernel.assembly)

  @parameterized.product(
    name=("sm_80", "sm_90", "sm_100", "sm_120"), epilogue=({}, EVERYTHING)
  )
  def test_reduction_waits_for_memory_once(self, name, epilogue):
    # All parts are asked for before the first two are added.
    architecture = architectures.by_name(name)
    shape = product("bf16", "nvfp4", m=1, n=8192, k=8192, **epilogue)
    config = configs.MatmulConfig(
      path="upcast", block_m=16, block_n=128, block_k=128, split_k=16
    )
    launch = matmul_plans.plan(shape, config, architecture)[1]
    kernel = compile.compile_matmul(launch, shape, architecture)
    opcodes = [
      item.opcode.partition(".")[0]
      for item in machine_code.read_sass(kernel.disassembly)
      if isinstance(item, machine_code.MachineInstruction)
    ]
    before = opcodes[: opcodes.index("FADD")]
    self.assertGreaterEqual(before.count("LDG"), config.split_k)

  @parameterized.parameters("sm_80", "sm_100", "gfx942", "gfx1250")
  def test_atomic_instructions_would_be_seen(self, name):
    kernel = compile.compile_kernel(
      _count_kernel, {"out": "*i32"}, {}, architectures.by_name(name)
    )
    self.assertRegex(kernel.assembly, ATOMIC)


if __name__ == "__main__":
  if "--regenerate" in sys.argv:
    regenerate()
  else:
    absltest.main()
