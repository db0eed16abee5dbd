# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates that go wrong, and devices that are simulated, for the tuner."""
