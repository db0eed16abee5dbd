# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints.

`selection` decides which tensors are weights, and `weights` quantizes them.
`staging` writes files, and renames the result when it is complete on the disk.
"""
