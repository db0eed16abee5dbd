# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of other packages: how they are found and called.

`records` defines their interface. `registry` finds them and adds
them to the table of an operation. The operation's module `views` defines the
problems and calls that they are passed.
"""
