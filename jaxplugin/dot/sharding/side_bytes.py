# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands as they travel between devices: quantized ones as bytes.

XLA:CPU widens collectives of 8-bit floats to 16 or 32 bits, and FP4 is not a
collective's type anywhere; uint8 is one everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.dot import sides


def without_words(side: sides.Side) -> sides.Side:
  """With FP4 values that come as words given as their bytes."""
  if not side.comes_as_words or _is_shardy():
    return side.with_bytes()
  # As below, without a bitcast that changes the shape.
  words = side.values
  shifts = jnp.arange(0, 32, 8, dtype=words.dtype)
  quadruples = (words[..., None] >> shifts).astype(jnp.uint8)
  values = quadruples.reshape(*words.shape[:-1], 4 * words.shape[-1])
  return side.replace(values=values, is_interleaved=True)


def _is_shardy() -> bool:
  return bool(jax.config.jax_use_shardy_partitioner)  # type: ignore[attr-defined]


def to_bytes(side: sides.Side) -> sides.Side:
  """With values and scale of bytes; FP4 packed, a plain operand as it is."""
  if side.format is None:
    return side
  assert side.axis is not None
  return side.replace(
    values=values_to_bytes(side.values, side.axis),
    scale=scale_to_bytes(side.scale),
  )


def values_to_bytes(values: jax.Array, axis: int) -> jax.Array:
  """Quantized values as bytes; FP4 packed along `axis`."""
  if values.dtype == formats.E2M1:
    pack: Any = layouts.pack_fp4 if _is_shardy() else _pack_fp4_elementwise
    values = pack(values, axis=axis)
  return _reinterpret(values, jnp.dtype(jnp.uint8))


def scale_to_bytes(scale: jax.Array) -> jax.Array:
  """Block scales as bytes."""
  return _reinterpret(scale, jnp.dtype(jnp.uint8))


def _pack_fp4_elementwise(values: jax.Array, *, axis: int) -> jax.Array:
  """`pack_fp4` in operations that GSPMD propagates shardings through.

  It replicates the operand of a bitcast that changes the shape.
  """
  nibbles = lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
  shape = values.shape
  pairs = nibbles.reshape(
    *shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :]
  )
  low = lax.index_in_dim(pairs, 0, axis + 1, keepdims=False)
  high = lax.index_in_dim(pairs, 1, axis + 1, keepdims=False)
  return low | (high << 4)


def from_bytes(side: sides.Side) -> sides.Side:
  """The side of which `to_bytes` made these; FP4 values stay packed."""
  if side.format is None:
    return side
  values = side.values
  if not side.format.is_fp4:
    values = _reinterpret(values, side.format.array_dtype)
  scale = _reinterpret(side.scale, side.format.scale_dtype)
  return side.replace(values=values, scale=scale)


def _reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
  """A bitcast between types of one byte; wider types, of formats that only
  the xla implementation serves, travel as they are."""
  if x.dtype.itemsize != dtype.itemsize:
    return x
  return lax.bitcast_convert_type(x, dtype)


class TypeShape:
  """Shape and dtype of an MLIR tensor type, as a `Side` reads them."""

  def __init__(self, tensor_type: Any) -> None:
    self.shape = tuple(tensor_type.shape)
    is_u8 = str(tensor_type.element_type) == "ui8"
    self.dtype = jnp.dtype(jnp.uint8) if is_u8 else None
