# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Variants of one matmul of a mixture of experts, with their operands."""
