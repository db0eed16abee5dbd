# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with checks of memory accesses, for tests."""
