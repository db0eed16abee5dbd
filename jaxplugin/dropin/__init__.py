# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products written as people write them already.

JAX's own names (`jaxplugin.nn`), `accelerate` and `quantize_dots` for code that
is not to change, `linear` for a layer, and the operator `@`.
"""
