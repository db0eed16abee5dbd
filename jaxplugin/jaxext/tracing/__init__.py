# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Observes and replaces operations during tracing, and finds their source."""
