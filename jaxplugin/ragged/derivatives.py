# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a ragged dot and a contraction by unquantized arrays.

    ragged dot:  cast(activation(ragged_dot(lhs, rhs) * global_scale + bias))
    contraction: cast(contraction(lhs, rhs) * global_scale)

Without an activation, a ragged dot is jointly linear in an unquantized lhs and
the bias. It is also linear in unquantized weights and in the global scale. A
contraction is linear in each of lhs, rhs and the global scale. Their tangents
are therefore calls with a tangent as operand.

The cotangent of lhs of a ragged dot is a ragged dot that contracts the weights
across their blocks. The cotangent of unquantized weights is a contraction. The
cotangent of an operand of a contraction is a ragged dot.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.dot import epilogue as dot_epilogue
from jaxplugin.dot import sides
from jaxplugin.operation import primitive
from jaxplugin.ragged import calls
from jaxplugin.ragged import epilogue
from jaxplugin.ragged import groups
from jaxplugin.ragged import problems

Bind = primitive.Bind

_F32: Final = np.dtype(np.float32)


# Forward.


def jvp(
  bind: Bind,
  call: calls.Call,
  tangents: Mapping[str, Any],
) -> tuple[jax.Array, jax.Array]:
  """Returns the result of a call and its tangent.

  Args:
    bind: binds the primitive.
    call: call of a ragged dot or a contraction with the primal arrays.
    tangents: tangent of each array by name, without symbolic zeros.
  """
  # `global_power` is computed from the bits of the scales, and group sizes are
  # integers, so both have zero tangents.
  constants = ("global_power", "group_sizes")
  active = {k: x for k, x in tangents.items() if k not in constants}
  result = bind(call)
  if isinstance(call, calls.RaggedContraction) or call.activation is None:
    return result, _linear_tangent(bind, call, active)
  before = call.before_activation()
  tangent = _linear_tangent(bind, before, active)
  # The dot is computed again, because kernels that fuse an activation do not
  # return its argument.
  activate = functools.partial(epilogue.activate, activation=call.activation)
  _, tangent = jax.jvp(activate, (bind(before),), (tangent,))
  # Rows without a group are 0, but the activation's tangent there may not be.
  tangent = jnp.where(epilogue.is_in_group(call), tangent, np.float32(0))
  return result, tangent.astype(result.dtype)


def _linear_tangent(
  bind: Bind,
  call: calls.Call,
  active: Mapping[str, Any],
) -> jax.Array:
  """Returns the tangent of a call without activation."""
  in_f32 = call.replace(preferred_element_type=_F32)
  if isinstance(in_f32, calls.RaggedDotCall):
    in_f32 = in_f32.replace(bias=None)
  terms = [
    bind(in_f32.with_arrays(**{name: active[name]}))
    for name in ("lhs", "rhs", "global_scale")
    if name in active
  ]
  if "bias" in active:
    assert isinstance(call, calls.RaggedDotCall)
    bias = active["bias"].astype(_F32)
    terms.append(groups.per_row(bias, epilogue.rows_of(call)))
  if not terms:
    return jnp.zeros(call.shape, call.preferred_element_type)
  total = sum(terms[1:], start=terms[0])
  return total.astype(call.preferred_element_type)


# Backward.


def cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.RaggedDotCall
) -> jax.Array:
  """Returns the cotangent of one array of a ragged dot that is linear in it.

  Args:
    bind: binds the primitive.
    name: the array's name in `RaggedDotCall.ARRAYS`.
    g: cotangent of the result.
    call: call whose arrays are abstract where a cotangent is wanted.
  """
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


def _gradient_of_lhs(
  g: jax.Array, call: calls.RaggedDotCall
) -> calls.RaggedDotCall:
  """Returns the ragged dot of g and the weights, which contracts columns."""
  (contracting,) = call.rhs.contracting
  lhs = sides.Side(name="lhs", values=g, contracting=(1,))
  rhs = call.rhs.without_origin().replace(contracting=(3 - contracting,))
  # The requested backend may not support a contraction across blocks.
  return call.bare().replace(lhs=lhs, rhs=rhs, implementation=None)


def _gradient_of_rhs(
  g: jax.Array, call: calls.RaggedDotCall
) -> calls.RaggedContraction:
  """Returns the contraction of g and the dequantized lhs, shaped like rhs."""
  lhs = call.in_usual_order().lhs.dequantized()
  arrays = (g, lhs) if call.rhs.contracting == (2,) else (lhs, g)
  return calls.plain_contraction(
    *arrays, call.group_sizes, overlay=call.overlay
  )


def contraction_cotangent(
  bind: Bind, name: str, g: jax.Array, call: calls.RaggedContraction
) -> jax.Array:
  """Returns the cotangent of one array of a contraction (see `cotangent`)."""
  g = g.astype(_F32)
  scale, power = call.global_scale, call.global_power
  if name == "global_scale":
    product = bind(call.bare()) * g
    axes = [d for d in range(3) if not scale.ndim or scale.shape[d] == 1]
    total = jnp.sum(product, tuple(axes), keepdims=bool(scale.ndim))
    return total if power is None else total * power
  if scale is not None:
    g = dot_epilogue.multiply(g, scale, power)
  other = call.rhs if name == "lhs" else call.lhs
  return bind(
    calls.plain(
      calls.in_usual_order(other).dequantized(),
      g,
      call.group_sizes,
      contracting=2 if name == "lhs" else 1,
      overlay=call.overlay,
    )
  )


# Refusals.


REMEDY: Final = (
  "Differentiate with respect to an unquantized lhs, bias and global scales,"
  " with jax.lax.stop_gradient around the quantized operands"
)


def require_linear(call: calls.Call, names: Sequence[str]) -> None:
  """Raises NotImplementedError unless a call is jointly linear in arrays.

  Only a user's `jax.linear_transpose` can violate it: `jvp` binds linear calls.
  """
  what = ""
  if isinstance(call, calls.RaggedContraction):
    what = " at once" if len(names) > 1 else ""
  elif call.activation is not None:
    what = f" through {call.activation}"
  elif len({"lhs", "rhs", "global_scale"} & {*names}) > 1 or (
    "global_scale" in names and "bias" in names
  ):
    what = " at once"
  if what:
    raise primitive.not_linear(problems.WHO, names, what)
