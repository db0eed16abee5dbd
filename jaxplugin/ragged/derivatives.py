# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a ragged dot, with respect to all that is not quantized.

    result = cast(activation(ragged_dot(lhs, rhs) * global_scale + bias))

Without its activation that is linear in a plain lhs and the bias together, and
in the global scale. A tangent is a ragged dot too. The cotangent of lhs is one
that contracts the weights across their blocks, and that of plain weights is a
ragged contraction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxplugin.dot import sides
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups
from jaxplugin.ragged import problems
from jaxplugin.ragged.contraction import calls as contraction_calls

Bind = Callable[[calls.Call | contraction_calls.Contraction], jax.Array]

_F32: Final = np.dtype(np.float32)


# Forward.


def jvp(
  bind: Bind, call: calls.Call, tangents: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """The result, by the call that it is without derivatives, and its tangent.

  Args:
    bind: of the primitive.
    call: the call.
    tangents: of its arrays by name, of their dtypes; `ad.Zero` for a constant.

  Raises:
    NotImplementedError: values or scales of a quantized operand have a tangent.
  """
  active = {k: x for k, x in tangents.items() if type(x) is not ad.Zero}
  refuse_quantized(call, active)
  # Zeros that were written out: powers of two come from bits.
  active.pop("global_power", None)
  active.pop("group_sizes", None)
  result = bind(call)
  if call.activation is None:
    return result, _linear_tangent(bind, call, active)
  before = call.before_activation()
  tangent = _linear_tangent(bind, before, active)
  # Computed again: the kernels that fuse an activation keep nothing of it.
  activate = functools.partial(epilogue.activate, activation=call.activation)
  _, tangent = jax.jvp(activate, (bind(before),), (tangent,))
  # Activations of 0 are 0, but their tangents need not be.
  tangent = jnp.where(epilogue.is_in_group(call), tangent, np.float32(0))
  return result, tangent.astype(result.dtype)


def _linear_tangent(
  bind: Bind, call: calls.Call, active: Mapping[str, Any]
) -> jax.Array:
  """The tangent of a call without activation, in the dtype of its result."""
  in_f32 = call.replace(preferred_element_type=_F32, bias=None)
  terms = [
    bind(in_f32.with_arrays(**{name: active[name]}))
    for name in ("lhs", "rhs", "global_scale")
    if name in active
  ]
  if "bias" in active:
    bias = active["bias"].astype(_F32)
    terms.append(groups.per_row(bias, epilogue.rows_of(call)))
  if not terms:
    return jnp.zeros(call.shape, call.preferred_element_type)
  total = sum(terms[1:], start=terms[0])
  return total.astype(call.preferred_element_type)


# Backward.


def transpose(
  bind: Bind, g: Any, args: Sequence[Any], form: calls.Call
) -> list[Any]:
  """Cotangents of the operands in which the call is linear.

  Args:
    bind: of the primitive.
    g: cotangent of the result, or `ad.Zero`.
    args: the call's arrays, an `ad.UndefinedPrimal` where a cotangent is
      wanted.
    form: of the call.

  Returns:
    For each of args its cotangent, of its shape and dtype, or None.

  Raises:
    NotImplementedError: values or scales of a quantized operand are wanted, or
      the call is not linear in all that are.
  """
  if type(g) is ad.Zero:
    return [None] * len(args)
  is_wanted = [ad.is_undefined_primal(x) for x in args]
  names = [name for name, wanted in form.named(is_wanted).items() if wanted]
  refuse_quantized(form, names)
  _require_linear(form, names)
  call = form.filled(x.aval if ad.is_undefined_primal(x) else x for x in args)
  cotangents = form.named([None] * len(args))
  for name in names:
    aval = call.arrays()[name]
    cotangents[name] = _cotangent(bind, name, g, call).astype(aval.dtype)
  return list(cotangents.values())


def _cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.Call
) -> jax.Array:
  """The cotangent of one operand; those that are wanted are abstract."""
  g = g.astype(_F32)
  if name == "lhs":
    return bind(_gradient_of_lhs(epilogue.scaled(g, call), call))
  if name == "rhs":
    return bind(_gradient_of_rhs(epilogue.scaled(g, call), call))
  if name == "bias":
    return groups.sums(g, epilogue.rows_of(call), call.num_groups)
  assert name == "global_scale"
  by_rows = jnp.sum(bind(call.bare()) * g, axis=1, keepdims=True)
  scale, power = call.global_scale, call.global_power
  if scale.ndim == 1:
    of_row = epilogue.rows_of(call)
    total = groups.sums(by_rows[:, 0], of_row, call.num_groups)
  else:
    total = by_rows if scale.ndim else jnp.sum(by_rows)
  return total if power is None else total * power


def _gradient_of_lhs(g: jax.Array, call: calls.Call) -> calls.Call:
  """The ragged dot of g with the weights the other way.

  Also of a call that is one itself: then it is the first way again.
  """
  (contracting,) = call.rhs.contracting
  lhs = sides.Side(name="lhs", values=g, contracting=(1,))
  rhs = call.rhs.replace(contracting=(3 - contracting,))
  # Chosen: what the user forced may read along the blocks alone.
  return call.bare().replace(lhs=lhs, rhs=rhs, implementation=None)


def _gradient_of_rhs(
  g: jax.Array, call: calls.Call
) -> contraction_calls.Contraction:
  """The contraction of g with a dequantized lhs, as plain weights lie."""
  lhs = call.in_usual_order().lhs.dequantized()
  arrays = (g, lhs) if call.rhs.contracting == (2,) else (lhs, g)
  return contraction_calls.plain(
    *arrays, call.group_sizes, overlay=call.overlay
  )


# Refusals.


def refuse_quantized(
  call: calls.Call | contraction_calls.Contraction, active: Container[str]
) -> None:
  """Refuses derivatives with respect to values and scales of blocks."""
  names = [
    f"{name} ({side.format})"
    for side in (call.lhs, call.rhs)
    for name in (side.name, f"{side.name}_scale")
    if side.format is not None and name in active
  ]
  if names:
    raise NotImplementedError(
      f"{problems.who()}: quantized values and block scales have no"
      f" derivative, got {' and '.join(names)}. Differentiate with respect to"
      " an unquantized lhs, bias and global scales, with"
      " jax.lax.stop_gradient around the quantized operands"
    )


def _require_linear(call: calls.Call, names: Sequence[str]) -> None:
  """Refuses, of a `linear_transpose` of the user's, what is not linear."""
  what = ""
  if call.activation is not None:
    what = f" through {call.activation}"
  elif len({"lhs", "rhs", "global_scale"} & {*names}) > 1 or (
    "global_scale" in names and "bias" in names
  ):
    what = " at once"
  if what:
    raise not_linear(names, what)


def not_linear(names: Sequence[str], what: str) -> NotImplementedError:
  return NotImplementedError(
    f"{problems.who()}: jax.linear_transpose needs a linear function, and the"
    f" result is not linear in {' and '.join(names)}{what}; use jax.vjp"
  )
