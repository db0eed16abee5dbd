# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for a backend of another package: `jaxplugin[testing]`.

  from jaxplugin import testing

  class AcmeTest(testing.BackendSuite):
    implementation = "acme"
    ...

`BackendSuite` (the dot), `RaggedBackendSuite`, `QuantizeBackendSuite`,
`DequantizeBackendSuite` and `contract` are public. `contract` makes operands
with known values, and compares results. Everything else in this folder is for
jaxplugin's own tests, and is in no wheel. Only tests import it.
"""

try:
  import absl.testing  # noqa: F401
except ImportError as error:
  raise ImportError(
    "jaxplugin.testing needs absl-py; pip install 'jaxplugin[testing]'"
  ) from error

from jaxplugin.testing import contract as contract
from jaxplugin.testing.dot_suite.backend_suite import (
  BackendSuite as BackendSuite,
)
from jaxplugin.testing.operation_suites import (
  DequantizeBackendSuite as DequantizeBackendSuite,
)
from jaxplugin.testing.operation_suites import (
  QuantizeBackendSuite as QuantizeBackendSuite,
)
from jaxplugin.testing.operation_suites import (
  RaggedBackendSuite as RaggedBackendSuite,
)
