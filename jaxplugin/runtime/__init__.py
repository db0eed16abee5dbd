# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries of kernels, and lowering for each platform.

`triton_library` launches Triton kernels through jax-triton, `cpu_library` makes
the C++ handlers known to XLA, `lowering` says what a lowering rule may assume.
"""
