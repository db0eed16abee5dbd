# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports which backend computes each matmul, and why.

It works without the GPU that it reports on.
"""
