# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies for `jax.checkpoint` that recognize block-scaled dots.

Under JAX's own `jax.checkpoint_policies.dots_saveable`, the backward pass
computes block-scaled dots again, because they are not JAX's primitives. The
policies here save them too: `block_scaled_dot`, `dot_general` in both passes,
`jaxplugin.nn`, `ragged_dot` and `ragged_dot_general`.

The quantized residuals of `dot_general` are not results of dots. Only
`quantized_saveable` saves them, by their names "jaxplugin_quantized_lhs",
"jaxplugin_quantized_rhs" and "jaxplugin_quantized_operand".

Example:
  >>> import jax
  >>> import jaxplugin as jp
  >>> policy = jp.checkpoint_policies.dots_saveable
  >>> f = jax.checkpoint(lambda x: jp.linear(x, x), policy=policy)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax

from jaxplugin.core import error_context
from jaxplugin.dot import primitive
from jaxplugin.ragged import calls as ragged_calls
from jaxplugin.training import gradients

__all__ = [
  "Policy",
  "dots_saveable",
  "dots_with_no_batch_dims_saveable",
  "for_block_scaled_dots",
  "offload_dot_with_no_batch_dims",
  "quantized_saveable",
]

error_context.public_module(__name__, __all__)

Policy = Callable[..., Any]
"""A policy of `jax.checkpoint`."""

_DOTS: Final = (
  primitive.block_scaled_dot_p,
  ragged_calls.ragged_dot_p,
  ragged_calls.ragged_contraction_p,
)


def for_block_scaled_dots(policy: Policy) -> Policy:
  """Returns a policy that treats block-scaled dots like `lax.dot_general`.

  For a block-scaled dot, the result asks `policy` about a `lax.dot_general` of
  the same operands, dimension numbers and result dtype. For a ragged dot, it
  asks about all rows times the weight of one group, without batch dimensions.
  For any other operation, it asks `policy` directly.

  Args:
    policy: a policy of `jax.checkpoint_policies`, or any other one.

  Returns:
    A policy for `jax.checkpoint`. Equal arguments give equal policies.

  Example:
    >>> import jax
    >>> import jaxplugin as jp
    >>> names = jax.checkpoint_policies
    >>> make = jp.checkpoint_policies.for_block_scaled_dots
    >>> make(names.dots_saveable) == jp.checkpoint_policies.dots_saveable
    True
  """
  if not callable(policy):
    raise TypeError(
      "for_block_scaled_dots: policy must be a policy of jax.checkpoint, got"
      f" {error_context.shown(policy)}. Pass one of jax.checkpoint_policies"
    )
  return _AsDotGeneral(policy)


@dataclasses.dataclass(frozen=True)
class _AsDotGeneral:
  """A policy that treats block-scaled dots like `lax.dot_general`.

  Equal policies are one key of JAX's caches.
  """

  policy: Policy

  def __call__(self, prim: Any, *args: Any, **params: Any) -> Any:
    if prim not in _DOTS:
      return self.policy(prim, *args, **params)
    call = params["call"].filled(args)
    lhs, rhs = call.lhs.values, call.rhs.values
    if prim is primitive.block_scaled_dot_p:
      numbers = call.dimension_numbers
    else:
      numbers = ((call.lhs.contracting, call.rhs.contracting), ((), ()))
    if prim is ragged_calls.ragged_dot_p:
      # The weight of one group.
      rhs = rhs.update(shape=rhs.shape[1:])
      (dim,) = call.rhs.contracting
      numbers = ((call.lhs.contracting, (dim - 1,)), ((), ()))
    return self.policy(
      lax.dot_general_p,
      lhs,
      rhs,
      dimension_numbers=numbers,
      precision=None,
      preferred_element_type=call.preferred_element_type,
      out_sharding=None,
    )


dots_saveable = for_block_scaled_dots(jax.checkpoint_policies.dots_saveable)
"""JAX's policy of this name, which also saves block-scaled dots."""

dots_with_no_batch_dims_saveable = for_block_scaled_dots(
  jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
"""JAX's policy of this name, which also saves block-scaled dots."""

quantized_saveable = jax.checkpoint_policies.save_only_these_names(
  *gradients.KEPT_NAMES.values()
)
"""A policy that saves the quantized operands of `dot_general`.

It saves nothing else, and at most 1.03 bytes a value. The backward pass then
does not compute or quantize these operands again. Combine it with another
policy by `jax.checkpoint_policies.save_from_both_policies`.
"""


def offload_dot_with_no_batch_dims(
  offload_src: str, offload_dst: str
) -> Policy:
  """Returns JAX's policy of this name that also offloads our dots.

  Args:
    offload_src: memory kind of the results, such as "device".
    offload_dst: memory kind that holds them until the backward pass, such as
      "pinned_host".

  Returns:
    A policy for `jax.checkpoint`.

  Example:
    >>> import jax
    >>> import jaxplugin as jp
    >>> policy = jp.checkpoint_policies.offload_dot_with_no_batch_dims(
    ...   "device", "pinned_host")
    >>> f = jax.checkpoint(lambda x: x @ x, policy=policy)
  """
  return for_block_scaled_dots(
    jax.checkpoint_policies.offload_dot_with_no_batch_dims(
      offload_src, offload_dst
    )
  )
