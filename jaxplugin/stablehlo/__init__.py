# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""StableHLO modules: reading, finding block-scaled calls, and rewriting.

A child process parses untrusted modules first.
"""
