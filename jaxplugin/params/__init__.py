# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models with quantized weights.

`quantize_params` quantizes a tree of parameters, and `accept_quantized` runs a
model's own code with the result.
"""
