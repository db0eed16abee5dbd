# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ragged_dot_p`: the primitive, and its rules for JAX.

Its operands are the arrays of a `Call`, in the order of its `ARRAYS`.
Parameters:

  call: the `Call.form`, everything about the call that is not an array.
  target: the `Target` of an enclosing `use_target`, or None.
"""

from __future__ import annotations

import functools

import jax
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import split
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import derivatives
from jaxplugin.ragged.contraction import calls as contraction_calls
from jaxplugin.ragged.sharding import assignment
from jaxplugin.ragged.sharding import per_device
from jaxplugin.ragged.transforms import batching as batching_rules
from jaxplugin.runtime import fingerprints
from jaxplugin.runtime import lowering
from jaxplugin.tables import ranks
from jaxplugin.tables import resolution

ragged_dot_p = calls.ragged_dot_p


def bind(
  call: calls.Call | contraction_calls.Contraction,
  target: targets.Target | None,
) -> jax.Array:
  """The result of a call whose rules were checked (`rules`).

  Also of a contraction: each is the derivative of the other.
  """
  return call.PRIMITIVE.bind(*call.flatten(), call=call.form(), target=target)


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
  size = next(
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  )
  return batching_rules.batch(
    functools.partial(bind, target=target),
    call.filled(args),
    {k: d for k, d in call.named(dims).items() if d is not None},
    size,
  )


# Lowering.


def lower(
  ctx,
  *flat,
  call,
  target,
  platform=None,
  who,
  backends,
  can_partition,
  operation,
):
  """Lowers a ragged dot or a contraction.

  Args:
    ctx, *flat, call, target, platform: as of a lowering rule.
    who: the function that errors name.
    backends: a module with `choose` and `emit`.
    can_partition: call -> whether devices can share it.
    operation: (form, local, whole) -> how the call is split.
  """
  platform = platform or ctx.module_context.platforms[0]
  target = lowering.resolve_target(target, platform)
  ranks.check()
  module = lowering.module_of(ctx)
  lowering.require_shardy(who, module)

  def local(module, call):
    unportable = module.kernels_refusal()
    if call.implementation is not None and module.is_exported:
      unportable = None
    decision = backends.choose(
      call.problem(),
      target,
      call.implementation,
      unportable=unportable,
      overlay=call.overlay,
    )
    return backends.emit(decision.implementation, call, target)

  def function(*flat):
    whole = call.filled(flat)
    if not module.is_split or not can_partition(whole):
      return local(module, whole)
    exact = per_device.prepared(whole)
    form = exact.form()
    split_operation = operation(
      form,
      functools.partial(local, module.of_device()),
      functools.partial(bind, target=target),
    )
    key = fingerprints.of(
      call.PRIMITIVE.name,
      form.replace(overlay=None),
      target,
      resolution.decides(form.overlay),
    )
    return split.partitioned(split_operation, key)(*exact.flatten())[0]

  out = mlir.lower_fun(function, multiple_results=False)(ctx, *flat)
  return [
    jax_private.lower_with_sharding_in_types(ctx, out[0], ctx.avals_out[0])
  ]


_lower = functools.partial(
  lower,
  who="ragged_dot",
  backends=backends,
  can_partition=assignment.can_partition,
  operation=per_device.operation,
)
ragged_dot_p.def_impl(functools.partial(lowering.impl, ragged_dot_p))
ragged_dot_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[ragged_dot_p] = _jvp
ad.primitive_transposes[ragged_dot_p] = _transpose
batching.primitive_batchers[ragged_dot_p] = _batch
lowering.register_kernels(ragged_dot_p, _lower)
