# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions to JAX, and the only modules that use its private API.

Nothing here knows of block scales. `jax_private`, `binding_private`,
`jaxlib_private` and, in `partitioner`, `calls_private` and `contexts_private`
hold all that is used of private modules, so that a new JAX is met in five
files.
"""

from __future__ import annotations

import time
from typing import Final

# Before other files of the package are read, in ns since 1970.
IMPORTED_NS: Final = time.time_ns()
