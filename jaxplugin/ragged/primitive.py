# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The primitives of the ragged dot and the contraction, and their JAX rules.

The derivatives of each use both. `operation/primitive.py` describes their
operands and parameters. `decide` returns the decision about an equation.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import Final

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.operation import choice
from jaxplugin.operation import primitive
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import derivatives
from jaxplugin.ragged import problems
from jaxplugin.ragged.sharding import assignment
from jaxplugin.ragged.sharding import per_device
from jaxplugin.ragged.transforms import batching
from jaxplugin.runtime import lowering

ragged_dot_p = calls.ragged_dot_p
ragged_contraction_p = calls.ragged_contraction_p
PRIMITIVES: Final = (ragged_dot_p, ragged_contraction_p)


def bind(call: calls.Call) -> jax.Array:
  """Binds a call with the request of the enclosing contexts."""
  return primitive.bind(call, targets.request())


def _local(
  call: Any, target: targets.Target, module: lowering.Module
) -> jax.Array:
  """Chooses a backend for the target and emits a call that is not split."""
  return backends.emit(backends.choose_in(module, call, target), call, target)


def decide(
  eqn: Any,
  target: targets.Target | None,
  num_devices: int = 1,
  *,
  for_export: bool = False,
) -> choice.Decided:
  """Returns `choice.decide` of an equation of one of `PRIMITIVES`.

  Args:
    eqn, target, for_export: as for `choice.decide`.
    num_devices: number of devices that XLA partitions the equation over.
  """

  def choose(call: calls.Call, target: targets.Target) -> decisions.Decision:
    # If the call is split, each device chooses a backend for its shard.
    is_partitioned = num_devices > 1 and not assignment.can_partition(call)
    module = lowering.Module(
      platforms=(target.platform,), is_partitioned=is_partitioned
    )
    return backends.choose_in(module, call, target)

  return choice.decide(eqn, target, choose, for_export=for_export)


_rules = functools.partial(
  primitive.Rules,
  remedy=derivatives.REMEDY,
  local=_local,
  jvp=derivatives.jvp,
  require_linear=derivatives.require_linear,
  can_partition=assignment.can_partition,
  prepared=per_device.prepared,
)
primitive.register_call(
  ragged_dot_p,
  _rules(
    who=problems.WHO,
    cotangent=derivatives.cotangent,
    batch=batching.batch,
    assign=assignment.assign,
    notation=assignment.notation,
    per_device=per_device.compute,
  ),
)
primitive.register_call(
  ragged_contraction_p,
  _rules(
    who=problems.CONTRACTION_WHO,
    cotangent=derivatives.contraction_cotangent,
    batch=batching.batch_contraction,
    assign=assignment.assign_contraction,
    notation=assignment.contraction_notation,
    per_device=per_device.compute_contraction,
  ),
)
