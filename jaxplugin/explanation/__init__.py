# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What was chosen, where and why; and what a GPU would make of it.

Everything here works without the GPU that it tells about.
"""
