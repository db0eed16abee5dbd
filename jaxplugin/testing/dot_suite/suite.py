# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of the dot must do, as one suite of tests.

A test file of an implementation subclasses `DotSuite`:

  class CpuDotTest(dot_suite.DotSuite):
    implementation = "cpu"

`dot_cases.DotTestCase` has the attributes that such a class may set.
"""

from __future__ import annotations

from jaxplugin.testing.dot_suite import bits
from jaxplugin.testing.dot_suite import epilogue
from jaxplugin.testing.dot_suite import shapes
from jaxplugin.testing.dot_suite import values


class DotSuite(
  shapes.DotShapesTestCase,
  values.DotValuesTestCase,
  bits.DotBitsTestCase,
  epilogue.DotEpilogueTestCase,
):
  """The numerical contract of one implementation."""
