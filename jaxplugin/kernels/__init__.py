# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels: Triton for GPUs, C++ for CPUs. No module here imports JAX.

A wheel installs them in this package. In a checkout they lie in `kernels/` at
the top level. An editable install knows that; without one this package adds the
folder to its path. The folder is never a top-level package of its own (PyPI's
`kernels` owns the name).
"""

import pathlib

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_KERNELS = _CHECKOUT / "kernels"
if (
  (_KERNELS / "cpu").is_dir()
  and (_CHECKOUT / "pyproject.toml").is_file()
  and str(_KERNELS) not in __path__
):
  __path__.append(str(_KERNELS))
