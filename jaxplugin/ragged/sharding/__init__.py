# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a ragged dot is split over the devices of a mesh."""
