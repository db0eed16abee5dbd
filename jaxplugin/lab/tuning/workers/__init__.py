# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes in which trials run: whatever these do is an outcome."""
