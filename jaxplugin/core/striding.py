# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Strides of operands for kernels, and which operands must be copied.

These are functions of shapes and dtypes. Both the problem that backends are
chosen by and the lowering call them, so that both describe the same kernels.
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
  """Returns the padded size of the blocked contracting dimension.

  Args:
    size: size of the dimension.
    formats: formats of both operands.
    num_contracting: number of contracting dimensions. With one, 4-bit
      values need an even size, for whole bytes. With several, dimensions are
      merged, so each must have whole blocks.
  """
  granule = 1
  for format in formats:
    if format is None:
      continue
    if num_contracting > 1:
      granule = math.lcm(granule, format.block_size)
    elif format.has_pairs:
      granule = math.lcm(granule, 2)
  return extents.round_up(size, granule)


def are_copied(
  size: int | None,
  formats: Sequence[formats_lib.BlockFormat | None],
  *,
  num_contracting: int,
) -> bool:
  """Returns whether both operands are copied to row-major [batch, rows, k].

  Args:
    size: size of the contracting dimension; None if it is symbolic.
    formats, num_contracting: arguments of `padded_size`.
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
  """Returns strides of (batch, row, k) of values that are not `are_copied`.

  Args:
    values: an object with a shape and a dtype. For FP4 that is not packed, the
      strides count bytes of its packed form.
    format: format of the operand.
    batch, free, contracting: all dimensions, by kind.

  Returns:
    The strides. None if the values must be copied to row-major [batch, rows,
    k], because dimensions that must merge are not adjacent, or because FP4 must
    be packed along k and k is not the last dimension.
  """
  shape = tuple(values.shape)
  if format is not None and values.dtype in formats_lib.FOUR_BITS:
    if contracting != (len(shape) - 1,):
      return None
    shape = (*shape[:-1], shape[-1] // 2)
  return strides(shape, batch=batch, free=free, contracting=contracting)


def strides(
  shape: Sequence[int], *, batch: Dims, free: Dims, contracting: Dims
) -> Strides | None:
  """Returns strides of (batch, row, k) of a row-major array, or None."""
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
