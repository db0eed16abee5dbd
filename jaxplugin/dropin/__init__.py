# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls for existing code.

`jaxplugin.nn` has JAX's own names. `accelerate` and `quantize_dots` change
functions without a change to their code. `linear` is a layer, and `matmul` the
operator `@`.
"""
