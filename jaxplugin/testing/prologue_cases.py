# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prologues of quantizing, their operands, and their results in f64."""

import jax.numpy as jnp
import numpy as np

from jaxplugin.quantization import prologues

Prologue = prologues.Prologue

# At least one of each function, operand and order of halves.
CASES = (
  Prologue(function="rms_norm", epsilon=1e-6),
  Prologue(function="rms_norm", operands=("weight", "residual"), epsilon=1e-6),
  Prologue(function="layer_norm", operands=("residual",), epsilon=1e-5),
  Prologue(function="layer_norm", operands=("weight", "bias"), epsilon=1e-5),
  Prologue(function="silu_and_mul", operands=("up",)),
  Prologue(function="silu_and_mul", halves="split"),
  Prologue(function="gelu_and_mul", operands=("bias",), halves="split"),
  Prologue(function="gelu_and_mul", operands=("up", "bias")),
  Prologue(function="swigluoai", operands=("bias",), halves="interleaved"),
  Prologue(function="swigluoai", operands=("up",), alpha=1.5, limit=2.0),
)


def operands(prologue, shape, dtype, seed=0):
  """Returns x and {name: operand} for a result of a shape."""
  rng = np.random.default_rng(seed)
  x = jnp.asarray(3 * rng.standard_normal(prologue.x_shape(shape)), dtype)
  types = prologue.operand_types(shape, np.dtype(dtype))
  more = {
    name: jnp.asarray(rng.standard_normal(size), kind)
    for name, (size, kind) in zip(prologue.operands, types, strict=True)
  }
  return x, more


def exact(prologue, x, more):
  """Returns a prologue's result in f64, and x + residual in x's dtype."""
  f64 = lambda a: np.asarray(a).astype(np.float64)
  p, values, total = prologue, f64(x), None
  if "residual" in more:
    total = (values + f64(more["residual"])).astype(x.dtype)
    values = f64(total)
  if p.is_norm:
    if p.function == "layer_norm":
      values = values - values.mean(-1, keepdims=True)
    square = np.mean(values**2, -1, keepdims=True)
    values = values / np.sqrt(square + p.epsilon)
    return values * f64(more.get("weight", 1)) + f64(more.get("bias", 0)), total
  k = values.shape[-1] // (2 if p.halves else 1)

  def halves(a):
    if p.halves == "interleaved":
      return a[..., ::2], a[..., 1::2]
    return a[..., :k], a[..., k:]

  gate, up = halves(values) if p.halves else (values, f64(more["up"]))
  if "bias" in more:
    gate_bias, up_bias = halves(f64(more["bias"]))
    gate, up = gate + gate_bias, up + up_bias
  if p.function == "swigluoai":
    gate = np.minimum(gate, p.limit)
    up = np.clip(up, -p.limit, p.limit)
    return gate / (1 + np.exp(-p.alpha * gate)) * (up + 1), None
  if p.function == "silu_and_mul":
    return gate / (1 + np.exp(-gate)) * up, None
  exponent = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
  return gate / (1 + np.exp(-exponent)) * up, None
