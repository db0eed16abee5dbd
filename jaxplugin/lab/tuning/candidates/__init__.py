# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates for a problem, and the reasons why others are pruned."""
