# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`DotProblem` describes a block-scaled dot for the choice of a backend.

Strides and copies of operands are functions of shapes and dtypes. Problems and
lowerings both call them, so both describe the same kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, decisions
from jaxplugin.core import formats as formats_lib
from jaxplugin.tables import records, resolution, row_fields

Activation = Literal["relu", "gelu", "silu"]
ACTIVATIONS: Final = ("relu", "gelu", "silu")
GlobalScale = Literal["none", "scalar", "array"]
GLOBAL_SCALES: Final = get_args(GlobalScale)
Dims = tuple[int, ...]
Strides = tuple[int, int, int]


def matmul_text(problem: Any, dtype: np.dtype, sizes: Sequence[str]) -> str:
  """Returns "mxfp8 x mxfp4 -> float32, m=2 n=3 k=32" for a matmul.

  Args:
    problem: has `lhs`, `rhs` and the sizes. A symbolic size is None.
  """
  values = ((name, getattr(problem, name)) for name in sizes)
  text = " ".join(f"{k}={'?' if v is None else v}" for k, v in values)
  return f"{problem.lhs} x {problem.rhs} -> {dtype.name}, {text}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideProblem:
  """One operand of a `DotProblem`.

  Attributes:
    format: its block format; None for a plain float operand.
    dtype: dtype of the stored values; uint8 is packed FP4.
    contracting_is_minor: whether values along k are contiguous in the array
      that a kernel with strides reads. Copies have k minor.
    scale_layout: "linear" or "swizzled_128x4".
    scale_is_padded: whether the scale is larger than rows x ceil(k / block).
    is_interleaved: whether FP4 values are interleaved, as `prepare_weights`
      does for some GPUs.
    has_square_scale: whether kernels may read the scale of square blocks, which
      has one row for `format.block_size` rows of values.
  """

  format: formats_lib.BlockFormat | None
  dtype: np.dtype
  contracting_is_minor: bool = True
  scale_layout: str = "linear"
  scale_is_padded: bool = False
  is_interleaved: bool = False
  has_square_scale: bool = False

  def __str__(self) -> str:
    return self.dtype.name if self.format is None else self.format.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotProblem:
  """A block-scaled dot, reduced to the facts that choose a backend.

  Attributes:
    batch, m, n, k: sizes, as products if the call has several dimensions of a
      kind. None is a symbolic size.
    lhs, rhs: the operands.
    out_dtype: dtype of the result.
    global_scale: "none", "scalar", or "array" (it varies over the result).
    has_global_power: whether the global scale is two factors (`epilogue`).
    highest_precision: whether the call has precision="highest".
    fastest_precision: whether the call has precision="fastest".
    has_bias, activation, has_residual: the epilogue.
    has_array_bias: whether the bias varies over more than n.
    num_contracting: number of contracting dimensions.
    blocked_k: size of the blocked contracting dimension, that of rhs if the
      sides differ. None with one contracting dimension or a symbolic size.
    blocks_pair_up: whether both sides are blocked along the same contracting
      dimension.
    reads_m: whether a kernel reads m, and `m` is only the size that it is
      planned for.
  """

  batch: int | None
  m: int | None
  n: int | None
  k: int | None
  lhs: SideProblem
  rhs: SideProblem
  out_dtype: np.dtype
  global_scale: GlobalScale = "none"
  has_global_power: bool = False
  highest_precision: bool = False
  fastest_precision: bool = False
  has_bias: bool = False
  activation: Activation | None = None
  has_residual: bool = False
  has_array_bias: bool = False
  num_contracting: int = 1
  blocked_k: int | None = None
  blocks_pair_up: bool = True
  reads_m: bool = False

  def __str__(self) -> str:
    return matmul_text(self, self.out_dtype, ("batch", "m", "n", "k"))

  @property
  def interleaved_sides(self) -> tuple[str, ...]:
    """Which of "lhs" and "rhs" have interleaved values."""
    sides = (("lhs", self.lhs), ("rhs", self.rhs))
    return tuple(name for name, side in sides if side.is_interleaved)

  @property
  def sizes_are_static(self) -> bool:
    return None not in (self.batch, self.m, self.n, self.k)

  @property
  def is_empty(self) -> bool:
    return 0 in (self.batch, self.m, self.n, self.k)

  @property
  def dense_k(self) -> int | None:
    """k with the padding of `DotCall.dense_sides`; None if it is symbolic."""
    size = self.k if self.blocked_k is None else self.blocked_k
    if not self.k or not size:
      return self.k
    # `dense_sides` dequantizes lhs if the blocks do not pair up.
    lhs = self.lhs.format if self.blocks_pair_up else None
    padded = padded_size(
      size, (lhs, self.rhs.format), num_contracting=self.num_contracting
    )
    return self.k // size * padded

  @property
  def is_copied(self) -> bool:
    """Whether both operands are copied to row-major [batch, rows, k]."""
    return are_copied(
      self.k,
      (self.lhs.format, self.rhs.format),
      num_contracting=self.num_contracting,
    )

  @property
  def has_epilogue(self) -> bool:
    return self.has_bias or self.activation is not None or self.has_residual

  @property
  def fuses_epilogue(self) -> bool:
    """Whether kernels fuse it: a scalar global scale and a bias over n."""
    return self.global_scale != "array" and not self.has_array_bias

  @property
  def fused_application(self) -> decisions.Application:
    """How kernels that fuse a scalar global scale apply the global scale."""
    if self.global_scale == "none":
      return "none"
    return "fused" if self.global_scale == "scalar" else "separate"


def padded_size(
  size: int,
  formats: Sequence[formats_lib.BlockFormat | None],
  *,
  num_contracting: int,
) -> int:
  """Returns the padded size of the blocked contracting dimension.

  Args:
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
  return blocking.round_up(size, granule)


def are_copied(
  size: int | None,
  formats: Sequence[formats_lib.BlockFormat | None],
  *,
  num_contracting: int,
) -> bool:
  """Returns whether both operands are copied to row-major [batch, rows, k].

  Args:
    size: size of the contracting dimension; None if it is symbolic.
  """
  if num_contracting > 1:
    return True
  return size is not None and size != padded_size(
    size, formats, num_contracting=num_contracting
  )


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


# Rows of tuning tables, which have the fields that differ from their defaults.

_SIDE_DEFAULTS: Final = row_fields.defaults_of(SideProblem)
_LAYOUTS: Final = (layouts.LINEAR, layouts.SWIZZLED)


def measured(
  kind: type[Any],
  name: str,
  backends: Callable[[], Mapping[str, Any]],
  *,
  what: str,
  sizes: Sequence[str],
  words: Mapping[str, tuple[str, ...]],
  numbers: Mapping[str, int | None] | None = None,
) -> resolution.MeasuredOperation[Any]:
  """Returns a matmul whose table rows have the fields of a problem.

  Args:
    kind: class of the problem. It has the attributes `lhs`, `rhs`, `out_dtype`,
      `sizes_are_static` and `is_empty`. Rows leave out its defaults.
    backends: returns the backends by name.
    sizes: names of the sizes that every row has.
    words: allowed values of each string field.
    numbers: default of each integer field that rows may leave out.
  """
  numbers = numbers or {}
  defaults = {**row_fields.defaults_of(kind), **numbers}

  @functools.lru_cache(maxsize=4096)
  def fields_of(problem: Any) -> records.Fields | None:
    if not problem.sizes_are_static or problem.is_empty:
      return None
    if problem.out_dtype.name not in row_fields.DTYPES:
      return None
    lhs = _side_fields("lhs", problem.lhs)
    rhs = _side_fields("rhs", problem.rhs)
    if lhs is None or rhs is None:
      return None
    fields: dict[str, Any] = {name: getattr(problem, name) for name in sizes}
    fields["out"] = problem.out_dtype.name
    fields |= row_fields.not_default(problem, defaults)
    return records.fields_of("problem", {**fields, **lhs, **rhs})

  def problem_of(fields: records.Fields) -> Any:
    row = row_fields.RowFields(what, fields, (*sizes, "out", "lhs", "rhs"))
    found: dict[str, Any] = {name: row.size(name) for name in sizes}
    found["out_dtype"] = row.named("out", row_fields.DTYPES)
    for name in ("lhs", "rhs"):
      found[name] = _side_of(name, row)
    found |= row.optional(defaults, words, numbers)
    row.finish()
    return kind(**found)

  return resolution.MeasuredOperation(
    name=name, fields_of=fields_of, problem_of=problem_of, backends=backends
  )


def _side_fields(name: str, side: SideProblem) -> dict[str, Any] | None:
  """Returns an operand's fields, or None if its format or dtype has no name."""
  if side.format is None:
    if side.dtype.name not in row_fields.DTYPES:
      return None
    fields: dict[str, Any] = {name: side.dtype.name}
  else:
    named = _named(side.format)
    # No measured program makes operands with a codebook.
    if named is None or named.codebook is not None:
      return None
    fields = {name: named.name}
    if not named.block_size:
      fields[f"{name}_block_size"] = side.format.block_size
    if side.dtype != side.format.array_dtype:
      fields[f"{name}_dtype"] = side.dtype.name
  others = row_fields.not_default(side, _SIDE_DEFAULTS)
  return fields | {f"{name}_{field}": v for field, v in others.items()}


def _named(
  format: formats_lib.BlockFormat,
) -> formats_lib.BlockFormat | None:
  """Returns the named format of an operand of `format`, or None.

  An operand without its offset has the name of the format with the offset.
  """
  named = row_fields.FORMATS.get(format.name)
  if named is None:
    return None
  if format.offset_dtype is None:
    named = formats_lib.named(named.without_offset())
  blocked = _blocked(named, format.block_size)
  is_equal = dataclasses.replace(blocked, name=format.name) == format
  return named if is_equal else None


def _blocked(
  named: formats_lib.BlockFormat, block_size: int
) -> formats_lib.BlockFormat:
  """Returns the format of a problem whose operand has the format `named`."""
  return named.along(block_size).of_rows()


def _side_of(name: str, row: row_fields.RowFields) -> SideProblem:
  """Returns the operand `name` from a row's fields."""
  text = row.text(name, (*row_fields.FORMATS, *row_fields.DTYPES))
  format = row_fields.FORMATS.get(text)
  layout = f"{name}_scale_layout"
  found = row.optional(
    {f"{name}_{field}": value for field, value in _SIDE_DEFAULTS.items()},
    {layout: _LAYOUTS},
  )
  changes = {n.removeprefix(f"{name}_"): v for n, v in found.items()}
  if format is None:
    return SideProblem(format=None, dtype=row_fields.DTYPES[text], **changes)
  size = format.block_size or row.size(f"{name}_block_size")
  format = _blocked(format, size)
  dtype = row.stored_dtype(f"{name}_dtype", format)
  return SideProblem(format=format, dtype=dtype, **changes)
