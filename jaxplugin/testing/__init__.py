# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Support of the tests. No wheel has it, and nothing but tests imports it."""
