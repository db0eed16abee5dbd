# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of sides to bytes, which collectives move between devices."""

from __future__ import annotations

from jaxplugin.dot import sides
from jaxplugin.operation import byte_arrays


def to_bytes(side: sides.Side) -> sides.Side:
  """Views values and scale as bytes, with FP4 packed."""
  if side.format is None:
    return side
  assert side.axis is not None
  return side.replace(
    values=byte_arrays.to_bytes(byte_arrays.packed(side.values, side.axis)),
    scale=byte_arrays.to_bytes(side.scale),
  )


def from_bytes(side: sides.Side) -> sides.Side:
  """Undoes `to_bytes`, except that FP4 values stay packed."""
  if side.format is None:
    return side
  values = side.values
  if not side.format.is_fp4:
    values = byte_arrays.from_bytes(values, side.format.array_dtype)
  scale = byte_arrays.from_bytes(side.scale, side.format.scale_dtype)
  return side.replace(values=values, scale=scale)


def has_whole_pairs(side: sides.Side) -> bool:
  """Returns whether no byte holds FP4 values of two blocks."""
  format = side.format
  return format is None or not format.is_fp4 or format.block_size % 2 == 0
