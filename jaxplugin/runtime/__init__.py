# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a kernel is called from a JAX program, and on what platforms.

`triton_library` launches Triton kernels through jax-triton, `cpu_library` makes
the C++ handlers known to XLA, `lowering` says what a lowering rule may assume.
"""
