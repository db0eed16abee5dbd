# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What of the matmul kernels is arranged so that memory is waited for less.

Pure functions of plain values; Triton is not imported here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from typing import Final

from jaxplugin.kernels import architectures

if TYPE_CHECKING:
  from jaxplugin.kernels.gpu import configs

REDUCE_WARPS: Final = 4
_REDUCE_THREADS: Final = 32 * REDUCE_WARPS
_MANY_ELEMENTS: Final = 1 << 20
_LEAST_COPY_BYTES: Final = 4  # PTX ISA, "cp.async"


def reduce_block(elements: int) -> int:
  """Elements that a program adds the parts of, of so many in all.

  One a thread: then ptxas, which spends 32 registers on such a kernel, loads
  all parts before it adds one, and memory is waited for once. With eight, of 16
  parts, it is waited for eight times. Where elements are so many that programs
  come in several waves, others hide that, and fewer programs are launched.
  """
  return _REDUCE_THREADS * (4 if elements > _MANY_ELEMENTS else 1)


def scales_ahead(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> tuple[bool, bool]:
  """`Tiling.scales_ahead`; exceptions are what the model of inspection says."""
  lhs, rhs = shape.lhs, shape.rhs
  if not architecture.is_nvidia or max(lhs.pieces, rhs.pieces) > 1:
    return False, False
  if config.path == "upcast" and architecture.multiplies_by_warp:
    # Main loops have 1 to 49 % fewer instructions.
    return True, True
  if (
    config.path == "upcast"
    and not (lhs.is_packed or rhs.is_packed)
    and lhs.is_quantized
    and rhs.is_quantized
    and lhs.k_is_minor
    and rhs.k_is_minor
  ):
    # With more than 128 registers one block would be left of an SM's two.
    return False, False
  threads = config.num_warps * architecture.warp_size
  ahead = (
    _has_short_scales(lhs, config.block_m, config.block_k, threads),
    _has_short_scales(rhs, config.block_n, config.block_k, threads),
  )
  if config.path == "small_m":
    # Where copies bring the weight's, those of lhs help in blocks of four warps
    # alone. A plain lhs of 64 rows leaves no registers for the next step's.
    is_slower = config.num_warps > 4 and not ahead[1]
    is_full = not lhs.is_quantized and config.block_m > 32
    if is_slower or is_full:
      return False, False
    # Where the last step overlaps its masks take registers. Then an SM has one
    # block of eight warps, not two, if scales of one-byte values are ahead too.
    is_masked = shape.k % config.block_k > 0 and config.num_warps > 4
    return ahead[0] and (lhs.is_packed or not is_masked), ahead[1]
  if config.path == "native" and config.swap and not ahead[1]:
    # Those of a few rows of lhs came early enough.
    return False, False
  return ahead


def _has_short_scales(
  kind: configs.OperandKind, rows: int, block_k: int, threads: int
) -> bool:
  """Whether a thread loads fewer bytes of a tile's scales than a copy takes."""
  if not kind.is_quantized or kind.is_swizzled:
    return False
  assert kind.scale_strides is not None
  columns = block_k // kind.values_per_scale
  in_line = math.gcd(columns, *kind.scale_strides[:-1])
  return min(rows * columns // threads, in_line) < _LEAST_COPY_BYTES
