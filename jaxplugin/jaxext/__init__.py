# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What this package adds to JAX, and the one door to JAX's private API.

Nothing here knows of block scales. `jax_private`, `binding_private` and
`jaxlib_private` hold all that is used of private modules, so that a new JAX is
met in three files.
"""
