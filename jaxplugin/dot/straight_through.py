# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot` of operands with straight-through gradients.

The surrogate of a `ScaledArray` is the array it was quantized from. The result
is the same as without surrogates. The derivative by a surrogate is that of

    cast(activation(dot(surrogate, other) * global_scale + bias) + residual)

where `other` is the quantized other operand with its own global scale, and
`global_scale` is the argument of `block_scaled_dot`. A surrogate needs no
global scale, because it is not quantized. The derivative of the activation is
taken at the sums of the quantized operands. If `other` has a surrogate too,
higher-order derivatives use it. So do those by an unquantized operand and by
global scales, whose first derivatives have the bits of a call without
surrogates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core

from jaxplugin import quantization
from jaxplugin.arrays import scaled_array
from jaxplugin.core import call_options, formats
from jaxplugin.dot import derivatives, epilogue, sides
from jaxplugin.dot.backends import xla
from jaxplugin.jaxext import linear_calls, mesh_axes, tangents

_F32: Final = np.dtype(np.float32)

# The argument of `block_scaled_dot`, and that of each quantized side.
GLOBAL_SCALES: Final = "global_scale", "lhs.global_scale", "rhs.global_scale"


class DotArrays(NamedTuple):
  """The array arguments of `block_scaled_dot`, or their tangents."""

  lhs: Any
  rhs: Any
  lhs_scale: Any
  rhs_scale: Any
  global_scale: Any
  bias: Any
  residual: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOptions:
  """A call without its arrays.

  Attributes:
    function: the called function with all other arguments bound. It is called
      with the fields of a named tuple, preferred_element_type and activation.
    dtype: dtype of the result.
    activation: as for the function.
  """

  function: Callable[..., jax.Array]
  dtype: np.dtype
  activation: Any

  def __call__(self, arrays: Any) -> jax.Array:
    return self.function(
      **arrays._asdict(),
      preferred_element_type=self.dtype,
      activation=self.activation,
    )

  def replace(self, **changes: Any) -> Self:
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotOptions(MatmulOptions):
  """A call of `block_scaled_dot`, with dimension numbers in tuples."""

  dimension_numbers: sides.DimensionNumbers


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot(of: DotOptions, arrays: DotArrays) -> jax.Array:
  """Computes `of(arrays)`, with derivatives by the surrogates."""
  return of(without_surrogates(arrays))


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _jvp(
  of: DotOptions, primals: tuple[DotArrays], given: tuple[DotArrays]
) -> tuple[jax.Array, jax.Array]:
  (arrays,), (arrays_tangent,) = primals, given
  if of.activation is not None:
    return jvp_of_activated(dot, _activated, of, arrays, arrays_tangent)
  result = dot(of, arrays)
  active = [
    side
    for side in ("lhs", "rhs")
    if scaled_array.has_surrogate(getattr(arrays, side))
    and not tangents.is_constant(getattr(arrays_tangent, side).surrogate)
  ]
  plain = [
    name
    for name in ("lhs", "rhs", *GLOBAL_SCALES)
    if is_multiplied_by_surrogate(name, arrays, arrays_tangent)
  ]
  with call_options.has_checks(False):
    rest = tangents.tangent_of(
      of,
      without_surrogates(arrays),
      without_surrogates(without_tangents(plain, arrays_tangent)),
    )
    by_plain = of.replace(dtype=of.dtype if len(plain) == 1 else _F32)
    for name in plain:
      added = _tangent_by_plain(
        name, leaf(arrays_tangent, name), by_plain, arrays, result
      )
      rest = added if rest is None else rest + added
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


def jvp_of_activated(
  dot: Callable[..., jax.Array],
  activated: Callable[..., jax.Array],
  of: Any,
  arrays: Any,
  moved: Any,
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of a dot with an activation, and its tangent.

  Kernels that fuse an activation do not return its argument. A dot without one
  gives both results.

  Args:
    dot: computes `of` of the arrays. Debug checks see only this result.
  """
  with call_options.has_checks(False):
    found = tangents.jvp(functools.partial(activated, of), arrays, moved)
  if found is not None and not call_options.has_checks.value:
    return found
  result = dot(of, arrays)
  return result, jnp.zeros_like(result) if found is None else found[1]


def without_surrogates(arrays: Any) -> Any:
  """Returns a named tuple of arrays or tangents without surrogates."""
  bare = {
    side: x.without_surrogate()
    for side, x in arrays._asdict().items()
    if isinstance(x, scaled_array.ScaledArray)
  }
  return arrays._replace(**bare)


def _activated(of: DotOptions, arrays: DotArrays) -> jax.Array:
  """Computes the dot without activation, then the activation as JAX ops."""
  before = of.replace(activation=None, dtype=_F32)
  result = dot(before, arrays._replace(residual=None))
  result = epilogue.activate(result, of.activation)
  if arrays.residual is not None:
    result = result + arrays.residual.astype(_F32)
  return result.astype(of.dtype)


def _tangent_by(
  side: str,
  tangent: jax.Array,
  of: DotOptions,
  arrays: DotArrays,
  result: jax.Array,
) -> jax.Array:
  """Returns the tangent by the surrogate of `side`, without activation.

  Args:
    of: call without activation.
    result: result of the call; the tangent gets its shape and sharding.
  """
  if tangent.dtype not in formats.FLOAT_DTYPES:
    tangent = tangent.astype(_F32)
  other = "rhs" if side == "lhs" else "lhs"
  product = arrays._replace(
    **{side: tangent, f"{side}_scale": None}, bias=None, residual=None
  )
  if scaled_array.has_surrogate(getattr(arrays, other)):
    return _product_of_both(side, product, of, result)
  is_quantized = (
    isinstance(getattr(arrays, other), scaled_array.ScaledArray)
    or getattr(arrays, f"{other}_scale") is not None
  )
  if is_quantized:
    return of(product)
  plain = functools.partial(_plain_product, of)
  sharding = mesh_axes.explicit_sharding_of(result)
  return mesh_axes.automatic(plain, sharding)(product)


def leaf(arrays: Any, name: str) -> Any:
  """Returns an array of `arrays`, or None if there is none of this name.

  Args:
    arrays: a named tuple of arrays or tangents.
    name: "lhs", "rhs" or one of `GLOBAL_SCALES`.
  """
  x = arrays
  for part in name.split("."):
    x = getattr(x, part, None)
  return x


def _with_leaf(arrays: Any, name: str, value: Any) -> Any:
  """Returns `arrays` with another `leaf`. Its side keeps no surrogate."""
  side, _, field = name.partition(".")
  if not field:
    return arrays._replace(**{name: value})
  array = getattr(arrays, side).without_surrogate()
  array = scaled_array.replace(array, global_scale=value)
  return arrays._replace(**{side: array})


def without_tangents(names: Sequence[str], moved: Any) -> Any:
  """Returns tangents of which those of `names` are constant."""
  for name in names:
    moved = _with_leaf(moved, name, tangents.CONSTANT)
  return moved


def is_multiplied_by_surrogate(name: str, arrays: Any, moved: Any) -> bool:
  """Returns whether the tangent by a plain array depends on a surrogate.

  Args:
    name: name of a `leaf`.
  """
  x = leaf(arrays, name)
  own = name.partition(".")[0]
  return (
    x is not None
    and not isinstance(x, scaled_array.ScaledArray)
    and getattr(arrays, f"{name}_scale", None) is None
    and any(
      scaled_array.has_surrogate(getattr(arrays, side))
      for side in ("lhs", "rhs")
      if side != own
    )
    and not tangents.is_constant(leaf(moved, name))
  )


def _tangent_by_plain(
  name: str,
  tangent: jax.Array,
  of: DotOptions,
  arrays: DotArrays,
  result: jax.Array,
) -> jax.Array:
  """Returns the tangent by an unquantized side or by a global scale.

  Args:
    name: name of a `leaf` of `arrays`.
    of, arrays, result: as for `_tangent_by`.
  """
  arrays = arrays._replace(bias=None, residual=None)
  if name in ("lhs", "rhs"):
    product = arrays._replace(**{name: tangent})
    return _product_of_both(name, product, of, result)

  def formula(arrays: DotArrays, scale: jax.Array) -> jax.Array:
    if name == "global_scale":
      unscaled = arrays._replace(global_scale=None)
      return (dot(of.replace(dtype=_F32), unscaled) * scale).astype(of.dtype)
    return _plain_product(of, dequantized(arrays, name, scale))

  return tangent_by_global_scale(
    name, tangent, arrays, of, formula, (tangent, result)
  )


def dequantized(arrays: Any, name: str, scale: jax.Array) -> Any:
  """Returns `arrays` with dequantized sides, one with this global scale."""
  given = _with_leaf(arrays, name, scale)
  return given._replace(
    lhs=quantization.dequantize(given.lhs),
    rhs=quantization.dequantize(given.rhs),
  )


def tangent_by_global_scale(
  name: str,
  tangent: jax.Array,
  arrays: Any,
  quantized: Callable[[Any], jax.Array],
  formula: Callable[[Any, jax.Array], jax.Array],
  like: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Returns the tangent of a dot by a global scale.

  Args:
    name: one of `GLOBAL_SCALES`.
    arrays: arguments of the dot, without an epilogue.
    quantized: arrays without surrogates -> dot.
    formula: (arrays, global scale) -> dot with that global scale. It is
      differentiable by the surrogates.
    like: as for `product_of_both`.
  """
  constants, tree = jax.tree.flatten(arrays)
  scale_of = lambda given: jax.lax.stop_gradient(leaf(given, name))

  def forward(x: jax.Array, *flat: jax.Array) -> jax.Array:
    given = without_surrogates(jax.tree.unflatten(tree, flat))
    scaled = lambda scale: quantized(_with_leaf(given, name, scale))
    return jax.jvp(scaled, (scale_of(given),), (x,))[1]

  def by_constants(x: jax.Array, *flat: jax.Array) -> jax.Array:
    return formula(jax.tree.unflatten(tree, flat), x)

  def transposed(g: jax.Array, *flat: jax.Array) -> jax.Array:
    given = jax.tree.unflatten(tree, flat)
    scaled = functools.partial(formula, given)
    return jax.vjp(scaled, scale_of(given))[1](g)[0]

  return _by_rule(
    tangent,
    constants,
    forward=forward,
    by_constants=by_constants,
    transposed=transposed,
    like=like,
  )


def _plain_product(of: DotOptions, arrays: DotArrays) -> jax.Array:
  """Computes the dot of two unquantized sides."""
  lhs, rhs = jnp.asarray(arrays.lhs), jnp.asarray(arrays.rhs)
  result = xla.plain_dot(lhs, rhs, of.dimension_numbers, _F32)
  if arrays.global_scale is not None:
    result = result * arrays.global_scale
  return result.astype(of.dtype)


def _product_of_both(
  side: str, arrays: DotArrays, of: DotOptions, result: jax.Array
) -> jax.Array:
  """Computes the dot of `side`'s tangent and an operand with a surrogate."""
  tangent = getattr(arrays, side)
  ndims = arrays.lhs.ndim, arrays.rhs.ndim

  def transpose(g: jax.Array, arrays: DotArrays, other: Any) -> jax.Array:
    is_bf16 = (
      g.dtype == formats.BF16
      and other.format.exact_in_bf16
      and other.global_scale is None
    )
    plain = quantization.dequantize(other, formats.BF16 if is_bf16 else _F32)
    return derivatives.side_cotangent(
      side,
      g,
      lambda g, numbers: xla.plain_dot(g, plain, numbers, _F32),
      arrays.global_scale,
      None,
      derivatives.GradientDims.of(of.dimension_numbers, *ndims),
    )

  return product_of_both(
    side,
    arrays,
    "global_scale",
    quantized=of,
    plain=functools.partial(_plain_product, of),
    transpose=transpose,
    like=(tangent, result),
  )


def product_of_both(
  side: str,
  arrays: Any,
  constant: str,
  *,
  quantized: Callable[[Any], jax.Array],
  plain: Callable[[Any], jax.Array],
  transpose: Callable[[jax.Array, Any, Any], jax.Array],
  like: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Computes the dot of `side`'s tangent and an operand with a surrogate.

  The forward pass computes one dot with the quantized operand. The backward
  pass is the transpose of that dot, with the bits of an operand without a
  surrogate. Both are differentiable by the operand's surrogate.

  Args:
    side: "lhs" or "rhs", the side of the tangent.
    arrays: named tuple whose field `side` is the tangent.
    constant: name of the other field that the dot depends on.
    quantized: arrays -> dot with the quantized operand.
    plain: arrays -> dot with the dequantized operand.
    transpose: (cotangent of the dot, arrays, quantized operand) -> cotangent of
      the tangent.
    like: the tangent and the result, whose types give the shardings on meshes
      with explicit axes; None if there are no such meshes.
  """
  tangent, other = getattr(arrays, side), "rhs" if side == "lhs" else "lhs"
  constants, tree = jax.tree.flatten(
    (getattr(arrays, other), getattr(arrays, constant))
  )

  # The functions below refer to no array, so they do not keep tracers alive.
  dtype = tangent.dtype
  rest = arrays._replace(**dict.fromkeys((side, other, constant)))

  def merged(x: Any, flat: Sequence[jax.Array]) -> Any:
    array, value = jax.tree.unflatten(tree, flat)
    return rest._replace(**{side: x, other: array, constant: value})

  def forward(x: jax.Array, *flat: jax.Array) -> jax.Array:
    return quantized(without_surrogates(merged(x, flat)))

  def by_constants(x: jax.Array, *flat: jax.Array) -> jax.Array:
    given = merged(x, flat)
    array = quantization.dequantize(getattr(given, other))
    return plain(given._replace(**{other: array}))

  def transposed(g: jax.Array, *flat: jax.Array) -> jax.Array:
    given = merged(None, flat)
    cotangent = transpose(g, given, getattr(given, other))
    return cotangent.astype(dtype)

  return _by_rule(
    tangent,
    constants,
    forward=forward,
    by_constants=by_constants,
    transposed=transposed,
    like=like,
  )


def _by_rule(
  tangent: jax.Array,
  constants: Sequence[jax.Array],
  *,
  forward: Callable[..., jax.Array],
  by_constants: Callable[..., jax.Array],
  transposed: Callable[..., jax.Array],
  like: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
  """Computes a linear function, whose backward pass is its transpose.

  Args:
    tangent: the argument in which the function is linear.
    constants: the other arguments.
    forward: (tangent, *constants) -> result.
    by_constants: computes `forward` from operations that are differentiable by
      the constants.
    transposed: (cotangent of the result, *constants) -> cotangent of the
      tangent, from such operations.
    like: as for `product_of_both`.
  """
  if like is not None:
    of_tangent, of_result = map(mesh_axes.explicit_sharding_of, like)
    by_constants = mesh_axes.automatic(by_constants, of_result)
    transposed = mesh_axes.automatic(transposed, of_tangent)
  # The tuning tables and the target are those of the forward pass.
  traced = extend_core.jaxpr_as_fun(
    jax.make_jaxpr(forward)(tangent, *constants)
  )
  abstract = jax.typeof(tangent)

  def by_rule(g: jax.Array, *flat: jax.Array) -> jax.Array:
    (x,) = jax.linear_transpose(lambda x: traced(x, *flat)[0], abstract)(g)
    return x

  def backward(g: jax.Array, *flat: jax.Array) -> jax.Array:
    function = linear_calls.LinearInOne(
      call=by_rule, transpose_call=product, call_by_constants=transposed
    )
    return linear_calls.linear_call(function, [g], flat)

  def product(x: jax.Array, *flat: jax.Array) -> jax.Array:
    function = linear_calls.LinearInOne(
      call=lambda x, *flat: traced(x, *flat)[0],
      transpose_call=backward,
      call_by_constants=by_constants,
    )
    return linear_calls.linear_call(function, [x], flat)

  return product(tangent, *constants)
