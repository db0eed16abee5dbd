# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the test suite of every backend on this one, which is installed."""

from absl.testing import absltest

import jaxplugin as jp
from jaxplugin import testing


class BlockwiseTest(testing.BackendSuite):
  implementation = "blockwise"
  kinds = (
    (jp.MXFP8, jp.MXFP8),
    (jp.MXFP8, jp.MXFP4),
    (jp.MXFP4, jp.MXFP8_E5M2),
  )
  sizes = ((1, 1, 48, 128), (2, 6, 34, 64))
  cases_per_test = 1
  exact_beyond_f32 = True


if __name__ == "__main__":
  absltest.main()
