# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for `jax.nn.scaled_*` and `jax.lax.scaled_dot`, on every platform.

The functions have the names, defaults and meaning of JAX's, and an argument
`implementation`. Code written for JAX works with another import. They differ
from JAX's functions:

* They multiply and accumulate in f32, and cast once at the end. On some
  platforms JAX multiplies in `preferred_element_type` or in bf16.
* Results are f32, bf16 or f16. JAX's `scaled_dot` and `scaled_matmul` also
  return integers.
* k = 0 returns zeros, and several contracting dimensions are paired in the
  order of `dimension_numbers`, as in `lax.dot_general`.

Values and scales that form one of the package's formats are multiplied by any
backend. Other operands that JAX takes (other block sizes, one scale per row,
bf16, f32 or integers as scales or values) get a new `BlockFormat`, which only
the xla backend supports.

Source: the documentation of `jax.nn` and `jax.lax`, JAX 0.10 to 0.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context, formats
from jaxplugin.dot import backends, sides
from jaxplugin.dot.backends import xla
from jaxplugin.dropin import nn_operands

MATMUL_NUMBERS: Final = (((2,), (2,)), ((0,), (0,)))


def scaled_matmul(
  lhs: jax.Array,
  rhs: jax.Array,
  lhs_scales: jax.Array,
  rhs_scales: jax.Array,
  preferred_element_type: Any = np.float32,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies batches of block-scaled matrices, as `jax.nn` does.

  With block = k / k_blocks, the number of values that share a scale::

    a = lhs * repeat(lhs_scales, block, axis=-1)
    b = rhs * repeat(rhs_scales, block, axis=-1)
    result = cast(einsum("bmk,bnk->bmn", a, b))

  Sums are in f32. A NaN scale makes its whole block NaN.

  Args:
    lhs: any real dtype[batch, m, k]. uint8 values are integers, as in JAX.
    rhs: any real dtype[batch, n, k].
    lhs_scales: any real dtype[batch, m, k_blocks]; k_blocks divides k.
    rhs_scales: any real dtype[batch, n, k_blocks].
    preferred_element_type: f32, bf16 or f16.
    implementation: backend; None chooses.

  Returns:
    preferred_element_type[batch, m, n].

  Raises:
    ValueError: If a rank is not 3, sizes disagree, the backend is unknown or an
      NVFP4 scale is negative.
    TypeError: If k_blocks does not divide k, or a dtype is invalid.
    NotImplementedError: If the named backend does not support the call.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, scale = jnp.ones((1, 2, 32)), jnp.full((1, 2, 1), 0.5)
    >>> jp.nn.scaled_matmul(x, x, scale, scale)
    Array([[[8., 8.],
            [8., 8.]]], dtype=float32)

  See also:
    `jp.block_scaled_dot`, which also accepts packed FP4.

  Source: `jax.nn.scaled_matmul`.
  """
  who = "scaled_matmul"
  arrays = {
    "lhs": nn_operands.array(who, "lhs", lhs),
    "rhs": nn_operands.array(who, "rhs", rhs),
    "lhs_scales": nn_operands.array(who, "lhs_scales", lhs_scales),
    "rhs_scales": nn_operands.array(who, "rhs_scales", rhs_scales),
  }
  shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in arrays.items())
  lhs, rhs, lhs_scales, rhs_scales = arrays.values()
  if any(x.ndim != 3 for x in arrays.values()):
    raise ValueError(
      f"{who}: all operands must have rank 3, (batch, rows, k) and (batch,"
      f" rows, k_blocks), got {shapes}; reshape them, or call scaled_dot"
    )
  if (lhs.shape[0], lhs.shape[2]) != (rhs.shape[0], rhs.shape[2]):
    raise ValueError(
      f"{who}: lhs and rhs must agree in batch and k, got {shapes}; pass rhs as"
      " (batch, n, k)"
    )
  if lhs_scales.shape[2] != rhs_scales.shape[2]:
    raise ValueError(
      f"{who}: lhs_scales and rhs_scales must have the same number of blocks,"
      f" got {shapes}; for a block size per side call scaled_dot"
    )
  if (
    lhs_scales.shape[:2] != lhs.shape[:2]
    or rhs_scales.shape[:2] != rhs.shape[:2]
  ):
    raise ValueError(
      f"{who}: scales must have the batch and row sizes of their operand, got"
      f" {shapes}; pass scales as (batch, rows, k_blocks)"
    )
  if preferred_element_type is None:
    raise ValueError(
      f"{who}: preferred_element_type must be float32, bfloat16 or float16,"
      " got None"
    )
  with error_context.in_function(who):
    return _dot_of_scaled(
      who,
      (lhs, lhs_scales),
      (rhs, rhs_scales),
      MATMUL_NUMBERS,
      preferred_element_type,
      implementation,
    )


def scaled_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  lhs_scale: jax.Array | None = None,
  rhs_scale: jax.Array | None = None,
  dimension_numbers: Any = None,
  preferred_element_type: Any = None,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies block-scaled operands, as `jax.lax.scaled_dot` does.

  Each scale is repeated along contracting dimensions to its operand's size::

    result = cast(dot_general(lhs * repeat(lhs_scale), rhs * repeat(rhs_scale)))

  Sums are in f32. A NaN scale makes its whole block NaN. An operand without a
  scale is not rounded. (JAX rounds it to bf16.)

  Args:
    lhs: any real dtype of any rank. uint8 values are integers, as in JAX.
    rhs: any real dtype, of the rank of lhs.
    lhs_scale: any real dtype. It has the shape of lhs with each contracting
      size divided by 2 or more. None leaves lhs unscaled.
    rhs_scale: the same for rhs. Its block sizes may differ from those of lhs.
    dimension_numbers: as for `lax.dot_general`. Default: [..., m, k] times
      [..., k, n], with leading batch dimensions.
    preferred_element_type: f32, bf16 or f16. Default: bf16.
    implementation: backend; None chooses.

  Returns:
    preferred_element_type[batch..., m..., n...].

  Raises:
    TypeError: If a rank, dtype or shape does not fit.
    ValueError: If the backend is unknown, or an NVFP4 scale is negative.
    NotImplementedError: If the named backend does not support the call, or a
      quantized operand is differentiated.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x, scale = jnp.ones((2, 32)), jnp.full((2, 1), 0.5)
    >>> jp.scaled_dot(x, x.T, lhs_scale=scale)
    Array([[16, 16],
           [16, 16]], dtype=bfloat16)

  See also:
    `jp.block_scaled_dot`, which also accepts packed FP4.

  Source: `jax.lax.scaled_dot`.
  """
  who = "scaled_dot"
  lhs, rhs = (
    nn_operands.array(who, "lhs", lhs),
    nn_operands.array(who, "rhs", rhs),
  )
  scales = {}
  for name, scale, operand in (
    ("lhs_scale", lhs_scale, lhs),
    ("rhs_scale", rhs_scale, rhs),
  ):
    given = None if scale is None else nn_operands.array(who, name, scale)
    scales[name] = given
    if given is not None and given.ndim != operand.ndim:
      raise TypeError(
        f"{who}: {name} must have the rank of its operand, got {name}"
        f" {tuple(given.shape)} for {tuple(operand.shape)}"
      )
  if lhs.ndim != rhs.ndim:
    raise TypeError(
      f"{who}: lhs and rhs must have the same rank, got {tuple(lhs.shape)} and"
      f" {tuple(rhs.shape)}; reshape one, or call block_scaled_dot"
    )
  if dimension_numbers is None:
    if lhs.ndim < 2:
      raise TypeError(
        f"{who}: without dimension_numbers operands must have rank 2 or more,"
        f" (..., m, k) and (..., k, n), got {tuple(lhs.shape)} and"
        f" {tuple(rhs.shape)}; pass dimension_numbers"
      )
    batch = tuple(range(lhs.ndim - 2))
    dimension_numbers = (((lhs.ndim - 1,), (lhs.ndim - 2,)), (batch, batch))
  if preferred_element_type is None:
    preferred_element_type = jnp.bfloat16
  with error_context.in_function(who):
    numbers = nn_operands.canonical_numbers(
      who, dimension_numbers, lhs.shape, rhs.shape
    )
    for side, operand, contracting in zip(
      ("lhs", "rhs"), (lhs, rhs), numbers[0], strict=True
    ):
      scale = scales[f"{side}_scale"]
      if scale is not None:
        _check_scale(who, side, operand.shape, scale.shape, contracting)
    return _dot_of_scaled(
      who,
      (lhs, scales["lhs_scale"]),
      (rhs, scales["rhs_scale"]),
      numbers,
      preferred_element_type,
      implementation,
    )


def _check_scale(
  who: str,
  side: str,
  shape: Sequence[Any],
  scale_shape: Sequence[Any],
  contracting: sides.Dims,
) -> None:
  """Raises TypeError unless a scale has a shape that `jax.lax` accepts."""

  def fits(dim: int, size: Any, scale_size: Any) -> bool:
    if dim not in contracting:
      return size == scale_size
    if not isinstance(size, int) or not isinstance(scale_size, int):
      return True  # `_block_size` checks symbolic sizes
    if 0 in (size, scale_size):
      return size == scale_size
    return (
      size % scale_size == 0 and size >= nn_operands.MIN_BLOCK_SIZE * scale_size
    )

  pairs = enumerate(zip(shape, scale_shape, strict=True))
  if not all(fits(dim, *sizes) for dim, sizes in pairs):
    raise TypeError(
      f"{who}: {side}_scale must have the shape of {side}, every contracting"
      f" dimension divided by {nn_operands.MIN_BLOCK_SIZE} or more, got"
      f" {side}_scale {tuple(scale_shape)} for {side} {tuple(shape)} with"
      f" contracting dimensions {contracting}; repeat a scale of other blocks"
      " with jnp.repeat"
    )


def _dot_of_scaled(
  who: str,
  lhs: tuple[jax.Array, jax.Array | None],
  rhs: tuple[jax.Array, jax.Array | None],
  numbers: sides.DimensionNumbers,
  dtype: Any,
  implementation: str | None,
) -> jax.Array:
  """Multiplies two (values, scale or None) pairs."""
  backends.validate_name(implementation)
  dtype = nn_operands.result_dtype(who, dtype)
  (lhs_k, rhs_k), batch = numbers
  is_empty = 0 in (lhs[0].shape[d] for d in lhs_k)
  is_plain = lhs[1] is None and rhs[1] is None
  if not lhs_k:  # blocks of one, in a contracting dimension of size 1
    unit: Any = lambda x: None if x is None else jnp.expand_dims(x, -1)
    lhs_k, rhs_k = (lhs[0].ndim,), (rhs[0].ndim,)
    lhs, rhs = (unit(lhs[0]), unit(lhs[1])), (unit(rhs[0]), unit(rhs[1]))
  operands: Any = [
    _block_scaled(who, side, values, None if is_empty else scale, contracting)
    for side, (values, scale), contracting in (
      ("lhs", lhs, lhs_k),
      ("rhs", rhs, rhs_k),
    )
  ]
  if is_empty or is_plain:
    nn_operands.require_portable(
      who, implementation, "a call without any block scale"
    )
    numbers = ((lhs_k, rhs_k), batch)
    return xla.plain_dot(operands[0], operands[1], numbers, dtype)
  return dot.block_scaled_dot(
    *operands,
    dimension_numbers=((lhs_k, rhs_k), batch),
    preferred_element_type=dtype,
    reduce_dtype=dtype,  # as in JAX's function
    implementation=implementation,
  )


def _block_scaled(
  who: str,
  side: str,
  values: jax.Array,
  scale: jax.Array | None,
  contracting: sides.Dims,
) -> jax.Array | scaled_array.ScaledArray:
  """Returns the operand of `block_scaled_dot` for values and a scale.

  Both may have any real dtype. A `ScaledArray` has blocks along one dimension,
  so a scale with several contracting dimensions is repeated along all of them
  except the last.
  """
  values = nn_operands.as_float(who, side, values)
  if scale is None:
    if ml_dtypes.finfo(values.dtype).bits <= 8:
      return values.astype(jnp.bfloat16)  # exact
    return values
  scale = nn_operands.as_float(who, f"{side}_scale", scale)
  *others, axis = contracting
  for dim in others:
    count = values.shape[dim] // scale.shape[dim]
    scale = jnp.repeat(scale, count, axis=dim)
  block_size = _block_size(who, side, values, scale, axis)
  format = nn_operands.block_format(
    values.dtype, scale.dtype, block_size, False
  )
  return scaled_array.ScaledArray(values, scale, None, format)


def _block_size(
  who: str, side: str, values: jax.Array, scale: jax.Array, axis: int
) -> int:
  size, scale_size = values.shape[axis], scale.shape[axis]
  format = formats.infer(values.dtype, scale.dtype)
  if format is not None and scale_size * format.block_size == size:
    return format.block_size  # sizes may be symbolic
  if not isinstance(size, int) or not isinstance(scale_size, int):
    raise TypeError(
      f"{who}: with a symbolic contracting size {side} must be of a known"
      f" format, got {values.dtype}{list(values.shape)} and"
      f" {scale.dtype}{list(scale.shape)}; known: {formats.pairs_table()}"
    )
  if scale_size == 0 or size % scale_size:
    raise TypeError(
      f"{who}: k must be a multiple of the number of blocks, got {side}"
      f" {tuple(values.shape)} with a scale {tuple(scale.shape)}"
    )
  return size // scale_size
