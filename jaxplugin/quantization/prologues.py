# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that are computed from x before it is quantized.

A kernel computes a prologue and quantizes its result in one pass, so the result
is not written as floats. All arithmetic is f32.

Sources: arXiv 1910.07467 (RMSNorm); arXiv 1607.06450 (LayerNorm); arXiv
1606.08415 (gelu, silu); arXiv 2002.05202 (gated activations); arXiv 2508.10925,
section 2.2 (swigluoai).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint

from jaxplugin.jaxext import mesh_axes
from jaxplugin.kernels import prologues
from jaxplugin.quantization import codes

T = TypeVar("T")

Prologue: TypeAlias = prologues.Prologue
NORMS: Final = prologues.NORMS
FUNCTIONS: Final = prologues.FUNCTIONS
OPERANDS: Final = prologues.OPERANDS
# Operands with x's dtype. They have x's shape, except that a cotangent has half
# the features of halves.
OF_X: Final = ("up", "residual", "cotangent")
HALVES: Final = ("split", "interleaved")
GRADIENTS: Final = ("x", "up")

# gelu's tanh approximation: arXiv 1606.08415, section 2.
_GELU_CUBIC: Final = 0.044715
_GELU_FACTOR: Final = 2 * math.sqrt(2 / math.pi)
# gelu's argument of erf is this times x.
_ROOT_HALF: Final = math.sqrt(0.5)


# The squares of rows with such an amax, and their sums, are in f32's range.
_USUAL_AMAX: Final = (2.0**-40, 2.0**40)
# The name of the factor in a trace.
FACTOR_IN_RANGE: Final = "jaxplugin_factor_in_range"
# With such an epsilon no row is scaled up, and the epsilon is negligible for
# rows that are scaled down.
_USUAL_EPSILON: Final = (2.0**-80, 2.0**30)


def operand_types(
  prologue: Prologue, shape: Sequence[Any], dtype: np.dtype
) -> list[tuple[tuple[Any, ...], np.dtype]]:
  """Returns shape and dtype of each operand besides x.

  Args:
    shape: shape of the function's result.
  """
  *lead, k = shape
  if prologue.gradient_of_halves:
    k //= 2
  row = (2 * k if prologue.is_gated else k,), np.dtype(np.float32)
  return [
    ((*lead, k), dtype) if name in OF_X else row for name in prologue.operands
  ]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["x", "more"],
  meta_fields=["prologue"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrologueCall:
  """A prologue and its operands.

  Attributes:
    prologue: the prologue.
    x: floats of the shape `prologue.x_shape`.
    more: `prologue.operands` by name, in any float dtype. A weight and a bias
      may have leading dimensions of size 1.
  """

  prologue: Prologue
  x: jax.Array
  more: Mapping[str, jax.Array]

  @property
  def shape(self) -> tuple[Any, ...]:
    """The shape of the function's result."""
    return self.prologue.shape_of(self.x.shape)

  def canonical(self, shape: Sequence[Any]) -> PrologueCall:
    """Returns the call for a result of `shape`, with `operand_types`."""
    of_x = {name: a for name, a in self.more.items() if name in OF_X}
    dtype = jnp.result_type(self.x, *of_x.values())
    types = operand_types(self.prologue, shape, dtype)
    more = {
      name: self.more[name].astype(kind).reshape(own)
      for name, (own, kind) in zip(self.prologue.operands, types, strict=True)
    }
    x = self.x.astype(dtype).reshape(self.prologue.x_shape(shape))
    return dataclasses.replace(self, x=x, more=more)

  def with_rows(
    self, function: Callable[[jax.Array], jax.Array]
  ) -> PrologueCall:
    """Returns the call with a function of x, and of operands like x."""
    more = {
      name: function(array) if name in OF_X else array
      for name, array in self.more.items()
    }
    return dataclasses.replace(self, x=function(self.x), more=more)


def compute(
  prologue: Prologue,
  x: jax.Array,
  more: Mapping[str, jax.Array],
  *,
  returns_amax: bool = False,
  column_sums: int | None = None,
) -> list[jax.Array]:
  """Computes a prologue with XLA ops.

  Args:
    x: floats of the shape `prologue.x_shape`.
    more: `prologue.operands` by name.
    column_sums: see `QuantizationProblem`.

  Returns:
    The function's result in f32; its largest finite magnitude f32[] if
    `returns_amax`; its sums if `column_sums`; an array like x if
    `prologue.returns_sum`.
  """
  if prologue.is_norm_gradient:
    y, summed = _gradient_of_norm(prologue, x, more)
    rest = [y.astype(x.dtype)]
  else:
    y, *rest = _computed(prologue, x, more)
    summed = y
  if column_sums is not None:
    rest = [summed.sum(tuple(range(column_sums, y.ndim - 1))), *rest]
  return [y, *([codes.finite_amax(y)] if returns_amax else []), *rest]


def _computed(
  prologue: Prologue, x: jax.Array, more: Mapping[str, jax.Array]
) -> list[jax.Array]:
  if not prologue.is_norm:
    return [_activated(prologue, x, more)]
  if (residual := more.get("residual")) is not None:
    x = (_f32(x) + _f32(_alike(residual, x))).astype(x.dtype)
    # XLA:GPU would compute the norm of the sum before it is rounded.
    x = jax.lax.optimization_barrier(x)
  y, _, _, inverse = _standardized(prologue, x)
  y = y * inverse
  if (weight := more.get("weight")) is not None:
    y = y * _alike(weight, y)
  if (bias := more.get("bias")) is not None:
    y = y + _alike(bias, y)
  return [y, x] if prologue.has_residual else [y]


def _mean(values: jax.Array) -> jax.Array:
  return jnp.mean(values, axis=-1, keepdims=True)


def _standardized(
  prologue: Prologue, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns rows whose squares f32 holds, and numbers of each row.

  The numbers are the mean, which is subtracted, a factor by which the rows are
  multiplied, and the inverse of the root of their mean square.
  """
  y, mean = _f32(x), None
  if prologue.function == "layer_norm":
    mean = _mean(y)
    y = y - mean
  y, epsilon, factor = _in_range(y, prologue.epsilon)
  mean = jnp.zeros_like(factor) if mean is None else mean
  return y, mean, factor, jax.lax.rsqrt(_mean(y * y) + epsilon)


def _gradient_of_norm(
  prologue: Prologue, x: jax.Array, more: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Returns the gradient of a norm, and each row's gradient of the weight."""
  h, d, (_, factor, inverse, of_d, of_products) = _rows_of_gradient(
    prologue, x, more
  )
  result = factor * inverse * (d - h * of_products - of_d)
  if (residual := more.get("residual")) is not None:
    result = result + _alike(_f32(residual), h)
  return result, _alike(_f32(more["cotangent"]), h) * h


def gradient_statistics(
  prologue: Prologue, x: jax.Array, more: Mapping[str, jax.Array]
) -> jax.Array:
  """Returns f32[..., 5]: numbers of each row for the gradient of a norm.

  They are those of `_standardized`, and the means of d and of d * h.
  """
  _, _, numbers = _rows_of_gradient(prologue, x, more)
  return jnp.concatenate(numbers, axis=-1)


def _rows_of_gradient(
  prologue: Prologue, x: jax.Array, more: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
  """Returns normalized rows h, d, and the numbers of each row."""
  y, mean, factor, inverse = _standardized(prologue, x)
  d = _alike(_f32(more["cotangent"]), y)
  if (weight := more.get("weight")) is not None:
    d = d * _alike(weight, y)
  of_d = _mean(d) if prologue.function == "layer_norm" else mean
  # One pass over y computes both sums.
  of_products = _mean(d * y) * inverse
  return y * inverse, d, [mean, factor, inverse, of_d, of_products]


def _in_range(
  y: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array | float, jax.Array]:
  """Multiplies rows by powers of two if f32 cannot hold their squares.

  Most rows are multiplied by 1. XLA compiles a norm to one kernel of a GPU,
  unless the epsilon is scaled too.

  Returns:
    The rows; the epsilon with which their norm is that of the given rows; and
    the factor of each row.
  """
  magnitude = jnp.abs(jax.lax.stop_gradient(y))
  amax = jnp.max(magnitude, axis=-1, keepdims=True, initial=0)
  amax = jnp.clip(amax, max(math.sqrt(epsilon), 2.0**-126), 2.0**126)
  power = jax.lax.reduce_precision(amax, exponent_bits=8, mantissa_bits=0)
  factor = jnp.clip(power, *_USUAL_AMAX) / power
  factor = ad_checkpoint.checkpoint_name(factor, FACTOR_IN_RANGE)
  y = y * factor
  low, high = _USUAL_EPSILON
  is_usual = low <= epsilon <= high
  return y, epsilon if is_usual else epsilon * factor * factor, factor


def pair(x: jax.Array, halves: str | None) -> jax.Array:
  """Returns x[..., k, 2] if halves are interleaved, else x[..., 2, k]."""
  *lead, k = x.shape
  granule = 2 if halves == "interleaved" else k
  x = mesh_axes.divided(x, x.ndim - 1, granule)
  return x.reshape(paired((*lead, k // 2), halves, 2))


def paired(row: Sequence[T], halves: str | None, pair: T) -> list[T]:
  """Inserts the item of a pair next to that of the last dimension."""
  *lead, k = row
  return [*lead, k, pair] if halves == "interleaved" else [*lead, pair, k]


def _activated(
  prologue: Prologue, x: jax.Array, more: Mapping[str, jax.Array]
) -> jax.Array:
  def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    axis = -1 if prologue.halves == "interleaved" else -2
    gate, up = jnp.unstack(pair(x, prologue.halves), axis=axis)
    return _f32(gate), _f32(up)

  gate: jax.Array
  up: jax.Array | float
  gate, up = both(x) if prologue.halves else (_f32(x), 1.0)
  if "up" in more:
    up = _alike(_f32(more["up"]), gate)
  if (bias := more.get("bias")) is not None:
    if prologue.is_gated:
      bias, up_bias = both(bias)
      up = up + _alike(up_bias, gate)
    gate = gate + _alike(bias, gate)
  is_gradient = prologue.gradient is not None
  cotangent = _alike(_f32(more["cotangent"]), gate) if is_gradient else gate
  if prologue.function == "relu":
    return (
      jnp.where(gate > 0, cotangent, 0) if is_gradient else jax.nn.relu(gate)
    )
  passes = jnp.float32(1), jnp.float32(1)  # gradients that limits pass on
  if prologue.function == "swigluoai":
    limit = jnp.float32(prologue.limit)
    passes = _passes(gate, limit), _passes(jnp.abs(up), limit)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1
    slope = jnp.float32(prologue.alpha)
    argument = slope * gate
  elif prologue.activation == "gelu":
    cube = gate * gate * gate
    argument = _GELU_FACTOR * (gate + _GELU_CUBIC * cube)
    slope = _GELU_FACTOR * (1 + 3 * _GELU_CUBIC * (gate * gate))
  else:
    argument, slope = gate, jnp.float32(1)
  is_exact = prologue.activation == "exact_gelu"
  if not is_gradient:
    share = _normal(gate) if is_exact else jax.nn.sigmoid(argument)
    return gate * share * up
  if is_exact:
    share = _normal(gate)
    change = jnp.exp(-0.5 * (gate * gate)) / math.sqrt(2 * math.pi)
  else:
    decay = jnp.exp(-jnp.abs(argument))
    inverse = 1 / (1 + decay)
    share = jnp.where(argument < 0, decay * inverse, inverse)
    change = decay * inverse * inverse  # the derivative of sigmoid
  # The slope or the gate may be infinite where the change is 0.
  change = jnp.where(change == 0, 0, gate * slope * change)
  of_gate = cotangent * up * (share + change) * passes[0]
  of_up = cotangent * (gate * share) * passes[1]
  if prologue.halves == "interleaved":
    return jnp.stack([of_gate, of_up], axis=-1).reshape(x.shape)
  if prologue.halves:
    return jnp.concatenate([of_gate, of_up], axis=-1)
  return of_up if prologue.gradient == "up" else of_gate


def _normal(x: jax.Array) -> jax.Array:
  """Returns the probability of less than x in the normal distribution."""
  return 0.5 * jax.lax.erfc(-_ROOT_HALF * x)


def _passes(x: jax.Array, limit: jax.Array) -> jax.Array:
  """Returns the derivative of `jnp.minimum(x, limit)`."""
  return jnp.where(x < limit, 1.0, jnp.where(x == limit, 0.5, 0.0))


def _alike(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns x with the rank, and over explicit axes the sharding, of like."""
  if mesh_axes.mesh_of([x]) and mesh_axes.mesh_of([like]):
    x = mesh_axes.reshard(x, mesh_axes.spec_of(like)[-x.ndim :])
  return jnp.expand_dims(x, tuple(range(like.ndim - x.ndim)))


def _f32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)
