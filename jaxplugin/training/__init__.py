# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What training needs: a `dot_general` that quantizes, and memory policies."""
