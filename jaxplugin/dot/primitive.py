# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot_p`: the primitive, and its rules for JAX.

`operation/primitive.py` describes its operands and parameters. The primitive
has general dimension numbers, so batching renumbers dimensions and does not
broadcast an unmapped side. If only the values or only the scales of a side are
mapped, the other array is broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from jaxplugin.core import targets
from jaxplugin.dot import (
  backends,
  calls,
  derivatives,
  epilogue,
  sharding,
  sides,
)
from jaxplugin.jaxext import program
from jaxplugin.operation import choice
from jaxplugin.operation import primitive as operation_primitive

block_scaled_dot_p = calls.block_scaled_dot_p
bind = operation_primitive.bind
Bind = operation_primitive.Bind


def _batch(
  bind: Bind, call: calls.DotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  lhs_is_mapped, lhs = _batch_side(call.lhs, mapped, size)
  rhs_is_mapped, rhs = _batch_side(call.rhs, mapped, size)
  if not (lhs_is_mapped or rhs_is_mapped):
    return _batch_epilogue(bind, call, mapped, size)

  position = 0
  if lhs_is_mapped and rhs_is_mapped:
    lhs = lhs.replace(batch=(0, *lhs.batch))
    rhs = rhs.replace(batch=(0, *rhs.batch))
  elif lhs_is_mapped:
    # The mapped dimension becomes a free dimension of lhs. rhs, such as a
    # weight, stays unbatched.
    position = len(lhs.batch)
  else:
    position = len(lhs.batch) + len(lhs.free)
  call = call.replace(lhs=lhs, rhs=rhs)
  if call.out_sharding is not None:
    # All mapped arrays have the same sharding of the mapped dimension.
    side = lhs if lhs_is_mapped else rhs
    axes = jax.typeof(side.values).sharding.spec[0]
    spec = list(call.out_sharding.spec)
    spec.insert(position, axes)
    sharding = call.out_sharding.update(spec=PartitionSpec(*spec))
    call = call.replace(out_sharding=sharding)
  ndim = len(call.shape) - 1
  changes = _batched_epilogue(call, mapped, position, ndim)
  return bind(call.replace(**changes)), position


def _batch_side(
  side: sides.Side, mapped: Mapping[str, int], size: int
) -> tuple[bool, sides.Side]:
  """Moves the mapped dimension of values and scale to the front.

  The old dimensions are renumbered. The caller makes the new dimension a batch
  dimension; otherwise it is a free dimension.

  Returns:
    Whether the side is mapped, and the side.
  """
  values_dim = mapped.get(side.name)
  scale_dim = mapped.get(f"{side.name}_scale")
  if values_dim is None and scale_dim is None:
    return False, side
  values = batching.bdim_at_front(side.values, values_dim, size)
  scale = side.scale
  if scale is not None:
    scale = batching.bdim_at_front(scale, scale_dim, size)
  return True, side.replace(
    values=values,
    scale=scale,
    axis=None if side.axis is None else side.axis + 1,
    contracting=tuple(d + 1 for d in side.contracting),
    batch=tuple(d + 1 for d in side.batch),
  )


def _batched_epilogue(
  call: calls.DotCall, mapped: Mapping[str, int], position: int, ndim: int
) -> dict[str, jax.Array]:
  """Returns the epilogue's operands with a new dimension at `position`.

  If one of two separate global scales is mapped, both are dropped.
  """
  changes = {}
  for name in ("global_scale", "global_power", "bias", "residual"):
    operand, dim = getattr(call, name), mapped.get(name)
    if operand is None:
      continue
    # A scalar global scale does not have the rank of the result.
    is_scale = name in ("global_scale", "global_power")
    is_number = is_scale and operand.ndim == (dim is not None)
    if dim is None:
      changes[name] = (
        operand if is_number else jnp.expand_dims(operand, position)
      )
    elif is_number:
      shape = [1] * (ndim + 1)
      shape[position] = operand.shape[0]
      changes[name] = operand.reshape(shape)
    else:
      changes[name] = jnp.moveaxis(operand, dim, position)
  of_product = ("first_global_scale", "second_global_scale")
  if all(mapped.get(name) is None for name in of_product):
    changes |= {name: getattr(call, name) for name in of_product}
  return changes


def _batch_epilogue(
  bind: Bind, call: calls.DotCall, mapped: Mapping[str, int], size: int
) -> tuple[jax.Array, int]:
  """Computes one dot in f32, then the epilogue of each mapped entry.

  Requires that neither side is mapped.
  """
  result = bind(call.bare())
  changes = _batched_epilogue(call, mapped, 0, result.ndim)
  result = jnp.broadcast_to(result, (size, *result.shape))
  return epilogue.apply(result, call.replace(**changes)), 0


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields every equation of the primitive, also those in sub-jaxprs."""
  for operation in program.operations(jaxpr):
    if operation.eqn.primitive is block_scaled_dot_p:
      yield operation.eqn


def decide(
  eqn: Any, target: targets.Target | None, *, for_export: bool = False
) -> choice.DecidedCall:
  """Returns `choice.decide` of an equation of the primitive."""
  return choice.decide(
    eqn,
    target,
    functools.partial(backends.choose_for, for_export=for_export),
    for_export=for_export,
  )


operation_primitive.register_call(
  block_scaled_dot_p,
  operation_primitive.Rules(
    who=sides.WHO,
    remedy=derivatives.REMEDY,
    local=backends.lower,
    jvp=derivatives.jvp,
    require_linear=derivatives.require_linear,
    cotangent=derivatives.cotangent,
    batch=_batch,
    can_partition=sharding.can_partition,
    prepared=sharding.prepared,
    restored=sharding.restored,
    assign=sharding.assign,
    notation=sharding.notation,
    per_device=sharding.compute,
    result_sharding=sharding.result_sharding,
    on_explicit_axes=sharding.split_dot,
  ),
)
