# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot`: its rules, backends, derivatives and sharding.

`api` binds `primitive.block_scaled_dot_p` to the arguments that `arguments`
checks. The lowering calls `backends.choose`, which picks a backend for the
target and records why the others are refused. `offsets` adds the zero points or
minima of an operand.
`reference` computes the results that tests expect.
"""

from jaxplugin.dot.api import block_scaled_dot as block_scaled_dot
from jaxplugin.dot.arguments import Operand as Operand
from jaxplugin.dot.arguments import as_operand as as_operand
from jaxplugin.dot.arguments import integers as integers
