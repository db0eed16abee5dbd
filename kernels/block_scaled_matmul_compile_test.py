# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the matmul kernels compile to, with their default configs.

The table beside this file holds the instructions of each main loop. Write it
anew, after a change that is meant, with

  python kernels/block_scaled_matmul_compile_test.py --regenerate
"""

import functools
import json
import pathlib
import sys

import triton
from absl.testing import absltest
from absl.testing import parameterized

from jaxplugin.kernels import architectures
from jaxplugin.kernels import block_scaled_matmul
from jaxplugin.kernels import compile as compile_lib
from jaxplugin.kernels import configs
from jaxplugin.kernels import tuning

TABLE = pathlib.Path(__file__).with_suffix(".json")
# How far a loop may grow before it is a regression.
TOLERANCE = 1.05
VECTOR_LOAD_BITS = 128

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


def product(
  lhs,
  rhs,
  *,
  m,
  n=4096,
  k=4096,
  k_is_minor=True,
  interleaved=False,
  **options,
):
  return configs.MatmulShape(
    batch=1,
    m=m,
    n=n,
    k=k,
    lhs=configs.operand(lhs, m, k),
    rhs=configs.operand(
      rhs, n, k, k_is_minor=k_is_minor, interleaved=interleaved
    ),
    **{"out_dtype": "bf16", **options},
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
INTERLEAVED = {
  f"bf16_{format}_{name}_interleaved": product(
    "bf16", format, interleaved=True, **sizes
  )
  for format in configs.PACKED_FORMATS
  for name, sizes in (
    ("decode", {"m": 1, "k": LONG_K}),
    ("prefill", {"m": 4096}),
  )
}
INTERLEAVING = ("sm_80", "sm_89", "sm_90")
PRODUCTS |= INTERLEAVED
CASES = [
  {"testcase_name": f"{name}_{key}", "name": name, "key": key}
  for name in architectures.ARCHITECTURES
  for key in PRODUCTS
  if key not in INTERLEAVED or name in INTERLEAVING
]
# Instructions of a main loop for each value of the weight: with interleaved
# values at most this share of those with values in their usual order.
INTERLEAVED_SHARE = {"sm_80": 0.75, "sm_89": 0.85, "sm_90": 0.85}

# Of the machine code's or the assembly's matrix instructions.
UPCAST_INSTRUCTION = {
  "sm_80": "mma.sync",
  "sm_89": "mma.sync",
  "sm_90": "wgmma.mma_async",
  "sm_100": "kind::f16",
  "sm_103": "kind::f16",
  "sm_120": "mma.sync",
  "sm_121": "mma.sync",
  "gfx942": "v_mfma_f32",
  "gfx950": "v_mfma_f32",
  "gfx1250": "v_wmma_f32",
}
NATIVE_INSTRUCTION = {
  ("sm_100", "mxfp8"): "kind::mxf8f6f4.block_scale.block32",
  ("sm_100", "nvfp4"): "kind::mxf4nvf4.block_scale.block16",
  ("sm_103", "mxfp8"): "kind::mxf8f6f4.block_scale.block32",
  ("sm_103", "nvfp4"): "kind::mxf4nvf4.block_scale.block16",
  ("sm_120", "mxfp8"): "kind::mxf8f6f4.block_scale",
  ("sm_120", "nvfp4"): "kind::mxf4nvf4.block_scale",
  ("sm_121", "mxfp8"): "kind::mxf8f6f4.block_scale",
  ("sm_121", "nvfp4"): "kind::mxf4nvf4.block_scale",
  ("gfx950", "mxfp8"): "v_mfma_scale_f32",
  ("gfx1250", "mxfp8"): "v_wmma_scale_f32",
}


@functools.cache
def compiled(name, key):
  """(matmul launch, config, what the kernel compiles to)."""
  shape = PRODUCTS[key]
  architecture = architectures.by_name(name)
  config = tuning.default_config(
    shape, architecture, core_count=CORE_COUNTS[name]
  )
  launch = configs.plan(shape, config, architecture)[0]
  return launch, config, compile_launch(launch, shape, architecture)


def compile_launch(launch, shape, architecture):
  return compile_lib.compile_kernel(
    block_scaled_matmul.KERNELS[launch.kernel],
    configs.signature(launch, shape),
    dict(launch.constexprs),
    architecture,
    num_warps=launch.num_warps,
    num_stages=launch.num_stages,
  )


def instructions_per_rhs_value(name, key):
  """Of a thread, in the main loop, for each value of rhs that it decodes."""
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
    "loop_instructions": kernel.main_loop.instructions,
    "matrix_instructions": dict(kernel.main_loop.matrix_instructions),
    "instructions_per_matrix_instruction": round(
      kernel.main_loop.instructions_per_matrix_instruction, 1
    ),
  }
  if "decode" in key:  # whose loops are not unrolled
    per_value = instructions_per_rhs_value(name, key)
    entry["instructions_per_rhs_value"] = round(per_value, 2)
  return entry


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
      tuning.shared_memory_bound(config, PRODUCTS[key], kernel.architecture),
    )
    self.assertIn(launch.name, kernel.assembly)

  @parameterized.named_parameters(CASES)
  def test_matrix_instruction_is_the_best_there_is(self, name, key):
    launch, _, kernel = compiled(name, key)
    formats = {PRODUCTS[key].lhs.format, PRODUCTS[key].rhs.format}
    kind = "nvfp4" if formats == {"nvfp4"} else "mxfp8"
    expected = UPCAST_INSTRUCTION[name]
    if formats <= {"mxfp8", "mxfp8_e5m2"} or formats == {"nvfp4"}:
      expected = NATIVE_INSTRUCTION.get((name, kind), expected)
    self.assertNotEmpty(kernel.matrix_instructions)
    for instruction in kernel.matrix_instructions:
      self.assertIn(expected, instruction, launch.name)

  @parameterized.named_parameters(
    case for case in CASES if case["key"] != "tails_k_major"
  )
  def test_values_are_loaded_by_128_bits(self, name, key):
    _, _, kernel = compiled(name, key)
    self.assertGreater(kernel.global_load_bits.get(VECTOR_LOAD_BITS, 0), 0)

  @parameterized.named_parameters(CASES)
  def test_main_loop_has_not_grown(self, name, key):
    table = json.loads(TABLE.read_text())
    if table["triton"] != triton.__version__:
      self.skipTest(
        f"the table is of triton {table['triton']}, installed is"
        f" {triton.__version__}"
      )
    entry = table["loops"][name][key]
    actual = table_entry(name, key)
    self.assertEqual(actual["kernel"], entry["kernel"])
    self.assertLessEqual(
      actual["loop_instructions"], TOLERANCE * entry["loop_instructions"]
    )

  @parameterized.product(name=INTERLEAVING, format=configs.PACKED_FORMATS)
  def test_interleaved_values_take_fewer_instructions(self, name, format):
    key = f"bf16_{format}_decode"
    usual = instructions_per_rhs_value(name, key)
    interleaved = instructions_per_rhs_value(name, f"{key}_interleaved")
    self.assertLessEqual(interleaved, INTERLEAVED_SHARE[name] * usual)

  @parameterized.parameters(*architectures.ARCHITECTURES)
  def test_reduction_compiles(self, name):
    architecture = architectures.by_name(name)
    shape = product("bf16", "nvfp4", m=3, **EVERYTHING)
    config = tuning.default_config(
      shape, architecture, core_count=CORE_COUNTS[name]
    )
    launches = configs.plan(shape, config, architecture)
    self.assertLen(launches, 2)
    kernel = compile_launch(launches[1], shape, architecture)
    self.assertIsNone(kernel.limit_error)
    self.assertEqual(kernel.spill_bytes, 0)
    self.assertIn("block_scaled_reduce_split", kernel.assembly)


if __name__ == "__main__":
  if "--regenerate" in sys.argv:
    regenerate()
  else:
    absltest.main()
