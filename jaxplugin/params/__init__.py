# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models with quantized weights: trees of them, and code that takes them.

`quantize_params` makes them, `accept_quantized` has a model's own code run with
them.
"""
