# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Eight virtual CPU devices for the sharding tests, before JAX starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
