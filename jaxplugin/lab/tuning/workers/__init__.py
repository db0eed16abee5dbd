# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that run trials, which may crash, hang or take all memory."""
