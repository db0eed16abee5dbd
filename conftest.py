# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What must be set before JAX starts."""

import os

# Without it the CUDA plugin, installed for its compiler, does not start where
# there is no GPU (jaxplugin/explanation/deviceless.py).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)  # for the sharding tests
