# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""From any dimension numbers to [batch, rows, k], which kernels take."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin import call
from jaxplugin import formats


def blocked_position(
  operand: call.OperandConfig, contracting: call.Dims
) -> int | None:
  """Which contracting dimension is blocked; None for a plain operand."""
  if operand.format is None:
    return None
  assert operand.axis is not None
  return contracting.index(operand.axis)


def last(contracting: call.Dims, position: int) -> call.Dims:
  """The contracting dimensions in order, but that of `position` last."""
  others = contracting[:position] + contracting[position + 1 :]
  return (*others, contracting[position])


def merge(
  x: jax.Array, *, batch: call.Dims, contracting: call.Dims
) -> jax.Array:
  """Transposes and reshapes to [batch, rows, contracting].

  Args:
    x: values, packed or not, or a linear scale of the same rank.
    batch: its batch dimensions.
    contracting: its contracting dimensions, the blocked one last.
  """
  free = call.free_dims(x.ndim, contracting, batch)
  sizes = [math.prod(x.shape[d] for d in dims) for dims in (batch, free)]
  x = jnp.transpose(x, (*batch, *free, *contracting))
  return x.reshape(*sizes, math.prod(x.shape[len(batch) + len(free) :]))


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
  """Appends zeros, or for E8M0, which has none, 2^-127, up to `size`."""
  axis %= x.ndim
  if x.shape[axis] == size:
    return x
  zero_code = jnp.zeros((), x.dtype)
  if x.dtype == formats.E8M0:  # it has no zero; byte 0 is its smallest
    zero_code = lax.bitcast_convert_type(jnp.zeros((), jnp.uint8), x.dtype)
  widths = [(0, 0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis], 0)
  return lax.pad(x, zero_code, widths)
