# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the quantize kernels, and what they compile to."""

import dataclasses
import functools

import pytest
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import global_scales
from jaxplugin.kernels.gpu.quantization import quantize
from jaxplugin.kernels.gpu.quantization import quantize_config
from jaxplugin.kernels.gpu.quantization import quantize_plans

from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.lab.inspection import compile as kernel_compile
from jaxplugin.testing.kernels import quantize_cases

SM_90 = architectures.by_name("sm_90")
CONFIG = quantize_config.QuantizeConfig(
  block_m=16, block_k=64, num_warps=1, hardware_cast=False
)
FORMAT_NAMES = quantize_config.FORMAT_NAMES
SIZE = 4096
PLAIN = quantize_config.NO_OPTIONS
TRANSFORMED_STOCHASTIC = quantize_config.QuantizeOptions(
  hadamard=64, sign_words=(0x1234567, -5), factor=0.125, is_stochastic=True
)
SQUARE_CHOSEN = quantize_config.QuantizeOptions(
  is_square=True, four_over_six=True
)


class ConfigTest(parameterized.TestCase):
  def test_every_format_of_the_package_is_known(self):
    names = [format.name for format in formats.FORMATS]
    self.assertContainsSubset(names, FORMAT_NAMES)

  def test_unknown_names_list_the_known(self):
    with self.assertRaisesRegex(ValueError, "'fp6'.*mxfp8, mxfp8_e5m2"):
      quantize_config.constexprs(CONFIG, "fp6")
    with self.assertRaisesRegex(ValueError, "up.*floor.*'down'"):
      quantize_config.constexprs(CONFIG, "mxfp8", scale_rounding="down")

  def test_grid_covers_the_array_and_the_padding_of_scales(self):
    self.assertEqual(
      quantize_config.launch_grid(CONFIG, 3, 17, 65), (3 * 2 * 2,)
    )
    self.assertEqual(
      quantize_config.covered(17, 65, "nvfp4", swizzled=False), (17, 65)
    )
    self.assertEqual(
      quantize_config.covered(17, 65, "nvfp4", swizzled=True), (128, 128)
    )
    self.assertEqual(
      quantize_config.covered_by_both(17, 300, "mxfp8", swizzled=True),
      (128, 384),
    )
    self.assertEqual(
      quantize_config.covered_by_both(17, 300, "nvfp4", swizzled=True),
      (128, 384),
    )

  def test_small_arrays_have_small_tiles(self):
    small = quantize_config.default_config("mxfp8", SM_90, 1, 32)
    self.assertEqual(
      (small.block_m, small.block_k, small.num_warps), (1, 32, 1)
    )
    large = quantize_config.default_config("mxfp8", SM_90, 4096, 4096)
    self.assertEqual((large.block_m, large.block_k), (16, 256))
    self.assertTrue(large.hardware_cast)

  def test_tiles_have_whole_squares_and_groups(self):
    options = quantize_config.QuantizeOptions(is_square=True, hadamard=64)
    small = quantize_config.default_config(
      "nvfp4", SM_90, 1, 64, options=options
    )
    self.assertEqual((small.block_m, small.block_k), (16, 64))
    across = quantize_config.default_config(
      "mxfp8", SM_90, 4096, 4096, k_is_contiguous=False, options=options
    )
    self.assertEqual((across.block_m, across.block_k), (128, 64))

  def test_random_rounding_is_not_the_hardwares(self):
    config = quantize_config.default_config(
      "mxfp8", SM_90, 64, 64, options=TRANSFORMED_STOCHASTIC
    )
    self.assertFalse(config.hardware_cast)

  def test_names_say_what_is_added(self):
    options = dataclasses.replace(TRANSFORMED_STOCHASTIC, is_square=True)
    x = quantize_cases.rows_of(
      64, 256, global_scale="computed", options=options
    )
    names = [launch.name for launch in quantize_plans.plan(x, SM_90)]
    self.assertEqual(
      names,
      [
        "finite_amax_hadamard64_square_16x256",
        "quantize_nvfp4_hadamard64_square_stochastic_16x256",
      ],
    )


@functools.cache
def compiled(
  kernel,
  format_name,
  target,
  dtype,
  k_is_contiguous=True,
  transposed=True,
  options=(PLAIN, PLAIN),
):
  """`kernel` for large, dense arrays, sizes constexprs as a lowering has it."""
  architecture = architectures.by_name(target)
  both = kernel in (quantize.quantize_both, global_scales.finite_amax_both)
  config = quantize_config.default_config(
    format_name, architecture, SIZE, SIZE, both=both,
    k_is_contiguous=k_is_contiguous, options=options[both],
  )  # fmt: skip
  facts = quantize_config.formats.by_name(format_name)
  constexprs = quantize_config.constexprs(
    config, format_name, options=options[0]
  )
  constexprs["QUANTIZED_T"] = dataclasses.replace(
    constexprs["QUANTIZED"], options=options[1]
  )
  constexprs["TRANSPOSED"] = transposed
  constexprs["VALUES_TRANSPOSED"] = transposed or facts.is_packed
  constexprs = {n: c for n, c in constexprs.items() if n in kernel.arg_names}
  for name in kernel.arg_names:
    if name.endswith("_strides"):
      per_k = {"values": facts.values_per_byte, "scale": facts.block_size}
      row = SIZE // per_k.get(name.removesuffix("_strides"), 1)
      minor = (row, 1) if k_is_contiguous else (1, row)
      constexprs[name] = (SIZE * SIZE, *minor)
    if name.startswith("random_places"):
      constexprs[name] = (((0, SIZE * SIZE),), ((0, SIZE),), ((0, 1),))
    if name in ("rows", "k", "k_t", "columns") or name.startswith("grid_"):
      constexprs[name] = SIZE
  constexprs |= {
    name: number
    for name, number in {"ROW": 0, "PROGRAMS": 512, "TILES": 4096}.items()
    if name in kernel.arg_names
  }
  types = {"x": f"*{dtype}"}
  types |= dict.fromkeys(("global_scale", "global_scale_t"), "*fp32")
  types |= dict.fromkeys(("key", "key_t"), "*u32")
  types |= dict.fromkeys(("computed_scale", "computed_scale_t"), "*fp32")
  types["maxima"] = "*u32"
  return kernel_compile.compile_kernel(
    kernel,
    {
      name: types.get(name, "*u8")
      for name in kernel.arg_names
      if name not in constexprs
    },
    constexprs,
    architecture,
    num_warps=config.num_warps,
  )


# Claim, kernel, format, architectures, and options of `compiled`.
# fmt: off
OTHERS = (
  ("mxfp8_both_ways", quantize.quantize_both, "mxfp8",
   ("sm_90", "sm_100", "gfx950"), {}),
  ("nvfp4_both_ways", quantize.quantize_both, "nvfp4",
   ("sm_90", "sm_100", "gfx950"), {}),
  ("both_ways_in_place", quantize.quantize_both, "mxfp8",
   ("sm_90", "gfx950"), {"transposed": False}),
  ("largest_magnitudes_both_ways", global_scales.finite_amax_both, "nvfp4",
   ("sm_100", "gfx950"), {}),
  ("f32_input", quantize.quantize, "mxfp4",
   ("sm_90", "gfx942"), {"dtype": "fp32"}),
  ("axis_that_is_not_contiguous", quantize.quantize, "mxfp8",
   ("sm_90", "gfx942"), {"k_is_contiguous": False}),
)
# fmt: on


class CompiledTest(parameterized.TestCase):
  def check(self, kernel):
    self.assertEqual(kernel.spill_bytes, 0)
    self.assertIsNone(kernel.limit_error)
    # All loads of x; 32 bits are the global scale.
    self.assertContainsSubset({128}, kernel.global_load_bits)
    self.assertContainsSubset(kernel.global_load_bits, {32, 128})
    # No instruction flushes subnormals. Arguments and results of reciprocals
    # are never subnormal.
    if kernel.architecture.is_nvidia:
      assembly = kernel.assembly.replace("rcp.approx.ftz.f32", "")
      self.assertNotIn(".ftz", assembly)
    else:
      self.assertIn(".amdhsa_float_denorm_mode_32 3", kernel.assembly)

  @parameterized.product(
    target=("sm_80", "sm_90", "sm_100", "gfx942", "gfx950"),
    format_name=("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4"),
  )
  @pytest.mark.sample(2)
  def test_nothing_spills_and_loads_are_wide(self, target, format_name):
    self.check(compiled(quantize.quantize, format_name, target, "bf16"))

  @parameterized.named_parameters(
    (f"{claim}_{target}", kernel, format_name, target, options)
    for claim, kernel, format_name, targets, options in OTHERS
    for target in targets
  )
  @pytest.mark.sample(7)  # each claim
  def test_others_spill_nothing_and_load_wide(
    self, kernel, format_name, target, options
  ):
    options = {"dtype": "bf16"} | options
    self.check(compiled(kernel, format_name, target, **options))

  @parameterized.parameters(
    ("sm_80", "mxfp4", TRANSFORMED_STOCHASTIC, True),
    ("sm_90", "mxfp4", TRANSFORMED_STOCHASTIC, False),
    ("sm_100", "nvfp4", TRANSFORMED_STOCHASTIC, False),
    ("sm_100", "nvfp4", SQUARE_CHOSEN, True),
    ("sm_120", "nvfp4", SQUARE_CHOSEN, False),
    ("gfx942", "mxfp4", TRANSFORMED_STOCHASTIC, True),
    ("gfx950", "nvfp4", SQUARE_CHOSEN, False),
  )
  @pytest.mark.sample(2)
  def test_what_recipes_add_spills_nothing(
    self, target, format_name, options, k_is_contiguous
  ):
    kernel = compiled(
      quantize.quantize,
      format_name,
      target,
      "bf16",
      k_is_contiguous,
      options=(options, options),
    )
    self.check(kernel)
    # The key's two words, and NVFP4's global scale: no random bits are read.
    narrow = 2 * options.is_stochastic + (format_name == "nvfp4")
    if kernel.architecture.is_nvidia:
      self.assertEqual(kernel.global_load_bits[32], narrow)

  @parameterized.parameters(
    ("mxfp8", "cvt.rn.satfinite.e4m3x2.f32"),
    ("mxfp8_e5m2", "cvt.rn.satfinite.e5m2x2.f32"),
  )
  @pytest.mark.sample(1)
  def test_fp8_is_cast_by_hardware_from_sm_89_on(
    self, format_name, instruction
  ):
    text = compiled(quantize.quantize, format_name, "sm_90", "bf16").assembly
    self.assertIn(instruction, text)
    text = compiled(quantize.quantize, format_name, "sm_80", "bf16").assembly
    self.assertNotIn(instruction, text)


if __name__ == "__main__":
  absltest.main()
