# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels: Triton for GPUs, C++ for CPUs. No module here imports JAX.

A wheel installs them in this package. In a checkout they lie in `kernels/` at
the top level, which this package then adds to its path: that folder is never a
top-level package of its own (PyPI's `kernels` owns the name).
"""

import pathlib

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
if (_CHECKOUT / "kernels" / "cpu").is_dir() and (
  _CHECKOUT / "pyproject.toml"
).is_file():
  __path__.append(str(_CHECKOUT / "kernels"))
