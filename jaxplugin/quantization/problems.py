# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of quantizing and dequantizing that choose a backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, formats
from jaxplugin.quantization import prologues
from jaxplugin.tables import records, row_fields

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
      smaller error (arXiv 2512.02010).
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
      parts.append(f"Hadamard-transformed in groups of {self.hadamard}")
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
    for_products: whether values may have the blocked dimension last in memory,
      as matmuls read them. Otherwise their memory is row-major. The arrays are
      equal.
    scale_layout: layout of the scales. A swizzled scale is blocked along the
      last dimension.
    pads_values: whether rows of zeros are appended to the values up to whole
      tiles of a swizzled scale, as cuDNN requires.
    options: options of each blocking; `NO_OPTIONS` by default.
    returns_amax: whether the largest finite magnitude of the f32 result of a
      prologue or a matmul, f32[], is a result.
    prologue: function of x whose result is quantized; None quantizes x.
    column_sums: first of the dimensions over which the prologue's f32 result is
      also summed, up to the second to last one: f32[..., features], the
      gradient of a bias. The gradient of a norm has the gradient of its weight
      instead. None for no sums.
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
  column_sums: int | None = None

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
    if self.column_sums is not None:
      where += ", with sums of columns"
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
    """See `Prologue.returns_sum`; the array is the last result."""
    return self.prologue is not None and self.prologue.returns_sum

  @property
  def sizes_are_static(self) -> bool:
    return blocking.are_static(self.shape)

  @property
  def written_shape(self) -> tuple[Any, ...]:
    """Logical shape of the values, including padding rows."""
    if not self.pads_values:
      return self.shape
    *batch, rows, k = self.shape
    return *batch, blocking.round_up(rows, layouts.SCALE_TILE_ROWS), k

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
    if self.column_sums is not None:
      shape = *self.shape[: self.column_sums], self.shape[-1]
      found.append((shape, np.dtype(np.float32)))
    if self.returns_sum:
      found.append((self.shape, self.dtype))
    return found

  def without_prologue(self) -> QuantizationProblem:
    """Returns the problem of quantizing the prologue's result."""
    return dataclasses.replace(
      self,
      dtype=np.dtype(np.float32),
      prologue=None,
      returns_amax=False,
      column_sums=None,
    )

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
      column_sums=None if self.column_sums is None else self.column_sums + 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedOutput:
  """How a kernel of another operation quantizes its f32 result.

  The kernel returns values, scale, and amax if the problem has one.

  Attributes:
    problem: problem of quantizing the result.
    global_scale: f32[], or None.
  """

  problem: QuantizationProblem
  global_scale: Any


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
    return blocking.are_static(self.shape)

  @property
  def logical_shape(self) -> tuple[Any, ...]:
    return layouts.array_shape(self.format, self, self.axis)


# Rows of tuning tables. A row has the number of rows m, the size k of the
# blocked dimension, and which of the two is last. It applies to arrays of any
# rank with this m and k. An array blocked along a middle dimension or along
# merged dimensions has no row.

_QUANTIZE: Final = row_fields.defaults_of(
  QuantizationProblem,
  without=(
    *("num_maxima", "pads_values", "options", "prologue"),
    *("returns_amax", "column_sums"),  # they do not affect the choice
  ),
)
_QUANTIZE_WORDS: Final = {
  "scale_rounding": ("up", "floor"),
  "scale_layout": (layouts.LINEAR, layouts.SWIZZLED),
}
# The blocked dimensions: the last one of (m, k), the first one of (k, m), or
# both of (m, k) in either order.
_ALONG: Final = ("last", "first", "last,first", "first,last")
_OPTIONS: Final[dict[str, records.Scalar]] = {
  **row_fields.defaults_of(RecipeOptions, without=("strides",)),
  "square": False,
}
_OPTION_WORDS: Final = {"key_impl": (THREEFRY,)}
_OPTION_NUMBERS: Final = ("hadamard",)
# Fields of a prologue. Numbers such as its epsilon do not affect the time.
_PROLOGUE: Final[dict[str, records.Scalar]] = {
  "prologue": None,
  "operands": "",
  "halves": None,
  "gradient": None,
}
_PROLOGUE_WORDS: Final = {
  "prologue": prologues.FUNCTIONS,
  "operands": [
    ",".join(names)
    for count in range(1, len(prologues.OPERANDS) + 1)
    for names in itertools.combinations(prologues.OPERANDS, count)
  ],
  "halves": prologues.HALVES,
  "gradient": prologues.GRADIENTS,
}
_DEQUANTIZE: Final[dict[str, records.Scalar]] = {"global_scale": "none"}
_DEQUANTIZE_WORDS: Final = {"global_scale": ("none", "scalar")}


@functools.lru_cache(maxsize=4096)
def fields_of(problem: QuantizationProblem) -> records.Fields | None:
  """Returns a problem's fields, or None if it has no row."""
  if not problem.sizes_are_static or 0 in problem.shape:
    return None
  if not problem.format.is_known or problem.dtype.name not in row_fields.DTYPES:
    return None
  if problem.pads_values:  # Rows have no field for it.
    return None
  # With maxima a kernel reads x once, as with a given global scale.
  if problem.num_maxima is not None:
    problem = problem.with_global_scale()
  sizes = _sizes_of(problem)
  if sizes is None:
    return None
  fields: dict[str, Any] = {
    **sizes,
    "dtype": problem.dtype.name,
    "format": problem.format.name,
    **row_fields.not_default(problem, _QUANTIZE),
  }
  if (prologue := problem.prologue) is not None:
    if "along" in sizes and len(problem.shape) != 2:
      return None  # Rows merge dimensions that a norm does not.
    given = {
      **vars(prologue),
      "prologue": prologue.function,
      "operands": ",".join(prologue.operands),
    }
    fields |= {name: given[name] for name in _PROLOGUE if given[name]}
  for number, options in enumerate(problem.options):
    if options.key_impl not in (None, THREEFRY):
      return None
    if options.strides is not None:  # x is a shard
      return None
    square = None if options.square is None else len(options.square)
    if square is not None and square != len(problem.shape) - 1:
      return None
    for name, default in _OPTIONS.items():
      value = getattr(options, name)
      value = square is not None if name == "square" else value
      if value != default:
        fields[_extra(name, number)] = value
  return records.fields_of("problem", fields)


def _extra(name: str, number: int) -> str:
  return f"second_{name}" if number else name


def _sizes_of(problem: QuantizationProblem) -> dict[str, Any] | None:
  """Returns m, k and the blocked dimension, or None if there is no row."""
  shape = problem.shape
  along = []
  for b in problem.blockings:
    if len(b.dims) != 1 or b.multiple != problem.format.block_size:
      return None
    (axis,) = b.dims
    if axis not in (0, len(shape) - 1):
      return None
    along.append("last" if axis == len(shape) - 1 else "first")
  if len(along) > 1 and (len(shape) != 2 or len({*along}) < len(along)):
    return None
  is_last = len(along) > 1 or along == ["last"]
  k = shape[-1] if is_last else shape[0]
  fields = {"m": math.prod(shape) // k, "k": k}
  if along != ["last"]:
    fields["along"] = ",".join(along)
  return fields


def problem_of(fields: records.Fields) -> QuantizationProblem:
  """Returns a problem of rank 2 that has these fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  row = row_fields.RowFields("quantize", fields, ("m", "k", "dtype", "format"))
  m, k = row.size("m"), row.size("k")
  along = row.text("along", _ALONG) if "along" in row else "last"
  format = row.named("format", row_fields.FORMATS)
  dtype = row.named("dtype", row_fields.DTYPES)
  places = along.split(",")
  found = row.optional(_QUANTIZE, _QUANTIZE_WORDS)
  options = tuple(_options_of(row, i, p) for i, p in enumerate(places))
  prologue = _prologue_of(row)
  row.finish()
  return QuantizationProblem(
    shape=(k, m) if along == "first" else (m, k),
    dtype=dtype,
    format=format,
    blockings=tuple(
      blocking.Blocking.along(int(p == "last"), 2, format.block_size)
      for p in places
    ),
    options=options,
    prologue=prologue,
    **found,
  )


def _options_of(
  row: row_fields.RowFields, number: int, place: str
) -> RecipeOptions:
  found = row.optional(
    {_extra(name, number): value for name, value in _OPTIONS.items()},
    {_extra(name, number): words for name, words in _OPTION_WORDS.items()},
    [_extra(name, number) for name in _OPTION_NUMBERS],
  )
  found = {name.removeprefix("second_"): v for name, v in found.items()}
  other = (0,) if place == "last" else (1,)
  found["square"] = other if found["square"] else None
  return RecipeOptions(**found)


def _prologue_of(row: row_fields.RowFields) -> prologues.Prologue | None:
  found = row.optional(_PROLOGUE, _PROLOGUE_WORDS)
  if found["prologue"] is None:
    return None
  return prologues.Prologue(
    function=found["prologue"],
    operands=tuple(filter(None, found["operands"].split(","))),
    halves=found["halves"],
    gradient=found["gradient"],
  )


@functools.lru_cache(maxsize=4096)
def dequantize_fields_of(
  problem: DequantizationProblem,
) -> records.Fields | None:
  """Returns a problem's fields, or None if it has no row."""
  format, shape = problem.format, problem.logical_shape
  if not all(isinstance(size, int) and size for size in shape):
    return None
  if not format.is_known or problem.out_dtype.name not in row_fields.DTYPES:
    return None
  if problem.axis not in (0, len(shape) - 1):
    return None
  if problem.global_shape not in (None, ()):
    return None
  k = shape[problem.axis]
  fields: dict[str, Any] = {
    "m": math.prod(shape) // k,
    "k": k,
    "format": format.name,
    "out": problem.out_dtype.name,
  }
  if problem.axis != len(shape) - 1:
    fields["along"] = "first"
  if problem.dtype != format.array_dtype:
    fields["dtype"] = problem.dtype.name
  if problem.global_shape is not None:
    fields["global_scale"] = "scalar"
  return records.fields_of("problem", fields)


def dequantize_problem_of(
  fields: records.Fields,
) -> DequantizationProblem:
  """Returns a problem of rank 2 that has these fields.

  Raises:
    ValueError: If a field is wrong. The message says what it must be.
  """
  row = row_fields.RowFields("dequantize", fields, ("m", "k", "format", "out"))
  m, k = row.size("m"), row.size("k")
  along = row.text("along", _ALONG[:2]) if "along" in row else "last"
  format = row.named("format", row_fields.FORMATS)
  out_dtype = row.named("out", row_fields.DTYPES)
  dtype = row.stored_dtype("dtype", format)
  found = row.optional(_DEQUANTIZE, _DEQUANTIZE_WORDS)
  row.finish()
  is_packed = format.is_fp4 and dtype == formats.PACKED
  stored = k // 2 if is_packed else k
  return DequantizationProblem(
    shape=(stored, m) if along == "first" else (m, stored),
    dtype=dtype,
    format=format,
    axis=0 if along == "first" else 1,
    out_dtype=out_dtype,
    global_shape=() if found["global_scale"] == "scalar" else None,
  )
