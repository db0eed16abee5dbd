# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks and other signs by which a file calls its tensors quantized."""
