# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs on many GPUs that are not here: bytes and memory.

`collectives` counts what a compiled program moves between devices, `blocks` and
`layouts` are the models and their shardings, `plans` compiles and measures.
"""
