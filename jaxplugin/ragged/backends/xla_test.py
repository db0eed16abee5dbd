# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The suite of the ragged dot for the xla implementation."""

from absl.testing import absltest

from jaxplugin.testing.dot_suite import ragged_suite


class RaggedTest(ragged_suite.RaggedSuite):
  implementation = "xla"


if __name__ == "__main__":
  absltest.main()
