# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Launches of the quantize kernels, and what they compile to."""

import dataclasses
import functools

import pytest
from absl.testing import parameterized
from jaxplugin.kernels.gpu.quantization import quantize_config, quantize_plans

from jaxplugin.core import formats
from jaxplugin.kernels import architectures
from jaxplugin.kernels import formats as kernel_formats
from jaxplugin.testing.kernels import executed, quantize_cases

SM_90 = architectures.by_name("sm_90")
CONFIG = quantize_config.QuantizeConfig(
  block_m=16, block_k=64, num_warps=1, hardware_cast=False
)
SIZE = 4096
rows_of = quantize_cases.rows_of
PLAIN = quantize_config.NO_OPTIONS
TRANSFORMED_STOCHASTIC = quantize_config.QuantizeOptions(
  hadamard=64, sign_words=(0x1234567, -5), factor=0.125, is_stochastic=True
)
SQUARE_CHOSEN = quantize_config.QuantizeOptions(
  is_square=True, four_over_six=True
)

SQUARE_64 = quantize_config.QuantizeOptions(is_square=True, hadamard=64)


class ConfigTest(parameterized.TestCase):
  def test_every_format_of_the_package_is_known(self):
    names = [format.name for format in formats.FORMATS]
    self.assertContainsSubset(names, kernel_formats.FORMATS)

  def test_unknown_names_list_the_known(self):
    for changes, message in (
      ({"format": "fp6"}, "'fp6'.*mxfp8, mxfp8_e5m2"),
      ({"scale_rounding": "down"}, "up.*floor.*'down'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        quantize_plans.plan(rows_of(64, 64, **changes), SM_90)

  def test_grid_covers_the_array_and_the_padding_of_scales(self):
    self.assertEqual(quantize_config.num_tiles(CONFIG, 3, 17, 65), 3 * 2 * 2)
    self.assertEqual(rows_of(17, 80).covered(), (17, 80))
    self.assertEqual(rows_of(17, 80, swizzled=True).covered(), (128, 128))

  @parameterized.parameters(
    ({"rows": 1, "k": 32}, (1, 32)),
    ({"rows": 4096, "k": 4096}, (16, 256)),
    ({"rows": 1, "k": 64, "format": "nvfp4", "options": SQUARE_64}, (16, 64)),
    (
      {"rows": 4096, "k": 4096, "k_is_minor": False, "options": SQUARE_64},
      (128, 64),
    ),
  )
  def test_tiles_are_small_for_small_arrays_and_have_whole_groups(
    self, fields, tile
  ):
    x = rows_of(**({"format": "mxfp8"} | fields))
    config = quantize_config.default_config(x, SM_90)
    self.assertEqual((config.block_m, config.block_k), tile)
    self.assertEqual(config.num_warps, max(1, tile[0] * tile[1] // 1024))

  def test_random_rounding_is_not_the_hardwares(self):
    for options in (PLAIN, TRANSFORMED_STOCHASTIC):
      x = rows_of(64, 64, "mxfp8", options=options)
      config = quantize_config.default_config(x, SM_90)
      self.assertEqual(config.hardware_cast, options is PLAIN)

  def test_names_say_what_is_added(self):
    options = dataclasses.replace(TRANSFORMED_STOCHASTIC, is_square=True)
    x = rows_of(64, 256, global_scale="computed", options=options)
    names = [launch.name for launch in quantize_plans.plan(x, SM_90)]
    self.assertEqual(
      names,
      [
        "finite_amax_hadamard64_square_16x256",
        "quantize_nvfp4_hadamard64_square_stochastic_16x256",
      ],
    )


@functools.cache
def compiled(kernel, format_name, target, dtype="bfloat16", **fields):
  """Returns `kernel` for large arrays, compiled as it is planned.

  Args:
    kernel: key of `quantize.KERNELS`.
    format_name, target: names.
    dtype: dtype of x.
    **fields: other fields of `Rows` or `Matrices`.
  """
  architecture = architectures.by_name(target)
  fields |= {"format": format_name, "packed_in_place": True}
  fields["global_scale"] = "given" if format_name == "nvfp4" else "none"
  if kernel == "quantize":
    x = rows_of(SIZE, SIZE, **fields)
    (launch,) = quantize_plans.plan(x, architecture)
  else:
    sizes = dict.fromkeys(("rows", "columns", "k", "k_t"), SIZE)
    sizes |= {"batch": 1, "is_transposed": True}
    x = quantize_config.Matrices(**(sizes | fields))
    launch = quantize_plans.plan_maxima(x, architecture)
    if kernel == "quantize_both":
      (launch,) = quantize_plans.plan(x, architecture)
  dtypes = {"x": dtype, "key": "uint32"}
  return executed.compiled_quantize(
    target,
    launch,
    tuple(dtypes.get(name, "float32") for name in launch.inputs),
  )


# Claim, kernel, format, architectures, and options of `compiled`.
OTHERS = (
  ("mxfp8_both_ways", "quantize_both", "mxfp8",
   ("sm_90", "sm_100", "gfx950"), {}),
  ("nvfp4_both_ways", "quantize_both", "nvfp4",
   ("sm_90", "sm_100", "gfx950"), {}),
  ("both_ways_in_place", "quantize_both", "mxfp8",
   ("sm_90", "gfx950"), {"is_transposed": False}),
  ("largest_magnitudes_both_ways", "finite_amax", "nvfp4",
   ("sm_100", "gfx950"), {}),
  ("f32_input", "quantize", "mxfp4",
   ("sm_90", "gfx942"), {"dtype": "float32"}),
  ("axis_that_is_not_contiguous", "quantize", "mxfp8",
   ("sm_90", "gfx942"), {"k_is_minor": False}),
)  # fmt: skip


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
    self.check(compiled("quantize", format_name, target))

  @parameterized.named_parameters(
    (f"{claim}_{target}", kernel, format_name, target, options)
    for claim, kernel, format_name, targets, options in OTHERS
    for target in targets
  )
  @pytest.mark.sample(7)  # each claim
  def test_others_spill_nothing_and_load_wide(
    self, kernel, format_name, target, options
  ):
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
    self, target, format_name, options, k_is_minor
  ):
    kernel = compiled(
      "quantize",
      format_name,
      target,
      k_is_minor=k_is_minor,
      options=options,
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
    for name in ("sm_80", "sm_90"):
      text = compiled("quantize", format_name, name).assembly
      self.assertEqual(instruction in text, name == "sm_90")
