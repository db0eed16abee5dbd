# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot`: its rules, backends, derivatives and sharding.

`api` checks arguments and binds `primitive.block_scaled_dot_p`; its lowering
asks `backends` which implementation takes the call on this target, and why the
others do not. `reference` is the meaning of it all.
"""

from jaxplugin.dot.api import Operand as Operand
from jaxplugin.dot.api import as_operand as as_operand
from jaxplugin.dot.api import block_scaled_dot as block_scaled_dot
from jaxplugin.dot.api import integers as integers
from jaxplugin.dot.api import vary_alike as vary_alike
