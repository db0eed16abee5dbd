# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a ragged contraction, by all that is not quantized.

    result = cast(contraction(lhs, rhs) * global_scale)

It is linear in each of the three. A tangent is a contraction too. The cotangent
of an operand is a ragged dot of the other one, dequantized, with the result's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxplugin.dot import epilogue
from jaxplugin.ragged import calls as ragged_calls
from jaxplugin.ragged import derivatives
from jaxplugin.ragged.contraction import calls

Bind = Callable[[calls.Contraction | ragged_calls.Call], jax.Array]

_F32: Final = np.dtype(np.float32)
_LINEAR_IN: Final = ("lhs", "rhs", "global_scale")


def jvp(
  bind: Bind, call: calls.Contraction, tangents: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """As `ragged.derivatives.jvp`."""
  active = {k: x for k, x in tangents.items() if type(x) is not ad.Zero}
  derivatives.refuse_quantized(call, active)
  in_f32 = call.replace(preferred_element_type=_F32)
  terms = [
    bind(in_f32.with_arrays(**{name: active[name]}))
    for name in _LINEAR_IN
    if name in active
  ]
  result = bind(call)
  if not terms:
    return result, jnp.zeros_like(result)
  return result, sum(terms[1:], start=terms[0]).astype(result.dtype)


def transpose(
  bind: Bind, g: Any, args: Sequence[Any], form: calls.Contraction
) -> list[Any]:
  """As `ragged.derivatives.transpose`."""
  if type(g) is ad.Zero:
    return [None] * len(args)
  is_wanted = [ad.is_undefined_primal(x) for x in args]
  names = [name for name, wanted in form.named(is_wanted).items() if wanted]
  derivatives.refuse_quantized(form, names)
  if len(names) > 1:
    raise derivatives.not_linear(names, " at once")
  call = form.filled(x.aval if ad.is_undefined_primal(x) else x for x in args)
  cotangents = form.named([None] * len(args))
  for name in names:
    aval = call.arrays()[name]
    cotangents[name] = _cotangent(bind, name, g, call).astype(aval.dtype)
  return list(cotangents.values())


def _cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.Contraction
) -> jax.Array:
  """The cotangent of one operand; those that are wanted are abstract."""
  g = g.astype(_F32)
  scale, power = call.global_scale, call.global_power
  if name == "global_scale":
    product = bind(call.bare()) * g
    axes = [d for d in range(3) if not scale.ndim or scale.shape[d] == 1]
    total = jnp.sum(product, tuple(axes), keepdims=bool(scale.ndim))
    return total if power is None else total * power
  if scale is not None:
    g = epilogue.multiply(g, scale, power)
  other = call.rhs if name == "lhs" else call.lhs
  return bind(
    ragged_calls.plain(
      calls.rows(other),
      g,
      call.group_sizes,
      contracting=2 if name == "lhs" else 1,
      overlay=call.overlay,
    )
  )
