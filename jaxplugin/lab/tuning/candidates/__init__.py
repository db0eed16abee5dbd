# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What may compute a product: candidates, and why others are pruned."""
