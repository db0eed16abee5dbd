# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of arrays whose blocks have zero points or minima.

A dequantized value is `stored * scale + term`, where the term is one f32 for
each block. So the dot with `x` is the dot of stored values and scales, which
every backend computes, plus a second dot::

    dot(sums of x over the blocks, terms)

The second dot has one product where the first has a block. XLA computes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.dot import arguments
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import tangents

SCOPE: Final = "block_offsets"  # named scope of the second dot
_F32: Final = np.dtype(np.float32)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["array"],
  meta_fields=["name", "format"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Offset:
  """The offset of one operand of a product.

  Attributes:
    name: "lhs" or "rhs".
    format: the format of the operand, which has an `offset_dtype`.
    array: the zero points or minima, of the shape of the operand's scale.
  """

  name: str
  format: formats.BlockFormat
  array: Any


def has_offset(operand: Any) -> bool:
  return (
    isinstance(operand, scaled_array.ScaledArray) and operand.offset is not None
  )


def split(lhs: Any, rhs: Any) -> tuple[Any, Any, Offset | None]:
  """Returns both operands without an offset, and the offset of one or None.

  An lhs with an offset is dequantized to f32 if rhs is quantized, because block
  sums of rhs would read all weights once more.
  """
  for name, operand in (("lhs", lhs), ("rhs", rhs)):
    if has_offset(operand):
      arguments.require_arrays(name, operand)
  if has_offset(lhs) and isinstance(rhs, scaled_array.ScaledArray):
    lhs = lhs.dequantize()
  if has_offset(rhs):
    offset = Offset(name="rhs", format=rhs.format, array=rhs.offset)
    return lhs, rhs.without_offset(), offset
  if has_offset(lhs):
    offset = Offset(name="lhs", format=lhs.format, array=lhs.offset)
    return lhs.without_offset(), rhs, offset
  return lhs, rhs, None


def terms(
  scale: jax.Array, offset: jax.Array, format: formats.BlockFormat
) -> jax.Array:
  """Returns f32 terms such that values are `stored * scale + term`."""
  scale, offset = tangents.without_derivative(
    (scale, offset),
    f"{sides.who()}: scales and offsets of quantized operands have no"
    f" derivative. {derivatives.REMEDY}",
  )
  scale, offset = scale.astype(jnp.float32), offset.astype(jnp.float32)
  if format.has_zero_points:
    return (format.code_offset - offset) * scale
  return format.code_offset * scale + offset


def block_sums(x: jax.Array, axis: int, block_size: int) -> jax.Array:
  """Returns f32 sums over blocks of `axis`, the last of which may be short."""
  count = extents.divide_up(x.shape[axis], block_size)
  x = extents.pad_axis(x.astype(jnp.float32), axis, count * block_size)
  shape = (*x.shape[:axis], count, block_size, *x.shape[axis + 1 :])
  return jnp.sum(x.reshape(shape), axis=axis + 1)


def with_offset(
  call: calls.DotCall,
  offset: Offset,
  bind: Callable[[calls.DotCall], jax.Array],
) -> jax.Array:
  """Computes a call of which one operand has an offset.

  Args:
    call: a checked call of the operands without the offset.
    offset: the offset.
    bind: computes a call.
  """
  result = bind(call.bare())
  form = call.form()

  def function(
    result: jax.Array, offset: Offset, *arrays: jax.Array
  ) -> jax.Array:
    call = form.filled(arrays)
    with jax.named_scope(SCOPE):
      lhs, rhs = operands(call, offset)
      second = reference.plain_dot(lhs, rhs, call.dimension_numbers, _F32)
    return epilogue.apply(result + second, call)

  return derivatives.partitioned(function, result)(
    result, offset, *call.flatten()
  )


def operands(call: Any, offset: Offset) -> tuple[jax.Array, jax.Array]:
  """Returns lhs and rhs of the second dot in f32, without global scales.

  Args:
    call: a `DotCall` or a `RaggedDotCall` of operands without the offset.
    offset: the offset of one of them.
  """
  side, other = call.lhs, call.rhs
  if offset.name == "rhs":
    side, other = other, side
  position = side.blocked_position
  assert side.format is not None and position is not None
  axis = other.contracting[position]
  both = {
    side.name: terms(side.linear_scale(), offset.array, offset.format),
    other.name: block_sums(
      other.in_usual_order().dequantized(), axis, side.format.block_size
    ),
  }
  return both["lhs"], both["rhs"]
