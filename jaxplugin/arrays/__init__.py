# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ScaledArray`, and what is done with one as a whole.

Layouts (packed, interleaved, swizzled), indices, stacks, shardings, and the
order that one device reads fastest.
"""
