# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests a backend of another package; `pip install 'jaxplugin[testing]'`.

  from jaxplugin import testing

  class AcmeTest(testing.BackendSuite):
    implementation = "acme"
    ...

`BackendSuite` is public, as is `contract`, which makes operands of known value
and compares. All else in this folder supports jaxplugin's own tests, and is in
no wheel. Nothing but tests imports any of it.
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
