# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions to JAX, and the only modules that use its private API.

The modules do not depend on block scales. Modules with a name that ends in
`_private` use private modules of JAX and jaxlib. A new JAX version can break
only these.
"""

from __future__ import annotations

import time
from typing import Final

# Time before other files of the package are read, in ns since 1970.
IMPORTED_NS: Final = time.time_ns()
