# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies for `jax.checkpoint` that know this package's dots.

`jax.checkpoint_policies` matches JAX's own primitives, so under its
`dots_saveable` a block-scaled dot is computed again in the backward pass. Those
here are JAX's, for JAX's dots and ours alike:

    jax.checkpoint(f, policy=jaxplugin.checkpoint_policies.dots_saveable)

A dot is our primitive, whatever called it: `block_scaled_dot`, `dot_general`
forward and backward, `jaxplugin.nn`, and those of groups of rows, `ragged_dot`
and `ragged_dot_general`. What `dot_general` keeps quantized for the backward
pass is not the result of a dot: under these policies it is quantized again. It
has names, "jaxplugin_quantized_lhs" and "jaxplugin_quantized_rhs", by which
`quantized_saveable` saves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
from jax import lax

from jaxplugin.dot import primitive
from jaxplugin.dot import sides
from jaxplugin.ragged import calls as ragged_calls
from jaxplugin.ragged.contraction import calls as contraction_calls
from jaxplugin.training import gradients

__all__ = [
  "Policy",
  "dots_saveable",
  "dots_with_no_batch_dims_saveable",
  "for_block_scaled_dots",
  "offload_dot_with_no_batch_dims",
  "quantized_saveable",
]


def __dir__() -> list[str]:
  return list(__all__)


Policy = Callable[..., Any]

_DOTS: Final = (
  primitive.block_scaled_dot_p,
  ragged_calls.ragged_dot_p,
  contraction_calls.ragged_contraction_p,
)


def for_block_scaled_dots(policy: Policy) -> Policy:
  """A policy that answers for a block-scaled dot as for `lax.dot_general`.

  Args:
    policy: one of `jax.checkpoint_policies`, or any other.

  Returns:
    A policy: of a block-scaled dot, `policy` is asked about a `lax.dot_general`
    of lhs and rhs with the same dimension numbers, whose result has the same
    dtype; else it is asked as it would have been. A ragged dot is asked about
    as that of all rows with the weight of one group, without batch dimensions:
    no row meets more than one.
  """
  return _AsDotGeneral(policy)


@dataclasses.dataclass(frozen=True)
class _AsDotGeneral:
  """Equal ones are one key of JAX's caches."""

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
      rhs, numbers = _of_one_group(rhs, numbers)
    return self.policy(
      lax.dot_general_p,
      lhs,
      rhs,
      dimension_numbers=numbers,
      precision=None,
      preferred_element_type=call.preferred_element_type,
      out_sharding=None,
    )


def _of_one_group(
  weights: Any, numbers: sides.DimensionNumbers
) -> tuple[Any, sides.DimensionNumbers]:
  """The weight of a group, of abstract (groups, n, k), and its numbers."""
  (lhs_contracting, (dim,)), batch = numbers
  weight = weights.update(shape=weights.shape[1:])
  return weight, ((lhs_contracting, (dim - 1,)), batch)


dots_saveable = for_block_scaled_dots(jax.checkpoint_policies.dots_saveable)
dots_with_no_batch_dims_saveable = for_block_scaled_dots(
  jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)


# Saves what `dot_general` keeps quantized of its operands, and nothing else: a
# byte or less a value. Then no operand that is kept so is computed, blocked,
# transformed or quantized again. `jax.checkpoint_policies` combines it with
# another: save_from_both_policies(dots_saveable, quantized_saveable).
quantized_saveable = jax.checkpoint_policies.save_only_these_names(
  *gradients.KEPT_NAMES.values()
)


def offload_dot_with_no_batch_dims(
  offload_src: str, offload_dst: str
) -> Policy:
  """`jax.checkpoint_policies.offload_dot_with_no_batch_dims`, of our dots too.

  Args:
    offload_src: a kind of memory, "device".
    offload_dst: another, "pinned_host".
  """
  return for_block_scaled_dots(
    jax.checkpoint_policies.offload_dot_with_no_batch_dims(
      offload_src, offload_dst
    )
  )
