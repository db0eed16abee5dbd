# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a block-scaled dot by its unquantized arguments.

    result = cast(activation(dot(lhs, rhs) * global_scale + bias) + residual)

Without an activation, the dot is jointly linear in one unquantized side, the
bias and the residual. It is also linear in the global scale. Its tangent is
therefore a block-scaled dot with a tangent as one operand: forward mode runs
the same kernels, and reverse mode saves quantized operands.

`g` is the cotangent of the result. The cotangent of a side contracts g with the
other side along a dimension without blocks, so the backward pass dequantizes
that side. The cotangent of the global scale computes the dot again.

`dot/primitive.py` registers `jvp`, `require_linear` and `cotangent`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import formats
from jaxplugin.dot import calls, epilogue, sharding, sides
from jaxplugin.dot.backends import xla
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import primitive
from jaxplugin.quantization import dequantization

Bind = primitive.Bind

_F32: Final = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientDims:
  """Dimension numbers of the two matmuls that compute a dot's gradients.

  Attributes:
    dgrad: dimension numbers of dot(g, rhs), the cotangent of lhs.
    wgrad: dimension numbers of dot(g, lhs), the cotangent of rhs.
    lhs_order, rhs_order: permutations from the results' dimensions to those of
      lhs and rhs.
  """

  dgrad: sides.DimensionNumbers
  wgrad: sides.DimensionNumbers
  lhs_order: tuple[int, ...]
  rhs_order: tuple[int, ...]

  @classmethod
  def of(
    cls, numbers: sides.DimensionNumbers, lhs_ndim: int, rhs_ndim: int
  ) -> GradientDims:
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = numbers
    lhs_free = sides.free_dims(lhs_ndim, lhs_k, lhs_batch)
    rhs_free = sides.free_dims(rhs_ndim, rhs_k, rhs_batch)
    # g is [batch..., m..., n...].
    batch = tuple(range(len(lhs_batch)))
    m = tuple(len(batch) + i for i in range(len(lhs_free)))
    n = tuple(len(batch) + len(m) + i for i in range(len(rhs_free)))

    def order(
      x_k: sides.Dims, x_batch: sides.Dims, x_free: sides.Dims, y_k: sides.Dims
    ) -> tuple[int, ...]:
      # The product is [batch..., x_free..., y_k... in ascending order].
      k_order = sorted(range(len(y_k)), key=lambda i: y_k[i])
      source = (*x_batch, *x_free, *(x_k[i] for i in k_order))
      return tuple(int(i) for i in np.argsort(source))

    return cls(
      dgrad=((n, rhs_free), (batch, rhs_batch)),
      wgrad=((m, lhs_free), (batch, lhs_batch)),
      lhs_order=order(lhs_k, lhs_batch, lhs_free, rhs_k),
      rhs_order=order(rhs_k, rhs_batch, rhs_free, lhs_k),
    )

  def of_side(
    self, side: str
  ) -> tuple[sides.DimensionNumbers, tuple[int, ...]]:
    """Returns dimension numbers and order for the cotangent of lhs or rhs."""
    if side == "lhs":
      return self.dgrad, self.lhs_order
    return self.wgrad, self.rhs_order


# Forward.


def jvp(
  bind: Bind, call: calls.DotCall, tangents: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of a call and its tangent.

  Args:
    tangents: tangent of each array by name, without symbolic zeros.
  """
  # `global_power` is computed from the bits of the scales, and origins are
  # constants, so both have zero tangents.
  constants = {"global_power", *call.ORIGINS}
  active = {k: x for k, x in tangents.items() if k not in constants}
  # The operands of the linear calls are residuals of the backward pass. Without
  # origins it does not save whole stacks of layers.
  linear = call.without_origins()
  if call.activation is None:
    result = bind(call)
    return result, _linear_tangent(bind, linear, active, result)
  residual = active.pop("residual", None)
  if not active:
    result = bind(call)
    return result, _as_result(residual, result).astype(result.dtype)
  # Kernels that fuse an activation do not return its argument. A dot without
  # one gives both results.
  before = {
    "activation": None,
    "preferred_element_type": _F32,
    "residual": None,
  }
  x = bind(call.replace(**before))
  result = epilogue.activate(x, call.activation)
  tangent = _linear_tangent(bind, linear.replace(**before), active, x)
  tangent = _activation_tangent(x, tangent, call)
  if call.residual is not None:
    result += _as_result(call.residual, x)
  if residual is not None:
    tangent += _as_result(residual, x)
  dtype = call.preferred_element_type
  return result.astype(dtype), tangent.astype(dtype)


def _linear_tangent(
  bind: Bind, call: calls.DotCall, active: Mapping[str, Any], result: jax.Array
) -> jax.Array:
  """Returns the tangent of a call without activation.

  Args:
    result: result of the call; the tangent gets its shape and sharding.
  """
  products = [x for x in ("lhs", "rhs", "global_scale") if x in active]
  # The first kernel also adds the tangents of the bias and the residual.
  added = {name: active.get(name) for name in ("bias", "residual")}
  terms = []
  dtype = call.preferred_element_type if len(products) == 1 else _F32
  for name in products:
    product = call.with_arrays(**{name: active[name]}, **added)
    terms.append(bind(product.replace(preferred_element_type=dtype)))
    added = dict.fromkeys(added)
  terms += [_as_result(x, result) for x in added.values() if x is not None]
  total = sum(terms[1:], start=terms[0])
  return total.astype(call.preferred_element_type)


def _as_result(x: jax.Array, result: jax.Array) -> jax.Array:
  """Returns f32 `x`, broadcast to the shape and sharding of `result`.

  `x` has the rank of the result.
  """
  return lax.broadcast_in_dim(
    x.astype(_F32),
    result.shape,
    range(x.ndim),
    out_sharding=mesh_axes.explicit_sharding_of(result),
  )


def _activation_tangent(
  x: jax.Array, tangent: jax.Array, call: calls.DotCall
) -> jax.Array:
  """Returns the tangent of the call's activation at `x`, in f32."""
  activate = functools.partial(epilogue.activate, activation=call.activation)
  # relu's own JVP selects, so an infinite tangent gives 0 where the slope is 0.
  if call.activation == "relu":
    return jax.jvp(activate, (x,), (tangent,))[1]
  # Only the slope is saved; JAX's rules would save every factor of it.
  _, slope = jax.jvp(activate, (x,), (jnp.ones_like(x),))
  return slope * tangent


# Backward.


def cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.DotCall
) -> jax.Array:
  """Returns the cotangent of one array of a call that is linear in it.

  Args:
    name: the array's name in `DotCall.ARRAYS`.
    call: call whose arrays are abstract where a cotangent is wanted.
  """
  aval = call.arrays()[name]
  if name in ("lhs", "rhs"):
    result = _side_cotangent(name, g, call)
  elif name == "global_scale":
    result = _sum_to(bind(call.bare()) * g.astype(_F32), aval)
    power = call.global_power
    if power is not None:
      result = result * _sharded_as(result, power)
  else:
    result = _sum_to(g.astype(_F32), aval)
  result = result.astype(aval.dtype)
  if mesh_axes.mesh_of([g]) is None:
    return result
  # The cotangent of an operand without a mesh is replicated.
  return mesh_axes.reshard(result, mesh_axes.spec_of(aval))


def _side_cotangent(name: str, g: jax.Array, call: calls.DotCall) -> jax.Array:
  """Returns g * global_scale times the dequantized other side, in f32."""
  dims = GradientDims.of(call.dimension_numbers, call.lhs.ndim, call.rhs.ndim)
  factor = call.global_scale
  dtype = _F32 if factor is not None and factor.ndim else g.dtype
  other = call.rhs if name == "lhs" else call.lhs

  def local(
    g: jax.Array, other: sides.Side, numbers: sides.DimensionNumbers
  ) -> jax.Array:
    plain = _dequantized(other.in_usual_order(), dtype)
    return xla.plain_dot(g, plain, numbers, _F32)

  def product(g: jax.Array, numbers: sides.DimensionNumbers) -> jax.Array:
    if mesh_axes.mesh_of([g]) is None:
      return local(g, other, numbers)
    _, order = dims.of_side(name)
    spec = mesh_axes.spec_of(call.arrays()[name])
    # Dimension i of the operand is dimension `order[i]` of the product.
    out = tuple(axes for _, axes in sorted(zip(order, spec, strict=True)))
    return sharding.product_across_blocks(local, g, other, numbers, out)

  return side_cotangent(name, g, product, factor, call.global_power, dims)


def side_cotangent(
  side: str,
  g: jax.Array,
  product_with: Callable[[jax.Array, sides.DimensionNumbers], jax.Array],
  factor: jax.Array | None,
  power: jax.Array | None,
  dims: GradientDims,
) -> jax.Array:
  """Returns the cotangent of a side of `dot(lhs, rhs) * factor * power`.

  Args:
    product_with: (g, numbers) -> dot of g and the other side, in f32.
    factor: f32[], or f32 that broadcasts to g and has its rank, or None.
    power: a power of two of factor's shape, or None.
  """
  numbers, order = dims.of_side(side)
  # An array may vary along dimensions that g contracts, so it scales g itself.
  if factor is not None and factor.ndim:
    if power is not None:
      power = _sharded_as(g, power)
    g = epilogue.multiply(g.astype(_F32), _sharded_as(g, factor), power)
  product = product_with(g, numbers)
  if factor is not None and not factor.ndim:
    product = epilogue.multiply(product, factor, power)
  return product.transpose(order)


def _sharded_as(like: jax.Array, x: jax.Array) -> jax.Array:
  """Reshards `x` to the explicit axes of `like`, to which it broadcasts."""
  if mesh_axes.mesh_of([like]) is None:
    return x
  sizes = zip(x.shape, mesh_axes.spec_of(like), strict=True)
  return mesh_axes.reshard(
    x, tuple(axes if size != 1 else () for size, axes in sizes)
  )


def _dequantized(side: sides.Side, g_dtype: np.dtype) -> jax.Array:
  """Dequantizes a side to bf16 if that is exact and g is bf16, else to f32.

  Unlike `Side.dequantized`, it may run a kernel.
  """
  assert side.format is not None and side.axis is not None
  is_bf16 = g_dtype == formats.BF16 and side.exact_in_bf16
  return dequantization.dequantize_arrays(
    side.values,
    side.linear_scale(),
    None,
    side.format,
    side.axis,
    formats.BF16 if is_bf16 else _F32,
  )


def _sum_to(x: jax.Array, aval: Any) -> jax.Array:
  """Sums `x` to the shape of `aval`, a scalar or an array of the same rank.

  This is the transpose of broadcasting `aval` to the shape of `x`.
  """
  if not aval.ndim:
    return x.sum()
  axes = tuple(d for d in range(x.ndim) if aval.shape[d] != x.shape[d])
  return x.sum(axes, keepdims=True)


# Refusals.


REMEDY: Final = (
  "Differentiate with respect to plain operands, bias, residual and"
  " global_scale, with jax.lax.stop_gradient around the quantized operands. To"
  " train a model in a block format pass plain parameters to"
  " jaxplugin.quantize_dots(f, recipe), or multiply by"
  " jaxplugin.dot_general(lhs_format, rhs_format), which quantizes both"
  " operands and defines the gradient."
)


def require_linear(call: calls.DotCall, names: Sequence[str]) -> None:
  """Raises NotImplementedError unless a call is jointly linear in arrays.

  Only a user's `jax.linear_transpose` can violate it: `jvp` binds linear calls.
  """
  what = ""
  if call.activation is not None and list(names) != ["residual"]:
    what = f" through {call.activation}"
  elif "global_scale" in names and ("lhs" in names or "rhs" in names):
    what = " at once"
  if what:
    raise primitive.not_linear(sides.WHO, names, what)
