# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of other packages: how they are found, and called.

`records` has their interface, `discovery` and `registry` find them, and
`guests` makes them backends of an operation's table. What they see of a call is
in the `views` of the operation.
"""
