# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`jp.export`: exported modules that keep their kernels."""
