# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the dot must do, as one suite of tests.

A test file of an implementation subclasses `DotSuite`:

  class CpuDotTest(dot_suite.DotSuite):
    implementation = "cpu"

`dot_testing.DotTestCase` has the attributes that such a class may set.
"""

from __future__ import annotations

from jaxplugin import dot_bits_testing
from jaxplugin import dot_epilogue_testing
from jaxplugin import dot_shapes_testing
from jaxplugin import dot_values_testing


class DotSuite(
  dot_shapes_testing.DotShapesTestCase,
  dot_values_testing.DotValuesTestCase,
  dot_bits_testing.DotBitsTestCase,
  dot_epilogue_testing.DotEpilogueTestCase,
):
  """The numerical contract of one implementation."""
