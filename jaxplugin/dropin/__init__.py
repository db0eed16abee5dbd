# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers: matmuls, norms and activations.

`jaxplugin.nn` has the names of `jax.nn`, and norms and activations that can
quantize their result (`producers`). `linear` is a layer.
"""
