# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizing a checkpoint into another tool's layout, a tensor at a time."""
