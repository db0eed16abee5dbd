# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces matmuls in functions that do not call jaxplugin.

`accelerate` replaces JAX's scaled dots, `quantize_dots` the matmuls of
parameters, and `accept_quantized` those of weights that are quantized already.

`facts` records what is known of a value that is the product of arrays, through
reshapes, transposes and conversions. `sources` says whether a value is a
parameter. `calls` follows functions inside operations (`jit`, `scan`, `cond`).
`patterns` finds norms and activations, whose results matmuls quantize.

`accelerate` and `accept_quantized` work below JAX's transformations, where an
operation without a derivative can be replaced. `quantize_dots` works above
them, so that JAX uses the recipe's derivative.
"""
