# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The static description of a block-scaled dot, and what follows from it.

A call has up to eight array operands (`Operands`) and one `DotConfig`. The
functions here need only shapes and dtypes, so arrays, tracers, abstract values
and `ShapeDtypeStruct`s all do. `call_rules` has the rules that they must keep.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple

import numpy as np
from jax import lax

from jaxplugin.arrays import interleaving
from jaxplugin.arrays import layouts
from jaxplugin.core import formats
from jaxplugin.core import striding
from jaxplugin.dot import problems

WHO: Final = "block_scaled_dot"
PLAIN_DTYPES: Final = (
  np.dtype(np.float32),
  formats.BF16,
  np.dtype(np.float16),
)
RESULT_DTYPES: Final = PLAIN_DTYPES

Dims = tuple[int, ...]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]


class Operands(NamedTuple):
  """Array operands of a call; absent ones are None.

  lhs, rhs: values, or plain floats. lhs_scale, rhs_scale: their block scales.
  global_scale: f32. bias and residual: floats. These have the rank of the
  result, each dimension either the result's or 1, except that a global_scale
  that is one number has rank 0. global_power: f32 of global_scale's shape, what
  multiplies after it (`global_scales`): a power of two without a derivative.
  """

  lhs: Any
  rhs: Any
  lhs_scale: Any = None
  rhs_scale: Any = None
  global_scale: Any = None
  bias: Any = None
  residual: Any = None
  global_power: Any = None

  @classmethod
  def unflatten(cls, config: DotConfig, flat: Sequence[Any]) -> Operands:
    """Inverse of `flatten`."""
    items = iter(flat)
    return cls(*(next(items) if p else None for p in config.present))

  def flatten(self) -> list[Any]:
    return [x for x in self if x is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandConfig:
  """How one operand is stored.

  Attributes:
    format: its block format; None for plain floats.
    axis: the contracting dimension that is blocked (and packed); None if plain.
    scale_layout: "linear" or "swizzled_128x4".
    is_interleaved: whether bytes of FP4 are those of interleaved words. (Values
      that come as words, uint32, are interleaved without it.)
  """

  format: formats.BlockFormat | None = None
  axis: int | None = None
  scale_layout: str = layouts.LINEAR
  is_interleaved: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotConfig:
  """Everything about a call that is not an array.

  Attributes:
    dimension_numbers: as `lax.dot_general`'s, in tuples.
    lhs, rhs: how the operands are stored.
    preferred_element_type: dtype of the result.
    highest_precision: apply the global scale in f32 whatever it costs.
    activation: None, "relu", "gelu" or "silu".
    implementation: the one asked for, or None to choose.
    padded_scales: whether scales may be larger than needed.
    has_global_scale, has_bias, has_residual, has_global_power: which optional
      operands are there.
  """

  dimension_numbers: DimensionNumbers
  lhs: OperandConfig
  rhs: OperandConfig
  preferred_element_type: np.dtype
  highest_precision: bool = False
  activation: problems.Activation | None = None
  implementation: str | None = None
  padded_scales: bool = False
  has_global_scale: bool = False
  has_bias: bool = False
  has_residual: bool = False
  has_global_power: bool = False

  @property
  def present(self) -> tuple[bool, ...]:
    """Which fields of `Operands` are there."""
    return (
      True,
      True,
      self.lhs.format is not None,
      self.rhs.format is not None,
      self.has_global_scale,
      self.has_bias,
      self.has_residual,
      self.has_global_power,
    )

  @property
  def lhs_contracting(self) -> Dims:
    return self.dimension_numbers[0][0]

  @property
  def rhs_contracting(self) -> Dims:
    return self.dimension_numbers[0][1]

  @property
  def lhs_batch(self) -> Dims:
    return self.dimension_numbers[1][0]

  @property
  def rhs_batch(self) -> Dims:
    return self.dimension_numbers[1][1]

  def replace(self, **changes: Any) -> DotConfig:
    return dataclasses.replace(self, **changes)


def bare_config(config: DotConfig) -> DotConfig:
  """The same dot in f32, without global scale and epilogue."""
  return config.replace(
    preferred_element_type=np.dtype(np.float32),
    activation=None,
    has_global_scale=False,
    has_bias=False,
    has_residual=False,
    has_global_power=False,
  )


def bare_operands(operands: Operands) -> Operands:
  return operands._replace(
    global_scale=None, bias=None, residual=None, global_power=None
  )


def free_dims(ndim: int, contracting: Dims, batch: Dims) -> Dims:
  """The dimensions that are neither contracting nor batch, in order."""
  return tuple(
    d for d in range(ndim) if d not in contracting and d not in batch
  )


def lhs_free(config: DotConfig, ndim: int) -> Dims:
  return free_dims(ndim, config.lhs_contracting, config.lhs_batch)


def rhs_free(config: DotConfig, ndim: int) -> Dims:
  return free_dims(ndim, config.rhs_contracting, config.rhs_batch)


def is_interleaved(operand: OperandConfig, values: Any) -> bool:
  """Whether an operand's values are FP4 that `prepare_weights` interleaved."""
  return operand.is_interleaved or (
    operand.format is not None and values.dtype == interleaving.WORDS
  )


def operand_shape(operand: OperandConfig, values: Any) -> tuple[int, ...]:
  """Logical shape of an operand (FP8 values may also come as raw bytes)."""
  if operand.format is None or not operand.format.is_fp4:
    return tuple(values.shape)
  assert operand.axis is not None
  return layouts.logical_shape(values, operand.axis)


def scale_shape(
  operand: OperandConfig, shape: Sequence[int]
) -> tuple[int, ...]:
  """Shape of the linear scale, without padding, of an operand of `shape`."""
  assert operand.format is not None and operand.axis is not None
  result = list(shape)
  size, block = shape[operand.axis], operand.format.block_size
  result[operand.axis] = (size + block - 1) // block
  return tuple(result)


def result_shape(config: DotConfig, operands: Operands) -> tuple[int, ...]:
  """Batch dimensions, then those of lhs, then those of rhs."""
  lhs = operand_shape(config.lhs, operands.lhs)
  rhs = operand_shape(config.rhs, operands.rhs)
  return (
    *(lhs[d] for d in config.lhs_batch),
    *(lhs[d] for d in lhs_free(config, len(lhs))),
    *(rhs[d] for d in rhs_free(config, len(rhs))),
  )


def canonical_dimension_numbers(
  dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int
) -> DimensionNumbers:
  """Tuples of ints; None is contraction of the last dimensions.

  For None the leading dimensions are batch where the ranks are equal, and rows
  of lhs where rhs has rank 2.

  Raises:
    TypeError: not of `lax.dot_general`'s form, or None for other ranks.
  """
  if dimension_numbers is None:
    if rhs_ndim < 2 or (lhs_ndim != rhs_ndim and not lhs_ndim > rhs_ndim == 2):
      raise TypeError(
        f"{WHO}: without dimension_numbers lhs and rhs must have the same rank"
        " of at least 2, (..., m, k) and (..., n, k), or rhs must have rank 2"
        " and lhs a higher one, (..., k) and (n, k), got ranks"
        f" {lhs_ndim} and {rhs_ndim}; pass dimension_numbers"
      )
    batch = tuple(range(rhs_ndim - 2))
    return ((lhs_ndim - 1,), (rhs_ndim - 1,)), (batch, batch)
  try:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = (
      dimension_numbers
    )
    as_dims = lambda dims: tuple(operator.index(d) for d in dims)
    return (
      (as_dims(lhs_contracting), as_dims(rhs_contracting)),
      (as_dims(lhs_batch), as_dims(rhs_batch)),
    )
  except (TypeError, ValueError):
    raise TypeError(
      f"{WHO}: dimension_numbers must be ((lhs_contracting, rhs_contracting),"
      f" (lhs_batch, rhs_batch)), got {dimension_numbers!r}"
    ) from None


def problem_of(config: DotConfig, operands: Operands) -> problems.DotProblem:
  """Reduces a call to the problem that implementations are chosen by."""
  lhs = operand_shape(config.lhs, operands.lhs)
  rhs = operand_shape(config.rhs, operands.rhs)
  global_scale: problems.GlobalScale = "none"
  if config.has_global_scale:
    global_scale = "array" if operands.global_scale.ndim else "scalar"
  k = _product(lhs[d] for d in config.lhs_contracting)
  are_copied = striding.are_copied(
    k,
    (config.lhs.format, config.rhs.format),
    num_contracting=len(config.lhs_contracting),
  )
  return problems.DotProblem(
    batch=_product(lhs[d] for d in config.lhs_batch),
    m=_product(lhs[d] for d in lhs_free(config, len(lhs))),
    n=_product(rhs[d] for d in rhs_free(config, len(rhs))),
    k=k,
    lhs=_operand_problem(
      config.lhs,
      operands.lhs,
      operands.lhs_scale,
      contracting=config.lhs_contracting,
      batch=config.lhs_batch,
      is_copied=are_copied,
    ),
    rhs=_operand_problem(
      config.rhs,
      operands.rhs,
      operands.rhs_scale,
      contracting=config.rhs_contracting,
      batch=config.rhs_batch,
      is_copied=are_copied,
    ),
    out_dtype=config.preferred_element_type,
    global_scale=global_scale,
    has_global_power=config.has_global_power,
    highest_precision=config.highest_precision,
    has_bias=config.has_bias,
    activation=config.activation,
    has_residual=config.has_residual,
    num_contracting=len(config.lhs_contracting),
    blocked_k=_blocked_k(config, lhs, rhs),
    blocks_pair_up=len(set(_blocked_positions(config))) <= 1,
  )


def _blocked_positions(config: DotConfig) -> list[int]:
  """Which contracting dimension is blocked, of each side that is quantized."""
  return [
    contracting.index(operand.axis)
    for operand, contracting in (
      (config.lhs, config.lhs_contracting),
      (config.rhs, config.rhs_contracting),
    )
    if operand.format is not None
  ]


def _blocked_k(
  config: DotConfig, lhs: tuple[int, ...], rhs: tuple[int, ...]
) -> int | None:
  """Size of the blocked one of several contracting dimensions.

  That of rhs where the sides differ: kernels then see a dequantized lhs.
  """
  if len(config.lhs_contracting) == 1:
    return None
  operand, shape = config.rhs, rhs
  if operand.format is None:
    operand, shape = config.lhs, lhs
  assert operand.axis is not None
  return _product([shape[operand.axis]])


def _product(sizes: Any) -> int | None:
  sizes = tuple(sizes)
  if not all(isinstance(size, (int, np.integer)) for size in sizes):
    return None  # symbolic
  return math.prod(sizes)


def _operand_problem(
  operand: OperandConfig,
  values: Any,
  scale: Any,
  *,
  contracting: Dims,
  batch: Dims,
  is_copied: bool,
) -> problems.OperandProblem:
  padded = (
    operand.format is not None
    and operand.scale_layout == layouts.LINEAR
    and tuple(scale.shape)
    != scale_shape(operand, operand_shape(operand, values))
  )
  interleaved = is_interleaved(operand, values)
  strides = None
  if not is_copied:
    strides = values_strides(operand, values, contracting, batch)
  return problems.OperandProblem(
    format=operand.format,
    dtype=formats.PACKED if interleaved else np.dtype(values.dtype),
    contracting_is_minor=strides is None or strides[2] == 1,
    scale_layout=operand.scale_layout,
    scale_is_padded=padded,
    is_interleaved=interleaved,
  )


def values_strides(
  operand: OperandConfig, values: Any, contracting: Dims, batch: Dims
) -> striding.Strides | None:
  """`striding.values_strides` of one operand."""
  return striding.values_strides(
    values,
    operand.format,
    batch=batch,
    free=free_dims(len(values.shape), contracting, batch),
    contracting=contracting,
  )


def canonical_precision(precision: Any) -> bool:
  """Whether `precision`, as lax functions take it, asks for the highest.

  Raises:
    ValueError: it is not a precision.
  """
  items = precision if isinstance(precision, (tuple, list)) else (precision,)
  try:
    precisions = [lax.Precision(i) for i in items if i is not None]
  except ValueError:
    raise ValueError(
      f"{WHO}: precision must be None, 'default', 'high', 'highest' or a"
      f" jax.lax.Precision, got {precision!r}"
    ) from None
  return lax.Precision.HIGHEST in precisions
