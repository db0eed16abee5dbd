# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes and memory of a model on many GPUs that need not be attached.

`collectives` counts the bytes that a compiled program moves between devices.
`blocks` and `layouts` have the models and their shardings. `plans` compiles
them and collects the figures.
"""
