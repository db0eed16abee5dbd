# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `quantize_dots` does with the products of a function.

`flow` follows parameters, `sites` says which products are taken by default,
`transforms` what was asked for, and `rewriting` replaces them, with `calls` for
operations that have functions inside.
"""
