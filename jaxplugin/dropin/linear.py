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

WHO: Final = "linear"


def linear(
  x: dot.Operand,
  w_q: dot.Operand,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  *,
  preferred_element_type: Any = None,
  implementation: str | None = None,
) -> jax.Array:
  """A linear layer: `activation(x @ w_q^T + bias)`, accumulated in f32.

  It is `block_scaled_dot` of the last dimensions, whose contract holds: one
  cast at the end, and derivatives with respect to a plain x and to bias.

  Args:
    x: (..., k), of rank 1 or more: f32, bf16 or f16, or a `ScaledArray` that is
      blocked along k. Its leading dimensions are rows.
    w_q: (n, k): a `ScaledArray` that is blocked along k, as
      `quantize(w, format)` makes it of w (n, k), and `quantize(kernel.T,
      format)` of a kernel (k, n); or plain, where x is quantized.
    bias: f32, bf16 or f16[n].
    activation: None, "relu", "gelu" (tanh approximation) or "silu".
    preferred_element_type: f32, bf16 or f16, the result's dtype. Default: that
      of x, and f32 where x is quantized.
    implementation: None chooses; "xla", "cudnn", "triton" or "cpu" forces one.

  Returns:
    preferred_element_type[..., n].

  Raises:
    TypeError: rank, dtype or shape of an argument is wrong.
    ValueError: a parameter is not acceptable, or an NVFP4 scale is negative.
    NotImplementedError: the implementation asked for cannot serve.
  """
  with speaking.speaking_for(WHO):
    lhs, rhs = dot.as_operand("x", x), dot.as_operand("w_q", w_q)
    if lhs.ndim < 1 or rhs.ndim != 2:
      raise TypeError(
        f"{WHO}: x must be (..., k) and w_q (n, k), got x {tuple(lhs.shape)}"
        f" and w_q {tuple(rhs.shape)}; call block_scaled_dot for other ranks"
      )
    for name, operand in (("x", lhs), ("w_q", rhs)):
      if _is_blocked_elsewhere(operand):
        raise TypeError(
          f"{WHO}: {name} must be blocked along k, its last dimension, got"
          f" {name} {tuple(operand.shape)} blocked along dimension"
          f" {operand.axis}; quantize the transposed array, or call"
          " block_scaled_dot with dimension_numbers"
        )
    if preferred_element_type is None:
      is_plain = not isinstance(lhs, scaled_array.ScaledArray)
      preferred_element_type = lhs.dtype if is_plain else jnp.float32
    return dot.block_scaled_dot(
      lhs,
      rhs,
      dimension_numbers=(((lhs.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=preferred_element_type,
      bias=bias,
      activation=activation,
      implementation=implementation,
    )


def _is_blocked_elsewhere(operand: Any) -> bool:
  return (
    isinstance(operand, scaled_array.ScaledArray)
    and operand.axis != operand.ndim - 1
  )
