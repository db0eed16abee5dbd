# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Views of a dot for backends of other packages (`jaxplugin.backends`).

`calls.DotCall` and its fields may change from one release to the next. A view
changes only with `records.API_VERSION`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import decisions, formats, targets
from jaxplugin.dot import calls, epilogue, problems, sides
from jaxplugin.plugins import records, registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandProblem:
  """One operand of a `Problem`.

  Attributes:
    format: its block format, a public or a user's one; None for plain floats.
    dtype: dtype of the stored values. Packed FP4 is uint8, two values per
      byte. FP6 is uint8, one value per byte. Plain floats are float32, bfloat16
      or float16.
    scale_layout: "linear" or "swizzled_128x4", before any conversion.
      `Backend.reads` says whether it is converted.

  Example:
    >>> import jaxplugin as jp
    >>> jp.backends.OperandProblem(
    ...   format=jp.MXFP8, dtype=jp.MXFP8.values_dtype
    ... ).scale_layout
    'linear'
  """

  format: formats.BlockFormat | None
  dtype: np.dtype
  scale_layout: str = layouts.LINEAR

  def __str__(self) -> str:
    return self.dtype.name if self.format is None else self.format.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """The properties of a call by which `Backend.supports` decides.

  Attributes:
    batch, m, n, k: positive sizes; products of sizes if the call has several
      dimensions of a kind. A symbolic size is None, which only a backend with
      `takes_symbolic_sizes` gets.
    lhs, rhs: the operands. At least one has a format.
    dtype: dtype of the result: float32, bfloat16 or float16.
    global_scale: "none", "scalar", or "array" if it varies over the result.
    has_bias, activation, has_residual: the epilogue. activation is None,
      "relu", "gelu" (tanh approximation) or "silu".
    num_contracting: number of contracting dimensions.
    blocks_pair_up: whether both operands are blocked along the same contracting
      dimension.
    rows_k: k of `Call.as_rows`, which may pad it. By default it is k.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> side = jp.backends.OperandProblem(
    ...   format=jp.MXFP8, dtype=jp.MXFP8.values_dtype
    ... )
    >>> problem = jp.backends.Problem(
    ...   batch=1, m=2, n=3, k=32, lhs=side, rhs=side, dtype=np.dtype("float32")
    ... )
    >>> problem.global_scale, problem.num_contracting
    ('none', 1)
  """

  batch: int | None
  m: int | None
  n: int | None
  k: int | None
  lhs: OperandProblem
  rhs: OperandProblem
  dtype: np.dtype
  global_scale: problems.GlobalScale = "none"
  has_bias: bool = False
  activation: problems.Activation | None = None
  has_residual: bool = False
  num_contracting: int = 1
  blocks_pair_up: bool = True
  rows_k: int | None = None

  def __post_init__(self) -> None:
    if self.rows_k is None:
      object.__setattr__(self, "rows_k", self.k)

  def __str__(self) -> str:
    return problems.matmul_text(self, self.dtype, ("batch", "m", "n", "k"))


def problem_of(problem: problems.DotProblem) -> Problem:
  """Returns the public view of a problem."""
  return Problem(
    batch=problem.batch,
    m=problem.m,
    n=problem.n,
    k=problem.k,
    lhs=operand_problem(problem.lhs),
    rhs=operand_problem(problem.rhs),
    dtype=problem.out_dtype,
    global_scale=problem.global_scale,
    has_bias=problem.has_bias,
    activation=problem.activation,
    has_residual=problem.has_residual,
    num_contracting=problem.num_contracting,
    blocks_pair_up=problem.blocks_pair_up,
    rows_k=problem.dense_k,
  )


def operand_problem(operand: problems.SideProblem) -> OperandProblem:
  """Returns the public view of an operand's problem."""
  dtype, format = operand.dtype, operand.format
  if format is not None and not format.has_pairs:
    dtype = format.array_dtype  # `typed` converts FP8 bytes to FP8.
  return OperandProblem(
    format=format, dtype=dtype, scale_layout=operand.scale_layout
  )


class Operand:
  """One operand of a `Call`: its arrays and the roles of its dimensions.

  jaxplugin creates it. Its methods are JAX operations.
  """

  def __init__(self, side: sides.Side) -> None:
    self._side = side

  def __repr__(self) -> str:
    kind = self.values.dtype if self.format is None else self.format
    return f"Operand({kind}, {self.shape})"

  @property
  def values(self) -> jax.Array:
    """The stored values, of dtype `OperandProblem.dtype`."""
    return self._side.values

  @property
  def scale(self) -> jax.Array | None:
    """The block scales in the format's scale dtype, or None (plain floats).

    In the linear layout it has `shape` with `axis` divided by the block size,
    rounded up, and no padding. Each scale multiplies the values of its block.
    """
    return self._side.scale

  @property
  def format(self) -> formats.BlockFormat | None:
    """The block format, or None for plain floats."""
    return self._side.format

  @property
  def axis(self) -> int | None:
    """The blocked and packed dimension, or None for plain floats."""
    return self._side.axis

  @property
  def scale_layout(self) -> str:
    """The layout of `scale`: "linear", or another that the backend reads."""
    return self._side.scale_layout

  @property
  def shape(self) -> tuple[int, ...]:
    """The logical shape, without packing."""
    return self._side.shape

  @property
  def contracting(self) -> tuple[int, ...]:
    """Its contracting dimensions."""
    return self._side.contracting

  @property
  def batch(self) -> tuple[int, ...]:
    """Its batch dimensions."""
    return self._side.batch

  @property
  def free(self) -> tuple[int, ...]:
    """Its other dimensions, in order."""
    return self._side.free

  def dequantized(self) -> jax.Array:
    """Returns f32[shape]: values times block scales, or the plain floats.

    A NaN scale makes its block NaN. The global scale is not included.
    """
    return self._side.dequantized()

  def unpacked(self) -> jax.Array:
    """Returns one element per value; 4-bit values as float4_e2m1fn or int4."""
    if not self._is_packed():
      return self.values
    assert self.axis is not None
    assert self.format is not None
    return layouts.unpack_fp4(
      self.values, axis=self.axis, dtype=self.format.values_dtype
    )

  def packed(self) -> jax.Array:
    """Returns 4-bit values as uint8, two per byte along `axis`."""
    has_pairs = self.format is not None and self.format.has_pairs
    if not has_pairs or self._is_packed():
      return self.values
    assert self.axis is not None
    return layouts.pack_fp4(self.values, axis=self.axis)

  def _is_packed(self) -> bool:
    return (
      self.format is not None
      and self.format.has_pairs
      and self.values.dtype == formats.PACKED
    )


ProblemView = TypeVar("ProblemView")


class MatmulCall(Generic[ProblemView]):
  """The properties that `Call` and `RaggedCall` share."""

  def __init__(
    self,
    call: Any,
    problem: ProblemView,
    target: targets.Target,
    config: Mapping[str, decisions.Scalar],
  ) -> None:
    self._call = call
    self._problem = problem
    self._target = target
    self._config = config

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self._problem})"

  @property
  def problem(self) -> ProblemView:
    """The problem that `supports` was given."""
    return self._problem

  @property
  def target(self) -> targets.Target:
    """The device that the call is lowered for."""
    return self._target

  @property
  def config(self) -> dict[str, decisions.Scalar]:
    """The config that a tuning table chose (`Tuning`); empty by default."""
    return dict(self._config)

  @property
  def lhs(self) -> Operand:
    """The first operand."""
    return Operand(self._call.lhs)

  @property
  def rhs(self) -> Operand:
    """The second operand."""
    return Operand(self._call.rhs)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the result."""
    return self._call.shape

  @property
  def dtype(self) -> np.dtype:
    """Dtype of the result."""
    return self._call.preferred_element_type

  @property
  def global_scales(self) -> tuple[jax.Array, ...]:
    """The f32 factors of the sums: none, one or two, in order.

    They have one shape. There are two if f32 need not hold their product.
    """
    found = (self._call.global_scale, self._call.global_power)
    return tuple(factor for factor in found if factor is not None)

  @property
  def bias(self) -> jax.Array | None:
    """The bias in f32, bf16 or f16, or None."""
    return self._call.bias

  @property
  def activation(self) -> str | None:
    """The activation, as in the problem."""
    return self._call.activation

  def _require_sums(
    self, sums: Any, shape: tuple[int, ...], remedy: str = ""
  ) -> None:
    """Raises TypeError unless `sums` is f32 of `shape`."""
    if tuple(sums.shape) != shape or sums.dtype != np.float32:
      raise TypeError(
        f"finish: sums must be float32{list(shape)}, got"
        f" {sums.dtype}{list(sums.shape)}{remedy}"
      )


class Call(MatmulCall[Problem]):
  """One dot that `Backend.emit` computes.

  The result is computed in f32 and cast once::

    sums   = dot_general(lhs dequantized, rhs dequantized)
    scaled = sums * global_scales[0] * global_scales[1] ...
    result = cast(activation(scaled + bias) + residual)

  The shape of the result is that of the batch, lhs and rhs dimensions. Each
  global scale has rank 0 or the rank of the result. Global scales of that rank,
  the bias and the residual have dimensions of the result's size or 1.
  jaxplugin creates the call.
  """

  @property
  def dimension_numbers(self) -> sides.DimensionNumbers:
    """As for `lax.dot_general`."""
    return self._call.dimension_numbers

  @property
  def residual(self) -> jax.Array | None:
    """f32, bf16 or f16, like `bias`."""
    return self._call.residual

  def as_rows(
    self, *, k: int | None = None, scale_layout: str = layouts.LINEAR
  ) -> Call:
    """Returns the call as (batch, m, k) x (batch, n, k).

    Scales have shape (batch, rows, ceil(k / block size)), or that of
    `jp.swizzle_scale`. k may be padded with zeros. If the operands are blocked
    along different dimensions, lhs becomes plain floats. The result has shape
    (batch, m, n), and `emit` may return it without a reshape.

    Args:
      k: the padded size of k, at least `Problem.rows_k`, which is the default.
      scale_layout: the layout of the scales, "linear" or "swizzled_128x4". A
        scale that is swizzled and needs no padding along k is not converted. It
        may have any values in rows that pad m or n.
    """
    least = self._problem.rows_k
    if k is None:
      k = least
    elif least is None or k < least:
      raise ValueError(f"as_rows: k must be at least {least}, got {k}")
    return self._with(_rows(self._call, k, scale_layout), self._problem)

  def fuse(self, kernel: Callable[[Call], jax.Array]) -> jax.Array:
    """Returns `kernel(call)`, for a kernel that fuses most epilogues.

    The kernel fuses scalar global scales, a bias over the dimensions of rhs,
    the activation and the residual. If the global scale or the bias varies
    otherwise, `kernel` is passed the call without an epilogue, in f32. The
    epilogue follows as operations.

    Args:
      kernel: (call) -> an array with the shape and dtype of the call.
    """
    if not self._call.has_array_bias and (
      self._problem.global_scale != "array"
    ):
      return kernel(self)
    bare = self._call.bare()
    sums = kernel(self._with(bare, problem_of(bare.problem())))
    return epilogue.apply(sums.reshape(self.shape), self._call)

  def _with(self, call: calls.DotCall, problem: Problem) -> Call:
    return Call(call, problem, self._target, self._config)

  def finish(self, sums: jax.Array) -> jax.Array:
    """Applies global scales, epilogue and cast to f32[shape] sums."""
    remedy = "; for the result of as_rows() call the finish of that object"
    self._require_sums(sums, self.shape, remedy)
    return epilogue.apply(sums, self._call)


def typed(side: sides.Side, *, reads_swizzled: bool) -> sides.Side:
  """Returns a side with the dtypes and scale layout documented in `Operand`."""
  if side.format is None:
    return side
  side = side.as_elements()
  if reads_swizzled and side.scale_layout == layouts.SWIZZLED:
    return side
  return side.with_linear_scale()


def _rows(
  call: calls.DotCall, k: int | None, scale_layout: str
) -> calls.DotCall:
  """Merges the dimensions of a call and of its epilogue's operands."""
  if scale_layout == layouts.SWIZZLED and len(call.lhs.contracting) == 1:
    lhs, rhs = (_swizzled_rows(side, k) for side in (call.lhs, call.rhs))
  else:
    lhs, rhs = call.dense_sides()
    if k is not None:
      lhs, rhs = lhs.padded(2, k), rhs.padded(2, k)
    if scale_layout == layouts.SWIZZLED:
      lhs, rhs = _swizzled(lhs), _swizzled(rhs)
  groups = (len(call.lhs.batch), len(call.lhs.free), len(call.rhs.free))
  merged = {}
  for name in ("global_scale", "global_power", "bias", "residual"):
    operand = getattr(call, name)
    if operand is not None and operand.ndim:
      operand = _merged(operand, call.shape, groups)
    merged[name] = operand
  return call.replace(lhs=lhs, rhs=rhs, padded_scales=False, **merged)


def _swizzled_rows(side: sides.Side, k: int | None) -> sides.Side:
  """Returns a side as [batch, rows, k], with a swizzled scale.

  Requires one contracting dimension.
  """
  if side.format is not None and side.stays_swizzled:
    tile_k = layouts.SCALE_TILE_COLUMNS * side.format.block_size
    if k == side.shape[side.contracting[0]] and k % tile_k == 0:
      return side.merged(0)
  side = side.with_linear_scale()
  if k is not None:
    side = side.padded(side.contracting[0], k)
  return _swizzled(side.merged(0))


def _swizzled(side: sides.Side) -> sides.Side:
  if side.format is None:
    return side
  return side.replace(
    scale=layouts.swizzle_scale(side.scale), scale_layout=layouts.SWIZZLED
  )


def _merged(
  x: jax.Array, shape: tuple[int, ...], groups: tuple[int, ...]
) -> jax.Array:
  """Merges groups of dimensions of `x`, which broadcasts to `shape`.

  A group in which all sizes are 1 stays 1. Other groups are broadcast first.
  """
  wanted: list[int] = []
  sizes, start = [], 0
  for count in groups:
    own = x.shape[start : start + count]
    whole = shape[start : start + count]
    is_constant = all(size == 1 for size in own)
    kept = own if is_constant else whole
    wanted += kept
    sizes.append(math.prod(kept))
    start += count
  return jnp.broadcast_to(x, wanted).reshape(sizes)


def refusal(problem: Any) -> str:
  """Returns why backends cannot support the formats of a matmul, or ""."""
  for side in (problem.lhs, problem.rhs):
    if isinstance(side.format, formats.UnquantizedFormat):
      return f"supports block formats, got {side.format}"
  return ""


def _notes(
  problem: problems.DotProblem, backend: records.Backend
) -> tuple[str, ...]:
  return tuple(
    f"{name}: every call converts its scale to the linear layout"
    for name, side in (("lhs", problem.lhs), ("rhs", problem.rhs))
    if side.scale_layout not in (layouts.LINEAR, *backend.reads)
  )


def _emit(
  adapter: registry.Adapter[problems.DotProblem],
  config: dict[str, decisions.Scalar],
  call: calls.DotCall,
  problem: problems.DotProblem,
  target: targets.Target,
) -> jax.Array:
  if problem.is_empty:
    return epilogue.apply(jnp.zeros(call.shape, jnp.float32), call)
  reads_swizzled = layouts.SWIZZLED in adapter.backend.reads
  seen = call.with_sides(
    functools.partial(typed, reads_swizzled=reads_swizzled)
  )
  result = adapter.emit_array(
    Call(seen, problem_of(problem), target, config),
    call.preferred_element_type,
    call.shape,
    (problem.batch, problem.m, problem.n),
    also=", or the array that as_rows() stands for",
  )
  return result.reshape(call.shape)


INTERFACE: Final = registry.Interface(
  operation=sides.WHO,
  problem_of=problem_of,
  emit=_emit,
  refusal=refusal,
  is_empty=lambda problem: problem.is_empty,
  notes=_notes,
)
