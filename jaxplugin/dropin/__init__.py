# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls with JAX's names and signatures.

`jaxplugin.nn` has JAX's own names. `linear` is a layer, and `matmul` the
operator `@`.
"""
