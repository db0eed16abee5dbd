# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot` of operands with straight-through gradients.

As in `dot/straight_through.py`, the result is the same as without
surrogates. The derivative by a surrogate is that of the ragged dot of the
surrogate and the quantized other operand. If the other operand has a surrogate
too, higher-order derivatives use it.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import call_options, formats
from jaxplugin.dot import straight_through
from jaxplugin.jaxext import tangents
from jaxplugin.ragged import calls, epilogue, groups, primitive
from jaxplugin.tables import resolution

_F32: Final = np.dtype(np.float32)


class RaggedArrays(NamedTuple):
  """The array arguments of `ragged_dot`, or their tangents."""

  lhs: Any
  rhs: Any
  group_sizes: Any
  bias: Any


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot(of: straight_through.MatmulOptions, arrays: RaggedArrays) -> jax.Array:
  """Computes `of(arrays)`, with derivatives by the surrogates."""
  return of(straight_through.without_surrogates(arrays))


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _jvp(
  of: straight_through.MatmulOptions,
  primals: tuple[RaggedArrays],
  given: tuple[RaggedArrays],
) -> tuple[jax.Array, jax.Array]:
  (arrays,), (moved,) = primals, given
  if of.activation is not None:
    return straight_through.jvp_of_activated(dot, _activated, of, arrays, moved)
  result = dot(of, arrays)
  with call_options.has_checks(False):
    terms = _terms(of.replace(dtype=_F32), arrays, moved)
  if not terms:
    return result, jnp.zeros_like(result)
  return result, sum(terms[1:], start=terms[0]).astype(result.dtype)


def _activated(
  of: straight_through.MatmulOptions, arrays: RaggedArrays
) -> jax.Array:
  """Computes the dot without activation, then the activation as JAX ops."""
  result = dot(of.replace(dtype=_F32, activation=None), arrays)
  result = epilogue.activate(result, of.activation)
  rows = result.shape[0]
  ends = groups.ends(arrays.group_sizes, rows)
  is_own = groups.of_rows(ends, rows)[:, None] < len(arrays.group_sizes)
  result = jnp.where(is_own, result, np.float32(0))
  return result.astype(of.dtype)


def _terms(
  of: straight_through.MatmulOptions, arrays: RaggedArrays, moved: RaggedArrays
) -> list[jax.Array]:
  """Returns f32 tangents whose sum is the tangent of the call."""
  terms = []
  for side in ("lhs", "rhs"):
    x, tangent = getattr(arrays, side), getattr(moved, side)
    if isinstance(x, scaled_array.ScaledArray):
      tangent = tangent.surrogate
    if tangent is not None and not tangents.is_constant(tangent):
      terms.append(_tangent_by(side, tangent, of, arrays))
  scales = [
    name
    for name in straight_through.GLOBAL_SCALES
    if straight_through.is_multiplied_by_surrogate(name, arrays, moved)
  ]
  terms += [_tangent_by_global_scale(n, arrays, moved, of) for n in scales]
  # The tangents by the bias and by other global scales.
  bare = straight_through.without_surrogates(arrays)
  bare_moved = straight_through.without_surrogates(
    straight_through.without_tangents(scales, moved)
  )
  names = [
    name
    for name, x in bare._asdict().items()
    if name == "bias" or isinstance(x, scaled_array.ScaledArray)
  ]
  rest = tangents.tangent_of(
    lambda changed: of(bare._replace(**changed)),
    {name: getattr(bare, name) for name in names},
    {name: getattr(bare_moved, name) for name in names},
  )
  return terms if rest is None else [*terms, rest]


def _tangent_by(
  side: str,
  tangent: jax.Array,
  of: straight_through.MatmulOptions,
  arrays: RaggedArrays,
) -> jax.Array:
  """Returns the ragged dot of one side's tangent and the other side."""
  if tangent.dtype not in formats.FLOAT_DTYPES:
    tangent = tangent.astype(_F32)
  other = "rhs" if side == "lhs" else "lhs"
  if side == "rhs":
    # The requested backend may not support unquantized weights.
    function = functools.partial(of.function, implementation=None)
    of = of.replace(function=function)
  arrays = arrays._replace(**{side: tangent}, bias=None)
  if not scaled_array.has_surrogate(getattr(arrays, other)):
    return of(arrays)
  return _product_of_both(side, of, arrays)


def _tangent_by_global_scale(
  name: str,
  arrays: RaggedArrays,
  moved: RaggedArrays,
  of: straight_through.MatmulOptions,
) -> jax.Array:
  """Returns the tangent by a side's global scale."""
  overlay = resolution.overlay()

  def formula(arrays: RaggedArrays, scale: jax.Array) -> jax.Array:
    plain = straight_through.dequantized(arrays, name, scale)
    return _plain_product(overlay, plain)

  tangent = straight_through.leaf(moved, name)
  return straight_through.tangent_by_global_scale(
    name, tangent, arrays._replace(bias=None), of, formula
  )


def _plain_product(overlay: Any, arrays: RaggedArrays) -> jax.Array:
  lhs, rhs, sizes, _ = arrays
  return primitive.bind(calls.plain(lhs, rhs, sizes, 2, overlay=overlay))


def _product_of_both(
  side: str, of: straight_through.MatmulOptions, arrays: RaggedArrays
) -> jax.Array:
  """Returns the dot of `side`'s tangent and an operand with a surrogate."""
  # The backward pass uses the tuning tables of the forward pass.
  overlay = resolution.overlay()
  plain = functools.partial(_plain_product, overlay)

  def transpose(g: jax.Array, arrays: RaggedArrays, other: Any) -> jax.Array:
    sizes, other = arrays.group_sizes, quantization.dequantize(other)
    if side == "lhs":
      return primitive.bind(calls.plain(g, other, sizes, 1, overlay=overlay))
    return primitive.bind(
      calls.plain_contraction(g, other, sizes, overlay=overlay)
    )

  return straight_through.product_of_both(
    side, arrays, "group_sizes", quantized=of, plain=plain, transpose=transpose
  )
