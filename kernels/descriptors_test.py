# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors load the same tiles as the threads of a kernel."""

import dataclasses
import itertools

import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import absltest
from absl.testing import parameterized
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu import constraints
from jaxplugin.kernels.gpu import matmul_plans
from jaxplugin.kernels.gpu import tiles_by_rule

from jaxplugin.kernels import architectures
from jaxplugin.kernels import descriptors
from jaxplugin.testing import contract
from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import gpu_operands

UPCAST = configs.MatmulConfig(
  path="upcast",
  block_m=16,
  block_n=32,
  block_k=64,
  num_stages=1,
  use_descriptors=True,
)
NATIVE = dataclasses.replace(UPCAST, path="native", block_k=128)
# For each path a GPU whose views of the values that path uses.
ARCHITECTURES = {"upcast": "sm_90", "native": "sm_100"}

# m, n and k are not multiples of a tile. With the padding of `testing`, a row
# of k values is a multiple of 16 bytes. FP4_K has whole scale blocks, OTHER_K
# does not.
FP4_K, OTHER_K = 96, 112
UPCAST_PAIRS = (
  ("mxfp8", "mxfp8", OTHER_K),
  ("mxfp8_e5m2", "bf16", OTHER_K),
  ("f32", "mxfp8", OTHER_K),
  ("mxfp4", "nvfp4", FP4_K),
  ("mxfp8", "mxfp4", FP4_K),
  ("f16", "nvfp4", FP4_K),
)
NATIVE_PAIRS = (
  ("mxfp8", "mxfp8", OTHER_K),
  ("mxfp8_e5m2", "mxfp8", OTHER_K),
  ("mxfp4", "mxfp4", FP4_K),
  ("nvfp4", "nvfp4", FP4_K),
)
CASES = [
  (config, *pair)
  for config, pairs in ((UPCAST, UPCAST_PAIRS), (NATIVE, NATIVE_PAIRS))
  for pair in pairs
]


def replace(value, **changes):
  return dataclasses.replace(value, **changes)


def needs_interpreter(test):
  reason = interpret.unsupported()
  return absltest.skipIf(reason is not None, reason or "")(test)


@needs_interpreter
class MatmulTest(parameterized.TestCase):
  """Runs the kernels in the interpreter, with poison around the arrays."""

  def make(self, lhs, rhs, *, batch, m, n, k, **storage):
    rng = np.random.default_rng(len(self.id()))
    return (
      gpu_operands.make_operand(rng, lhs, (batch, m, k), **storage),
      gpu_operands.make_operand(rng, rhs, (batch, n, k), **storage),
    )

  def check(self, lhs, rhs, config):
    """Checks the error bound, and equal bits with and without descriptors."""
    architecture = ARCHITECTURES[config.path]
    result = gpu_operands.run(lhs, rhs, config, architecture=architecture)
    numbers = (((2,), (2,)), ((0,), (0,)))
    exact, magnitude = contract.dot(lhs.exact, rhs.exact, numbers)
    contract.assert_within(
      result, exact, contract.DOT_BOUND * magnitude, result.dtype
    )
    by_threads = gpu_operands.run(
      lhs,
      rhs,
      replace(config, use_descriptors=False),
      architecture=architecture,
    )
    np.testing.assert_array_equal(
      result.view(np.uint32), by_threads.view(np.uint32)
    )

  @parameterized.parameters(*CASES)
  @pytest.mark.sample(1)
  def test_tails_and_batch(self, config, lhs, rhs, k):
    self.check(*self.make(lhs, rhs, batch=2, m=19, n=35, k=k), config)

  @parameterized.parameters(*CASES[::3])
  @pytest.mark.sample(1)
  def test_swapped_and_split(self, config, lhs, rhs, k):
    config = replace(config, swap=True, split_k=3)
    self.check(*self.make(lhs, rhs, batch=1, m=7, n=33, k=k), config)

  @parameterized.parameters(UPCAST, NATIVE)
  @pytest.mark.sample(1)
  def test_sizes_of_one_have_any_stride(self, config):
    # The only row of lhs has 52 bytes and is followed by poison.
    lhs, rhs = self.make("mxfp4", "mxfp4", batch=1, m=1, n=1, k=104)
    self.assertNotEqual(lhs.kind.strides[1] % 16, 0)
    self.check(lhs, rhs, config)

  def test_interleaved_values(self):
    rng = np.random.default_rng(0)
    lhs = gpu_operands.make_operand(rng, "bf16", (2, 19, 96))
    rhs = gpu_operands.make_operand(rng, "nvfp4", (2, 35, 96), interleaved=True)
    self.check(lhs, rhs, UPCAST)


@triton.jit
def copy_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
  box = x.load([0, tl.program_id(0) * ROWS, 0]).reshape(ROWS, COLUMNS)
  rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  offsets = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
  tl.store(out + offsets, box)


@needs_interpreter
class InterpretTest(parameterized.TestCase):
  def copy(self, x, shape, strides=(512, 32, 1)):
    descriptor = descriptors.Descriptor(
      shape=shape, strides=strides, block_shape=(1, 4, 32)
    )
    out = np.full((8, 32), 9, np.uint8)
    interpret.launch(
      copy_kernel,
      2,
      descriptors.Described(x, descriptor),
      out,
      ROWS=4,
      COLUMNS=32,
    )
    return out

  def test_beyond_the_shape_are_zeros_not_neighbours(self):
    x = np.arange(1, 257, dtype=np.uint8).reshape(1, 8, 32)
    expected = np.zeros((8, 32), np.uint8)
    expected[:5, :17] = x[0, :5, :17]
    np.testing.assert_array_equal(self.copy(x, (1, 5, 17)), expected)

  def test_shape_beyond_the_array_is_seen(self):
    x = np.zeros((1, 7, 32), np.uint8)
    with self.assertRaisesRegex(
      interpret.InterpretError,
      r"program \(1, 0, 0\) .* reads at byte 224 counted .* of x",
    ):
      self.copy(x, (1, 8, 32))

  def test_column_between_the_rows_is_seen(self):
    x = np.zeros((1, 8, 48), np.uint8)[:, :, :31]
    with self.assertRaisesRegex(interpret.InterpretError, "reads at byte 31"):
      self.copy(x, (1, 8, 32), (512, 48, 1))

  def test_what_the_hardware_does_not_take_is_refused(self):
    x = np.zeros((1, 8, 40), np.uint8)
    with self.assertRaisesRegex(TypeError, "of x: strides .*16 bytes, got 40"):
      self.copy(x, (1, 8, 32), (320, 40, 1))
    with self.assertRaisesRegex(TypeError, "x must describe a NumPy array"):
      self.copy([1], (1, 8, 32))


class DescriptorTest(parameterized.TestCase):
  def test_of_an_operand_counts_stored_elements(self):
    shape = configs.MatmulShape(
      batch=3,
      m=20,
      n=40,
      k=128,
      lhs=configs.operand("bf16", 20, 128),
      rhs=configs.operand("nvfp4", 40, 128),
    )
    lhs, rhs = matmul_plans.operand_descriptors(shape, UPCAST)
    self.assertEqual(lhs.shape, (3, 20, 128))
    self.assertEqual(lhs.strides, (2560, 128, 1))
    self.assertEqual(lhs.block_shape, (1, 16, 64))
    self.assertEqual(rhs.shape, (3, 40, 64))
    self.assertEqual(rhs.strides, (2560, 64, 1))
    self.assertEqual(rhs.block_shape, (1, 32, 32))

  @parameterized.parameters(
    # bytes of an element, stride of the only row, in elements
    (1, 48),
    (2, 40),
    (4, 36),
  )
  def test_stride_of_one_row_becomes_a_valid_one(self, element_bytes, stride):
    descriptor = descriptors.describe(
      (1, 1, 35), (0, 35, 1), (16, 32), element_bytes
    )
    self.assertEqual(descriptor.strides, (stride, stride, 1))
    self.assertIsNone(descriptors.descriptor_error(descriptor, element_bytes))

  @parameterized.parameters(
    ((0, 64, 1), 1, (1, 16, 64), None),
    ((2**39, 64, 1), 1, (1, 256, 16), None),
    ((0, 1, 64), 1, (1, 16, 64), "k must be the minor dimension"),
    ((0, 72, 1), 1, (1, 16, 64), "multiples of 16 bytes, got 72"),
    ((0, 72, 1), 2, (1, 16, 64), None),
    ((40, 64, 1), 2, (1, 16, 64), None),
    ((40, 64, 1), 1, (1, 16, 64), "multiples of 16 bytes, got 40"),
    ((2**40, 64, 1), 1, (1, 16, 64), "below 2\\^40 bytes, got 1099511627776"),
    ((0, 64, 1), 1, (1, 512, 64), "256 rows, got 512"),
    ((0, 64, 1), 1, (1, 16, 8), "multiples of 16 bytes, got 8"),
    ((0, 64, 1), 2, (1, 16, 8), None),
  )
  def test_limits_of_strides_and_tiles(
    self, strides, element_bytes, block_shape, message
  ):
    descriptor = descriptors.Descriptor(
      shape=(2, 64, 64), strides=strides, block_shape=block_shape
    )
    error = descriptors.descriptor_error(descriptor, element_bytes)
    if message is None:
      self.assertIsNone(error)
    else:
      self.assertRegex(error, message)

  def test_array_without_elements_is_refused(self):
    for k in (0, 64):
      descriptor = descriptors.describe((1, 64, k), (0, 64, 1), (16, 64), 1)
      error = descriptors.descriptor_error(descriptor, 1)
      if k:
        self.assertIsNone(error)
      else:
        self.assertRegex(error, r"sizes must be positive, got \(1, 64, 0\)")


def product(lhs, rhs, *, m=256, k=256, lhs_k_is_minor=True, **options):
  return configs.MatmulShape(
    batch=1,
    m=m,
    n=256,
    k=k,
    lhs=configs.operand(lhs, m, k, k_is_minor=lhs_k_is_minor),
    rhs=configs.operand(rhs, 256, k),
    **options,
  )


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ("sm_90", UPCAST, product("mxfp8", "mxfp4"), None),
    ("sm_100", NATIVE, product("nvfp4", "nvfp4"), None),
    ("sm_120", NATIVE, product("mxfp8", "mxfp8_e5m2"), None),
    ("sm_89", UPCAST, product("mxfp8", "mxfp8"), "from sm_90 on, not sm_89"),
    ("gfx950", NATIVE, product("mxfp8", "mxfp8"), "from sm_90 on, not gfx950"),
    ("sm_100", NATIVE, product("mxfp8", "mxfp4"), "FP4 next to FP8 .* 'mxfp4'"),
    ("sm_100", UPCAST, product("mxfp8", "mxfp4"), None),
    (
      "sm_90",
      replace(UPCAST, path="small_m", block_k=128),
      product("bf16", "mxfp8"),
      "small_m kernel loads values by threads",
    ),
    (
      "sm_90",
      UPCAST,
      product("mxfp8", "mxfp4", k=272),
      "descriptor of rhs: strides must be .*, got 136",
    ),
    (
      "sm_90",
      UPCAST,
      product("bf16", "mxfp8", lhs_k_is_minor=False),
      "descriptor of lhs: k must be the minor dimension",
    ),
  )
  def test_what_takes_descriptors(self, name, config, shape, message):
    error = constraints.config_error(config, shape, architectures.by_name(name))
    if message is None:
      self.assertIsNone(error)
    else:
      self.assertRegex(error, message)

  def test_they_are_asked_for_never_the_default(self):
    shape = product("mxfp8", "mxfp8")
    for name in architectures.ARCHITECTURES:
      architecture = architectures.by_name(name)
      config = tiles_by_rule.default_config(shape, architecture, core_count=100)
      self.assertFalse(config.use_descriptors)
      try:
        config = tiles_by_rule.default_config(
          shape, architecture, core_count=100, use_descriptors=True
        )
      except ValueError:
        config = None
      else:
        self.assertTrue(config.use_descriptors)
      takes_them = name in ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
      self.assertEqual(config is not None, takes_them, name)

  @parameterized.parameters(
    ("sm_90", "mxfp8", 4096, "upcast"),
    ("sm_90", "bf16", 1, "upcast"),  # small_m without them
    ("sm_100", "mxfp8", 1, "native"),
  )
  def test_config_by_rule_that_is_to_have_them(self, name, lhs, m, path):
    shape = product(lhs, "mxfp8", m=m)
    architecture = architectures.by_name(name)
    config = tiles_by_rule.default_config(
      shape, architecture, core_count=100, use_descriptors=True
    )
    self.assertTrue(config.use_descriptors)
    self.assertEqual(config.path, path)
    self.assertIsNone(constraints.config_error(config, shape, architecture))

  def test_no_config_that_has_them_is_told_with_the_reason(self):
    with self.assertRaisesRegex(ValueError, "m=256 .* sm_90 on, not gfx942"):
      tiles_by_rule.default_config(
        product("mxfp8", "mxfp8"),
        architectures.by_name("gfx942"),
        core_count=100,
        use_descriptors=True,
      )


class PlanTest(parameterized.TestCase):
  @parameterized.parameters(*itertools.product(("mxfp8", "bf16"), (1, 4)))
  def test_values_are_described_and_scales_are_not(self, lhs, split_k):
    shape = product(lhs, "mxfp8", has_bias=True)
    config = replace(UPCAST, split_k=split_k)
    matmul, *rest = matmul_plans.plan(
      shape, config, architectures.by_name("sm_90")
    )
    described = dict(zip(matmul.inputs, matmul.descriptors, strict=True))
    self.assertEqual(described["rhs"].block_shape, (1, 32, 64))
    # In `inputs`, lhs replaces each absent array. These are pointers.
    is_described = [spec is not None for spec in matmul.descriptors]
    self.assertEqual(is_described, [True, False, True, *[False] * 6])
    tiling = dict(matmul.constexprs)["TILING"]
    self.assertTrue(tiling.lhs.is_described)
    self.assertTrue(tiling.rhs.is_described)
    self.assertEndsWith(matmul.name, "_tma")
    for launch in rest:
      self.assertFalse(any(launch.descriptors))
    element = {"mxfp8": "fp8e4nv", "bf16": "bf16"}[lhs]
    signature = matmul_plans.signature(matmul, shape)
    self.assertEqual(signature["lhs"], f"tensordesc<{element}[1,16,64]>")
    self.assertEqual(signature["rhs"], "tensordesc<fp8e4nv[1,32,64]>")
    self.assertEqual(signature["rhs_scale"], "*u8")
    absent = "*" + element
    self.assertEqual(signature["residual"], absent)


if __name__ == "__main__":
  absltest.main()
