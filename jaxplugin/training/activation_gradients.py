# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations that matmuls quantize as they are computed.

In the backward pass of dot -> activation -> dot, the first matmul quantizes the
gradient of its result. If an activation was `attached`, that matmul finds which
operation computes the gradient, and quantizes it with that operation as the
prologue.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxplugin.jaxext import jax_private, linear_calls, mesh_axes, tangents
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.quantization import prologues

Arrays = Sequence[jax.Array]
# JAX's `add_any` sums the cotangents of a value that is read twice.
_SUM: Final = "a sum with another gradient"


def attached(y: jax.Array, call: prologues.PrologueCall) -> jax.Array:
  """Returns y, whose gradient goes to the operands of the call.

  Args:
    y: the result of the activation, in any float dtype.
    call: an activation that computes y.
  """
  call = call.canonical(y.shape)
  operands = [call.x, *call.more.values()]
  if call.prologue.halves and mesh_axes.mesh_of(operands) is not None:
    return y  # the gradient of halves would merge a sharded dimension
  y, *operands = jax_private.vary_alike([y, *operands])
  return _attached(call.prologue, y, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attached(
  prologue: prologues.Prologue, y: jax.Array, operands: list[jax.Array]
) -> jax.Array:
  del prologue, operands  # the derivative is that by the operands only
  return y


def _attached_jvp(
  prologue: prologues.Prologue, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
  (y, operands), (_, given) = primals, tangents
  names = ("x", *prologue.operands)
  active = {
    name: t
    for name, t in zip(names, given, strict=True)
    if not isinstance(t, SymbolicZero)
  }
  if not active:
    return y, jnp.zeros_like(y)
  tangent = _GatedTangent(
    prologue=prologue, active=tuple(active), dtype=y.dtype
  )
  linear = list(active.values())
  return y, linear_calls.linear_call(tangent, linear, operands)


_attached.defjvp(_attached_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GatedTangent(linear_calls.Linear):
  """The tangent of an activation, from those of its active operands.

  Its constants are all operands of the activation.
  """

  prologue: prologues.Prologue
  active: tuple[str, ...]
  dtype: np.dtype

  is_value: ClassVar[bool] = True

  def apply(self, linear: Arrays, constants: Arrays) -> jax.Array:
    names = ("x", *self.prologue.operands)
    given = dict(zip(names, constants, strict=True))

    def activation(*active: jax.Array) -> jax.Array:
      x, *more = (given | dict(zip(self.active, active, strict=True))).values()
      operands = dict(zip(names[1:], more, strict=True))
      (y,) = prologues.compute(self.prologue, x, operands)
      return y.astype(self.dtype)

    point = tuple(given[name] for name in self.active)
    return jax.jvp(activation, point, tuple(linear))[1]

  def transpose(
    self, wanted: Sequence[bool], g: jax.Array, constants: Arrays
  ) -> list[jax.Array | None]:
    names = [n for n, w in zip(self.active, wanted, strict=True) if w]
    dtype, found = constants[0].dtype, dict[str, jax.Array]()
    if "bias" in names:  # the floats of the other gradients are summed
      has_up = "up" in self.prologue.operands
      for name in ("x", "up") if has_up else ("x",):
        gradient = _Gradient.of(self.prologue, name, np.dtype(np.float32))
        found[name] = gradient.apply([g], constants)
      sums = [row.sum(tuple(range(row.ndim - 1))) for row in found.values()]
      found = {name: row.astype(dtype) for name, row in found.items()}
      found["bias"] = jnp.concatenate(sums)
    else:
      for name in names:
        gradient = _Gradient.of(self.prologue, name, dtype)
        found[name] = linear_calls.linear_call(gradient, [g], constants)
    return [found[n] if n in names else None for n in self.active]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient(linear_calls.Linear):
  """The gradient of an activation, from the cotangent of its result.

  Attributes:
    prologue: computes the gradient. Its operands end with the cotangent, and
      the others are the constants.
    dtype: of the gradient.
  """

  prologue: prologues.Prologue
  dtype: np.dtype

  is_value: ClassVar[bool] = True

  @classmethod
  def of(
    cls, prologue: prologues.Prologue, name: str, dtype: np.dtype
  ) -> _Gradient:
    """Returns the gradient of an activation with respect to an operand."""
    operands = (*prologue.operands, "cotangent")
    prologue = dataclasses.replace(prologue, operands=operands, gradient=name)
    return cls(prologue=prologue, dtype=dtype)

  def call(self, linear: Arrays, constants: Arrays) -> prologues.PrologueCall:
    x, *more = (*constants, *linear)
    operands = dict(zip(self.prologue.operands, more, strict=True))
    return prologues.PrologueCall(prologue=self.prologue, x=x, more=operands)

  def apply(self, linear: Arrays, constants: Arrays) -> jax.Array:
    call = self.call(linear, constants)
    (y,) = prologues.compute(call.prologue, call.x, call.more)
    return y.astype(self.dtype)

  def transpose(
    self, wanted: Sequence[bool], g: jax.Array, constants: Arrays
  ) -> list[jax.Array | None]:
    if not wanted[0]:
      return [None]
    *_, (shape, _) = prologues.operand_types(self.prologue, g.shape, g.dtype)
    cotangent = jax.ShapeDtypeStruct(shape, self.dtype)
    transposed = jax.linear_transpose(
      lambda c: self.apply([c], constants), cotangent
    )
    return list(transposed(g))


def call_of(g: Any) -> prologues.PrologueCall | None:
  """Returns the call that computes g, the gradient of an attached activation.

  Returns None for another array. Conversions of floats and reshapes of rows may
  come after the call. Also returns None if another operation has read g, such
  as the sum that is the gradient of a bias: then g is computed anyway, and a
  prologue would compute it again. The call's arrays are in the `vmap`s of g.
  """
  x = binding_private.below_vmaps(g)
  if x is None:
    return None
  shape, after = np.shape(x), None
  while (made := binding_private.maker(x)) is not None:
    eqn, _ = made
    if any(user is not after for user in binding_private.users(x)):
      return None
    if eqn.primitive is linear_calls.linear_call_p:
      call = _call_of_all(eqn.params["function"], eqn.in_tracers)
      as_g = functools.partial(binding_private.mapped_as, g)
      return call and call.canonical(shape).with_rows(as_g)
    (x, *_), name = eqn.in_tracers, eqn.primitive.name
    is_conversion = name == "convert_element_type" and jnp.issubdtype(
      x.dtype, jnp.floating
    )
    is_same = is_conversion or (
      name == "reshape" and x.shape[-1:] == shape[-1:]
    )
    if not is_same:
      return None
    after = eqn
  return None


def _call_of_all(
  function: linear_calls.Linear, arrays: Arrays
) -> prologues.PrologueCall | None:
  """Returns the call of a gradient, or of `vmap`s of one; or None."""
  linear, *constants = arrays
  function, is_by_first = _without_vmaps(function)
  if not isinstance(function, _Gradient) or not is_by_first:
    return None
  return function.call([linear], constants)


def _without_vmaps(
  function: linear_calls.Linear,
) -> tuple[linear_calls.Linear, bool]:
  """Returns a gradient inside of `vmap`s, and whether they map as it requires.

  Each `vmap` must map the first dimension of all arrays except the bias.
  """
  mapped = []
  while isinstance(function, linear_calls.Mapped):
    mapped.append((*function.linear_dims, *function.constant_dims))
    function = function.function
  if not isinstance(function, _Gradient):
    return function, False
  names = ("cotangent", "x", *function.prologue.operands[:-1])
  dims = tuple(None if name == "bias" else 0 for name in names)
  return function, all(each == dims for each in mapped)


def separate_gradient(eqn: Any, jaxpr: Any) -> tuple[str, str]:
  """Returns the gradient that an operation computes, and why it is separate.

  Both are "" for another operation, and for a gradient that a matmul computes
  as it quantizes.

  Args:
    jaxpr: contains it, and has no dead code.
  """
  if eqn.primitive is not linear_calls.linear_call_p:
    return "", ""
  function, is_by_first = _without_vmaps(eqn.params["function"])
  (result,) = eqn.outvars
  users = [
    e.primitive for e in jaxpr.eqns if any(v is result for v in e.invars)
  ]
  others = {
    _SUM if p.name == "add_any" else p.name: None
    for p in users
    if p not in tangents.GUARDS
  }
  # With a prologue, a matmul's only use of the gradient is this guard.
  is_fused = tangents.derivative_guard_p in users
  if not isinstance(function, _Gradient) or not others or is_fused:
    return "", ""
  if not is_by_first:
    reason = "jax.vmap maps another dimension than the first"
  elif tangents.without_derivative_p in users:  # which the matmul reads
    reason = f"{' and '.join(others)} also needs its floats"
  else:
    reason = f"{' and '.join(others)} is between it and the matmul"
  return str(function.prologue), reason
