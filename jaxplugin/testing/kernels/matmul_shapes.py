# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products, a config and GPUs for the tests of what plans matmul launches."""

from __future__ import annotations

from typing import Any
from typing import Final

from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import configs

CONFIG: Final = configs.MatmulConfig(
  path="upcast", block_m=64, block_n=64, block_k=64, num_stages=2
)
SM_90: Final = architectures.by_name("sm_90")
SM_100: Final = architectures.by_name("sm_100")
CORES: Final = 132
SIZES: Final = (1, 16, 65, 4096)


def product(
  lhs: str = "mxfp8",
  rhs: str = "mxfp8",
  *,
  m: int = 256,
  n: int = 256,
  k: int = 256,
  **options: Any,
) -> configs.MatmulShape:
  """[m, k] x [n, k] of formats by name; `options` are the shape's fields."""
  fields: dict[str, Any] = {
    "batch": 1,
    "m": m,
    "n": n,
    "k": k,
    "lhs": configs.operand(lhs, m, k),
    "rhs": configs.operand(rhs, n, k),
  }
  return configs.MatmulShape(**(fields | options))
