# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ScaledArray`: its layouts, indexing, stacks and sharding.

Layouts (packed, interleaved, swizzled), indices, stacks, shardings, and the
layout that one device reads fastest.
"""
