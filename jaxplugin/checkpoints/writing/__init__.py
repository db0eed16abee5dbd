# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints. Only this part of `checkpoints` imports an operation.

`selection` says which tensors are weights, and `weights` quantizes them.
`shards` computes a file's offsets before any value. `staging` renames the
result when all of it is on the disk.
"""
