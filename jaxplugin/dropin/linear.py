# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear`: a layer's product with a quantized weight."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.core import speaking
from jaxplugin.dot import problems
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.dropin import layers

WHO: Final = "linear"


def linear(
  x: dot.Operand,
  w_q: dot.Operand,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  *,
  layer: Any = None,
  preferred_element_type: Any = None,
  out_sharding: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
) -> jax.Array:
  """A linear layer: `activation(x @ w_q^T + bias)`, accumulated in f32.

  It is `block_scaled_dot` of the last dimensions, whose contract holds: one
  cast at the end, and derivatives with respect to a plain x and to bias.

  Args:
    x: (..., k), of rank 1 or more: f32, bf16 or f16, or a `ScaledArray` that is
      blocked along k. Its leading dimensions are rows. f64 is rounded to f32,
      in which the product is computed.
    w_q: (n, k): a `ScaledArray` that is blocked along k, as
      `quantize(w, format)` makes it of w (n, k), and `quantize(kernel.T,
      format)` of a kernel (k, n); or plain, where x is quantized.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (tanh approximation) or "silu".
    layer: integer[], traced or not: w_q is a stack of weights (layers, n, k),
      bias of biases (layers, n), and this one is meant, or the nearest where it
      is out of range. Inside of a `lax.scan` over layer numbers kernels read
      the layer where it lies; what a scan over the weights themselves hands
      over is a copy. With a plain x, or one of rank 2.
    preferred_element_type: f32, bf16 or f16, the result's dtype. Default: that
      of x, and f32 if x is quantized or f64.
    out_sharding: a `PartitionSpec` or a `NamedSharding` of explicit mesh axes,
      as in `block_scaled_dot`, which needs it where k is sharded.
    reduce_dtype: f32, bf16 or f16: what devices send each other where k is
      sharded, as in `block_scaled_dot`; None is f32.
    implementation: None chooses; a name forces one, as in `block_scaled_dot`.

  Returns:
    preferred_element_type[..., n].

  Raises:
    TypeError: rank, dtype or shape of an argument is wrong.
    ValueError: a parameter is not acceptable, or an NVFP4 scale is negative.
    NotImplementedError: the implementation asked for cannot serve, or
      out_sharding has unreduced axes.
    JAX's own errors of shardings, as of `block_scaled_dot`.
  """
  with speaking.speaking_for(WHO):
    lhs, rhs = dot.as_operand("x", x), dot.as_operand("w_q", w_q)
    _validate_ranks(lhs, rhs, layer)
    for name, operand in (("x", lhs), ("w_q", rhs)):
      is_plain = not isinstance(operand, scaled_array.ScaledArray)
      if is_plain and operand.dtype not in sides.PLAIN_DTYPES:
        raise TypeError(
          f"{WHO}: {name} must be float32, bfloat16, float16 or a ScaledArray,"
          f" got {operand.dtype}{list(operand.shape)}; cast it, or quantize it"
        )
      if _is_blocked_elsewhere(operand):
        raise TypeError(
          f"{WHO}: {name} must be blocked along k, its last dimension, got"
          f" {name} {tuple(operand.shape)} blocked along dimension"
          f" {operand.axis}; {_blocked_remedy(name, operand)}"
        )
    _validate_sizes(lhs, rhs)
    if preferred_element_type is None:
      is_plain = not isinstance(lhs, scaled_array.ScaledArray)
      preferred_element_type = lhs.dtype if is_plain else jnp.float32
    if layer is not None:
      return layers.layer_dot(
        lhs,
        rhs,
        _layer_number(layer, rhs.shape[0]),
        _stacked_bias(bias, rhs),
        activation=activation,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        reduce_dtype=reduce_dtype,
        implementation=implementation,
      )
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=(((lhs.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=preferred_element_type,
      bias=bias,
      activation=activation,
      out_sharding=out_sharding,
      reduce_dtype=reduce_dtype,
      implementation=implementation,
    )


def _validate_ranks(lhs: Any, rhs: Any, layer: Any) -> None:
  rank, names, remedy = 2, "(n, k)", "call block_scaled_dot for other ranks"
  if layer is not None:
    rank, names = 3, "(layers, n, k) if layer is given"
    remedy = "leave layer out, or pass a stack of weights"
  elif rhs.ndim == 3:
    remedy = "pass layer= for a stack, or call block_scaled_dot"
  if lhs.ndim < 1 or rhs.ndim != rank:
    raise TypeError(
      f"{WHO}: x must be (..., k) and w_q {names}, got x {tuple(lhs.shape)}"
      f" and w_q {tuple(rhs.shape)}; {remedy}"
    )
  if layer is not None and not isinstance(rhs, scaled_array.ScaledArray):
    raise TypeError(
      f"{WHO}: w_q must be a ScaledArray if layer is given, got"
      f" {rhs.dtype}{list(rhs.shape)}; pass w_q[layer] and leave layer out"
    )


def _blocked_remedy(name: str, operand: scaled_array.ScaledArray) -> str:
  if operand.axis == operand.ndim - 2:
    order = (*range(operand.ndim - 2), operand.ndim - 1, operand.ndim - 2)
    return f"pass {name}.transpose{order}"
  return "quantize it along its last axis"


def _validate_sizes(lhs: Any, rhs: Any) -> None:
  """Raises TypeError unless both have the same k."""
  if lhs.shape[-1] == rhs.shape[-1]:
    return
  kernel = "kernel.T for a kernel (k, n)"
  if rhs.ndim == 3:
    kernel = "jnp.swapaxes(kernels, 1, 2) for kernels (layers, k, n)"
  verb = "quantize" if isinstance(rhs, scaled_array.ScaledArray) else "pass"
  remedy = rules.sizes_remedy(
    *(lhs, rhs, (lhs.ndim - 1, rhs.ndim - 1)),
    names=("x", "w_q"),
    transposed=f"weights are (n, k): {verb} {kernel}",
  )
  raise TypeError(
    f"{WHO}: x (..., k) and w_q (..., n, k) must have the same k, got x"
    f" {tuple(lhs.shape)} and w_q {tuple(rhs.shape)}{remedy}"
  )


def _layer_number(layer: Any, count: int) -> jax.Array:
  """i32[] in range; raises TypeError unless it is one integer."""
  number = dot.integers("layer", layer)
  if number.ndim or not jnp.issubdtype(number.dtype, jnp.integer):
    raise TypeError(
      f"{WHO}: layer must be one integer, got"
      f" {number.dtype}{list(number.shape)}"
    )
  # As Python's integer: within a trace a comparison of arrays is traced.
  if not isinstance(number, jax.core.Tracer) and not 0 <= int(layer) < count:
    raise ValueError(
      f"{WHO}: layer must be at least 0 and below the {count} layers of w_q,"
      f" got {int(layer)}"
    )
  return jnp.clip(number, 0, count - 1)


def _stacked_bias(bias: Any, rhs: Any) -> jax.Array | None:
  if bias is None:
    return None
  bias = dot.as_operand("bias", bias)
  if tuple(bias.shape) != tuple(rhs.shape[:2]):
    raise TypeError(
      f"{WHO}: bias must have a row for each layer, shape (layers, n)"
      f" {tuple(rhs.shape[:2])}, got {tuple(bias.shape)}"
    )
  return bias


def _is_blocked_elsewhere(operand: Any) -> bool:
  return (
    isinstance(operand, scaled_array.ScaledArray)
    and operand.axis != operand.ndim - 1
  )
