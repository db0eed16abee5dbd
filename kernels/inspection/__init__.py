# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for GPUs that are not there, and their machine code."""
