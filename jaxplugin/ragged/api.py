# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot`: arguments in, primitive out."""

from __future__ import annotations

from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import scaled_array
from jaxplugin.core import speaking
from jaxplugin.core import targets
from jaxplugin.dot import api
from jaxplugin.dot import epilogue
from jaxplugin.dot import guards
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import straight_through
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import checks
from jaxplugin.ragged import groups
from jaxplugin.ragged import primitive
from jaxplugin.ragged import problems
from jaxplugin.ragged import rules

WHO: Final = "ragged_dot"


def ragged_dot(
  lhs: api.Operand,
  rhs: scaled_array.ScaledArray,
  group_sizes: jax.Array,
  *,
  bias: jax.Array | None = None,
  activation: problems.Activation | None = None,
  preferred_element_type: Any = jnp.float32,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies groups of rows, each with a block-scaled weight of its own.

  The rows of lhs belong to groups in turn: the first group_sizes[0] to group 0,
  and so on, as tokens sorted by expert do. With g the group of row i:

    dot[i] = sum_k(lhs[i, k] * rhs[g, :, k]) * global scales
    result[i] = cast(activation(dot[i] + bias[g]))

  Rows beyond the sum of the sizes belong to none, and are zero. A group may be
  empty; its weight is not read then. Nothing is padded to anything.

  Numbers are those of `block_scaled_dot`: exact where all products and sums
  are, and within 16 * 2^-24 * sum|a * b| before what follows it.

  Derivatives are with respect to a plain lhs, bias and global scales. The
  gradient of lhs is a ragged dot with the dequantized weights the other way.

  Args:
    lhs: (m, k): a plain f32, bf16 or f16 array, or a `ScaledArray` blocked
      along k.
    rhs: a `ScaledArray` of (groups, n, k), blocked along k. Its global scale is
      one number or one a group, f32[groups, 1, 1].
    group_sizes: integers[groups], of a sum of at most m. Larger sums end at row
      m and negative sizes count as 0; inside of `debug_checks` both are an
      error.
    bias: f32, bf16 or f16[groups, n].
    activation: None, "relu", "gelu" (tanh approximation), "silu"; or a gated
      one, of which the result has n / 2 columns: "swiglu", silu(first half) *
      second half, as checkpoints with concatenated gate and up projections have
      it; "swigluoai", gpt-oss's, of gates in even and values in odd columns:
      gate * sigmoid(1.702 * gate) * (value + 1), of min(gate, 7) and of the
      value clamped to [-7, 7].
    preferred_element_type: f32, bf16 or f16: dtype of the result.
    implementation: None chooses; "xla" or "cpu" forces one.

  Returns:
    preferred_element_type[m, n], or [m, n / 2] of a gated activation.

  Raises:
    TypeError: rank, dtype or shape of an argument is wrong.
    ValueError: a parameter is not acceptable, or an NVFP4 scale is negative.
    NotImplementedError: the implementation asked for cannot serve (all reasons
      are listed), or a derivative with respect to quantized values or block
      scales is asked for.
  """
  with speaking.speaking_for(speaking.who(WHO)):
    rules.require_quantized(rhs)
    for name, side in (("lhs", lhs), ("rhs", rhs)):
      if straight_through.has_surrogate(side):
        raise NotImplementedError(
          f"{sides.who()}: {name} was quantized with"
          ' derivative="straight_through", which ragged_dot does not have;'
          " quantize it without, under jax.lax.stop_gradient"
        )
    call = _call(
      lhs, rhs, group_sizes, activation, preferred_element_type, implementation
    )
    call = _with_epilogue(call, bias)
    call = call.form().filled(api.vary_alike(call.flatten()))
    _validate_implementation(call)
    result = primitive.bind(call, targets.overriding_target())
    if guards.is_on():
      checks.check(result, call)
    return result


def _call(
  lhs: Any,
  rhs: scaled_array.ScaledArray,
  group_sizes: Any,
  activation: problems.Activation | None,
  dtype: Any,
  implementation: str | None,
) -> calls.Call:
  """The call without its epilogue's arrays, checked."""
  lhs_side, rhs_side = _side_of("lhs", lhs), _side_of("rhs", rhs)
  for side in (lhs_side, rhs_side):
    rules.validate_rank(side)
  group_sizes = api.array("group_sizes", group_sizes)
  rules.validate_groups(group_sizes, rhs_side.shape[0])
  backends.validate_name(implementation)
  lhs_side = _contracting(lhs_side, 1)
  rhs_side = _contracting(rhs_side, 2)
  call = calls.Call(
    lhs=lhs_side,
    rhs=rhs_side,
    group_sizes=group_sizes.astype(jnp.int32),
    preferred_element_type=api.result_dtype(dtype),
    activation=activation,
    implementation=implementation,
  )
  rules.validate(call)
  rules.validate_activation(activation, call.columns)
  call = call.replace(
    lhs=_with_bytes(call.lhs, lhs), rhs=_with_bytes(call.rhs, rhs)
  )
  for side in (call.lhs, call.rhs):
    api.reject_negative_scale(side)
  return call


def _side_of(name: str, operand: Any) -> sides.Side:
  """The side of an argument; of one of bytes, what it would be as floats."""
  if not isinstance(operand, scaled_array.ScaledArray) or not operand.is_bytes:
    return api.side_of(name, operand)
  api.require_arrays(name, operand)
  to_floats = scaled_array.ScaledArray.to_floats
  return api.scaled_side(name, jax.eval_shape(to_floats, operand))


def _with_bytes(side: sides.Side, operand: Any) -> sides.Side:
  """With the arrays of an argument of bytes."""
  if isinstance(operand, scaled_array.ScaledArray) and operand.is_bytes:
    return side.replace(
      values=operand.values,
      scale=operand.scale,
      global_scale=operand.global_scale,
    )
  return side


def _contracting(side: sides.Side, axis: int) -> sides.Side:
  """With its dimensions; raises TypeError if it is blocked along another."""
  if side.format is None:
    return side.replace(contracting=(axis,))
  if side.axis not in (None, axis):
    raise TypeError(
      f"{sides.who()}: {side.name} must be blocked along its last dimension, k,"
      f" got blocks along dimension {side.axis}; quantize it with axis={axis}"
    )
  return side.replace(contracting=(axis,), axis=axis)


def _with_epilogue(call: calls.Call, bias: Any) -> calls.Call:
  """With its global scales, as one or two factors, and its bias."""
  if bias is not None:
    bias = api.float_operand("bias", bias)
    rules.validate_bias(bias, call.num_groups, call.columns)
  scales = [
    scale
    for scale in (_global_of_lhs(call.lhs), _global_of_rhs(call.rhs))
    if scale is not None
  ]
  if len({scale.ndim for scale in scales} - {0}) > 1:
    # One a row and one a group: all by rows.
    ends = groups.ends(call.group_sizes, call.num_rows)
    of_row = groups.of_rows(ends, call.num_rows)
    scales = [
      groups.per_row(scale, of_row)[:, None] if scale.ndim == 1 else scale
      for scale in scales
    ]
  factor, power = epilogue.product(scales)
  return call.replace(
    lhs=call.lhs.replace(global_scale=None),
    rhs=call.rhs.replace(global_scale=None),
    global_scale=factor,
    global_power=power,
    bias=bias,
  )


def _global_of_lhs(lhs: sides.Side) -> jax.Array | None:
  """f32[] or f32[m, 1]."""
  scale = lhs.global_scale
  if scale is None:
    return None
  return scale.reshape(()) if scale.size == 1 else scale


def _global_of_rhs(rhs: sides.Side) -> jax.Array | None:
  """f32[] or f32[groups].

  Raises:
    TypeError: it varies inside of a group.
  """
  scale = rhs.global_scale
  if scale is None:
    return None
  if scale.size == 1:
    return scale.reshape(())
  if tuple(scale.shape[1:]) != (1, 1):
    raise TypeError(
      f"{sides.who()}: the global scale of rhs must be one number or one a"
      f" group, ({rhs.shape[0]}, 1, 1), got {tuple(scale.shape)}"
    )
  return scale.reshape(-1)


def _validate_implementation(call: calls.Call) -> None:
  """Refuses, while tracing, an implementation that no device here can run."""
  if call.implementation is None:
    return
  api.require_somewhere(
    lambda target: backends.choose(call.problem(), target, call.implementation)
  )
