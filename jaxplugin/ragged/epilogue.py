# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The epilogue of a ragged dot: global scale, bias, activation, cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.dot import epilogue
from jaxplugin.ragged import calls, groups

# "swigluoai", the gated activation of gpt-oss (arXiv 2508.10925 and its
# reference implementation). Both halves are clamped, and the gate's sigmoid has
# a factor that silu does not have.
OAI_LIMIT: Final = 7.0
OAI_ALPHA: Final = 1.702


def activate(x: jax.Array, activation: calls.Activation | None) -> jax.Array:
  """Applies an activation; a gated one halves the last dimension."""
  if activation == "swiglu":
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up
  if activation == "swigluoai":
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    gate = jnp.minimum(pairs[..., 0], OAI_LIMIT)
    up = jnp.clip(pairs[..., 1], -OAI_LIMIT, OAI_LIMIT)
    return gate * jax.nn.sigmoid(OAI_ALPHA * gate) * (up + 1)
  return epilogue.activate(x, activation)


def scaled(result: jax.Array, call: calls.RaggedDotCall) -> jax.Array:
  """Returns f32[m, columns] times the call's global scale."""
  scale, power = call.global_scale, call.global_power
  if scale is None:
    return result
  if scale.ndim == 1:
    scale = _column(call, scale)
    power = None if power is None else _column(call, power)
  return epilogue.multiply(result, scale, power)


def apply(
  result: jax.Array, call: calls.RaggedDotCall, *, is_masked: bool = False
) -> jax.Array:
  """Computes activation(result * global_scale + bias), cast to the result.

  Rows without a group become zero.

  Args:
    is_masked: whether rows without a group are zero in `result`.
  """
  result = scaled(result, call)
  if call.bias is not None:
    group_of_row = rows_of(call)
    bias = call.bias.astype(jnp.float32)
    result = result + groups.per_row(bias, group_of_row)
  result = activate(result, call.activation)
  # Every activation of 0 is 0.
  if call.bias is not None or call.global_scale is not None or not is_masked:
    result = jnp.where(is_in_group(call), result, np.float32(0))
  return result.astype(call.preferred_element_type)


def around_kernel(
  kernel: Callable[[calls.RaggedDotCall], jax.Array], call: calls.RaggedDotCall
) -> jax.Array:
  """Computes a call by a kernel that fuses all but a global scale of rows."""
  if call.problem().by_kernel == "separate":
    return apply(kernel(call.bare()), call)
  return kernel(call)


def rows_of(call: calls.RaggedDotCall) -> jax.Array:
  """Returns i32[m]: each row's group, or num_groups if it has none."""
  group_ends = groups.ends(call.group_sizes, call.num_rows)
  return groups.of_rows(group_ends, call.num_rows)


def is_in_group(call: calls.RaggedDotCall) -> jax.Array:
  """Returns bool[m, 1]: whether a row is in a group."""
  return rows_of(call)[:, None] < call.num_groups


def _column(call: calls.RaggedDotCall, x: jax.Array) -> jax.Array:
  """Returns [m, 1]: the element of `x[groups]` for each row's group."""
  return groups.per_row(x, rows_of(call))[:, None]
