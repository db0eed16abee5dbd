# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for absent GPUs, then reads and executes their code."""
