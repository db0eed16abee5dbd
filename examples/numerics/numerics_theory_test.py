# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Noise against samples, and the formula against the paper."""

from __future__ import annotations

import functools
import math

import numerics_theory as theory
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp

SAMPLERS = {
  "Gaussian": lambda random, shape: random.normal(size=shape),
  "Laplace": lambda random, shape: random.laplace(scale=2**-0.5, size=shape),
}
BOTH = (theory.GAUSSIAN, theory.LAPLACE)
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SAMPLES = 400_000


class NoiseTest(parameterized.TestCase):
  def test_fine_uniform_levels_have_noise_of_a_twelfth_step_squared(self):
    levels = np.arange(0, 801) / 100
    noise = theory.rounding_noise(
      theory.GAUSSIAN, levels, np.ones(1), np.full(1, 8.0)
    )
    self.assertAlmostEqual(noise[0] / (0.01**2 / 12), 1, delta=1e-3)

  @parameterized.product(distribution=BOTH, largest=(0.2, 2.0, 30.0))
  def test_rounding_noise_is_that_of_samples(self, distribution, largest):
    random = np.random.default_rng(0)
    x = SAMPLERS[distribution.name](random, SAMPLES)
    x = np.abs(x[np.abs(x) <= largest])
    scale = 0.4
    nearest = np.abs(x[:, None] - scale * LEVELS).min(axis=1)
    noise = theory.rounding_noise(
      distribution, LEVELS, np.array([scale]), np.array([largest])
    )
    error = np.std(nearest**2) / math.sqrt(len(x))
    self.assertAlmostEqual(noise[0], np.mean(nearest**2), delta=4 * error)

  @parameterized.product(distribution=BOTH, block_size=(2, 16))
  def test_block_noise_is_that_of_samples(self, distribution, block_size):
    random = np.random.default_rng(1)
    x = SAMPLERS[distribution.name](random, (SAMPLES // block_size, block_size))
    x = np.abs(x)

    def scale_of(largest, power):
      return np.exp2(np.ceil(np.log2(largest / 6))) * power

    for power in (1.0, 0.5):  # 0.5: the larger half of the blocks saturates
      scale = scale_of(x.max(axis=1), power)[:, None, None]
      squares = np.square(np.abs(x[..., None] - scale * LEVELS).min(axis=2))
      noise = theory.block_noise(
        distribution,
        LEVELS,
        block_size,
        functools.partial(scale_of, power=power),
      )
      blocks = squares.mean(axis=1)
      error = 4 * np.std(blocks) / math.sqrt(len(blocks))
      error += 2 / theory.UNIFORM_CELLS * blocks.mean()  # of the integral
      self.assertAlmostEqual(noise, blocks.mean(), delta=error)

  def test_scale_of_zero_loses_the_block(self):
    noise = theory.block_noise(theory.GAUSSIAN, LEVELS, 16, np.zeros_like)
    self.assertAlmostEqual(noise, 1, delta=1e-4)  # all of the signal


class FormulaTest(parameterized.TestCase):
  # Figure 3 of arXiv 2510.25602v1 prints (crest factor, dB) where curves cross.
  @parameterized.parameters(
    (jp.MXFP8, 7.55, 1.5, 31.86, 0.005),
    (jp.MXFP4, 2.04, 1.5, 19.14, 0.005),
    (jp.NVFP4, 2.39, 1.0, 21.14, 0.085),  # unexplained
  )
  def test_formula_gives_the_values_printed(
    self, format, crest_factor, overhead, printed, delta
  ):
    value = theory.chen_qsnr_db(format, crest_factor, overhead)
    self.assertAlmostEqual(value, printed, delta=delta)

  @parameterized.parameters((jp.MXFP8, 3), (jp.MXFP8_E5M2, 2))
  def test_ample_range_leaves_the_mantissa(self, format, mantissa_bits):
    value = theory.chen_qsnr_db(format, 2.5, 1.5)
    self.assertAlmostEqual(value, 13.80 + 6.02 * mantissa_bits, delta=0.01)
