# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Choices that hide memory latency in the matmul kernels.

They are pure functions of plain values and do not import Triton.
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
_LEAST_COPY_BYTES: Final = 4  # smallest cp.async (PTX ISA, "cp.async")


def reduce_block(elements: int) -> int:
  """Returns the number of elements that a program of the reduction sums.

  With one element a thread, ptxas, which uses 32 registers for such a kernel,
  loads all parts before it adds them and waits for memory once. With eight
  elements of 16 parts it would wait eight times. With many elements, programs
  run in several waves that hide this latency, so each has four a thread.

  Args:
    elements: number of elements of the result.
  """
  return _REDUCE_THREADS * (4 if elements > _MANY_ELEMENTS else 1)


def scales_ahead(
  shape: configs.MatmulShape,
  config: configs.MatmulConfig,
  architecture: architectures.Architecture,
) -> tuple[bool, bool]:
  """Returns `Tiling.scales_ahead`.

  The exceptions follow the model in `jaxplugin/lab/inspection/simulation.py`.
  """
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
    # More than 128 registers would leave one block on an SM instead of two.
    return False, False
  threads = config.num_warps * architecture.warp_size
  ahead = (
    _has_short_scales(lhs, config.block_m, config.block_k, threads),
    _has_short_scales(rhs, config.block_n, config.block_k, threads),
  )
  if config.path == "small_m":
    # If the weight's scales are copied asynchronously, loading those of lhs
    # ahead helps only blocks of four warps. A plain lhs of 64 rows leaves no
    # registers for scales of the next step.
    is_slower = config.num_warps > 4 and not ahead[1]
    is_full = not lhs.is_quantized and config.block_m > 32
    if is_slower or is_full:
      return False, False
    # The masks of a last step that overlaps need registers. If scales of
    # one-byte values were loaded ahead too, an SM would run one block of eight
    # warps instead of two.
    is_masked = shape.k % config.block_k > 0 and config.num_warps > 4
    return ahead[0] and (lhs.is_packed or not is_masked), ahead[1]
  if config.path == "native" and config.swap and not ahead[1]:
    # Scales of few rows of lhs arrive early enough without this.
    return False, False
  return ahead


def _has_short_scales(
  kind: configs.OperandKind, rows: int, block_k: int, threads: int
) -> bool:
  """Returns whether a thread's scales of a tile are too short for cp.async."""
  if not kind.scales_values or kind.is_swizzled:
    return False
  assert kind.scale_strides is not None
  columns = block_k // kind.values_per_scale
  in_line = math.gcd(columns, *kind.scale_strides[:-1])
  return min(rows * columns // threads, in_line) < _LEAST_COPY_BYTES
