# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the ragged dot for the cpu implementation."""

import pytest
from absl.testing import absltest

from jaxplugin.testing.dot_suite import ragged_suite


@pytest.mark.sample(1)
class RaggedTest(ragged_suite.RaggedSuite):
  implementation = "cpu"
  has_loop = True


if __name__ == "__main__":
  absltest.main()
