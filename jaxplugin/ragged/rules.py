# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Validation of a call's shapes, dtypes and options.

The errors name the argument, the rule, the given value and the remedy.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.core import error_context
from jaxplugin.dot import rules, sides
from jaxplugin.ragged import calls, problems

_TRANSPOSE: Final = (
  "for weights (groups, k, n) quantize jnp.swapaxes(weights, 1, 2)"
)
_RANKS: Final = {"lhs": (2, "(m, k)"), "rhs": (3, "(groups, n, k)")}


def validate_rank(side: sides.Side) -> None:
  """Raises TypeError unless lhs has rank 2 or rhs rank 3."""
  rank, names = _RANKS[side.name]
  if side.ndim != rank:
    raise TypeError(
      f"{sides.who()}: {side.name} must have rank {rank}, {names}, got values"
      f" {list(side.values.shape)}"
    )


def require_quantized(rhs: Any) -> None:
  """Raises TypeError unless rhs is a `ScaledArray`."""
  if not isinstance(rhs, scaled_array.ScaledArray):
    raise TypeError(
      f"{sides.who()}: rhs must be a ScaledArray of shape (groups, n, k), got"
      f" {type(rhs).__name__}; quantize it along its last axis, or call"
      " jax.lax.ragged_dot for plain weights"
    )


def validate_activation(activation: Any, columns: Any) -> None:
  """Raises ValueError unless the activation is valid for these columns."""
  if activation is None:
    return
  if activation not in problems.ACTIVATIONS:
    raise ValueError(
      f"{sides.who()}: activation must be None or one of"
      f" {problems.ACTIVATIONS}, got {error_context.shown(activation)}"
    )
  if activation in problems.GATED and columns % 2:
    raise ValueError(
      f"{sides.who()}: activation {error_context.shown(activation)} needs an"
      f" even n, half for the gate and half for the values, got n={columns}"
    )


def validate_groups(group_sizes: Any, num_groups: Any) -> None:
  """Raises TypeError unless group sizes are integers[num_groups]."""
  if not np.issubdtype(group_sizes.dtype, np.integer):
    raise TypeError(
      f"{sides.who()}: group_sizes must be integers, got {group_sizes.dtype}"
    )
  if tuple(group_sizes.shape) != (num_groups,):
    raise TypeError(
      f"{sides.who()}: group_sizes must have one size for each of the"
      f" {num_groups} groups, shape ({num_groups},), got"
      f" {tuple(group_sizes.shape)}"
    )


def validate(call: calls.RaggedDotCall) -> None:
  """Checks values, scales and k; raises TypeError."""
  for side in (call.lhs, call.rhs):
    rules.validate_values(side)
  lhs_k, rhs_k = call.lhs.shape[1], call.rhs.shape[2]
  if lhs_k != rhs_k:
    raise TypeError(
      f"{sides.who()}: lhs (m, k) and rhs (groups, n, k) must have the same k,"
      f" got {call.lhs.shape} and {call.rhs.shape} (logical shapes)"
      f"{rules.sizes_remedy(call.lhs, call.rhs, (1, 2), transposed=_TRANSPOSE)}"
    )
  for side in (call.lhs, call.rhs):
    if side.format is not None:
      rules.validate_scale(side)


def validate_bias(bias: Any, num_groups: Any, columns: Any) -> None:
  """Raises TypeError unless the bias has shape [num_groups, columns]."""
  if tuple(bias.shape) != (num_groups, columns):
    raise TypeError(
      f"{sides.who()}: bias must have shape (groups, n), ({num_groups},"
      f" {columns}), got {tuple(bias.shape)}"
    )
