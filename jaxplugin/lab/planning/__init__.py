# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts communication and memory of a model on GPUs that are not attached.

`collectives` counts the bytes that a compiled program moves between devices.
`blocks` defines the models, and `layouts` their shardings. `plans` compiles the
models and collects the costs. `report` prints plans.
"""
