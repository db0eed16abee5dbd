# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`RaggedDotCall`, `RaggedContraction`, and the problems that describe them.

Their arrays may be abstract for properties that need only shapes and dtypes.
Errors name the argument, the rule, the given value and the remedy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal, Self, get_args

import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core

from jaxplugin.arrays import scaled_array
from jaxplugin.core import decisions, error_context
from jaxplugin.dot import arguments, problems, sides
from jaxplugin.operation import primitive
from jaxplugin.tables import resolution

WHO: Final = "ragged_dot"
CONTRACTION_WHO: Final = "ragged_dot_general"

Activation = Literal["relu", "gelu", "silu", "swiglu", "swigluoai"]
GATED: Final = ("swiglu", "swigluoai")
ACTIVATIONS: Final = (*problems.ACTIVATIONS, *GATED)
# "scalar" is one global scale, "group" and "row" one for each group or row.
GlobalScale = Literal["none", "scalar", "group", "row"]
GLOBAL_SCALES: Final = get_args(GlobalScale)


def static(size: Any) -> int | None:
  """Returns a size as an int, or None if it is symbolic."""
  return int(size) if isinstance(size, (int, np.integer)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
  """Fields of `RaggedDotProblem` and `ContractionProblem`.

  Attributes:
    groups, m, n, k: sizes. None is a symbolic size.
    lhs, rhs: the operands.
    out_dtype: dtype of the result.
  """

  groups: int | None
  m: int | None
  n: int | None
  k: int | None
  lhs: problems.SideProblem
  rhs: problems.SideProblem
  out_dtype: np.dtype

  def __str__(self) -> str:
    sizes = ("groups", "m", "n", "k")
    return problems.matmul_text(self, self.out_dtype, sizes)

  @property
  def sizes_are_static(self) -> bool:
    return None not in (self.groups, self.m, self.n, self.k)

  @property
  def is_empty(self) -> bool:
    return 0 in (self.groups, self.m, self.n, self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDotProblem(_Problem):
  """A ragged dot, reduced to the facts that choose a backend.

  lhs is [m, k] and a group's weight [n, k].

  Attributes:
    is_along_blocks: whether rhs is contracted along its blocked dimension.
      False in the gradient of lhs.
    global_scale: kind of the global scale.
    has_global_power: whether the global scale is two factors (`dot.epilogue`).
    has_bias, activation: the epilogue.
    fastest_precision: whether the call has precision="fastest".
    reads_m: as for `dot.problems.DotProblem`.
  """

  is_along_blocks: bool = True
  global_scale: GlobalScale = "none"
  has_global_power: bool = False
  has_bias: bool = False
  activation: Activation | None = None
  fastest_precision: bool = False
  reads_m: bool = False

  @property
  def by_kernel(self) -> decisions.Application:
    """How kernels apply the global scale: they do not fuse one for each row."""
    if self.global_scale == "none":
      return "none"
    return "separate" if self.global_scale == "row" else "fused"

  @property
  def blocks_pair_up(self) -> bool:
    """As for `dot.problems.DotProblem`."""
    return self.is_along_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContractionProblem(_Problem):
  """A ragged contraction, reduced to the facts that choose a backend.

  lhs is [m, n], rhs [m, k], and the result of a group [n, k].

  Attributes:
    global_scale: kind of the global scale. "array" varies over the result.
  """

  global_scale: Literal["none", "scalar", "array"] = "none"

  def __str__(self) -> str:
    return f"{super().__str__()}, contracting m by groups"


Problem = RaggedDotProblem | ContractionProblem


_F32: Final = np.dtype(np.float32)
# `ragged.primitive` registers the rules of these primitives.
ragged_dot_p: Final = extend_core.Primitive("block_scaled_ragged_dot")
ragged_contraction_p: Final = extend_core.Primitive(
  "block_scaled_ragged_contraction"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call(primitive.OperationCall):
  """Fields of `RaggedDotCall` and `RaggedContraction`.

  Attributes:
    lhs, rhs: the operands.
    group_sizes: i32[groups].
    global_scale: scale of the result, or None.
    global_power: power of two, f32 of global_scale's shape, multiplied after
      global_scale. It has no derivative.
    preferred_element_type: dtype of the result.
    implementation: the requested backend, or None to choose.
    overlay: tuning tables in effect when the call was traced.
    reduce_dtype: dtype of each device's partial sum; None is f32.
  """

  lhs: sides.Side
  rhs: sides.Side
  group_sizes: Any
  global_scale: Any = None
  global_power: Any = None
  preferred_element_type: np.dtype
  implementation: str | None = None
  overlay: resolution.Overlay | None = None
  reduce_dtype: np.dtype | None = None

  def bare(self) -> Self:
    """Returns the same call in f32, without global scale and epilogue."""
    return self.replace(
      preferred_element_type=_F32, global_scale=None, global_power=None
    )

  def without_origins(self) -> Self:
    """Returns the call without the origins of its sides."""
    return self.with_sides(sides.Side.without_origin)

  @property
  def num_rows(self) -> Any:
    return self.lhs.shape[0]

  @property
  def num_groups(self) -> Any:
    return self.group_sizes.shape[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDotCall(_Call):
  """The arrays and parameters of a ragged dot.

  Attributes:
    lhs: rows [m, k], contracting dimension 1. In the gradient of lhs they are
      [m, n].
    rhs: weights [groups, n, k], blocked along dimension 2. The contracting
      dimension is 2, or 1 in the gradient of lhs. 8-bit values and scales may
      be bytes, because viewing all groups as floats would copy them
      (`Side.as_elements`); `prepare_weights` returns bytes. Only gradients and
      training use an unquantized rhs. A backend may read its `square_scale`.
    global_scale: f32[], f32[groups] or f32[m, 1], or None.
    bias: float[groups, columns], or None.
    activation: as for `ragged_dot`.
    fastest_precision: as for `dot.calls.DotCall`.
    reduce_dtype: as for `dot.calls.DotCall`, if k is sharded. If only groups
      are sharded, sums over devices use the dtype of the result: each adds
      zeros to one device's result.
  """

  bias: Any = None
  activation: Activation | None = None
  fastest_precision: bool = False

  ARRAYS = primitive.paths_of_two_sides(
    "group_sizes", "global_scale", "bias", "global_power"
  ) | {"rhs_square_scale": ("rhs", "square_scale")}
  PRIMITIVE = ragged_dot_p

  # Conversions.

  def bare(self) -> RaggedDotCall:
    return super().bare().replace(bias=None, activation=None)

  def before_activation(self) -> RaggedDotCall:
    """Returns the call in f32, without its activation."""
    return self.replace(preferred_element_type=_F32, activation=None)

  def steps(self) -> tuple[RaggedDotCall, RaggedDotCall]:
    """Splits the call for a sharded k.

    Returns:
      (call for a device's partial sums, call for the epilogue of the total).
    """
    if self.reduce_dtype is None:
      return self.bare(), self
    part = self.replace(
      preferred_element_type=self.reduce_dtype, bias=None, activation=None
    )
    return part, self.replace(global_scale=None, global_power=None)

  def in_usual_order(self) -> RaggedDotCall:
    """Returns the call with deinterleaved values and linear scales."""
    return self.with_sides(
      lambda side: side.in_usual_order().with_linear_scale()
    )

  # Shapes and dtypes.

  @property
  def columns(self) -> Any:
    """Number of columns before a gated activation halves them."""
    (column_dim,) = {1, 2} - set(self.rhs.contracting)
    return self.rhs.shape[column_dim]

  @property
  def is_gated(self) -> bool:
    return self.activation in GATED

  @property
  def shape(self) -> tuple[Any, Any]:
    """Shape of the result."""
    columns = self.columns
    return self.num_rows, columns // 2 if self.is_gated else columns

  def problem(self) -> RaggedDotProblem:
    """Returns the problem that chooses a backend."""
    _, n, k = self.rhs.shape
    kinds: tuple[GlobalScale, ...] = ("scalar", "group", "row")
    scale = self.global_scale
    return RaggedDotProblem(
      groups=static(self.num_groups),
      m=static(self.num_rows),
      n=static(n),
      k=static(k),
      lhs=self.lhs.problem(is_copied=True),
      rhs=self.rhs.problem(is_copied=True),
      out_dtype=self.preferred_element_type,
      is_along_blocks=self.rhs.contracting == (2,),
      global_scale="none" if scale is None else kinds[scale.ndim],
      has_global_power=self.global_power is not None,
      has_bias=self.bias is not None,
      activation=self.activation,
      fastest_precision=self.fastest_precision,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedContraction(_Call):
  """The arrays and parameters of a ragged contraction.

  It contracts the rows of each group::

    result[g] = sum over the rows i of group g of outer(lhs[i], rhs[i])

  Attributes:
    lhs: [m, n], blocked along m or unquantized. The contracting dimension is 0.
    rhs: [m, k], blocked along m or unquantized. The contracting dimension is 0.
    global_scale: f32[], or f32[1, n or 1, k or 1], or None.
  """

  ARRAYS = primitive.paths_of_two_sides(
    "group_sizes", "global_scale", "global_power"
  )
  PRIMITIVE = ragged_contraction_p

  @property
  def shape(self) -> tuple[Any, Any, Any]:
    """Shape of the result."""
    return self.num_groups, self.lhs.shape[1], self.rhs.shape[1]

  def problem(self) -> ContractionProblem:
    """Returns the problem that chooses a backend."""
    groups, n, k = map(static, self.shape)
    scale = self.global_scale
    return ContractionProblem(
      groups=groups,
      m=static(self.num_rows),
      n=n,
      k=k,
      lhs=self.lhs.problem(is_copied=True),
      rhs=self.rhs.problem(is_copied=True),
      out_dtype=self.preferred_element_type,
      global_scale=(
        "none" if scale is None else "array" if scale.ndim else "scalar"
      ),
    )


Call = RaggedDotCall | RaggedContraction


def plain(
  lhs: Any, rhs: Any, group_sizes: Any, contracting: int, **options: Any
) -> RaggedDotCall:
  """Returns a call of unquantized arrays, in f32 by default.

  Args:
    contracting: contracting dimension of rhs, 1 or 2.
    **options: other fields of `RaggedDotCall`. The default `overlay` is the
      tables of an enclosing `tuning`.
  """
  return RaggedDotCall(
    lhs=sides.Side(name="lhs", values=lhs, contracting=(1,)),
    rhs=sides.Side(name="rhs", values=rhs, contracting=(contracting,)),
    group_sizes=group_sizes,
    **_with_defaults(options),
  )


def plain_contraction(
  lhs: Any, rhs: Any, group_sizes: Any, **options: Any
) -> RaggedContraction:
  """Returns a contraction of unquantized arrays, with options of `plain`."""
  return RaggedContraction(
    lhs=sides.Side(name="lhs", values=lhs, contracting=(0,)),
    rhs=sides.Side(name="rhs", values=rhs, contracting=(0,)),
    group_sizes=group_sizes,
    **_with_defaults(options),
  )


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
  return {
    "preferred_element_type": _F32,
    "overlay": resolution.overlay(),
  } | options


_TRANSPOSE: Final = (
  "for weights (groups, k, n) quantize jnp.swapaxes(weights, 1, 2)"
)
_RANKS: Final = {
  "lhs": (2, "(m, k)", "Reshape it to (m, k)"),
  "rhs": (3, "(groups, n, k)", "Stack the weights of the groups"),
}


def validate_rank(side: sides.Side) -> None:
  """Raises TypeError unless lhs has rank 2 or rhs rank 3."""
  rank, names, remedy = _RANKS[side.name]
  if side.ndim != rank:
    raise TypeError(
      f"{sides.who()}: {side.name} must have rank {rank}, {names}, got values"
      f" {list(side.values.shape)}. {remedy}"
    )


def require_quantized(rhs: Any) -> None:
  """Raises TypeError unless rhs is a `ScaledArray`."""
  if not isinstance(rhs, scaled_array.ScaledArray):
    raise TypeError(
      f"{sides.who()}: rhs must be a ScaledArray of shape (groups, n, k), got"
      f" {error_context.shown(rhs)}; quantize it along its last axis, pass the"
      " .array of a QuantizedWeight, or call jax.lax.ragged_dot for plain"
      " weights"
    )


def validate_activation(activation: Any, columns: Any) -> None:
  """Raises ValueError unless the activation is valid for these columns."""
  if activation is None:
    return
  if not error_context.is_one_of(activation, ACTIVATIONS):
    raise ValueError(
      f"{sides.who()}: activation must be None or one of"
      f" {ACTIVATIONS}, got {error_context.shown(activation)}; apply another"
      " function to the result"
    )
  if activation in GATED and columns % 2:
    raise ValueError(
      f"{sides.who()}: activation {error_context.shown(activation)} needs an"
      f" even n, half for the gate and half for the values, got n={columns};"
      " join the weights of gate and values along n"
    )


def validate_groups(group_sizes: Any, num_groups: Any) -> None:
  """Raises TypeError unless group sizes are integers[num_groups]."""
  if not jnp.issubdtype(group_sizes.dtype, np.integer):
    raise TypeError(
      f"{sides.who()}: group_sizes must be integers, got"
      f" {error_context.shown(group_sizes)}; pass group_sizes.astype(jnp.int32)"
    )
  if tuple(group_sizes.shape) != (num_groups,):
    raise TypeError(
      f"{sides.who()}: group_sizes must have one size for each of the"
      f" {num_groups} groups, shape ({num_groups},), got"
      f" {error_context.shown(group_sizes)}; pass the number of rows of each"
      " group"
    )


def validate(call: RaggedDotCall) -> None:
  """Checks values, scales and k; raises TypeError."""
  for side in (call.lhs, call.rhs):
    arguments.validate_values(side)
  lhs_k, rhs_k = call.lhs.shape[1], call.rhs.shape[2]
  if lhs_k != rhs_k:
    remedy = arguments.sizes_remedy(
      call.lhs, call.rhs, (1, 2), transposed=_TRANSPOSE
    )
    raise TypeError(
      f"{sides.who()}: lhs (m, k) and rhs (groups, n, k) must have the same k,"
      f" got {call.lhs.shape} and {call.rhs.shape} (logical"
      f" shapes){remedy}"
    )
  for side in (call.lhs, call.rhs):
    if side.format is not None:
      arguments.validate_scale(side)


def validate_bias(bias: Any, num_groups: Any, columns: Any) -> None:
  """Raises TypeError unless the bias has shape [num_groups, columns]."""
  if tuple(bias.shape) != (num_groups, columns):
    raise TypeError(
      f"{sides.who()}: bias must have shape (groups, n), ({num_groups},"
      f" {columns}), got {tuple(bias.shape)}; broadcast a bias that all groups"
      " share"
    )
