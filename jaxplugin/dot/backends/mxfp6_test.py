# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP6 by kernels that read the bytes: against f64 of ml_dtypes' values."""

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import reference
from jaxplugin.testing import interpreted

FORMATS = (jp.MXFP6_E2M3, jp.MXFP6_E3M2)
# (m, n, k, batch): one row, few, and tails of every tile.
SIZES = ((1, 40, 96, 1), (5, 33, 160, 2), (67, 70, 64, 1))


def array(format, shape, seed):
  """Every code, under scales around 1."""
  random = np.random.default_rng(seed)
  values = random.integers(0, 64, shape).astype(np.uint8)
  scale_shape = (*shape[:-1], shape[-1] // format.block_size)
  scale = random.integers(120, 134, scale_shape).astype(np.uint8)
  return jp.ScaledArray(values, scale.view(formats.E8M0), None, format)


def as_f64(x):
  """By ml_dtypes, which the package's decoders are not made of."""
  if not isinstance(x, jp.ScaledArray):
    return np.asarray(x, np.float64)
  values = np.asarray(x.values).view(x.format.values_dtype).astype(np.float64)
  scale = np.asarray(x.scale).astype(np.float64)
  return values * np.repeat(scale, x.format.block_size, axis=-1)


def other_side(kind, shape):
  if isinstance(kind, formats.BlockFormat) and kind in FORMATS:
    return array(kind, shape, 11)
  x = np.random.default_rng(12).normal(size=shape).astype(np.float32)
  return jp.quantize(x, kind, packed=False) if kind else x


class Mxfp6TestCase(parameterized.TestCase):
  """Products of MXFP6 with itself, with other formats and with floats."""

  implementation = ""
  target = jp.detect_target("cpu")

  def assert_product(self, lhs, rhs, **kwargs):
    exact_lhs, exact_rhs = as_f64(lhs), as_f64(rhs).swapaxes(-1, -2)
    exact = exact_lhs @ exact_rhs
    magnitude = np.abs(exact_lhs) @ np.abs(exact_rhs)
    with jp.use_target(self.target):
      result = jp.block_scaled_dot(
        lhs, rhs, implementation=self.implementation, **kwargs
      )
    error = np.abs(np.asarray(result, np.float64) - exact)
    np.testing.assert_array_less(
      error, reference.ERROR_BOUND * magnitude + 1e-300
    )

  def check_kinds(self, format, kind, sizes):
    m, n, k, batch = sizes
    w = array(format, (batch, n, k), 3)
    self.assert_product(other_side(kind, (batch, m, k)), w)
    self.assert_product(w, other_side(kind, (batch, m, k)))


class CpuTest(Mxfp6TestCase):
  implementation = "cpu"

  def setUp(self):
    super().setUp()
    if self.target.cpu_kernels is None:
      self.skipTest(self.target.missing(targets.CPU_KERNELS))

  @parameterized.product(
    format=FORMATS, kind=(*FORMATS, jp.MXFP8, jp.MXFP4, None), sizes=SIZES
  )
  @pytest.mark.sample(1)
  def test_product_is_within_the_bound(self, format, kind, sizes):
    self.check_kinds(format, kind, sizes)

  @parameterized.parameters(*FORMATS)
  def test_it_is_chosen(self, format):
    w = array(format, (64, 64), 3)
    (dot,) = jp.explain(jp.block_scaled_dot, w, w, target=self.target)
    self.assertEqual(dot.decision.implementation, "cpu")


@interpreted.needs_interpreter
class TritonTest(interpreted.RecordedTestCase, Mxfp6TestCase):
  implementation = "triton"
  target = jp.named_target("h200")

  @parameterized.product(
    format=FORMATS, kind=(*FORMATS, jp.MXFP8, None), sizes=SIZES[:2]
  )
  @pytest.mark.sample(1)
  def test_product_is_within_the_bound(self, format, kind, sizes):
    self.check_kinds(format, kind, sizes)
    self.assertNotEmpty(self.launched)

  @parameterized.product(format=FORMATS, target=("h200", "b200"))
  @pytest.mark.sample(1)
  def test_prepared_weights_give_the_same_bits(self, format, target):
    x = np.random.default_rng(5).normal(size=(5, 160)).astype(np.float32)
    w = array(format, (33, 160), 3)
    with jp.use_target(jp.named_target(target)):
      prepared = jp.prepare_weights(w)
      actual, expected = (
        jp.block_scaled_dot(x, each, implementation="triton")
        for each in (prepared, w)
      )
    is_swizzled = prepared.scale_layout == "swizzled_128x4"
    self.assertEqual(is_swizzled, target == "b200")
    np.testing.assert_array_equal(actual, expected)

  @parameterized.product(format=FORMATS, target=("h200", "b200", "a100"))
  def test_it_is_chosen(self, format, target):
    w = array(format, (64, 64), 3)
    target = jp.named_target(target)
    (dot,) = jp.explain(jp.block_scaled_dot, w, w, target=target)
    self.assertEqual(dot.decision.implementation, "triton")


del Mxfp6TestCase

if __name__ == "__main__":
  absltest.main()
