# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels: Triton for GPUs, C++ for CPUs. No module here imports JAX.

A wheel installs the kernels in this package. A checkout has them in `kernels/`
at the top level. An editable install maps that folder; otherwise this package
adds it to its path. The folder is not a top-level package, because PyPI's
`kernels` has that name.
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
