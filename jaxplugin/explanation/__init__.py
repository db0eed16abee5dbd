# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Chosen backends and their reasons, and output of GPU compilers.

Nothing in this package needs the GPU that it describes.
"""
