# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` of what was quantized straight-through.

Such a `ScaledArray` has the array that it was made of as its surrogate. The
result is that of the call without surrogates. The derivative by one is that of

    cast(activation(dot(surrogate, other) * other's global_scale + bias)
         + residual)

at the result's numbers, the side's own global scale being part of what was
quantized. The other side is as it is in the call, quantized, and where it has a
surrogate too that is what derivatives of higher order go to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import formats
from jaxplugin.dot import epilogue
from jaxplugin.dot import guards
from jaxplugin.dot import problems
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import linear_calls
from jaxplugin.jaxext import tangents

_F32: Final = np.dtype(np.float32)


class Arrays(NamedTuple):
  """The arrays that `block_scaled_dot` is given, or their tangents."""

  lhs: Any
  rhs: Any
  lhs_scale: Any
  rhs_scale: Any
  global_scale: Any
  bias: Any
  residual: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A call, but for its arrays.

  Attributes:
    function: `block_scaled_dot`; takes `Arrays`, preferred_element_type and
      activation.
    dimension_numbers: in tuples.
    dtype: of the result.
    activation: as of `block_scaled_dot`.
  """

  function: Callable[..., jax.Array]
  dimension_numbers: sides.DimensionNumbers
  dtype: np.dtype
  activation: problems.Activation | None

  def __call__(self, arrays: Arrays) -> jax.Array:
    return self.function(
      **arrays._asdict(),
      preferred_element_type=self.dtype,
      activation=self.activation,
    )

  def replace(self, **changes: Any) -> Call:
    return dataclasses.replace(self, **changes)


def has_surrogate(operand: Any) -> bool:
  return (
    isinstance(operand, scaled_array.ScaledArray)
    and operand.surrogate is not None
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot(of: Call, arrays: Arrays) -> jax.Array:
  """`of(arrays)`, with derivatives by the surrogates."""
  return of(_without_surrogates(arrays))


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _jvp(
  of: Call, primals: tuple[Arrays], given: tuple[Arrays]
) -> tuple[jax.Array, jax.Array]:
  (arrays,), (arrays_tangent,) = primals, given
  result = dot(of, arrays)
  if of.activation is not None:
    function = functools.partial(_activated, of)
    with guards.debug_checks(enabled=False):
      tangent = tangents.tangent_of(function, arrays, arrays_tangent)
    return result, jnp.zeros_like(result) if tangent is None else tangent
  active = [
    side
    for side in ("lhs", "rhs")
    if has_surrogate(getattr(arrays, side))
    and not tangents.is_constant(getattr(arrays_tangent, side).surrogate)
  ]
  with guards.debug_checks(enabled=False):
    rest = tangents.tangent_of(
      of, _without_surrogates(arrays), _without_surrogates(arrays_tangent)
    )
    single = rest is None and len(active) == 1
    term = of.replace(dtype=of.dtype if single else _F32)
    terms = [
      _tangent_by(
        side, getattr(arrays_tangent, side).surrogate, term, arrays, result
      )
      for side in active
    ]
  if rest is not None:
    terms.append(rest.astype(_F32))
  if not terms:
    return result, jnp.zeros_like(result)
  return result, sum(terms[1:], start=terms[0]).astype(of.dtype)


def _without_surrogates(arrays: Arrays) -> Arrays:
  bare = {
    side: getattr(arrays, side).without_surrogate()
    for side in ("lhs", "rhs")
    if isinstance(getattr(arrays, side), scaled_array.ScaledArray)
  }
  return arrays._replace(**bare)


def _activated(of: Call, arrays: Arrays) -> jax.Array:
  """The call in steps, of which derivatives are taken."""
  before = of.replace(activation=None, dtype=_F32)
  result = dot(before, arrays._replace(residual=None))
  result = epilogue.activate(result, of.activation)
  if arrays.residual is not None:
    result = result + arrays.residual.astype(_F32)
  return result.astype(of.dtype)


def _tangent_by(
  side: str, tangent: jax.Array, of: Call, arrays: Arrays, result: jax.Array
) -> jax.Array:
  """The tangent of a call without activation by the surrogate of `side`.

  Args:
    result: of the shape and the sharding that it gets.
  """
  if tangent.dtype not in sides.PLAIN_DTYPES:
    tangent = tangent.astype(_F32)
  other = _other(side)
  product = arrays._replace(
    **{side: tangent, f"{side}_scale": None}, bias=None, residual=None
  )
  if has_surrogate(getattr(arrays, other)):
    return _product_of_both(side, product, of, result)
  is_quantized = (
    isinstance(getattr(arrays, other), scaled_array.ScaledArray)
    or getattr(arrays, f"{other}_scale") is not None
  )
  if is_quantized:
    return of(product)
  plain = functools.partial(_plain_product, of)
  return derivatives.partitioned(plain, result)(product)


def _other(side: str) -> str:
  return "rhs" if side == "lhs" else "lhs"


def _plain_product(of: Call, arrays: Arrays) -> jax.Array:
  """The product of two plain sides."""
  lhs, rhs = jnp.asarray(arrays.lhs), jnp.asarray(arrays.rhs)
  result = reference.plain_dot(lhs, rhs, of.dimension_numbers, _F32)
  if arrays.global_scale is not None:
    result = result * arrays.global_scale
  return result.astype(of.dtype)


def _product_of_both(
  side: str, arrays: Arrays, of: Call, result: jax.Array
) -> jax.Array:
  """A tangent of `side` times the other side, which has a surrogate.

  Forward it is one dot, backward the other side is dequantized then; both have
  a derivative by its surrogate.
  """
  tangent, other = getattr(arrays, side), _other(side)
  constants, tree = jax.tree.flatten(
    (getattr(arrays, other), arrays.global_scale)
  )

  def merge(x: jax.Array, *flat: jax.Array) -> Arrays:
    array, factor = jax.tree.unflatten(tree, flat)
    return arrays._replace(**{side: x, other: array}, global_scale=factor)

  def forward(x: jax.Array, *flat: jax.Array) -> jax.Array:
    return of(_without_surrogates(merge(x, *flat)))

  def by_constants(x: jax.Array, *flat: jax.Array) -> jax.Array:
    product = merge(x, *flat)
    array = quantization.dequantize(getattr(product, other))
    return _plain_product(of, product._replace(**{other: array}))

  def transpose(g: jax.Array, *flat: jax.Array) -> jax.Array:
    array, factor = jax.tree.unflatten(tree, flat)
    is_bf16 = (
      g.dtype == formats.BF16
      and array.format.exact_in_bf16
      and array.global_scale is None
    )
    plain = quantization.dequantize(array, formats.BF16 if is_bf16 else _F32)
    return derivatives.side_cotangent(
      side,
      g,
      lambda g, numbers: reference.plain_dot(g, plain, numbers, _F32),
      factor,
      None,
      derivatives.GradientDims.of(
        of.dimension_numbers, arrays.lhs.ndim, arrays.rhs.ndim
      ),
    ).astype(tangent.dtype)

  return linear_calls.linear_call(
    linear_calls.LinearInOne(
      call=forward,
      transpose_call=derivatives.partitioned(transpose, tangent),
      call_by_constants=derivatives.partitioned(by_constants, result),
    ),
    [tangent],
    constants,
  )
