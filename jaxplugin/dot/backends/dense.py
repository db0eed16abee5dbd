# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transposes sides of any dimension numbers to [batch, rows, k] for kernels."""

from __future__ import annotations

from jaxplugin.core import striding
from jaxplugin.dot import calls
from jaxplugin.dot import sides


def dense_sides(call: calls.Call) -> tuple[sides.Side, sides.Side]:
  """Returns both sides row-major, [batch, rows, k], with contiguous blocks.

  The blocked contracting dimension comes last in k. It is padded with zeros to
  whole blocks if k merges several dimensions, and to an even size for FP4. If
  the sides are blocked along different dimensions, lhs is dequantized to f32,
  whose subnormals XLA:CPU flushes. Scales are linear, without padding.
  """
  lhs, rhs = call.lhs.with_linear_scale(), call.rhs.with_linear_scale()
  positions = (lhs.blocked_position, rhs.blocked_position)
  if None not in positions and positions[0] != positions[1]:
    lhs = lhs.plain()
  blocked = lhs.blocked_position
  if blocked is None:
    blocked = rhs.blocked_position
  assert blocked is not None
  size = striding.padded_size(
    lhs.shape[lhs.contracting[blocked]],
    (lhs.format, rhs.format),
    num_contracting=len(lhs.contracting),
  )
  return _dense(lhs, blocked, size), _dense(rhs, blocked, size)


def _dense(side: sides.Side, blocked: int, size: int) -> sides.Side:
  return side.padded(side.contracting[blocked], size).merged(blocked)
