# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that XLA's partitioner splits, with stable names in modules."""
