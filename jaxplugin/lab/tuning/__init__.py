# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tuner: which candidate is fastest here, for the tables of choices."""
