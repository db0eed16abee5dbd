# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats, targets, decisions and blockings, for all operations.

Nothing here knows an operation or a backend. All of it is plain data and pure
functions of it.
"""
