# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures, tunes and compiles. The library never imports this package.

`compilation` runs XLA's and Triton's GPU compilers on a machine without that
GPU. `inspection` reads machine code, models its time, and executes PTX.
`planning` counts the bytes that a sharded model moves and keeps. `bench` times
backends beside peers and the roofline. `tuning` measures the rows of tuning
tables. `commands` has the commands bench, compile, kernels, plan and tune.
`file_locks` has the locks of files that several processes change.
"""
