# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of quantizing and dequantizing that choose a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.quantization import prologues

# Kernels can draw random bits of keys with this implementation.
THREEFRY: Final = "threefry2x32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
  """Options of training recipes for quantizing along one blocking.

  Attributes:
    hadamard: group size of the Hadamard transform, or None for no transform.
    square: dimensions of x that are merged, in this order, into the other side
      of square blocks; None for blocks of one row.
    four_over_six: whether each block is scaled to 6 or 4, whichever has the
      smaller error.
    scale_up: whether floating-point scales are rounded up instead of to
      nearest.
    is_stochastic: whether values are rounded stochastically. The blocking then
      has an operand with key data.
    key_impl: implementation of the key (`jax.random.key_impl`).
    is_partitionable: whether jax_threefry_partitionable is on. Each value's
      random bits then depend only on its offset in the array.
    strides: strides of the whole array if x is a shard with stochastic
      rounding, whose key data is `offsets.words`; else None.
  """

  hadamard: int | None = None
  square: tuple[int, ...] | None = None
  four_over_six: bool = False
  scale_up: bool = False
  is_stochastic: bool = False
  key_impl: Any = None
  is_partitionable: bool = True
  strides: tuple[int, ...] | None = None

  def __str__(self) -> str:
    parts = []
    if self.hadamard is not None:
      parts.append(f"transformed in groups of {self.hadamard}")
    if self.square is not None:
      parts.append("in square blocks")
    if self.four_over_six:
      parts.append("scaled to 6 or 4")
    if self.scale_up:
      parts.append("scales rounded up")
    if self.is_stochastic:
      parts.append("rounded stochastically")
    return ", ".join(parts)

  def bits_refusal(self) -> str:
    """Returns why a kernel cannot draw the random bits, or ""."""
    if not self.is_stochastic:
      return ""
    if self.key_impl != THREEFRY:
      return f"draws random bits of a {THREEFRY} key, got {self.key_impl}"
    if not self.is_partitionable:
      return (
        "needs jax_threefry_partitionable to draw random bits, and it is off"
      )
    return ""

  def under_leading_dimension(self) -> RecipeOptions:
    """Returns the options of arrays stacked along a new first dimension."""
    if self.square is None:
      return self
    square = tuple(d + 1 for d in self.square)
    return dataclasses.replace(self, square=square)


NO_OPTIONS: Final = RecipeOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationProblem:
  """One array x, quantized along one blocking or several.

  Attributes:
    shape: shape of the quantized array: that of x, or of the prologue's result.
      Sizes may be symbolic.
    dtype: dtype of x.
    format: the format to quantize to.
    blockings: blocking of each result.
    scale_rounding: "up" or "floor".
    has_global_scale: whether a global scale is given, one for all blockings or
      one for each. Otherwise each blocking computes one if the format has one:
      a NaN or an Inf invalidates different blocks along each axis.
    num_maxima: number of partial amax values that each blocking is given
      instead of a global scale, if x is a shard (`sharding.global_scales`);
      else None.
    packed: whether values are packed, if the format can be packed.
    for_products: whether packed values have the blocked dimension last in
      memory, as matmuls read FP4. Otherwise their memory is row-major. The
      arrays are equal.
    scale_layout: layout of the scales. A swizzled scale is blocked along the
      last dimension.
    pads_values: whether rows of zeros are appended to the values up to whole
      tiles of a swizzled scale, as cuDNN requires.
    options: options of each blocking; `NO_OPTIONS` by default.
    returns_amax: whether the largest finite magnitude of x, f32[], is the last
      result. Only kernels of matmuls that quantize their result support it.
    prologue: function of x whose result is quantized; None quantizes x.
  """

  shape: tuple[Any, ...]
  dtype: np.dtype
  format: formats.BlockFormat
  blockings: tuple[blocking.Blocking, ...]
  scale_rounding: str = "up"
  has_global_scale: bool = False
  num_maxima: int | None = None
  packed: bool = False
  for_products: bool = False
  scale_layout: layouts.ScaleLayout = layouts.LINEAR
  pads_values: bool = False
  options: tuple[RecipeOptions, ...] = ()
  returns_amax: bool = False
  prologue: prologues.Prologue | None = None

  def __post_init__(self) -> None:
    if not self.options:
      each = (NO_OPTIONS,) * len(self.blockings)
      object.__setattr__(self, "options", each)

  @classmethod
  def along(
    cls,
    axis: int,
    *,
    shape: tuple[Any, ...],
    format: formats.BlockFormat,
    **fields: Any,
  ) -> QuantizationProblem:
    """Returns the problem of quantizing an array along one dimension."""
    blockings = (blocking.Blocking.along(axis, len(shape), format.block_size),)
    return cls(shape=shape, format=format, blockings=blockings, **fields)

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.shape))
    is_plain = set(self.options) == {NO_OPTIONS}
    is_single = len(self.blockings) == 1
    dims = " and ".join(
      f"{list(b.dims)}"
      + ("" if is_plain or is_single else f" ({e or 'plain'})")
      for b, e in zip(self.blockings, map(str, self.options), strict=True)
    )
    where = f"dimensions {dims}"
    if is_single and len(self.blockings[0].dims) == 1:
      where = f"axis {self.blockings[0].axis()}"
    if self.scale_layout != layouts.LINEAR:
      where += f", {self.scale_layout} scale"
    if self.pads_values:
      where += ", rows of values in whole tiles"
    if is_single and not is_plain:
      where += f", {self.options[0]}"
    if self.prologue is not None:
      where += f", after {self.prologue}"
    return f"{self.dtype.name}[{sizes}] to {self.format}, {where}"

  @property
  def computes_global_scale(self) -> bool:
    return self.format.has_global_scale and not self.has_global_scale

  @property
  def packed_in_order(self) -> bool:
    """Whether values are packed and row-major in memory."""
    return self.packed and not self.for_products

  @property
  def results_each(self) -> int:
    """Number of results of each blocking, with a computed global scale."""
    return 3 if self.computes_global_scale else 2

  @property
  def returns_sum(self) -> bool:
    """Whether the last result is the prologue's sum of x and residual."""
    return self.prologue is not None and self.prologue.returns_sum

  @property
  def sizes_are_static(self) -> bool:
    return extents.are_static(self.shape)

  @property
  def written_shape(self) -> tuple[Any, ...]:
    """Logical shape of the values, including padding rows."""
    if not self.pads_values:
      return self.shape
    *batch, rows, k = self.shape
    return *batch, extents.round_up(rows, layouts.SCALE_TILE_ROWS), k

  @property
  def num_keys(self) -> int:
    """Number of operands with key data."""
    return sum(options.is_stochastic for options in self.options)

  def split_operands(
    self, operands: Sequence[Any]
  ) -> tuple[Any, dict[str, Any], list[Any], list[Any]]:
    """Splits the operands of `quantize_p`.

    Returns:
      x; the prologue's other operands by name; the global scales or maxima if
      given; and the key data of blockings with stochastic rounding.
    """
    x, *given = operands
    names = () if self.prologue is None else self.prologue.operands
    first_key = len(given) - self.num_keys
    more = dict(zip(names, given, strict=False))
    return x, more, given[len(names) : first_key], given[first_key:]

  def result_types(self) -> list[tuple[tuple[Any, ...], np.dtype]]:
    """Returns shape and dtype of each result."""
    format = self.format
    found: list[tuple[tuple[Any, ...], np.dtype]] = []
    for b in self.blockings:
      shape, axis = b.shape(self.shape), b.axis()
      divided = lambda n, s=shape, d=axis: (*s[:d], s[d] // n, *s[d + 1 :])
      scale = divided(format.block_size)
      if self.packed:
        found.append((divided(2), formats.PACKED))
      else:
        values = self.written_shape if self.pads_values else shape
        found.append((values, format.array_dtype))
      if self.scale_layout == layouts.SWIZZLED:
        scale = layouts.swizzled_shape(scale)
      found.append((scale, format.scale_dtype))
      if self.computes_global_scale:
        found.append(((), np.dtype(np.float32)))
    if self.returns_amax:
      found.append(((), np.dtype(np.float32)))
    if self.returns_sum:
      found.append((self.shape, self.dtype))
    return found

  def without_prologue(self) -> QuantizationProblem:
    """Returns the problem of quantizing the prologue's result."""
    dtype = np.dtype(np.float32)
    return dataclasses.replace(self, dtype=dtype, prologue=None)

  def with_global_scale(self) -> QuantizationProblem:
    """Returns the problem with given global scales instead of maxima."""
    return dataclasses.replace(self, num_maxima=None, has_global_scale=True)

  def with_blockings(self, indices: Sequence[int]) -> QuantizationProblem:
    """Returns the problem of some of the blockings."""
    return dataclasses.replace(
      self,
      blockings=tuple(self.blockings[i] for i in indices),
      options=tuple(self.options[i] for i in indices),
    )

  def singles(self) -> list[QuantizationProblem]:
    """Returns the problem of each blocking."""
    return [self.with_blockings([i]) for i in range(len(self.blockings))]

  def each(self) -> list[QuantizationProblem]:
    """Returns a problem for each blocking, with the shape of the blocked x."""
    found = []
    for single in self.singles():
      (b,) = single.blockings
      shape = b.shape(self.shape)
      along = blocking.Blocking.along(
        b.axis(), len(shape), self.format.block_size
      )
      found.append(dataclasses.replace(single, shape=shape, blockings=(along,)))
    return found

  def under_leading_dimension(self, size: int) -> QuantizationProblem:
    """Returns the problem of arrays stacked along a new first dimension."""
    return dataclasses.replace(
      self,
      shape=(size, *self.shape),
      blockings=tuple(b.under_leading_dimension() for b in self.blockings),
      options=tuple(e.under_leading_dimension() for e in self.options),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizationProblem:
  """Dequantizing one array.

  Attributes:
    shape, dtype: shape and dtype of the stored values. Sizes may be symbolic.
    format: format of the array.
    axis: the blocked axis, at least 0.
    out_dtype: dtype of the result.
    global_shape: shape of the global scale, or None without one.
  """

  shape: tuple[Any, ...]
  dtype: np.dtype
  format: formats.BlockFormat
  axis: int
  out_dtype: np.dtype
  global_shape: tuple[Any, ...] | None = None

  def __str__(self) -> str:
    sizes = ", ".join(map(str, self.logical_shape))
    result = f"{self.out_dtype.name}[{sizes}]"
    return f"{self.format} to {result}, axis {self.axis}"

  @property
  def sizes_are_static(self) -> bool:
    return extents.are_static(self.shape)

  @property
  def logical_shape(self) -> tuple[Any, ...]:
    return layouts.array_shape(self.format, self, self.axis)
