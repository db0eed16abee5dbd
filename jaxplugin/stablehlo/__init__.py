# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads StableHLO modules and rewrites their block-scaled calls.

A child process parses untrusted modules first.
"""
