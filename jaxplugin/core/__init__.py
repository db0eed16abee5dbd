# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats, targets, decisions and blockings, for all operations.

The package does not depend on operations or backends. It has plain data, pure
functions of such data, and functions that every package needs for its files.
"""
