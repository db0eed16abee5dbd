# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The product of two global scales, which a kernel multiplies by."""

import numpy as np
import pytest
import triton
import triton.language as tl
from absl.testing import parameterized
from jaxplugin.kernels.gpu import epilogues

from jaxplugin.testing.interpreter import interpret
from jaxplugin.testing.kernels import matmul_shapes

SIZE = 1024
SHAPE = matmul_shapes.product(
  "f32", "f32", 1, 1, 1, has_global_scale=True, has_two_global_scales=True
)
# Two roundings of what is normal: of the significands' product, and of its
# product with x. A power of two follows, which rounds a subnormal result alone.
RTOL = 2 * 2.0**-24 * (1 + 2.0**-20)
ATOL = 2.0**-150
SPECIAL = np.float32(
  [0, -0.0, 2.0**-126, 1, -3, 2.0**127, np.inf, -np.inf, np.nan]
)

setUpModule = interpret.skip_unless_supported


@triton.jit
def scaled_kernel(
  x, first, second, out, SHAPE: tl.constexpr, BLOCK: tl.constexpr
):
  """out[i] = x[i] * first * second: the epilogue without all else."""
  offsets = tl.arange(0, BLOCK)
  mask = offsets < BLOCK
  result = epilogues.apply_epilogue(
    tl.load(x + offsets),
    (first, second, x, x),
    offsets,
    offsets,
    mask,
    mask,
    SHAPE,
  )
  tl.store(out + offsets, result)


def scaled(x, first, second):
  out = np.full(SIZE, -77, np.float32)
  arrays = (np.float32([first]), np.float32([second]), out)
  constants = {"SHAPE": SHAPE, "BLOCK": SIZE}
  interpret.launch(scaled_kernel, 1, x, *arrays, **constants)
  return out


class TwoGlobalScalesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    exponents = rng.integers(-30, 30, SIZE)
    self.x = (rng.normal(size=SIZE) * 2.0**exponents).astype(np.float32)

  @parameterized.parameters(
    (0.37, -1.7),
    (2.0**-68, 1.5 * 2.0**-42),
    (3e-38, 2.9e38),
    (1.1e25, 1.3e10),
    (-1e-30, 3e-5),
  )
  def test_result_is_that_of_the_exact_product(self, first, second):
    first, second = np.float32([first, second])
    got = scaled(self.x, first, second)
    exact = np.float64(self.x) * np.float64(first) * np.float64(second)
    is_held = np.abs(exact) < 2.0**127
    self.assertGreater(np.mean(is_held), 0.5)
    np.testing.assert_allclose(
      np.float64(got)[is_held], exact[is_held], rtol=RTOL, atol=ATOL
    )

  def test_powers_of_two_are_exact(self):
    for first, second in ((2.0**-101, 2.0**100), (2.0**-126, -(2.0**125))):
      np.testing.assert_array_equal(
        scaled(self.x, first, second), self.x * np.float32(first * second)
      )

  @parameterized.parameters(*SPECIAL)
  @pytest.mark.sample(1)
  def test_what_is_no_normal_number_stays_what_it_is(self, first):
    x = np.resize(np.float32([1.5, -1.5]), SIZE)
    for second in SPECIAL:
      with np.errstate(all="ignore"):
        exact = np.float64(x) * (np.float64(first) * np.float64(second))
        expected = exact.astype(np.float32)
      got = scaled(x, first, second)
      np.testing.assert_array_equal(got, expected, f"{first} {second}")
      np.testing.assert_array_equal(
        np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)]
      )
