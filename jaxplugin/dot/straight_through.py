# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matmuls of operands with straight-through gradients.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self

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
class Matmul:
  """A call of a matmul without its arrays, which are a named tuple.

  Attributes:
    function: the called function with all other arguments bound. It is called
      with the fields of the named tuple, preferred_element_type and activation.
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

  def of_tangent(self, side: str) -> Self:
    """Returns the call whose `side` is a tangent, which is unquantized."""
    del side
    return self

  def activated(self, arrays: Any) -> jax.Array:
    """Computes the dot without activation, then the activation as JAX ops."""
    raise NotImplementedError

  def plain(self, arrays: Any) -> jax.Array:
    """Computes the dot of two unquantized sides, without an epilogue."""
    raise NotImplementedError

  def transpose(self, side: str, g: jax.Array, arrays: Any) -> jax.Array:
    """Returns the cotangent of an unquantized side of a dot without epilogue.

    Args:
      arrays: `side` is a type.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot(Matmul):
  """A call of `block_scaled_dot`, with dimension numbers in tuples."""

  dimension_numbers: sides.DimensionNumbers

  def activated(self, arrays: DotArrays) -> jax.Array:
    before = self.replace(activation=None, dtype=_F32)
    result = dot(before, arrays._replace(residual=None))
    result = epilogue.activate(result, self.activation)
    if arrays.residual is not None:
      result = result + arrays.residual.astype(_F32)
    return result.astype(self.dtype)

  def plain(self, arrays: DotArrays) -> jax.Array:
    lhs, rhs = jnp.asarray(arrays.lhs), jnp.asarray(arrays.rhs)
    result = xla.plain_dot(lhs, rhs, self.dimension_numbers, _F32)
    if arrays.global_scale is not None:
      result = result * arrays.global_scale
    return result.astype(self.dtype)

  def transpose(self, side: str, g: jax.Array, arrays: DotArrays) -> jax.Array:
    other = getattr(arrays, _other(side))
    is_bf16 = (
      g.dtype == formats.BF16
      and other.format.exact_in_bf16
      and other.global_scale is None
    )
    plain = quantization.dequantize(other, formats.BF16 if is_bf16 else _F32)
    dims = derivatives.GradientDims.of(
      self.dimension_numbers, arrays.lhs.ndim, arrays.rhs.ndim
    )
    return derivatives.side_cotangent(
      side,
      g,
      lambda g, numbers: xla.plain_dot(g, plain, numbers, _F32),
      arrays.global_scale,
      None,
      dims,
    )


def _other(side: str) -> str:
  return "rhs" if side == "lhs" else "lhs"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot(of: Matmul, arrays: Any) -> jax.Array:
  """Computes `of(arrays)`, with derivatives by the surrogates."""
  return of(without_surrogates(arrays))


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _jvp(
  of: Matmul, primals: tuple[Any], given: tuple[Any]
) -> tuple[jax.Array, jax.Array]:
  (arrays,), (moved,) = primals, given
  if of.activation is not None:
    return _jvp_of_activated(of, arrays, moved)
  result = dot(of, arrays)
  surrogates = {
    side: getattr(moved, side).surrogate
    for side in ("lhs", "rhs")
    if scaled_array.has_surrogate(getattr(arrays, side))
    and not tangents.is_constant(getattr(moved, side).surrogate)
  }
  plain = {
    name: _leaf(moved, name)
    for name in ("lhs", "rhs", *GLOBAL_SCALES)
    if _is_multiplied_by_surrogate(name, arrays, moved)
  }
  in_f32 = of.replace(dtype=_F32)
  with call_options.has_checks(False):
    rest = tangents.tangent_of(
      in_f32 if surrogates or plain else of,
      without_surrogates(arrays),
      without_surrogates(_without_tangents(plain, moved)),
    )
    # The sum of several terms is rounded once.
    is_single = rest is None and len(surrogates) + len(plain) == 1
    term = functools.partial(
      _tangent_by,
      of=of if is_single else in_f32,
      arrays=arrays,
      result=result,
    )
    for name, tangent in plain.items():
      added = term(name, tangent)
      rest = added if rest is None else rest + added
    terms = [term(side, tangent) for side, tangent in surrogates.items()]
  if rest is not None:
    terms.append(rest)
  if not terms:
    return result, jnp.zeros_like(result)
  return result, sum(terms[1:], start=terms[0]).astype(of.dtype)


def _jvp_of_activated(
  of: Matmul, arrays: Any, moved: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of a dot with an activation, and its tangent.

  Kernels that fuse an activation do not return its argument. A dot without one
  gives both results. Debug checks see only the result of `dot`.
  """
  with call_options.has_checks(False):
    found = tangents.jvp(of.activated, arrays, moved)
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


def _leaf(arrays: Any, name: str) -> Any:
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
  """Returns `arrays` with another `_leaf`. Its side keeps no surrogate."""
  side, _, field = name.partition(".")
  if not field:
    return arrays._replace(**{name: value})
  array = getattr(arrays, side).without_surrogate()
  array = scaled_array.replace(array, global_scale=value)
  return arrays._replace(**{side: array})


def _without_tangents(names: Iterable[str], moved: Any) -> Any:
  """Returns tangents of which those of `names` are constant."""
  for name in names:
    moved = _with_leaf(moved, name, tangents.CONSTANT)
  return moved


def _is_multiplied_by_surrogate(name: str, arrays: Any, moved: Any) -> bool:
  """Returns whether the tangent by a plain array depends on a surrogate.

  Args:
    name: name of a `_leaf`.
  """
  x = _leaf(arrays, name)
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
    and not tangents.is_constant(_leaf(moved, name))
  )


def _tangent_by(
  name: str,
  tangent: jax.Array,
  of: Matmul,
  arrays: Any,
  result: jax.Array,
) -> jax.Array:
  """Returns the tangent by an unquantized side, a surrogate or a global scale.

  Args:
    name: name of a `_leaf`; that of a side for its surrogate.
    of: call without activation.
    result: result of the call; the tangent gets its shape and sharding.
  """
  absent = {"bias": None, "residual": None}
  if name in GLOBAL_SCALES:
    arrays = _replaced(arrays, absent)
    return _tangent_by_global_scale(name, tangent, of, arrays, result)
  if tangent.dtype not in formats.FLOAT_DTYPES:
    tangent = tangent.astype(_F32)
  of, other = of.of_tangent(name), _other(name)
  arrays = _replaced(arrays, absent | {name: tangent, f"{name}_scale": None})
  if scaled_array.has_surrogate(getattr(arrays, other)):
    return _product_of_both(name, of, arrays, result)
  is_quantized = (
    isinstance(getattr(arrays, other), scaled_array.ScaledArray)
    or getattr(arrays, f"{other}_scale", None) is not None
  )
  if is_quantized:
    return of(arrays)
  sharding = mesh_axes.explicit_sharding_of(result)
  return mesh_axes.automatic(of.plain, sharding)(arrays)


def _replaced(arrays: Any, changes: dict[str, Any]) -> Any:
  """Returns a named tuple with other values of the fields that it has."""
  fields = arrays._fields
  return arrays._replace(**{k: x for k, x in changes.items() if k in fields})


def _tangent_by_global_scale(
  name: str, tangent: jax.Array, of: Matmul, arrays: Any, result: jax.Array
) -> jax.Array:
  """Returns the tangent by a global scale, see `_tangent_by`."""
  constants, tree = jax.tree.flatten(arrays)
  scale_of = lambda given: jax.lax.stop_gradient(_leaf(given, name))

  def scaled(given: Any, scale: jax.Array) -> jax.Array:
    """Computes the dot, differentiable by the surrogates."""
    if name == "global_scale":
      unscaled = dot(of.replace(dtype=_F32), given._replace(global_scale=None))
      return (unscaled * scale).astype(of.dtype)
    given = _with_leaf(given, name, scale)
    both = {
      s: quantization.dequantize(getattr(given, s)) for s in ("lhs", "rhs")
    }
    return of.plain(given._replace(**both))

  def forward(x: jax.Array, *flat: jax.Array) -> jax.Array:
    given = without_surrogates(jax.tree.unflatten(tree, flat))
    quantized = lambda scale: of(_with_leaf(given, name, scale))
    return jax.jvp(quantized, (scale_of(given),), (x,))[1]

  def plain(x: jax.Array, *flat: jax.Array) -> jax.Array:
    return scaled(jax.tree.unflatten(tree, flat), x)

  def plain_transpose(g: jax.Array, *flat: jax.Array) -> jax.Array:
    given = jax.tree.unflatten(tree, flat)
    function = functools.partial(scaled, given)
    return jax.vjp(function, scale_of(given))[1](g)[0]

  return _linear(tangent, constants, forward, plain, plain_transpose, result)


def _product_of_both(
  side: str, of: Matmul, arrays: Any, result: jax.Array
) -> jax.Array:
  """Computes the dot of `side`'s tangent and an operand with a surrogate.

  The forward pass computes one dot with the quantized operand. The backward
  pass is the transpose of that dot, with the bits of an operand without a
  surrogate. Both are differentiable by the operand's surrogate.
  """
  tangent, other = getattr(arrays, side), _other(side)
  constants, tree = jax.tree.flatten(arrays._replace(**{side: None}))
  # The functions below refer to no array, so they do not keep tracers alive.
  kind = jax.typeof(tangent)

  def merged(x: Any, flat: Sequence[jax.Array]) -> Any:
    return jax.tree.unflatten(tree, flat)._replace(**{side: x})

  def forward(x: jax.Array, *flat: jax.Array) -> jax.Array:
    return of(without_surrogates(merged(x, flat)))

  def plain(x: jax.Array, *flat: jax.Array) -> jax.Array:
    given = merged(x, flat)
    array = quantization.dequantize(getattr(given, other))
    return of.plain(given._replace(**{other: array}))

  def plain_transpose(g: jax.Array, *flat: jax.Array) -> jax.Array:
    return of.transpose(side, g, merged(kind, flat)).astype(kind.dtype)

  return _linear(tangent, constants, forward, plain, plain_transpose, result)


def _linear(
  tangent: jax.Array,
  constants: Sequence[jax.Array],
  forward: Callable[..., jax.Array],
  plain: Callable[..., jax.Array],
  plain_transpose: Callable[..., jax.Array],
  result: jax.Array,
) -> jax.Array:
  """Computes `forward(tangent, *constants)`, which is linear in the tangent.

  Args:
    plain, plain_transpose: as for `_Linear`.
    result: an array with the sharding of the result.
  """
  of_tangent, of_result = map(mesh_axes.explicit_sharding_of, (tangent, result))
  # The tuning tables and the target are those of the forward pass.
  jaxpr = jax.make_jaxpr(forward)(tangent, *constants)
  function = _Linear(
    operations=extend_core.jaxpr_as_fun(jaxpr),
    argument=jax.typeof(tangent),
    result=jaxpr.out_avals[0],
    plain=mesh_axes.automatic(plain, of_result),
    plain_transpose=mesh_axes.automatic(plain_transpose, of_tangent),
  )
  return function.call(tangent, constants)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Linear(linear_calls.Linear):
  """A dot as a function of a tangent, or its transpose.

  Attributes:
    operations: (tangent, *constants) -> [result], without surrogates.
    argument, result: types of the tangent and of the result.
    plain: computes the result from operations that are differentiable by the
      constants.
    plain_transpose: computes its transpose from such operations.
    is_transposed: whether this is the transpose.
  """

  operations: Callable[..., Sequence[jax.Array]]
  argument: Any
  result: Any
  plain: Callable[..., jax.Array]
  plain_transpose: Callable[..., jax.Array]
  is_transposed: bool = False

  is_value: ClassVar[bool] = False

  def call(self, x: jax.Array, constants: Sequence[jax.Array]) -> jax.Array:
    like = self.argument if self.is_transposed else self.result
    return linear_calls.linear_call(self, [x], constants, like=like)

  def apply(
    self, linear: linear_calls.Arrays, constants: linear_calls.Arrays
  ) -> jax.Array:
    function = lambda x: self.operations(x, *constants)[0]
    if self.is_transposed:
      (x,) = jax.linear_transpose(function, self.argument)(*linear)
      return x
    return function(*linear)

  def by_constants(
    self, linear: linear_calls.Arrays, constants: linear_calls.Arrays
  ) -> jax.Array:
    plain = self.plain_transpose if self.is_transposed else self.plain
    return plain(*linear, *constants)

  def transpose(
    self, wanted: Sequence[bool], g: jax.Array, constants: linear_calls.Arrays
  ) -> list[jax.Array | None]:
    other = dataclasses.replace(self, is_transposed=not self.is_transposed)
    return [other.call(g, constants) if wanted[0] else None]
