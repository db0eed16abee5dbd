# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Side`: one operand of a block-scaled dot.

Members that need only shapes and dtypes (`shape`, `strides`, `problem`, ...)
support arrays, tracers, abstract values and `ShapeDtypeStruct`s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import problems
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import operations

WHO: Final = "block_scaled_dot"


def who() -> str:
  """Returns the name of the public function that errors name."""
  return error_context.who(WHO)


Dims = problems.Dims
_OF_STACK: Final = ("stack", "stack_scale", "layer")
_OF_ORIGIN: Final = (
  *_OF_STACK,
  "source",
  "source_global_scale",
  "square_scale",
)
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


def free_dims(ndim: int, contracting: Dims, batch: Dims) -> Dims:
  """Returns the dimensions that are neither contracting nor batch."""
  return tuple(
    d for d in range(ndim) if d not in contracting and d not in batch
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """One operand: its arrays, how they are stored, and its dimensions.

  Attributes:
    name: "lhs" or "rhs".
    values: quantized values, or plain floats.
    scale: block scales; None for a plain operand.
    global_scale: global scale of a `ScaledArray`, or None. A valid `DotCall`
      has the product of both sides' global scales instead.
    format: the block format; None for a plain operand.
    axis: the contracting dimension that is blocked (and packed); None if plain.
    scale_layout: "linear" or "swizzled_128x4".
    is_interleaved: whether FP4 values stored as bytes are interleaved. Values
      stored as uint32 words are always interleaved.
    contracting, batch: contracting and batch dimensions.
    stack, stack_scale, layer: arrays such that values = stack[layer] and scale
      = stack_scale[layer], with layer an i32[] in range; None if rhs is not a
      known slice. A backend may read the layer from the stack.
    source: floats that `quantize` quantized along the last dimension to values
      and scale; None if unknown. A backend that needs another layout may
      quantize them again.
    source_global_scale: global scale of `source`, f32 of one element, or None.
    square_scale: scale of square blocks, from which `in_rows` repeated `scale`;
      None if unknown. A backend may read it instead.
  """

  name: str
  values: Any
  scale: Any = None
  global_scale: Any = None
  format: formats.BlockFormat | None = None
  axis: int | None = None
  scale_layout: str = layouts.LINEAR
  is_interleaved: bool = False
  contracting: Dims = ()
  batch: Dims = ()
  stack: Any = None
  stack_scale: Any = None
  layer: Any = None
  source: Any = None
  source_global_scale: Any = None
  square_scale: Any = None

  def replace(self, **changes: Any) -> Side:
    """Replaces fields. New arrays drop the side's origin."""
    if not changes.keys().isdisjoint(("values", "scale")):
      changes = dict.fromkeys(_OF_ORIGIN) | changes
    return dataclasses.replace(self, **changes)

  # Shapes and dtypes.

  @property
  def ndim(self) -> int:
    return len(self.values.shape)

  @property
  def free(self) -> Dims:
    """The dimensions that are neither contracting nor batch, in order."""
    return free_dims(self.ndim, self.contracting, self.batch)

  @property
  def shape(self) -> tuple[int, ...]:
    """Logical shape, in which a dimension of packed FP4 counts values."""
    if self.format is None or not self.format.has_pairs:
      return tuple(self.values.shape)
    assert self.axis is not None
    return layouts.logical_shape(self.values, self.axis)

  @property
  def scale_shape(self) -> tuple[int, ...]:
    """Shape of the linear scale without padding."""
    assert self.format is not None and self.axis is not None
    return layouts.linear_scale_shape(self.format, self.shape, self.axis)

  @property
  def scale_is_padded(self) -> bool:
    """Whether the scale is linear, and larger than `scale_shape`."""
    return (
      self.format is not None
      and self.scale_layout == layouts.LINEAR
      and tuple(self.scale.shape) != self.scale_shape
    )

  @property
  def has_whole_pairs(self) -> bool:
    """Whether no byte holds 4-bit values of two blocks."""
    format = self.format
    if format is None or not format.has_pairs:
      return True
    assert self.axis is not None
    return format.block_size % 2 == 0 and self.shape[self.axis] % 2 == 0

  @property
  def blocked_position(self) -> int | None:
    """Which contracting dimension is blocked; None for a plain operand."""
    if self.format is None:
      return None
    assert self.axis is not None
    return self.contracting.index(self.axis)

  @property
  def comes_as_words(self) -> bool:
    """Whether values are uint32 words of interleaved FP4 (`interleaving`)."""
    return self.format is not None and self.values.dtype == interleaving.WORDS

  @property
  def exact_in_bf16(self) -> bool:
    """Whether bf16 represents every (dequantized) value exactly."""
    if self.format is None:
      return self.values.dtype == formats.BF16
    return self.format.exact_in_bf16

  @property
  def scales_rows(self) -> bool:
    """Whether only codes are exact in bf16, and a row has one scale."""
    format = self.format
    return (
      format is not None
      and format.codes_are_exact_in_bf16
      and not format.scale_is_power_of_two
      and not format.exact_in_bf16
      and all(self.scale_shape[d] == 1 for d in self.contracting)
    )

  @property
  def stays_swizzled(self) -> bool:
    """Whether merging to [batch, rows, k] keeps a swizzled scale's layout.

    Tiles have 128 rows of the second to last dimension. Several free dimensions
    merge without padding between them only if 128 divides its size.
    """
    if self.scale_layout != layouts.SWIZZLED:
      return False
    free = self.free
    in_order = (*self.batch, *free, *self.contracting)
    if in_order != tuple(range(self.ndim)):
      return False
    if not free or len(self.contracting) != 1:
      return False
    rows = self.values.shape[-2]
    return len(free) == 1 or rows % layouts.SCALE_TILE_ROWS == 0

  def strides(self) -> problems.Strides | None:
    """Returns the values' strides of (batch, row, k), or None if not strided.

    The values then need a copy: dimensions that must merge are not adjacent, or
    FP4 must be packed along k and k is not the last dimension. Strides of FP4
    that is not packed count bytes of its packed form.
    """
    shape = tuple(self.values.shape)
    if self.format is not None and self.values.dtype in formats.FOUR_BITS:
      if self.contracting != (self.ndim - 1,):
        return None
      shape = (*shape[:-1], shape[-1] // 2)
    return problems.strides(
      shape, batch=self.batch, free=self.free, contracting=self.contracting
    )

  def problem(self, *, is_copied: bool) -> problems.SideProblem:
    """Returns the operand's part of the problem that chooses a backend.

    Args:
      is_copied: whether kernels read a row-major copy of the operand.
    """
    is_interleaved = self.is_interleaved or self.comes_as_words
    strides = None if is_copied else self.strides()
    dtype = formats.PACKED if is_interleaved else np.dtype(self.values.dtype)
    return problems.SideProblem(
      format=self.format,
      dtype=dtype,
      contracting_is_minor=strides is None or strides[2] == 1,
      scale_layout=self.scale_layout,
      scale_is_padded=self.scale_is_padded,
      is_interleaved=is_interleaved,
      # Square blocks must not cross the rows of different matrices.
      has_square_scale=self.square_scale is not None
      and not is_copied
      and len(self.free) == 1,
    )

  @property
  def is_layer(self) -> bool:
    """Whether the side is a slice of a known stack, and has no batch."""
    return self.stack is not None and not self.batch

  # Conversions.

  def in_rows(self) -> Side:
    """Returns the side with a known block size and a scale for each row.

    Square blocks become blocks along a contracting dimension. The side keeps
    their scale as `square_scale`, but not a stack of square blocks, since its
    scales have another shape.
    """
    format = self.format
    if format is None or not (format.is_square or format.block_size == 0):
      return self
    if not format.is_square:
      assert self.axis is not None
      return dataclasses.replace(
        self, format=format.along(self.shape[self.axis])
      )
    last, rows = self.ndim - 1, self.ndim - 2
    axis = (
      rows
      if last not in self.contracting and rows in self.contracting
      else last
    )
    other = rows if axis == last else last
    scale = layouts.scale_of_rows(
      self.scale, other, self.shape[other], format.block_rows
    )
    return self.replace(
      format=format.of_rows(), scale=scale, axis=axis, square_scale=self.scale
    )

  def without_origin(self) -> Side:
    """Returns the side without its stack and its source."""
    return self.replace(**dict.fromkeys(_OF_ORIGIN))

  def whole_stack(self) -> Side:
    """Returns a side with the whole stack, whose batch dimension is layers."""
    assert self.is_layer
    return self.replace(
      values=self.stack,
      scale=self.stack_scale,
      axis=None if self.axis is None else self.axis + 1,
      contracting=tuple(d + 1 for d in self.contracting),
      batch=(0,),
    )

  def with_bytes(self) -> Side:
    """Returns the side with FP4 words viewed as bytes."""
    if not self.comes_as_words:
      return self
    values = interleaving.to_bytes(self.values)
    kept: dict[str, Any] = {}
    if self.stack is not None:
      kept = {name: getattr(self, name) for name in _OF_STACK}
      kept["stack"] = interleaving.to_bytes(self.stack)
    return self.replace(values=values, is_interleaved=True, **kept)

  def as_bytes(self) -> Side:
    """Returns the side as collectives move it: values and scale as bytes.

    FP4 is packed, and the scale is linear, without padding.
    """
    if self.format is None:
      return self
    side = self.with_bytes()
    if mesh_axes.mesh_of([side.scale]) is not None and (
      side.scale_layout != layouts.LINEAR or side.scale_is_padded
    ):
      # Shards of a swizzled or padded scale do not match shards of rows and
      # blocks.
      side = side.replace(scale=mesh_axes.gathered(side.scale))
    side = side.with_linear_scale()
    assert side.axis is not None
    values = layouts.packed_pairs(side.values, side.axis)
    return side.replace(
      values=layouts.to_bytes(values),
      scale=layouts.to_bytes(side.scale),
    )

  def as_elements(self) -> Side:
    """Undoes `as_bytes`, except that FP4 values stay packed."""
    if self.format is None:
      return self
    values = self.values
    if not self.format.has_pairs:
      values = layouts.from_bytes(values, self.format.array_dtype)
    scale = layouts.from_bytes(self.scale, self.format.scale_dtype)
    return self.replace(values=values, scale=scale)

  def in_usual_order(self) -> Side:
    """Returns the side with interleaved FP4 values put back in order."""
    side = self.with_bytes()
    if not side.is_interleaved:
      return side
    words = interleaving.from_bytes(side.values)
    values = interleaving.deinterleave(words)
    return side.replace(values=values, is_interleaved=False)

  def global_scale_in(
    self, positions: Mapping[int, int], ndim: int
  ) -> jax.Array | None:
    """Returns the global scale, reshaped to broadcast to the result, or None.

    Args:
      positions: {noncontracting dimension of the side: dimension of the
        result}.
      ndim: rank of the result.

    Raises:
      TypeError: If the global scale varies along a contracting dimension.
    """
    scale = self.global_scale
    if scale is None or scale.size == 1:
      return None if scale is None else scale.reshape(())
    varying = [d for d in range(scale.ndim) if scale.shape[d] != 1]
    if any(d not in positions for d in varying):
      raise TypeError(
        f"{who()}: the global scale of {self.name} must have size 1 in"
        f" contracting dimensions, got shape {tuple(scale.shape)}"
      )
    order = sorted(varying, key=lambda d: positions[d])
    shape = [1] * ndim
    for d in order:
      shape[positions[d]] = scale.shape[d]
    ones = tuple(d for d in range(scale.ndim) if d not in varying)
    return jnp.transpose(scale, (*order, *ones)).reshape(shape)

  def linear_scale(self) -> jax.Array:
    """Returns the scale in the linear layout, without padding."""
    shape = self.scale_shape
    if self.scale_layout == layouts.SWIZZLED:
      return layouts.unswizzle_scale(self.scale, shape[-2:])
    if tuple(self.scale.shape) == shape:
      return self.scale
    return lax.slice(self.scale, (0,) * self.scale.ndim, shape)

  def with_linear_scale(self) -> Side:
    """Returns the side with `linear_scale`; a plain side is unchanged."""
    if self.format is None:
      return self
    return self.replace(scale=self.linear_scale(), scale_layout=layouts.LINEAR)

  def dequantized(self) -> jax.Array:
    """Returns f32 values times scales, or the floats of a plain operand.

    It uses XLA ops and leaves out the global scale. Values may be bytes, but
    not interleaved.
    """
    if self.format is None:
      return self.values
    assert self.axis is not None
    is_bytes = self.scale.dtype == formats.PACKED
    side = self.as_elements() if is_bytes else self
    return operations.dequantize_raw(
      side.values, side.linear_scale(), self.format, axis=self.axis
    )

  def plain(self) -> Side:
    """Returns an unquantized side with the `dequantized` values."""
    return Side(
      name=self.name,
      values=self.dequantized(),
      contracting=self.contracting,
      batch=self.batch,
    )

  def padded(self, axis: int, size: int) -> Side:
    """Returns the side with zeros appended along a dimension.

    The scale must be linear. It is padded with zeros, or 2^-127 for E8M0, which
    has no zero.
    """
    if self.shape[axis] == size:
      return self
    per_byte = 1
    has_pairs = self.format is not None and self.format.has_pairs
    if has_pairs and self.values.dtype == formats.PACKED:
      per_byte = 2
    side = self.replace(
      values=blocking.pad_axis(self.values, axis, size // per_byte)
    )
    if self.format is None:
      return side
    columns = blocking.divide_up(size, self.format.block_size)
    return side.replace(scale=blocking.pad_axis(self.scale, axis, columns))

  def joined(self) -> Side | None:
    """Returns the side with its contracting dimensions merged and last.

    The arrays may be abstract. The result is None if a quantized side is not
    blocked along its last contracting dimension in whole blocks, or if it is
    interleaved or has a swizzled or padded scale.
    """
    last = self.contracting[-1]
    if self.format is not None and (
      self.axis != last
      or self.is_interleaved
      or self.comes_as_words
      or self.scale_layout != layouts.LINEAR
      or self.scale_is_padded
      or not isinstance(self.shape[last], int)
      or self.shape[last] % self.format.block_size
    ):
      return None
    others = (*self.batch, *self.free)

    def join(x: Any) -> Any:
      if x is None:
        return None
      k = math.prod(x.shape[d] for d in self.contracting)
      shape = (*(x.shape[d] for d in others), k)
      if isinstance(x, jax.Array):
        return x.transpose(*others, *self.contracting).reshape(shape)
      return jax.ShapeDtypeStruct(shape, x.dtype)

    return self.replace(
      values=join(self.values),
      scale=join(self.scale),
      axis=None if self.axis is None else len(others),
      contracting=(len(others),),
      batch=tuple(range(len(self.batch))),
    )

  def with_last(self, position: int) -> Side:
    """Returns the side with `contracting` reordered to end with `position`."""
    others = self.contracting[:position] + self.contracting[position + 1 :]
    return self.replace(contracting=(*others, self.contracting[position]))

  def merged(self, position: int) -> Side:
    """Returns the side transposed and reshaped to [batch, rows, k].

    Args:
      position: index of the contracting dimension that becomes minor in k, the
        blocked one of a quantized side.
    """
    side = self.with_last(position)
    values, scale = side.merge(side.values), None
    if side.scale is not None:
      scale = side.merge(side.scale)
    return side.replace(
      values=values,
      scale=scale,
      axis=None if side.axis is None else 2,
      contracting=(2,),
      batch=(0,),
    )

  def merge(self, x: jax.Array) -> jax.Array:
    """Transposes and reshapes the values or scale to [batch, rows, k]."""
    kinds = (self.batch, self.free)
    sizes = [math.prod(x.shape[d] for d in dims) for dims in kinds]
    x = jnp.transpose(x, (*self.batch, *self.free, *self.contracting))
    num_contracting = len(self.contracting)
    return x.reshape(*sizes, math.prod(x.shape[x.ndim - num_contracting :]))


def dense_strides(shape: Sequence[int]) -> problems.Strides:
  """Returns the strides of a row-major [batch, rows, columns].

  The batch must be 1 if rows are symbolic. Its stride is then 0.
  """
  _, rows, columns = shape
  return rows * columns if blocking.are_static([rows]) else 0, columns, 1
