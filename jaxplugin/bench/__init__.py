# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxplugin bench`: how fast each implementation is here.

`command` runs it. Results are verified, then timed beside their peers in one
run: `rows` says what is measured, `operands` makes the data, `variants` the
functions, `verification` checks them, `timing` measures, `ceilings` finds what
the device can do, `results` keeps and compares, `table` and `plot` show.
"""
