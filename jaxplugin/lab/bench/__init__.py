# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxplugin bench`: times each backend on this machine.

`measurement` verifies results, then times variants next to their peers.
`workloads` lists the problems. `peers` has operands, functions and checks.
`libraries` has peers that run in separate processes.
`timing` measures, `roofline` measures the limits of the device, `results`
stores and compares results, and `table` prints them.
"""
