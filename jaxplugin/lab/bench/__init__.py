# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxplugin bench`: how fast each implementation is here.

`runs` does one. Results are verified, then timed beside their peers in the same
run: `workloads` says what is measured, `peers` has the operands, the functions
and their checks, `timing` measures, `roofline` finds what the device can do,
`report` keeps, compares and shows.
"""
