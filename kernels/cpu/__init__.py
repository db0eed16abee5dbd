# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU kernels in C++: README.md beside this file describes them."""
