# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How quantizing and dequantizing are split over the devices of a mesh."""
