# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that quantize, and the plans of their launches."""
