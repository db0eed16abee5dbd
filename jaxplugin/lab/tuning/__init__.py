# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tuner: finds the fastest candidates for tuning tables.

`operations` has a record for each operation: operands with an exact expected
result, and the configs of backends. `listing` lists the ways to compute a
problem and removes slow ways. `machine` checks and times each candidate in a
process (`jobs`) that the tuner can stop (`pool`). The process pins the
candidate (`tables.resolution.pinned`) and checks that the decision is this
candidate. `session` converts times to rows, and `store` writes the rows.
"""
