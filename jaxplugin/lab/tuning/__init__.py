# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tuner: finds the fastest candidates for tuning tables.

`operations` has a record for each operation: its operands, which a test can
compute exactly, and the configs of its backends. `candidates` lists the ways of
computing a problem and removes slow ones. `trials` checks and times one in a
process that the tuner can stop: it pins the candidate
(`tables.resolution.pinned`), then checks that the decision used it. `session`
turns times into rows, which `store` writes.
"""
