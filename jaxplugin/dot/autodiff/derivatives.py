# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a block-scaled dot, with respect to all that is not quantized.

    result = cast(activation(dot(lhs, rhs) * global_scale + bias) + residual)

Without its activation that is linear in a plain side, bias and residual
together, and in the global scale. So tangents are block-scaled dots too, with a
tangent where the operand was: forward mode runs the same kernels, and reverse
mode keeps the operands as they are, quantized. Their transposes dequantize the
other side, in the backward pass, as g contracts the dimension that is not
blocked, and multiply the bare dot, computed once more, for the global scale.

`primitive` registers `jvp` and `transpose`. They take `bind`, as it does:
(operands, config) -> the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxplugin.core import formats
from jaxplugin.dot import call
from jaxplugin.dot import canonical
from jaxplugin.dot import global_scales
from jaxplugin.dot import reference
from jaxplugin.quantization import dequantize_primitive

Bind = Callable[[call.Operands, call.DotConfig], jax.Array]

_F32: Final = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientDims:
  """How the gradients of `dot_general` are products of its result's, g.

  Attributes:
    dgrad, wgrad: dimension numbers of g and rhs, and of g and lhs.
    lhs_order, rhs_order: permutations that bring those products' dimensions
      into the order of lhs and of rhs.
    g_ndim: of g.
  """

  dgrad: call.DimensionNumbers
  wgrad: call.DimensionNumbers
  lhs_order: tuple[int, ...]
  rhs_order: tuple[int, ...]
  g_ndim: int

  @classmethod
  def of(
    cls, numbers: call.DimensionNumbers, lhs_ndim: int, rhs_ndim: int
  ) -> GradientDims:
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = numbers
    lhs_free = call.free_dims(lhs_ndim, lhs_k, lhs_batch)
    rhs_free = call.free_dims(rhs_ndim, rhs_k, rhs_batch)
    # g is [batch..., m..., n...].
    batch = tuple(range(len(lhs_batch)))
    m = tuple(len(batch) + i for i in range(len(lhs_free)))
    n = tuple(len(batch) + len(m) + i for i in range(len(rhs_free)))

    def order(
      x_k: call.Dims, x_batch: call.Dims, x_free: call.Dims, y_k: call.Dims
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
      g_ndim=len(batch) + len(m) + len(n),
    )


# Forward.


def jvp(
  bind: Bind,
  primals: Sequence[jax.Array],
  tangents: Sequence[Any],
  config: call.DotConfig,
) -> tuple[jax.Array, jax.Array]:
  """The result, by the call that it is without derivatives, and its tangent.

  Args:
    bind: of the primitive.
    primals: operands that are present.
    tangents: theirs, of their dtypes; `ad.Zero` for a constant one.
    config: the call's.

  Raises:
    NotImplementedError: values or scales of a quantized operand have a tangent.
  """
  operands = call.Operands.unflatten(config, primals)
  given = call.Operands.unflatten(config, tangents)
  _refuse_quantized(
    config, [x is not None and type(x) is not ad.Zero for x in given]
  )
  active = call.Operands(*(None if type(x) is ad.Zero else x for x in given))
  # A zero that was written out: powers of two come from bits.
  active = active._replace(global_power=None)
  result = bind(operands, config)
  if config.activation is None:
    return result, _linear_tangent(bind, operands, active, config, result)

  before = config.replace(
    activation=None, preferred_element_type=_F32, has_residual=False
  )
  inner, inner_active = (x._replace(residual=None) for x in (operands, active))
  terms = []
  if any(x is not None for x in inner_active):
    tangent = _linear_tangent(bind, inner, inner_active, before, result)
    # Computed again: the kernels that fuse an activation keep nothing of it.
    terms.append(_activation_tangent(bind(inner, before), tangent, config))
  if active.residual is not None:
    terms.append(_as_result(active.residual, result))
  return result, sum(terms[1:], start=terms[0]).astype(result.dtype)


def _linear_tangent(
  bind: Bind,
  operands: call.Operands,
  active: call.Operands,
  config: call.DotConfig,
  result: jax.Array,
) -> jax.Array:
  """The tangent of a dot without activation, in the dtype of `config`.

  Args:
    active: tangents, None for constants; not all of them None.
    result: of the shape and the sharding that the tangent gets.
  """
  products = [
    operands._replace(**{name: tangent})
    for name in ("lhs", "rhs", "global_scale")
    if (tangent := getattr(active, name)) is not None
  ]
  # The first adds the others, in the kernel.
  added = call.Operands(None, None, bias=active.bias, residual=active.residual)
  terms = []
  dtype = config.preferred_element_type if len(products) == 1 else _F32
  for product in products:
    product = product._replace(bias=added.bias, residual=added.residual)
    product_config = config.replace(
      preferred_element_type=dtype,
      has_bias=added.bias is not None,
      has_residual=added.residual is not None,
    )
    terms.append(bind(product, product_config))
    added = call.Operands(None, None)
  terms += [_as_result(x, result) for x in added if x is not None]
  total = sum(terms[1:], start=terms[0])
  return total.astype(config.preferred_element_type)


def _as_result(x: jax.Array, result: jax.Array) -> jax.Array:
  """`x` in f32, broadcast to the shape and the explicit sharding of `result`.

  Its rank is that of the result.
  """
  sharding = jax.typeof(result).sharding if _is_explicit(result) else None
  return lax.broadcast_in_dim(
    x.astype(_F32), result.shape, range(x.ndim), out_sharding=sharding
  )


def _activation_tangent(
  x: jax.Array, tangent: jax.Array, config: call.DotConfig
) -> jax.Array:
  """The tangent of `config.activation` at `x`, in f32."""
  only = call.bare_config(config).replace(activation=config.activation)

  def activate(x: jax.Array) -> jax.Array:
    return reference.apply_epilogue(x, call.Operands(None, None), only)

  if config.activation == "relu":  # it selects: 0, not NaN, of 0 * inf
    return jax.jvp(activate, (x,), (tangent,))[1]
  # Of what JAX's rules multiply in turn one array is kept.
  _, slope = jax.jvp(activate, (x,), (jnp.ones_like(x),))
  return slope * tangent


# Backward.


def transpose(
  bind: Bind, g: Any, args: Sequence[Any], config: call.DotConfig
) -> list[Any]:
  """Cotangents of the operands in which the call is linear.

  Args:
    bind: of the primitive.
    g: cotangent of the result, [batch..., m..., n...], or `ad.Zero`.
    args: operands that are present, an `ad.UndefinedPrimal` where a cotangent
      is wanted.
    config: the call's.

  Returns:
    For each of args its cotangent, of its shape and dtype, or None.

  Raises:
    NotImplementedError: values or scales of a quantized operand are wanted, or
      the call is not linear in all that are.
  """
  if type(g) is ad.Zero:
    return [None] * len(args)
  is_wanted = [ad.is_undefined_primal(x) for x in args]
  operands = call.Operands.unflatten(config, is_wanted)
  _refuse_quantized(config, [bool(x) for x in operands])
  _require_linear(config, operands)
  avals = [x.aval for x in args if ad.is_undefined_primal(x)]

  def cotangents(g: jax.Array, known: list[jax.Array]) -> tuple[jax.Array, ...]:
    wanted, rest = iter(avals), iter(known)
    flat = [next(wanted if w else rest) for w in is_wanted]
    operands = call.Operands.unflatten(config, flat)
    return tuple(
      _cotangent(bind, name, g, operands, config)
      for name, is_wanted_ in call.Operands.unflatten(config, is_wanted)
      ._asdict()
      .items()
      if is_wanted_
    )

  function: Any = cotangents
  if _is_explicit(g):
    # What a device then sends or sums is the partitioner's to decide.
    mesh = jax.typeof(g).sharding.mesh
    shardings = tuple(
      # Of an operand that is on no mesh, the whole cotangent everywhere.
      NamedSharding(mesh, PartitionSpec(*(None,) * aval.ndim))
      if aval.sharding.mesh.empty
      else aval.sharding
      for aval in avals
    )
    function = jax.sharding.auto_axes(cotangents, out_sharding=shardings)
  known = [x for x in args if not ad.is_undefined_primal(x)]
  results = iter(function(g, known))
  return [next(results) if w else None for w in is_wanted]


def _cotangent(
  bind: Bind,
  name: str,
  g: jax.Array,
  operands: call.Operands,
  config: call.DotConfig,
) -> jax.Array:
  """The cotangent of one operand; those that are wanted are abstract."""
  aval = getattr(operands, name)
  if name in ("lhs", "rhs"):
    cotangent = _side_cotangent(name, g, operands, config)
  elif name == "global_scale":
    dot = bind(call.bare_operands(operands), call.bare_config(config))
    cotangent = _sum_to(dot * g.astype(_F32), aval)
    if operands.global_power is not None:
      cotangent = cotangent * operands.global_power
  else:
    cotangent = _sum_to(g.astype(_F32), aval)
  return cotangent.astype(aval.dtype)


def _side_cotangent(
  side: str, g: jax.Array, operands: call.Operands, config: call.DotConfig
) -> jax.Array:
  """g * global_scale times the other side, dequantized; f32."""
  dims = GradientDims.of(
    config.dimension_numbers, operands.lhs.ndim, operands.rhs.ndim
  )
  factor = operands.global_scale
  dtype = _F32 if factor is not None and factor.ndim else g.dtype
  other = "rhs" if side == "lhs" else "lhs"
  plain = _dequantized(other, operands, config, dtype)
  return side_cotangent(side, g, plain, factor, operands.global_power, dims)


def side_cotangent(
  side: str,
  g: jax.Array,
  other: jax.Array,
  factor: jax.Array | None,
  power: jax.Array | None,
  dims: GradientDims,
) -> jax.Array:
  """The cotangent of a side of `dot(lhs, rhs) * factor * power`, in f32.

  Args:
    side: "lhs" or "rhs".
    g: the result's cotangent.
    other: the other side, dequantized.
    factor: f32[], or f32 that broadcasts to g and has its rank, or None.
    power: likewise, a power of two.
    dims: of the dot.
  """
  numbers, order = dims.dgrad, dims.lhs_order
  if side == "rhs":
    numbers, order = dims.wgrad, dims.rhs_order
  if factor is not None and factor.ndim:  # it may vary along the contracted
    g = global_scales.multiply(g.astype(_F32), factor, power)
  product = reference.plain_dot(g, other, numbers, _F32)
  if factor is not None and not factor.ndim:
    product = global_scales.multiply(product, factor, power)
  return product.transpose(order)


def _dequantized(
  side: str,
  operands: call.Operands,
  config: call.DotConfig,
  g_dtype: np.dtype,
) -> jax.Array:
  """A side in bf16, if that holds it and g is in bf16, or else in f32."""
  operands, config = canonical.in_usual_order(operands, config)
  operand: call.OperandConfig = getattr(config, side)
  values, scale = getattr(operands, side), getattr(operands, f"{side}_scale")
  assert operand.format is not None and operand.axis is not None
  is_bf16 = g_dtype == formats.BF16 and operand.format.exact_in_bf16
  return dequantize_primitive.dequantize(
    values,
    reference.exact_scale(operand, values, scale),
    None,
    operand.format,
    operand.axis,
    formats.BF16 if is_bf16 else _F32,
  )


def _sum_to(x: jax.Array, aval: Any) -> jax.Array:
  """The transpose of broadcasting to `x`, of one number or of its rank."""
  if not aval.ndim:
    return x.sum()
  axes = tuple(d for d in range(x.ndim) if aval.shape[d] != x.shape[d])
  return x.sum(axes, keepdims=True)


def partitioned(
  function: Callable[..., jax.Array], like: jax.Array
) -> Callable[..., jax.Array]:
  """`function`; under explicit axes, what devices send is the partitioner's.

  Args:
    like: of the result's shape and sharding.
  """
  if not _is_explicit(like):
    return function
  sharding = jax.typeof(like).sharding
  return jax.sharding.auto_axes(function, out_sharding=sharding)


def _is_explicit(x: jax.Array) -> bool:
  return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


# Refusals.


def _refuse_quantized(
  config: call.DotConfig, is_active: Sequence[bool]
) -> None:
  """Refuses derivatives with respect to values and scales of blocks."""
  active = call.Operands(*is_active)
  names = []
  for side, operand in (("lhs", config.lhs), ("rhs", config.rhs)):
    if operand.format is not None:
      names += [
        f"{name} ({operand.format})"
        for name in (side, f"{side}_scale")
        if getattr(active, name)
      ]
  if names:
    raise NotImplementedError(
      f"{call.WHO}: quantized values and block scales have no derivative, one"
      f" is asked for with respect to {' and '.join(names)}; differentiate with"
      " respect to plain operands, bias, residual and global_scale only, with"
      " jax.lax.stop_gradient around the quantized. To train what is quantized"
      " use jaxplugin.dot_general(lhs_format, rhs_format), which quantizes both"
      " operands itself and defines the gradient."
    )


def _require_linear(config: call.DotConfig, wanted: call.Operands) -> None:
  """Refuses, of a `linear_transpose` of the user's, what is not linear."""
  names = [name for name, is_wanted in wanted._asdict().items() if is_wanted]
  what = ""
  if config.activation is not None and names != ["residual"]:
    what = f" through {config.activation}"
  elif wanted.global_scale and (wanted.lhs or wanted.rhs):
    what = " at once"
  if what:
    raise NotImplementedError(
      f"{call.WHO}: jax.linear_transpose needs a linear function, and this is"
      f" not linear in {' and '.join(names)}{what}; use jax.vjp"
    )
