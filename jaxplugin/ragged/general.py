# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot_general` and `align_groups`: check arguments and bind."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, cast

import jax
import jax.numpy as jnp

from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context
from jaxplugin.dot import arguments, epilogue, sides
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import choice
from jaxplugin.quantization import out_format as out_format_lib
from jaxplugin.ragged import api as ragged_api
from jaxplugin.ragged import backends, calls, groups
from jaxplugin.ragged import sharding as sharding_lib
from jaxplugin.tables import resolution

# For each operand: {dimension of its global scale: dimension of the result}.
_PLACES: Final = {"lhs": {1: 1}, "rhs": {1: 2}}


def ragged_dot_general(
  lhs: arguments.Operand,
  rhs: arguments.Operand,
  group_sizes: jax.Array,
  ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
  *,
  preferred_element_type: Any = jnp.float32,
  precision: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
  out_sharding: Any = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Multiplies block-scaled operands, as `jax.lax.ragged_dot_general` does.

  One dimension of lhs is ragged: its first group_sizes[0] rows are group 0, and
  so on. If it is not contracted, lhs is [m, k] and rhs [groups, n, k]. With g
  the group of row i, this is `ragged_dot`::

    result[i, n] = sum_k(lhs[i, k] * rhs[g, n, k])

  If it is contracted, lhs is [m, n] and rhs [m, k], as for the gradient of
  experts::

    result[g, n, k] = sum over rows i of g (lhs[i, n] * rhs[i, k])

  A group without rows is zero there. Rows beyond the last group do not affect
  any result. Blocks along m are counted from row 0, and a group may begin
  inside of one. `align_groups` prevents that, so that groups do not share
  scales or NaNs. The bound and the derivatives are those of `ragged_dot`.

  Args:
    lhs: f32, bf16, f16 or f64 of rank 2, or a `ScaledArray` blocked along the
      contracted dimension.
    rhs: the same if m is contracted; else a `ScaledArray` of rank 3. Its codes
      are copied if its order is not [groups, n, k].
    group_sizes: integers[groups], as for `ragged_dot`.
    ragged_dot_dimension_numbers: one contracting and one ragged dimension.
    preferred_element_type: f32, bf16 or f16.
    precision: as for `ragged_dot`. If m is contracted, it changes nothing.
    reduce_dtype: as for `block_scaled_dot`.
    implementation: backend; None chooses.
    out_sharding, out_format: as for `ragged_dot`.

  Returns:
    preferred_element_type[m, n], or [groups, n, k] if m is contracted.

  Raises:
    TypeError: If a rank, dtype or shape does not fit.
    ValueError: If a parameter is invalid, or an NVFP4 scale is negative.
    NotImplementedError: If the dimension numbers or the call are not supported.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> numbers = jax.lax.RaggedDotDimensionNumbers(
    ...   (((0,), (0,)), ((), ())), (0,), ()
    ... )
    >>> x_q = jp.quantize(jnp.ones((32, 2)), "mxfp8", axis=0)
    >>> sizes = jnp.array([30, 2])
    >>> jp.ragged_dot_general(x_q, x_q, sizes, numbers)[:, 0]
    Array([[30., 30.],
           [ 2.,  2.]], dtype=float32)
  """
  with error_context.in_function(error_context.who(calls.CONTRACTION_WHO)):
    order = Order.of(
      ragged_dot_dimension_numbers,
      arguments.as_operand("lhs", lhs),
      arguments.as_operand("rhs", rhs),
    )
    lhs, rhs = order.transposed(lhs, rhs)
    options: dict[str, Any] = {
      "preferred_element_type": preferred_element_type,
      "reduce_dtype": reduce_dtype,
      "implementation": implementation,
      "out_sharding": out_sharding,
    }
    if order.is_contraction:
      arguments.canonical_precision(precision)
      out = None
      if out_format is not None:
        out = out_format_lib.OutFormat.of_matmul(
          sides.who(), out_format, preferred_element_type
        )
      return contract(lhs, rhs, group_sizes, out=out, **options)
    calls.require_quantized(rhs)
    return ragged_api.ragged_dot(
      lhs,
      cast(scaled_array.ScaledArray, rhs),
      group_sizes,
      precision=precision,
      out_format=out_format,
      **options,
    )


def contract(
  lhs: arguments.Operand,
  rhs: arguments.Operand,
  group_sizes: Any,
  *,
  out_sharding: Any = None,
  out: out_format_lib.OutFormat | None = None,
  **options: Any,
) -> Any:
  """Contracts (m, n) and (m, k) over the rows of each group.

  `out` is that of `quantized_results.compute`, the options are those of
  `_call`.
  """
  call_of = lambda *arrays: _call(*arrays, **options)
  call = call_of(lhs, rhs, group_sizes)
  sharding = sharding_lib.result_sharding(call, out_sharding)
  if sharding is None:
    call = _with_global_scale(call)
    return (
      ragged_api.bind(call) if out is None else ragged_api.quantized(call, out)
    )
  product = lambda *arrays: ragged_api.bind(
    _with_global_scale(call_of(*arrays))
  )
  arrays = jax.tree.map(jnp.asarray, (lhs, rhs, call.group_sizes))
  result = mesh_axes.automatic(product, sharding)(*arrays)
  if out is None:
    return result
  return out_format_lib.quantized(sides.who(), result, out)


def align_groups(
  x: jax.Array, group_sizes: jax.Array, multiple: int
) -> tuple[jax.Array, jax.Array]:
  """Moves groups of rows so that each begins at a multiple of a number.

  If the number is a block size, no block contains rows of two groups. Zeros
  fill the space between groups and after the last one.

  Args:
    x: [m, ...]: rows in groups.
    group_sizes: integers[groups], as for `ragged_dot`.
    multiple: a positive integer.

  Returns:
    The rows, in x's dtype, and i32[groups], the sizes rounded up to multiples.
    The number of rows suffices for any sizes::

      m + min(groups, m) * (multiple - 1), rounded down to a multiple

  Raises:
    TypeError: If x has rank 0, group_sizes are not integers, or multiple is not
      an integer.
    ValueError: If multiple is not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> rows, sizes = jp.align_groups(jnp.arange(1, 7), jnp.array([1, 5]), 4)
    >>> rows
    Array([1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0], dtype=int32)
    >>> sizes
    Array([4, 8], dtype=int32)

  See also:
    `jp.ragged_dot_general`, which takes both after `jp.quantize(axis=0)`.
  """
  with error_context.in_function("align_groups"):
    x = arguments.array("x", x)
    group_sizes = arguments.integers("group_sizes", group_sizes)
    if not x.ndim:
      raise TypeError("align_groups: x must have rank 1 or more, got a scalar")
    calls.validate_groups(group_sizes, group_sizes.size)
    multiple = error_context.require_integer(
      "align_groups", "multiple", multiple
    )
    if multiple < 1:
      raise ValueError(
        f"align_groups: multiple must be at least 1, got {multiple}"
      )
    return groups.align(x, group_sizes, multiple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """The transposes that supported dimension numbers require.

  Attributes:
    lhs, rhs: permutations of the operands to [m, k] and [groups, n, k], or to
      [m, n] and [m, k] for a contraction.
    is_contraction: whether m is contracted.
  """

  lhs: tuple[int, ...]
  rhs: tuple[int, ...]
  is_contraction: bool

  @classmethod
  def of(cls, numbers: Any, lhs: Any, rhs: Any) -> Order:
    """Returns the order of dimension numbers.

    Raises:
      TypeError: If they do not fit the operands.
      NotImplementedError: If they are not supported.
    """
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
      raise TypeError(
        f"{sides.who()}: ragged_dot_dimension_numbers must be a"
        " jax.lax.RaggedDotDimensionNumbers, got"
        f" {error_context.shown(numbers)}"
      )
    dims = arguments.canonical_dimension_numbers(
      numbers.dot_dimension_numbers, lhs.ndim, rhs.ndim
    )
    arguments.validate_dimension_numbers(
      sides.who(), dims, lhs.shape, rhs.shape
    )
    (lhs_k, rhs_k), (lhs_batch, _) = dims
    ragged = _in_range("lhs_ragged", numbers.lhs_ragged_dimensions, lhs.ndim)
    group = _in_range("rhs_group", numbers.rhs_group_dimensions, rhs.ndim)
    if len(ragged) != 1:
      raise TypeError(
        f"{sides.who()}: one dimension of lhs must be ragged, got {ragged};"
        " pass lhs_ragged_dimensions=(0,) for rows in groups"
      )
    if lhs_batch:
      raise NotImplementedError(
        f"{sides.who()}: dimension_numbers must have no batch dimensions, got"
        f" {dims[1]}; use jax.vmap, or block_scaled_dot if the groups are a"
        " batch dimension"
      )
    is_contraction = ragged == lhs_k
    ranks = (2, 2) if is_contraction else (2, 3)
    if len(lhs_k) != 1 or (lhs.ndim, rhs.ndim) != ranks:
      raise NotImplementedError(
        f"{sides.who()}: operands must be (m, k) x (groups, n, k) contracting"
        f" k, or (m, n) x (m, k) contracting m, got {tuple(lhs.shape)} x"
        f" {tuple(rhs.shape)} with {numbers}; merge other dimensions by"
        " reshape"
      )
    if len(group) != (0 if is_contraction else 1) or group == rhs_k:
      raise TypeError(
        f"{sides.who()}: rhs must have one group dimension, which is not"
        " contracted, or none if the ragged dimension is contracted, got"
        f" {group}; pass rhs_group_dimensions=(0,) or ()"
      )
    if is_contraction:
      return cls(
        lhs=(*ragged, *sides.free_dims(2, lhs_k, ())),
        rhs=(*rhs_k, *sides.free_dims(2, rhs_k, ())),
        is_contraction=True,
      )
    return cls(
      lhs=(*ragged, *lhs_k),
      rhs=(*group, *sides.free_dims(3, rhs_k, group), *rhs_k),
      is_contraction=False,
    )

  def transposed(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    return _transposed(lhs, self.lhs), _transposed(rhs, self.rhs)


def _transposed(x: Any, order: tuple[int, ...]) -> Any:
  if order == tuple(range(len(order))):
    return x
  if isinstance(x, scaled_array.ScaledArray):
    return x.transpose(order)
  return jnp.transpose(x, order)


def _in_range(name: str, dims: Any, ndim: int) -> tuple[int, ...]:
  """Returns dimensions as ints; raises TypeError unless they are in range."""
  if any(not 0 <= d < ndim for d in dims):
    raise TypeError(
      f"{sides.who()}: {name}_dimensions {tuple(dims)} must be dimensions of an"
      f" operand of rank {ndim}"
    )
  return tuple(map(int, dims))


def _call(
  lhs: Any,
  rhs: Any,
  group_sizes: Any,
  *,
  preferred_element_type: Any = jnp.float32,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> calls.RaggedContraction:
  """Returns the checked call; the sides still have their global scales."""
  for name, operand in (("lhs", lhs), ("rhs", rhs)):
    if scaled_array.has_surrogate(operand):
      raise NotImplementedError(
        f"{sides.who()}: {name} was quantized with"
        ' derivative="straight_through", which this contraction does not'
        " support; for gradients call jaxplugin.training.ragged_dot_general"
      )
  group_sizes = arguments.integers("group_sizes", group_sizes)
  calls.validate_groups(group_sizes, group_sizes.size)
  choice.validate_name(backends.CONTRACTION, implementation)
  lhs_side, rhs_side = _side("lhs", lhs), _side("rhs", rhs)
  if lhs_side.shape[0] != rhs_side.shape[0]:
    raise TypeError(
      f"{sides.who()}: lhs (m, n) and rhs (m, k) must have the same m, got"
      f" {lhs_side.shape} and {rhs_side.shape} (logical shapes)"
    )
  return calls.RaggedContraction(
    lhs=lhs_side,
    rhs=rhs_side,
    group_sizes=group_sizes,
    preferred_element_type=arguments.result_dtype(preferred_element_type),
    implementation=implementation,
    overlay=resolution.overlay(),
    reduce_dtype=arguments.parts_dtype(reduce_dtype),
  )


def _side(name: str, operand: Any) -> sides.Side:
  """Returns a checked side [m, columns], contracted along m."""
  side = arguments.side_of(name, operand).replace(contracting=(0,))
  arguments.validate_values(side)
  if side.format is None:
    return side
  if side.axis not in (None, 0):
    raise TypeError(
      f"{sides.who()}: {name} must be blocked along m, the contracting"
      " dimension, got blocks along the other dimension; quantize it along m"
    )
  side = side.replace(axis=0).in_rows()
  arguments.validate_scale(side)
  arguments.reject_negative_scale(side)
  return side


def _with_global_scale(
  call: calls.RaggedContraction,
) -> calls.RaggedContraction:
  """Moves the sides' global scales to the call."""
  scales = [
    side.global_scale_in(_PLACES[side.name], 3) for side in (call.lhs, call.rhs)
  ]
  return epilogue.with_global_scale(call, scales)
