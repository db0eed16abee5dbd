# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled code of the ragged kernels, with the configs that rules choose."""

import functools

import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import constraints
from jaxplugin.kernels.gpu.ragged import plans

from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import compile
from jaxplugin.testing.kernels import machine_claims, matmul_shapes

pytestmark = pytest.mark.lab

CORES = 132
# Instructions that change memory and read it: PTX ISA, "atom" and "red"; AMD's.
ATOMIC = r"\b(atom|red)\.|\b(global|buffer|flat)_atomic"
# The experts of gpt-oss: gate and up, and down (its model card).
GROUPS, HIDDEN, INTERMEDIATE = 32, 2880, 2880
EPILOGUE = {"has_bias": True, "has_global_scale": True}


product = functools.partial(
  matmul_shapes.product,
  groups=GROUPS,
  n=2 * INTERMEDIATE,
  k=HIDDEN,
  out_dtype="bf16",
)

DECODE = product("bf16", "mxfp4", m=4, activation="swigluoai", **EPILOGUE)
PREFILL = product("bf16", "nvfp4", m=8192, activation="swiglu", **EPILOGUE)
ANY_M = product("bf16", "nvfp4", m=8192, activation="swiglu", reads_m=True)
GRADIENT = product(
  "f32", "mxfp4", m=8192, is_across=True, n=HIDDEN, k=2 * INTERMEDIATE
)
SPLIT = product("bf16", "mxfp4", m=1, n=512, k=65536, activation="swiglu")
INTERLEAVED = product("bf16", "mxfp4", m=8, interleaved=True)
MIXED = product("mxfp8", "mxfp4", m=8192, activation="swigluoai", **EPILOGUE)
NATIVE = product("mxfp8", "mxfp8", m=8192, activation="swiglu", **EPILOGUE)
SWIZZLED = product("nvfp4", "nvfp4", m=8192, swizzled=True)
FP4 = product("mxfp4", "mxfp4", m=2048, activation="swigluoai", **EPILOGUE)

# (architecture, shape, path).
CASES = {
  "sm_80_decode": ("sm_80", DECODE, "upcast"),
  "sm_89_prefill": ("sm_89", PREFILL, "upcast"),
  "sm_90_decode": ("sm_90", DECODE, "small_m"),
  "sm_90_prefill": ("sm_90", PREFILL, "upcast"),
  "sm_90_any_m": ("sm_90", ANY_M, "upcast"),
  "sm_90_gradient": ("sm_90", GRADIENT, "upcast"),
  "sm_90_split": ("sm_90", SPLIT, "small_m"),
  "sm_90_interleaved": ("sm_90", INTERLEAVED, "small_m"),
  "sm_100_decode": ("sm_100", DECODE, "small_m"),
  "sm_100_mixed": ("sm_100", MIXED, "native"),
  "sm_103_swizzled": ("sm_103", SWIZZLED, "native"),
  "sm_120_native": ("sm_120", NATIVE, "native"),
  "gfx942_decode": ("gfx942", DECODE, "upcast"),
  "gfx950_native": ("gfx950", FP4, "native"),
}


@functools.cache
def compiled(key):
  """[(launch, what it compiles to)], and the config."""
  name, shape, _ = CASES[key]
  architecture = architectures.by_name(name)
  config = plans.default_config(shape, architecture, core_count=CORES)
  launches = plans.plan(shape, config, architecture)
  kernels = [
    compile.compile_matmul(launch, shape, architecture, bias_dtype="bf16")
    for launch in launches
  ]
  return list(zip(launches, kernels, strict=True)), config


class CompileTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_default_config_fits_and_spills_nothing(self, key):
    # The launch that adds the parts of k too.
    name, shape, path = CASES[key]
    found, config = compiled(key)
    self.assertEqual(config.path, path)
    self.assertLen(found, 1 + (config.split_k > 1))
    for launch, kernel in found:
      self.assertIsNone(kernel.limit_error)
      self.assertEqual(kernel.spill_bytes, 0)
      self.assertIn(launch.name, kernel.assembly)
      # Results would depend on the order in which programs come.
      self.assertNotRegex(kernel.assembly, ATOMIC)
    _, kernel = found[0]
    self.assertLessEqual(
      kernel.shared_memory_bytes,
      constraints.shared_memory_bound(
        config, shape, architectures.by_name(name)
      ),
    )

  @parameterized.parameters(*CASES)
  def test_machine_code_is_made_of_what_is_claimed(self, key):
    name, shape, path = CASES[key]
    kind = machine_claims.kind(name, shape.lhs.format, shape.rhs.format)
    self.assertEqual(path == "native", kind != machine_claims.UPCAST)
    (_, kernel), *_ = compiled(key)[0]
    self.assertEqual(
      machine_claims.broken(name, kind, kernel.machine_instructions), ""
    )

  def test_split_of_k_is_among_them(self):
    self.assertGreater(compiled("sm_90_split")[1].split_k, 1)
    self.assertEqual(compiled("sm_90_prefill")[1].split_k, 1)
