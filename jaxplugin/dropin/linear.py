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
from jaxplugin.core import error_context
from jaxplugin.dot import problems
from jaxplugin.dot import rules
from jaxplugin.dot import sides
from jaxplugin.dropin import layers
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import mesh_axes
from jaxplugin.quantization import out_format as out_format_lib

WHO: Final = "linear"


def linear(
  x: dot.Operand,
  w_q: dot.Operand,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  *,
  layer: Any = None,
  preferred_element_type: Any = None,
  precision: Any = None,
  out_sharding: Any = None,
  reduce_dtype: Any = None,
  implementation: str | None = None,
  out_format: out_format_lib.OutFormatLike | None = None,
) -> Any:
  """Multiplies rows by a quantized weight, as a linear layer does.

  The formula is that of `block_scaled_dot`, with its bound and derivatives::

    result = cast(activation(x @ w_q^T + bias))

  Args:
    x: f32, bf16, f16 or f64[..., k], or a `ScaledArray` blocked along k. f64 is
      rounded to f32.
    w_q: a `ScaledArray` [n, k] blocked along k. A kernel [k, n] becomes one by
      `quantize(kernel.T, format)`. It may be a plain array if x is quantized.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (tanh approximation) or "silu".
    layer: integer[]. If given, w_q is a stack [layers, n, k], bias is
      [layers, n], and this layer is used. Under `jit` it is clamped.
      x must then be unquantized or of rank 2.
    preferred_element_type: f32, bf16 or f16. Default: the dtype of x, or f32 if
      x is quantized or f64.
    precision: as for `block_scaled_dot`.
    out_sharding: as for `block_scaled_dot`.
    reduce_dtype: as for `block_scaled_dot`.
    implementation: backend; None chooses.
    out_format: as for `block_scaled_dot`.

  Returns:
    preferred_element_type[..., n], or a quantized result.

  Raises:
    TypeError: If a rank, dtype or shape does not fit.
    ValueError: If a parameter is invalid, or an NVFP4 scale is negative.
    NotImplementedError: If the named backend does not support the call.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w_q = jp.quantize(jnp.ones((3, 32)), "mxfp4")
    >>> jp.linear(jnp.ones((2, 32), jnp.bfloat16), w_q)
    Array([[32, 32, 32],
           [32, 32, 32]], dtype=bfloat16)

  See also:
    `jp.block_scaled_dot`; the page "Write a decode loop" for `layer`.
  """
  with error_context.in_function(WHO):
    lhs, rhs = dot.as_operand("x", x), dot.as_operand("w_q", w_q)
    _validate_ranks(lhs, rhs, layer)
    for name, operand in (("x", lhs), ("w_q", rhs)):
      if not isinstance(operand, scaled_array.ScaledArray):
        if operand.dtype not in sides.PLAIN_DTYPES:
          raise TypeError(
            f"{WHO}: {name} must be float32, bfloat16, float16 or a"
            f" ScaledArray, got {operand.dtype}{list(operand.shape)}; cast it,"
            " or quantize it"
          )
      elif operand.axis != operand.ndim - 1:
        raise TypeError(
          f"{WHO}: {name} must be blocked along k, its last dimension, got"
          f" {name} {tuple(operand.shape)} blocked along dimension"
          f" {operand.axis}; {_blocked_remedy(name, operand)}"
        )
    _validate_sizes(lhs, rhs)
    out = None
    if out_format is not None:
      out = out_format_lib.OutFormat.of_matmul(
        WHO, out_format, preferred_element_type
      )
      preferred_element_type = jnp.float32
    if preferred_element_type is None:
      is_plain = not isinstance(lhs, scaled_array.ScaledArray)
      preferred_element_type = lhs.dtype if is_plain else jnp.float32
    options: dict[str, Any] = dict(
      activation=activation,
      preferred_element_type=preferred_element_type,
      precision=precision,
      out_sharding=out_sharding,
      reduce_dtype=reduce_dtype,
      implementation=implementation,
    )
    if layer is not None:
      _require_whole_layers(rhs)
      return layers.layer_dot(
        lhs,
        rhs,
        _layer_number(layer, rhs.shape[0]),
        _stacked_bias(bias, rhs),
        out=out,
        **options,
      )
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=(((lhs.ndim - 1,), (1,)), ((), ())),
      bias=bias,
      out_format=out,
      **options,
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


def _require_whole_layers(stack: scaled_array.ScaledArray) -> None:
  """Raises NotImplementedError if the type divides a stack's layers."""
  spec = explicit_axes.spec_of(stack.values)
  if spec[0]:
    whole = mesh_axes.partition_spec(((), *spec[1:]))
    raise NotImplementedError(
      f"{WHO}: w_q must have all its layers on each device if layer is given,"
      f" got a stack {tuple(stack.shape)} divided over the explicit mesh axes"
      f" {spec[0]}; pass jp.shard(w_q, {whole})"
    )


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
