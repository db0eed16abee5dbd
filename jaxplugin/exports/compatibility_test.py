# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of earlier releases give the same bits: docs/how_to/export.md."""

from __future__ import annotations

import jax.export
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.kernels.cpu import library
from jaxplugin.testing.exported import reading
from jaxplugin.testing.exported import release_0_1
from jaxplugin.testing.exported import sample

MODULES = {"release_0_1": release_0_1.MODULE}


class CompatibilityTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if jp.detect_target("cpu").cpu_kernels is None:
      self.skipTest("there are no kernels for CPUs here")

  @parameterized.parameters(*((name,) for name in MODULES))
  def test_module_of_a_release_gives_exact_results(self, name):
    exported = jax.export.deserialize(bytearray(sample.read(MODULES[name])))
    for m in (1, 5):
      results = exported.call(jnp.asarray(sample.rows(m)))
      expected = sample.expected(sample.rows(m))
      self.assertEqual({*results}, {*expected})
      for key, result in results.items():
        np.testing.assert_array_equal(
          np.asarray(result).astype(np.float64), expected[key], err_msg=key
        )

  def test_newest_of_them_calls_every_handler(self):
    *_, newest = MODULES.values()
    exported = jax.export.deserialize(bytearray(sample.read(newest)))
    self.assertEqual({*reading.calls_in(exported)}, {*library.HANDLERS})

  def test_export_of_today_is_of_the_same_calls(self):
    *_, newest = MODULES.values()
    then = jax.export.deserialize(bytearray(sample.read(newest)))
    now = jax.export.deserialize(bytearray(sample.export()))
    self.assertEqual(reading.calls_in(now), reading.calls_in(then))
