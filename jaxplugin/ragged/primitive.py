# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The primitives of the ragged dot and the contraction, and their JAX rules.

The derivatives of each use both. `operation/primitive.py` describes their
operands and parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxplugin.core import targets
from jaxplugin.operation import primitive
from jaxplugin.ragged import backends
from jaxplugin.ragged import calls
from jaxplugin.ragged import derivatives
from jaxplugin.ragged import problems
from jaxplugin.ragged.sharding import assignment
from jaxplugin.ragged.sharding import contraction
from jaxplugin.ragged.sharding import per_device
from jaxplugin.ragged.transforms import batching
from jaxplugin.runtime import lowering

ragged_dot_p = calls.ragged_dot_p
ragged_contraction_p = calls.ragged_contraction_p
bind = primitive.bind


def _local(
  call: Any, target: targets.Target, module: lowering.Module
) -> jax.Array:
  """Chooses a backend for the target and emits a call that is not split."""
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
  return backends.emit(decision, call, target)


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
    assign=contraction.assign,
    notation=contraction.notation,
    per_device=contraction.compute,
  ),
)
