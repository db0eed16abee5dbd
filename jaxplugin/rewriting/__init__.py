# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces matmuls in functions that do not call jaxplugin.

`accelerate` replaces JAX's scaled dots, `quantize_dots` the matmuls of
parameters, and `accept_quantized` those of weights that are quantized already.
"""
