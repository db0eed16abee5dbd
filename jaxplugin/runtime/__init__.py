# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Libraries of kernels, and lowering for each platform.

`triton_library` launches Triton kernels through jax-triton. `cpu_library`
registers the C++ handlers with XLA. `lowering` returns facts about the module
that a rule lowers into. `child_process` starts processes that may crash.
"""
