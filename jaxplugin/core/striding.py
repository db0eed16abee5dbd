# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How operands lie, for kernels that take strides: in place, or copied.

Functions of shapes and dtypes. The problem that implementations are chosen by
and the lowering ask the same ones, so that both speak of the same kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxplugin.core import extents
from jaxplugin.core import formats as formats_lib

Dims = tuple[int, ...]
Strides = tuple[int, int, int]


def padded_size(
  size: int,
  formats: Sequence[formats_lib.BlockFormat | None],
  *,
  num_contracting: int,
) -> int:
  """The size that the blocked contracting dimension is padded to.

  Args:
    size: its own.
    formats: of both operands.
    num_contracting: one: FP4 needs an even size, for whole bytes. More: other
      dimensions follow it once they merge, so it needs whole blocks.
  """
  granule = 1
  for format in formats:
    if format is None:
      continue
    if num_contracting > 1:
      granule = math.lcm(granule, format.block_size)
    elif format.is_fp4:
      granule = math.lcm(granule, 2)
  return extents.round_up(size, granule)


def are_copied(
  size: int | None,
  formats: Sequence[formats_lib.BlockFormat | None],
  *,
  num_contracting: int,
) -> bool:
  """Whether both operands are copied to row-major [batch, rows, k].

  Args:
    size: of the contracting dimension, if there is one; None is symbolic.
    formats, num_contracting: see `padded_size`.
  """
  if num_contracting > 1:
    return True
  return size is not None and size != padded_size(
    size, formats, num_contracting=num_contracting
  )


def values_strides(
  values: Any,
  format: formats_lib.BlockFormat | None,
  *,
  batch: Dims,
  free: Dims,
  contracting: Dims,
) -> Strides | None:
  """Strides of (batch, row, k) of values that are not `are_copied`.

  Args:
    values: anything with a shape and a dtype. Strides of FP4 that is not packed
      are those of its bytes.
    format: of the operand.
    batch, free, contracting: all dimensions, by their kind.

  Returns:
    None if the values must be copied to row-major [batch, rows, k]. The reason
    is that dimensions that must merge are not adjacent, or that FP4 must be
    packed along k and k is not the last dimension.
  """
  shape = tuple(values.shape)
  is_fp4 = format is not None and format.is_fp4
  if is_fp4 and values.dtype == formats_lib.E2M1:
    if contracting != (len(shape) - 1,):
      return None
    shape = (*shape[:-1], shape[-1] // 2)
  return strides(shape, batch=batch, free=free, contracting=contracting)


def strides(
  shape: Sequence[int], *, batch: Dims, free: Dims, contracting: Dims
) -> Strides | None:
  """Strides of (batch, row, k) of a row-major array, if each has one."""
  of_dim = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

  def merged(dims: Dims, unit: int) -> int | None:
    dims = tuple(d for d in dims if shape[d] != 1)
    for outer, inner in itertools.pairwise(dims):
      if of_dim[outer] != of_dim[inner] * shape[inner]:
        return None
    return of_dim[dims[-1]] if dims else unit

  of_batch, of_row, of_k = (
    merged(batch, 0),
    merged(free, 0),
    merged(contracting, 1),
  )
  if of_batch is None or of_row is None or of_k is None:
    return None
  return of_batch, of_row, of_k
