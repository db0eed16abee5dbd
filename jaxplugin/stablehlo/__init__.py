# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""StableHLO modules: read, their block-scaled calls found, and rewritten.

Modules that nobody vouches for are parsed by a process of their own.
"""
