# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A matmul in cuTile, its plans, and what compiles it."""
