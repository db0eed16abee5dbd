# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tuner: finds the fastest candidates for tuning tables."""
