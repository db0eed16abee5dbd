# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of other packages: their discovery and their calls.

`records` has their interface. `discovery` and `registry` find them, and
`adapters` adds them to the table of an operation. The module `views` of the
operation has the classes that they are passed.
"""
