# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot_p`: the primitive, and its rules for JAX.

Its operands are the arrays of a `Call`, in the order of `calls.ARRAYS`.
Parameters:

  call: the `Call.form`, everything about the call that is not an array.
  target: the `Target` of an enclosing `use_target`, or None.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

from jaxplugin.core import targets
from jaxplugin.dot import primitive as dot_primitive
from jaxplugin.jaxext import jax_private
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import derivatives
from jaxplugin.runtime import lowering

ragged_dot_p = extend_core.Primitive("block_scaled_ragged_dot")


def bind(call: calls.Call, target: targets.Target | None) -> jax.Array:
  """The result of a call whose rules were checked (`rules`)."""
  return ragged_dot_p.bind(*call.flatten(), call=call.form(), target=target)


@functools.partial(jax.jit, static_argnames=("call", "target"))
def _eager(*flat, call, target):
  return ragged_dot_p.bind(*flat, call=call, target=target)


def _impl(*flat, call, target):
  with jax.disable_jit(False):  # or `_eager` would come back here
    return _eager(*flat, call=call, target=target)


def _abstract_eval(*flat, call, target):
  del target
  call = call.filled(flat)
  return call.lhs.values.update(
    shape=call.shape, dtype=call.preferred_element_type, weak_type=False
  )


# Derivatives.


def _jvp(primals, tangents, *, call, target):
  return derivatives.jvp(
    functools.partial(bind, target=target),
    call.filled(primals),
    call.named(tangents),
  )


def _transpose(g, *flat, call, target):
  return derivatives.transpose(
    functools.partial(bind, target=target), g, flat, call
  )


# Batching.


def _batch(args, dims, *, call, target):
  mapped = {k: d for k, d in call.named(dims).items() if d is not None}
  size = next(
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  )
  if set(mapped) <= {"lhs", "lhs_scale"}:
    return _batch_rows(call.filled(args), mapped, size, target)

  # Each entry has groups of its own: one after the other.
  is_mapped = [d is not None for d in dims]
  moved = [
    x if d is None else jnp.moveaxis(x, d, 0)
    for x, d in zip(args, dims, strict=True)
  ]

  def entry(own: list[jax.Array]) -> jax.Array:
    rest = iter(own)
    flat = [
      next(rest) if m else x for x, m in zip(moved, is_mapped, strict=True)
    ]
    return bind(call.filled(flat), target)

  own = [x for x, m in zip(moved, is_mapped, strict=True) if m]
  return lax.map(entry, own), 0


def _batch_rows(
  call: calls.Call,
  mapped: Mapping[str, int],
  size: int,
  target: targets.Target | None,
) -> tuple[jax.Array, int]:
  """Only lhs is mapped: each row becomes as many, all of the same group."""
  m = call.group_sizes.dtype.type(size)

  def merged(name: str, x: Any) -> Any:
    if x is None:
      return None
    x = batching.bdim_at_front(x, mapped.get(name), size)
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0] * size, *x.shape[2:])

  lhs = call.lhs.replace(
    values=merged("lhs", call.lhs.values),
    scale=merged("lhs_scale", call.lhs.scale),
  )
  by_rows = lambda x: (
    x if x is None or x.ndim != 2 else jnp.repeat(x, size, axis=0)
  )
  call = call.replace(
    lhs=lhs,
    group_sizes=call.group_sizes * m,
    global_scale=by_rows(call.global_scale),
    global_power=by_rows(call.global_power),
  )
  result = bind(call, target)
  return result.reshape(-1, size, result.shape[1]), 1


# Lowering.


def _lower(ctx, *flat, call, target, platform=None):
  platform = platform or ctx.module_context.platforms[0]
  target = lowering.resolve_target(target, platform)
  unportable = lowering.module_of(ctx).kernels_refusal()
  if call.implementation is not None and lowering.module_of(ctx).is_exported:
    unportable = None

  def function(*flat):
    whole = call.filled(flat)
    decision = backends.choose(
      whole.problem(), target, call.implementation, unportable=unportable
    )
    return backends.emit(decision.implementation, whole, target)

  out = mlir.lower_fun(function, multiple_results=False)(ctx, *flat)
  return [
    jax_private.lower_with_sharding_in_types(ctx, out[0], ctx.avals_out[0])
  ]


ragged_dot_p.def_impl(_impl)
ragged_dot_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[ragged_dot_p] = _jvp
ad.primitive_transposes[ragged_dot_p] = _transpose
batching.primitive_batchers[ragged_dot_p] = _batch
jax_private.require_devices_during_lowering(ragged_dot_p)
mlir.register_lowering(ragged_dot_p, _lower)
for _platform in dot_primitive.PLATFORMS:
  mlir.register_lowering(
    ragged_dot_p,
    functools.partial(_lower, platform=_platform),
    platform=_platform,
  )
