# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products, a config and GPUs for the tests of what plans matmul launches."""

from __future__ import annotations

from typing import Any, Final

from jaxplugin.kernels import architectures
from jaxplugin.kernels.gpu import configs
from jaxplugin.kernels.gpu.ragged import plans as ragged_plans

CONFIG: Final = configs.MatmulConfig(
  path="upcast", block_m=64, block_n=64, block_k=64, num_stages=2
)
SM_90: Final = architectures.by_name("sm_90")
SM_100: Final = architectures.by_name("sm_100")
CORES: Final = 132
SIZES: Final = (1, 16, 65, 4096)


# Small tiles of one stage, for the interpreter.
UPCAST: Final = configs.MatmulConfig(
  path="upcast", block_m=16, block_n=32, block_k=64, num_stages=1
)
NATIVE: Final = configs.MatmulConfig(
  path="native", block_m=16, block_n=32, block_k=128, num_stages=1
)
SMALL_M: Final = configs.MatmulConfig(
  path="small_m", block_m=16, block_n=32, block_k=128, num_stages=1, swap=True
)
PATHS: Final = {"upcast": UPCAST, "native": NATIVE, "small_m": SMALL_M}


def product(
  lhs: str = "mxfp8",
  rhs: str = "mxfp8",
  m: int = 256,
  n: int = 256,
  k: int = 256,
  *,
  k_is_minor: bool = True,
  interleaved: bool = False,
  swizzled: bool = False,
  groups: int | None = None,
  **options: Any,
) -> configs.MatmulShape:
  """Returns the shape of [m, k] x [n, k], or of a ragged product with groups.

  Args:
    lhs, rhs: formats by name.
    m, n, k: sizes.
    k_is_minor, interleaved: options of rhs.
    swizzled: whether the scales are, lhs's only without groups.
    groups: the number of groups of a ragged product.
    **options: other fields of the shape.
  """
  weight = (k, n) if options.get("is_across") else (n, k)
  fields: dict[str, Any] = {
    "batch": 1,
    "m": m,
    "n": n,
    "k": k,
    "lhs": configs.operand(lhs, m, k, swizzled=swizzled and groups is None),
    "rhs": configs.operand(
      rhs,
      *weight,
      k_is_minor=k_is_minor,
      interleaved=interleaved,
      swizzled=swizzled,
    ),
  }
  if groups is not None:
    return ragged_plans.RaggedShape(groups=groups, **(fields | options))
  return configs.MatmulShape(**(fields | options))
