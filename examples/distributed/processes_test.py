# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes compute what one does."""

import pathlib
import tempfile

import agreement
import jax
import numpy as np
import pytest
from absl.testing import absltest
from jax.sharding import Mesh

import jaxplugin as jp

# The contract's, in units of the sum of magnitudes, before the last rounding.
BOUND = 16 * 2.0**-24
SUMMED = ("dw", "dx", "summed")


class TwoProcessesTest(absltest.TestCase):
  PROCESSES = 2
  FORMATS = (jp.MXFP8,)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    formats = [str(format) for format in cls.FORMATS]
    options = ["--processes", str(cls.PROCESSES), "--formats", *formats]
    with tempfile.TemporaryDirectory() as folder:
      agreement.main([folder, *options])
      cls.found = agreement.read(pathlib.Path(folder))

  @pytest.mark.full
  def test_bits_are_equal_where_no_sum_crosses_devices(self):
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    expected = agreement.results(mesh, self.FORMATS)
    names = [name for name in expected if not name.endswith(SUMMED)]
    self.assertLen(names, 10 + len(self.FORMATS))
    for name in names:
      self.assertTrue(self.found[name].any(), name)
      np.testing.assert_array_equal(
        self.found[name], expected[name], err_msg=name
      )

  def test_sums_over_processes_are_within_the_contract(self):
    """Against NumPy in f64, of what one process quantizes."""
    arrays = agreement.operands()
    for format in self.FORMATS:

      def seen(name, axis, format=format):
        quantized = jp.quantize(arrays[name], format, axis=axis)
        return np.asarray(jp.dequantize(quantized), np.float64)

      for name, lhs, rhs in (
        ("summed", seen("x", 1), seen("w", 0)),
        ("dw", seen("x", 0).T, seen("g", 0)),
        ("dx", seen("g", 1), seen("w", 1).T),
      ):
        error = np.abs(self.found[f"{format}.{name}"] - lhs @ rhs)
        bound = BOUND * (np.abs(lhs) @ np.abs(rhs))
        self.assertTrue((error <= bound).all(), (name, (error / bound).max()))


@pytest.mark.full
class FourProcessesTest(TwoProcessesTest):
  PROCESSES = 4
  FORMATS = agreement.FORMATS
