# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`DotCall`: one call of a block-scaled dot.

Members that need only shapes and dtypes (`shape`, `problem`, ...) support
arrays, tracers, abstract values and `ShapeDtypeStruct`s. So do the functions
that validate. Their errors name the argument, the rule, the given value and the
remedy.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core
from jax.sharding import NamedSharding

from jaxplugin.arrays import interleaving, layouts
from jaxplugin.core import blocking, error_context, formats
from jaxplugin.dot import problems, sides
from jaxplugin.operation import primitive
from jaxplugin.tables import resolution

# `dot.primitive` registers the rules of this primitive.
block_scaled_dot_p: Final = extend_core.Primitive("block_scaled_dot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotCall(primitive.OperationCall):
  """The arrays and parameters of a block-scaled dot.

  Attributes:
    lhs, rhs: the operands.
    global_scale: f32[], or f32 that broadcasts to the result and has its rank.
    bias, residual: floats that broadcast to the result and have its rank.
    global_power: power of two, f32 of global_scale's shape, multiplied after
      global_scale (`epilogue`). It has no derivative.
    first_global_scale, second_global_scale: f32[], the factors of
      global_scale * global_power if these are the product of two numbers. A
      backend may use the factors instead. They have no derivative. In a call
      that is lowered global_scale and global_power may be None
      (`with_scales_alone`).
    preferred_element_type: dtype of the result.
    highest_precision: whether every backend must apply the global scale in f32.
    fastest_precision: whether sums over a block may have fewer bits than f32,
      and rows may be quantized to int8.
    activation: None, "relu", "gelu" or "silu".
    implementation: the requested backend, or None to choose.
    padded_scales: whether scales may be larger than needed.
    overlay: tuning tables in effect when the call was traced.
    out_sharding: requested sharding of the result, on a mesh with explicit
      axes, or None.
    reduce_dtype: dtype of each device's partial sum, which includes the global
      scale. If None, partial sums are f32 and the global scale multiplies the
      total.
  """

  lhs: sides.Side
  rhs: sides.Side
  global_scale: Any = None
  bias: Any = None
  residual: Any = None
  global_power: Any = None
  first_global_scale: Any = None
  second_global_scale: Any = None
  preferred_element_type: np.dtype
  highest_precision: bool = False
  fastest_precision: bool = False
  activation: problems.Activation | None = None
  implementation: str | None = None
  padded_scales: bool = False
  overlay: resolution.Overlay | None = None
  out_sharding: NamedSharding | None = None
  reduce_dtype: np.dtype | None = None

  PRIMITIVE = block_scaled_dot_p
  # Arrays from which values and scales were computed. Backends may read them
  # because that is faster; the result does not depend on them.
  ORIGINS: ClassVar[dict[str, tuple[str, ...]]] = {
    "first_global_scale": ("first_global_scale",),
    "second_global_scale": ("second_global_scale",),
  } | {
    f"{side}_{name}": (side, name)
    for side, names in (
      ("rhs", ("stack", "stack_scale", "layer")),
      ("lhs", ("source", "source_global_scale", "square_scale")),
      ("rhs", ("source", "source_global_scale", "square_scale")),
    )
    for name in names
  }
  ARRAYS = (
    primitive.paths_of_two_sides(
      "global_scale", "bias", "residual", "global_power"
    )
    | ORIGINS
  )

  # Conversions.

  def replace(self, **changes: Any) -> Self:
    """Replaces fields; a new global scale drops its old factors."""
    if not changes.keys().isdisjoint(("global_scale", "global_power")):
      changes = {
        "first_global_scale": None,
        "second_global_scale": None,
      } | changes
    return super().replace(**changes)

  def scales_in_result(self) -> list[jax.Array]:
    """Returns the sides' global scales, reshaped to broadcast to the result."""
    scales = []
    offset = len(self.lhs.batch)
    for side in (self.lhs, self.rhs):
      positions = {d: i for i, d in enumerate(side.batch)}
      positions |= {d: i + offset for i, d in enumerate(side.free)}
      offset += len(side.free)
      scales.append(side.global_scale_in(positions, len(self.shape)))
    return [scale for scale in scales if scale is not None]

  def bare(self) -> DotCall:
    """Returns the same dot in f32, without global scale and epilogue."""
    return self.replace(
      preferred_element_type=np.dtype(np.float32),
      global_scale=None,
      bias=None,
      activation=None,
      residual=None,
      global_power=None,
    )

  def without_origins(self) -> DotCall:
    """Returns the call without the origins of sides and global scales."""
    call = self.without_origins_of_sides()
    # Without a product, the two factors are the call's only global scales.
    if self.global_scale is None:
      return call
    return call.replace(first_global_scale=None, second_global_scale=None)

  def without_origins_of_sides(self) -> DotCall:
    """Returns the call without the origins of its sides."""
    return self.with_sides(sides.Side.without_origin)

  def with_scales_alone(self) -> DotCall:
    """Replaces the product of two global scales by its factors, if known."""
    if self.first_global_scale is None:
      return self
    return self.replace(
      global_scale=None,
      global_power=None,
      first_global_scale=self.first_global_scale,
      second_global_scale=self.second_global_scale,
    )

  def joined(self) -> DotCall:
    """Returns the call with its contracting dimensions merged, if possible.

    Operands with the contracting dimensions last, as `quantize` kernels write
    them, are not moved in memory.
    """
    if len(self.lhs.contracting) < 2:
      return self
    lhs, rhs = self.lhs.joined(), self.rhs.joined()
    if lhs is None or rhs is None:
      return self
    return self.replace(lhs=lhs, rhs=rhs)

  def dense_sides(self) -> tuple[sides.Side, sides.Side]:
    """Returns both sides row-major, [batch, rows, k], with contiguous blocks.

    The blocked contracting dimension comes last in k. It is padded with zeros
    to whole blocks if k merges several dimensions, and to an even size for FP4.
    If the sides are blocked along different dimensions, lhs is dequantized to
    f32, whose subnormals XLA:CPU flushes. Scales are linear, without padding.
    """
    lhs, rhs = self.lhs.with_linear_scale(), self.rhs.with_linear_scale()
    positions = (lhs.blocked_position, rhs.blocked_position)
    if None not in positions and positions[0] != positions[1]:
      lhs = lhs.plain()
    blocked = lhs.blocked_position
    if blocked is None:
      blocked = rhs.blocked_position
    assert blocked is not None
    size = problems.padded_size(
      lhs.shape[lhs.contracting[blocked]],
      (lhs.format, rhs.format),
      num_contracting=len(lhs.contracting),
    )
    dense = [
      side.padded(side.contracting[blocked], size).merged(blocked)
      for side in (lhs, rhs)
    ]
    return dense[0], dense[1]

  # Shapes and dtypes.

  @property
  def dimension_numbers(self) -> sides.DimensionNumbers:
    """Dimension numbers of `lax.dot_general`, in tuples."""
    return (
      (self.lhs.contracting, self.rhs.contracting),
      (self.lhs.batch, self.rhs.batch),
    )

  @property
  def has_epilogue(self) -> bool:
    """Whether anything but a cast follows the sum of products."""
    return self.activation is not None or any(
      x is not None
      for x in (
        self.global_scale,
        self.first_global_scale,
        self.bias,
        self.residual,
      )
    )

  @property
  def is_of_layer(self) -> bool:
    """Whether rhs is a layer that backends may read from its stack."""
    return self.rhs.is_layer and not self.lhs.batch

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the result: [batch..., lhs's free..., rhs's free...]."""
    lhs, rhs = self.lhs.shape, self.rhs.shape
    return (
      *(lhs[d] for d in self.lhs.batch),
      *(lhs[d] for d in self.lhs.free),
      *(rhs[d] for d in self.rhs.free),
    )

  def problem(self) -> problems.DotProblem:
    """Returns the problem that chooses a backend.

    It describes the call after `joined`, which is the call that is emitted.
    """
    return self.joined()._problem()

  def _problem(self) -> problems.DotProblem:
    lhs, rhs = self.lhs.shape, self.rhs.shape
    global_scale: problems.GlobalScale = "none"
    if self.global_scale is not None:
      global_scale = "array" if self.global_scale.ndim else "scalar"
    elif self.first_global_scale is not None:
      global_scale = "scalar"
    k = _product(lhs[d] for d in self.lhs.contracting)
    num_contracting = len(self.lhs.contracting)
    is_copied = problems.are_copied(
      k, (self.lhs.format, self.rhs.format), num_contracting=num_contracting
    )
    positions = {self.lhs.blocked_position, self.rhs.blocked_position} - {None}
    return problems.DotProblem(
      batch=_product(lhs[d] for d in self.lhs.batch),
      m=_product(lhs[d] for d in self.lhs.free),
      n=_product(rhs[d] for d in self.rhs.free),
      k=k,
      lhs=self.lhs.problem(is_copied=is_copied),
      rhs=self.rhs.problem(is_copied=is_copied),
      out_dtype=self.preferred_element_type,
      global_scale=global_scale,
      has_global_power=self.global_power is not None
      or self.first_global_scale is not None,
      highest_precision=self.highest_precision,
      fastest_precision=self.fastest_precision,
      has_bias=self.bias is not None,
      activation=self.activation,
      has_residual=self.residual is not None,
      has_array_bias=self.has_array_bias,
      num_contracting=num_contracting,
      blocked_k=self._blocked_k() if num_contracting > 1 else None,
      blocks_pair_up=len(positions) <= 1,
    )

  @property
  def has_array_bias(self) -> bool:
    """Whether the bias varies over dimensions that rhs does not have."""
    if self.bias is None:
      return False
    num_n = len(self.rhs.free)
    return any(n != 1 for n in self.bias.shape[: self.bias.ndim - num_n])

  def _blocked_k(self) -> int | None:
    """Returns the size of the blocked contracting dimension.

    If the sides are blocked along different dimensions, it is the size for rhs,
    because kernels then read a dequantized lhs.
    """
    side = self.lhs if self.rhs.format is None else self.rhs
    assert side.axis is not None
    return _product([side.shape[side.axis]])


def _product(sizes: Iterable[Any]) -> int | None:
  sizes = tuple(sizes)
  if not blocking.are_static(sizes):
    return None  # symbolic
  return math.prod(sizes)


RESULT_DTYPES: Final = sides.PLAIN_DTYPES
FASTEST: Final = "fastest"


def canonical_dimension_numbers(
  dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int
) -> sides.DimensionNumbers:
  """Returns dimension numbers as tuples of ints.

  None contracts the last dimensions. The leading dimensions are then batch if
  the ranks are equal, or rows of lhs if rhs has rank 2.

  Raises:
    TypeError: If they do not have the form of `lax.dot_general`, or are None
      for other ranks.
  """
  if dimension_numbers is None:
    if rhs_ndim < 2 or (lhs_ndim != rhs_ndim and not lhs_ndim > rhs_ndim == 2):
      raise TypeError(
        f"{sides.who()}: without dimension_numbers lhs and rhs must have the"
        " same rank of at least 2, (..., m, k) and (..., n, k), or rhs must"
        " have rank 2 and lhs a higher one, (..., k) and (n, k), got ranks"
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
      f"{sides.who()}: dimension_numbers must be ((lhs_contracting,"
      " rhs_contracting), (lhs_batch, rhs_batch)), got"
      f" {error_context.shown(dimension_numbers)}"
    ) from None


def is_fastest(precision: Any) -> bool:
  """Returns whether `precision` is `FASTEST`; raises as below if invalid."""
  canonical_precision(precision)
  return isinstance(precision, str) and precision == FASTEST


def canonical_precision(precision: Any) -> bool:
  """Returns whether `precision` is or contains HIGHEST.

  Raises:
    ValueError: If it is neither a precision nor `FASTEST`.
  """
  if isinstance(precision, str) and precision == FASTEST:
    return False
  items = precision if isinstance(precision, (tuple, list)) else (precision,)
  try:
    precisions = [lax.Precision(i) for i in items if i is not None]
  except (TypeError, ValueError):
    raise ValueError(
      f"{sides.who()}: precision must be None, 'default', 'high', 'highest',"
      f" 'fastest' or a jax.lax.Precision, got {error_context.shown(precision)}"
    ) from None
  return lax.Precision.HIGHEST in precisions


def product_dtype(lhs: np.dtype, rhs: np.dtype) -> np.dtype:
  """Returns the operand dtype with the wider range, then the finer one.

  For bf16 and f16 it is bf16. The result of `jp.dot_general` has this dtype
  without preferred_element_type.
  """
  properties = lambda x: (jnp.finfo(x).maxexp, jnp.finfo(x).nmant)
  return np.dtype(max(lhs, rhs, key=properties))


def parts_dtype(dtype: Any) -> np.dtype | None:
  """Returns `reduce_dtype` as a NumPy dtype; raises TypeError."""
  if dtype is None:
    return None
  return _float_dtype("reduce_dtype", dtype, ", or None for float32")


def result_dtype(dtype: Any) -> np.dtype:
  """Returns `preferred_element_type` as a NumPy dtype; raises TypeError."""
  return _float_dtype(
    "preferred_element_type", jnp.float32 if dtype is None else dtype
  )


def _float_dtype(name: str, dtype: Any, remedy: str = "") -> np.dtype:
  result = formats.as_dtype(dtype)
  if result not in RESULT_DTYPES:
    raise TypeError(
      f"{sides.who()}: {name} must be float32, bfloat16 or float16{remedy}, got"
      f" {result or error_context.shown(dtype)}"
    )
  return result


def validate_sides(call: DotCall) -> None:
  """Checks lhs, rhs and their scales; raises TypeError."""
  for side in (call.lhs, call.rhs):
    validate_values(side)
  numbers = call.dimension_numbers
  validate_dimension_numbers(
    sides.who(),
    numbers,
    call.lhs.shape,
    call.rhs.shape,
    lambda *dims: sizes_remedy(
      call.lhs,
      call.rhs,
      dims,
      transposed=(
        "without dimension_numbers rhs is (n, k): for a weight (k, n)"
        " quantize its transpose"
      ),
    ),
  )
  if not call.lhs.contracting:
    raise TypeError(
      f"{sides.who()}: dimension_numbers must name a contracting dimension, got"
      f" {numbers}"
    )
  for side in (call.lhs, call.rhs):
    if side.format is not None:
      validate_scale(side, padded=call.padded_scales)


def validate_dimension_numbers(
  who: str,
  dimension_numbers: sides.DimensionNumbers,
  lhs_shape: Sequence[int],
  rhs_shape: Sequence[int],
  remedy: Callable[[int, int], str] = lambda *_: "",
) -> None:
  """Raises TypeError unless dimension numbers match the logical shapes.

  Args:
    who: name of the function in errors.
    dimension_numbers: as for `lax.dot_general`.
    lhs_shape, rhs_shape: logical shapes.
    remedy: (lhs dimension, rhs dimension) -> text that the error adds if these
      contracting dimensions have different sizes.
  """
  contracting, batch = dimension_numbers
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    if len(lhs_dims) != len(rhs_dims):
      raise TypeError(
        f"{who}: dimension_numbers must have as many {kind} dimensions for lhs"
        f" as for rhs, got {lhs_dims} and {rhs_dims}"
      )
  for side, shape, dims in (
    ("lhs", lhs_shape, contracting[0] + batch[0]),
    ("rhs", rhs_shape, contracting[1] + batch[1]),
  ):
    if any(not 0 <= d < len(shape) for d in dims):
      raise TypeError(
        f"{who}: dimension_numbers name dimensions {dims} of {side}, which has"
        f" rank {len(shape)} (shape {tuple(shape)})"
      )
    if len(set(dims)) != len(dims):
      raise TypeError(
        f"{who}: dimension_numbers name a dimension of {side} twice: {dims}"
      )
  for kind, (lhs_dims, rhs_dims) in (
    ("contracting", contracting),
    ("batch", batch),
  ):
    for lhs_dim, rhs_dim in zip(lhs_dims, rhs_dims, strict=True):
      if lhs_shape[lhs_dim] != rhs_shape[rhs_dim]:
        raise TypeError(
          f"{who}: {kind} sizes must agree, got {lhs_shape[lhs_dim]} in"
          f" dimension {lhs_dim} of lhs {tuple(lhs_shape)} and"
          f" {rhs_shape[rhs_dim]} in dimension {rhs_dim} of rhs"
          f" {tuple(rhs_shape)} (logical shapes)"
          f"{remedy(lhs_dim, rhs_dim) if kind == 'contracting' else ''}"
        )


def sizes_remedy(
  lhs: Any,
  rhs: Any,
  dims: tuple[int, int],
  *,
  names: tuple[str, str] = ("lhs", "rhs"),
  transposed: str = "",
) -> str:
  """Returns the remedy if two contracting sizes differ, or "" if none is known.

  Args:
    lhs, rhs: plain or quantized arrays, or sides.
    dims: contracting dimensions of lhs and rhs.
    names: argument names of lhs and rhs in the caller.
    transposed: remedy if another dimension of rhs has the size of lhs.
  """
  given = tuple(zip(names, (lhs, rhs), dims, strict=True))
  for (name, plain, dim), (other, quantized, k) in (given, given[::-1]):
    format = _block_format(quantized)
    if format is None or _block_format(plain) is not None:
      continue
    size, wanted = plain.shape[dim], quantized.shape[k]
    if not isinstance(size, int) or (
      blocking.round_up(size, format.block_size) != wanted
    ):
      continue
    widths = [(0, 0)] * len(plain.shape)
    widths[dim] = (0, wanted - size)
    return (
      f"; {other} was padded with zeros to whole blocks, as by"
      f" quantize(pad=True): pad {name} too, with jnp.pad({name}, {widths})"
    )
  others = [size for d, size in enumerate(rhs.shape) if d != dims[1]]
  if transposed and lhs.shape[dims[0]] in others:
    return f"; {transposed}"
  return ""


def _block_format(x: Any) -> formats.BlockFormat | None:
  # JAX arrays have a `format` too: their memory layout.
  format = getattr(x, "format", None)
  return format if isinstance(format, formats.BlockFormat) else None


def validate_values(side: sides.Side) -> None:
  """Checks the dtype of one operand's values; raises TypeError."""
  format, values, name = side.format, side.values, side.name
  if format is None:
    if values.dtype not in sides.PLAIN_DTYPES:
      remedy = "cast it, or quantize it with jaxplugin.quantize"
      if sides.who() == "block_scaled_dot":  # Only it has `{name}_scale`.
        remedy = f"pass {name}_scale for quantized values, else {remedy}"
      raise TypeError(
        f"{sides.who()}: {name} without a scale must be float32, bfloat16 or"
        f" float16, got {values.dtype}; {remedy}"
      )
    return
  if values.dtype == interleaving.WORDS and (
    layouts.may_be_interleaved(format)
  ):
    return
  if values.dtype not in format.storage_dtypes:
    allowed = " or ".join(dtype.name for dtype in format.storage_dtypes)
    raise TypeError(
      f"{sides.who()}: {name} values of {format} must be {allowed}, got"
      f" {values.dtype}"
    )


def validate_scale(side: sides.Side, *, padded: bool = False) -> None:
  """Checks the block scale of a quantized operand; raises TypeError."""
  format, axis, scale = side.format, side.axis, side.scale
  assert format is not None and axis is not None
  contracting = side.contracting
  name = f"{side.name}_scale"
  if scale.dtype != format.scale_dtype:
    raise TypeError(
      f"{sides.who()}: {name} of {format} must be {format.scale_dtype.name},"
      f" got {scale.dtype}"
    )
  validate_scale_rank(side)
  shape = side.shape
  if axis not in contracting:
    raise TypeError(
      f"{sides.who()}: {side.name} must be blocked along a contracting"
      f" dimension, got blocks along dimension {axis} and contraction over"
      f" {contracting}; quantize {side.name} with axis={contracting[-1]}"
    )
  block = format.block_size
  expected = side.scale_shape
  if side.scale_layout == layouts.SWIZZLED:
    if axis != len(shape) - 1 or len(shape) < 2:
      raise TypeError(
        f"{sides.who()}: a swizzled {name} needs the contracting dimension"
        f" last, got dimension {axis} of {side.name} {shape}; use a linear"
        " scale"
      )
    expected = layouts.swizzled_shape(expected)
  if padded and side.scale_layout == layouts.LINEAR:
    _validate_padded_scale(side, expected)
    return
  if (
    not format.may_be_short
    and expected[axis] * block != shape[axis]
    and side.scale_layout == layouts.LINEAR
  ):
    raise TypeError(
      f"{sides.who()}: {side.name} contracting size must be a multiple of"
      f" {block} for {format.name.upper()}, got k={shape[axis]}; pad lhs and"
      " rhs"
    )
  if tuple(scale.shape) != expected:
    raise TypeError(
      f"{sides.who()}: {name} of {format} for {side.name} {shape} must have"
      f" shape {expected} (one scale per {block} values of dimension {axis}),"
      f" got {tuple(scale.shape)}; for a padded scale pass block_size={block}"
    )


def validate_scale_rank(side: sides.Side) -> None:
  """Raises TypeError unless the scale has the rank of the values."""
  if side.scale.ndim != side.values.ndim:
    name = f"{side.name}_scale"
    raise TypeError(
      f"{sides.who()}: {name} must have the rank of {side.name}, got {name}"
      f" {tuple(side.scale.shape)} for {side.name} {tuple(side.values.shape)}"
    )


def _validate_padded_scale(side: sides.Side, expected: Sequence[int]) -> None:
  pairs = zip(side.scale.shape, expected, strict=True)
  if any(
    have != need if d in side.batch else have < need
    for d, (have, need) in enumerate(pairs)
  ):
    raise TypeError(
      f"{sides.who()}: padded {side.name}_scale for {side.name} {side.shape}"
      f" must have shape {tuple(expected)}, or more in dimensions that are not"
      f" batch, got {tuple(side.scale.shape)}"
    )


def validate_global_scale(scale: Any, shape: Sequence[int]) -> None:
  """Raises TypeError unless a scale is scalar or broadcasts to the result."""
  if scale.ndim and (
    scale.ndim != len(shape)
    or any(
      have not in (1, want)
      for have, want in zip(scale.shape, shape, strict=True)
    )
  ):
    raise TypeError(
      f"{sides.who()}: global_scale of shape {tuple(scale.shape)} does not"
      f" broadcast to the result's shape {tuple(shape)}"
    )
