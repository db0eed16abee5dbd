# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of `ragged_contraction_p` for JAX.

Its operands are the arrays of a `Contraction`, in the order of its `ARRAYS`,
and its parameters are those of `ragged_dot_p`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad
from jax.interpreters import batching

from jaxplugin.dot import sides
from jaxplugin.ragged import primitive as ragged_primitive
from jaxplugin.ragged.contraction import backends
from jaxplugin.ragged.contraction import calls
from jaxplugin.ragged.contraction import derivatives
from jaxplugin.ragged.contraction import sharding
from jaxplugin.ragged.transforms import batching as batching_rules
from jaxplugin.runtime import lowering

ragged_contraction_p = calls.ragged_contraction_p
bind = ragged_primitive.bind


def _abstract_eval(*flat, call, target):
  del target
  call = call.filled(flat)
  return call.lhs.values.update(
    shape=call.shape, dtype=call.preferred_element_type, weak_type=False
  )


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
  names = {name.removesuffix("_scale") for name in mapped}
  is_number = call.filled(args).global_scale is None or (
    call.filled(args).global_scale.ndim == 0
  )
  if not is_number or names not in ({"lhs"}, {"rhs"}):
    return batching_rules.in_turn(
      functools.partial(bind, target=target), args, dims, call
    )
  # One operand only, with the same groups: it has as many times its columns.
  (name,) = names
  dim = 1 if name == "lhs" else 2
  call = call.filled(args)
  side: sides.Side = getattr(call, name)
  changed = side.replace(
    values=_beside(side.values, mapped.get(name), size),
    scale=_beside(side.scale, mapped.get(f"{name}_scale"), size),
  )
  result = bind(call.replace(**{name: changed}), target)
  # Read from the operand, because `size` may be 0 and divides nothing then.
  entry = list(side.values.shape)
  if name in mapped:
    del entry[mapped[name]]
  shape = list(result.shape)
  shape[dim : dim + 1] = [size, entry[1]]
  return result.reshape(shape), dim


def _beside(x: Any, dim: int | None, size: int) -> Any:
  """[rows, entries * columns] of [rows, columns] that is mapped or not."""
  if x is None:
    return None
  x = jnp.moveaxis(batching.bdim_at_front(x, dim, size), 0, 1)
  return x.reshape(x.shape[0], size * x.shape[2])


_lower = functools.partial(
  ragged_primitive.lower,
  who="ragged_dot_general",
  backends=backends,
  can_partition=sharding.can_partition,
  operation=sharding.operation,
)
ragged_contraction_p.def_impl(
  functools.partial(lowering.impl, ragged_contraction_p)
)
ragged_contraction_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[ragged_contraction_p] = _jvp
ad.primitive_transposes[ragged_contraction_p] = _transpose
batching.primitive_batchers[ragged_contraction_p] = _batch
lowering.register_kernels(ragged_contraction_p, _lower)
