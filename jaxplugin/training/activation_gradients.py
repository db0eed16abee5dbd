# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations and norms that matmuls quantize, in one kernel.

In the backward pass of dot -> activation -> dot, the first matmul quantizes the
gradient of its result. If an activation was `attached`, that matmul finds which
operation computes the gradient, and quantizes it with that operation as the
prologue.

The gradient of a bias is the sum of the rows of that gradient. JAX asks for it
before the matmul runs. So with a bias the activation quantizes its gradient, as
the matmul's `Backward` says, and one kernel also computes the sum. The matmul
finds the quantized arrays.

A norm reads the residual stream, which later code reads too. `attached_norm`
returns the stream for that code, so the transpose of one operation has both
gradients. One kernel adds them, quantizes their sum as the matmul's `Backward`
says, and sums the gradient of the weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxplugin.jaxext import jax_private, linear_calls, mesh_axes, tangents
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.quantization import operands as operands_lib
from jaxplugin.quantization import prologues

Arrays = Sequence[jax.Array]
_Setting: TypeAlias = (
  "tuple[prologues.Prologue, tuple[tuple[str, Backward], ...]]"
)
_NO_CONTEXT: Final = contextlib.nullcontext()
# Names of operations in reasons. JAX's `add_any` sums the cotangents of a value
# that is read twice, and `reduce_sum` those of a bias.
_NAMES: Final = {
  "add_any": "a sum with another gradient",
  "reduce_sum": "a sum of rows, such as the gradient of a bias,",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward:
  """How a matmul quantizes the gradient of its result.

  Attributes:
    shape: of the result.
    specs: for each matmul of the backward pass.
    message: of the error for a second derivative.
    layer: names of the scopes of the matmul, "" without a scope.
  """

  shape: tuple[int, ...]
  specs: tuple[operands_lib.QuantizeSpec, ...]
  message: str
  layer: str

  def quantize(
    self, call: prologues.PrologueCall, *, sums_columns: bool = True
  ) -> tuple[list[Any], list[jax.Array]]:
    """Returns the result of a call for each spec, and its other results."""
    call = tangents.without_derivative(call.canonical(self.shape), self.message)
    named = jax.named_scope(self.layer) if self.layer else _NO_CONTEXT
    with named:
      results = operands_lib.quantize_all(
        call, self.specs, (None,) * len(self.specs), sums_columns=sums_columns
      )
    count = len(self.specs)
    return results[:count], results[count:]


def attached(
  y: jax.Array,
  call: prologues.PrologueCall,
  matmuls: Mapping[str, Backward | None] = types.MappingProxyType({}),
) -> jax.Array:
  """Returns y, whose gradient goes to the operands of the call.

  Args:
    y: the result of the activation, in any float dtype.
    call: an activation that computes y.
    matmuls: of the matmuls that compute "x" and "up", if they quantize their
      gradients with a prologue.
  """
  call = call.canonical(y.shape)
  operands = [call.x, *call.more.values()]
  if call.prologue.halves and mesh_axes.mesh_of(operands) is not None:
    return y  # the gradient of halves would merge a sharded dimension
  y, *operands = jax_private.vary_alike([y, *operands])
  shape = call.x.shape  # that of the matmul's result, unless a `vmap` maps y
  found = tuple(
    (name, b)
    for name, b in matmuls.items()
    if b
    and b.shape[-1:] == shape[-1:]
    and math.prod(b.shape) == math.prod(shape)
  )
  # A `Backward` has the scopes of its matmul.
  with jax_private.outside_scopes() if found else _NO_CONTEXT:
    return _attached((call.prologue, found), y, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attached(
  setting: _Setting, y: jax.Array, operands: list[jax.Array]
) -> jax.Array:
  del setting, operands  # the derivative is that by the operands only
  return y


def _attached_jvp(
  setting: _Setting, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
  (y, operands), (_, given) = primals, tangents
  prologue, matmuls = setting
  names = ("x", *prologue.operands)
  active = _active(names, given)
  if not active:
    return y, jnp.zeros_like(y)
  tangent = _GatedTangent(
    prologue=prologue, matmuls=matmuls, active=tuple(active), dtype=y.dtype
  )
  linear = list(active.values())
  return y, linear_calls.linear_call(tangent, linear, operands, like=y)


_attached.defjvp(_attached_jvp, symbolic_zeros=True)


def _active(
  names: Sequence[str], tangents: Sequence[Any]
) -> dict[str, jax.Array]:
  return {
    name: t
    for name, t in zip(names, tangents, strict=True)
    if not isinstance(t, SymbolicZero)
  }


def attached_norm(
  y: jax.Array, call: prologues.PrologueCall, matmul: Backward
) -> tuple[jax.Array, jax.Array]:
  """Returns y and the x of a norm, for later code to read in place of both.

  Args:
    y: the result of the norm, in any float dtype.
    call: a norm without a residual that computes y.
    matmul: of the matmul whose result is the last term of x.
  """
  x, call = call.x, call.canonical(y.shape)
  y, *operands = jax_private.vary_alike([y, call.x, *call.more.values()])
  with jax_private.outside_scopes():
    y, stream = _attached_norm((call.prologue, matmul), y, operands)
  return y, stream.reshape(x.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attached_norm(
  setting: tuple[prologues.Prologue, Backward],
  y: jax.Array,
  operands: list[jax.Array],
) -> tuple[jax.Array, jax.Array]:
  del setting
  return y, operands[0]


def _attached_norm_jvp(
  setting: tuple[prologues.Prologue, Backward], primals: Any, tangents: Any
) -> Any:
  (y, operands), (_, given) = primals, tangents
  prologue, matmul = setting
  active = _active(("x", *prologue.operands), given)
  results = y, operands[0]
  if not active:
    return results, jax.tree.map(jnp.zeros_like, results)
  active = {"x": jnp.zeros_like(operands[0])} | active
  tangent = _NormTangent(
    prologue=prologue, matmul=matmul, active=tuple(active), dtype=y.dtype
  )
  linear = list(active.values())
  found = linear_calls.linear_call(
    tangent, linear, operands, like=list(results)
  )
  return results, tuple(found)


_attached_norm.defjvp(_attached_norm_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GatedTangent(linear_calls.Linear):
  """The tangent of an activation, from those of its active operands.

  Its constants are all operands of the activation.
  """

  prologue: prologues.Prologue
  matmuls: tuple[tuple[str, Backward], ...]
  active: tuple[str, ...]
  dtype: np.dtype

  def apply(self, linear: Arrays, constants: Arrays) -> jax.Array:
    return _tangent(self.prologue, self.active, self.dtype, linear, constants)

  def transpose(
    self, wanted: Sequence[bool], g: jax.Array, constants: Arrays
  ) -> list[jax.Array | None]:
    names = [n for n, w in zip(self.active, wanted, strict=True) if w]
    dtype, found = constants[0].dtype, dict[str, jax.Array]()
    operands = dict(zip(("x", *self.prologue.operands), constants, strict=True))
    has_bias, sums = "bias" in names, list[jax.Array]()
    if has_bias:  # the rows of the other gradients are summed
      has_up = "up" in self.prologue.operands
      names = ["x", "up"] if has_up else ["x"]
    for name in names:
      gradient = _Gradient.of(self.prologue, name, dtype)
      leaves = list[jax.Array]()
      if has_bias and (matmul := dict(self.matmuls).get(name)) is not None:
        quantized, (row,) = matmul.quantize(gradient.call([g], constants))
        leaves, tree = jax.tree.flatten(quantized)
        gradient = dataclasses.replace(
          gradient, specs=matmul.specs, quantized=tree
        )
        sums.append(row)
      elif has_bias:  # the floats are summed, so no kernel computes them again
        exact = dataclasses.replace(gradient, dtype=np.dtype(np.float32))
        row = exact.apply([g], constants)
        sums.append(row.sum(tuple(range(row.ndim - 1))))
        found[name] = row.astype(dtype)
        continue
      found[name] = linear_calls.linear_call(
        gradient, [g], [*constants, *leaves], like=operands[name]
      )
    if has_bias:
      found["bias"] = jnp.concatenate(sums)
    pairs = zip(self.active, wanted, strict=True)
    return [found[name] if is_wanted else None for name, is_wanted in pairs]


def _tangent(
  prologue: prologues.Prologue,
  active: Sequence[str],
  dtype: np.dtype,
  linear: Arrays,
  constants: Arrays,
) -> jax.Array:
  """Returns the tangent of a prologue's result, from those of `active`."""
  names = ("x", *prologue.operands)
  given = dict(zip(names, constants, strict=True))

  def function(*values: jax.Array) -> jax.Array:
    x, *more = (given | dict(zip(active, values, strict=True))).values()
    operands = dict(zip(names[1:], more, strict=True))
    return prologues.compute(prologue, x, operands)[0].astype(dtype)

  point = tuple(given[name] for name in active)
  return jax.jvp(function, point, tuple(linear))[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NormTangent(linear_calls.Linear):
  """The tangents of a norm and of its x. The first active operand is x.

  Its constants are all operands of the norm.
  """

  prologue: prologues.Prologue
  matmul: Backward
  active: tuple[str, ...]
  dtype: np.dtype

  def apply(self, linear: Arrays, constants: Arrays) -> list[jax.Array]:
    y = _tangent(self.prologue, self.active, self.dtype, linear, constants)
    return [y, linear[0]]

  def transpose(
    self, wanted: Sequence[bool], g: Any, constants: Arrays
  ) -> list[jax.Array | None]:
    cotangent, residual = g
    if cotangent is None:
      return [residual if wanted[0] else None, *[None] * (len(wanted) - 1)]
    names = {n for n, w in zip(self.active, wanted, strict=True) if w}
    x, *more = constants
    operands = dict(zip(self.prologue.operands, more, strict=True))
    operands |= {"residual": residual, "cotangent": cotangent}
    found = dict[str, jax.Array]()
    if "bias" in names:
      rows = cotangent.astype(jnp.float32)
      found["bias"] = rows.sum(tuple(range(rows.ndim - 1)))
    given = {
      name: operands[name]
      for name in prologues.OPERANDS
      if name != "bias" and operands.get(name) is not None
    }
    prologue = dataclasses.replace(
      self.prologue, operands=tuple(given), gradient="x"
    )
    has_weight = "weight" in names
    if "x" in names:
      call = prologues.PrologueCall(prologue=prologue, x=x, more=given)
      quantized, rest = self.matmul.quantize(call, sums_columns=has_weight)
      leaves, tree = jax.tree.flatten(quantized)
      total = linear_calls.linear_call(
        _Quantized(prologue=prologue, specs=self.matmul.specs, quantized=tree),
        rest[-1:],
        leaves,
        like=rest[-1],
      )
      found["x"] = _sharded_as(total.astype(x.dtype).reshape(x.shape), x)
    elif has_weight:
      _, *rest = prologues.compute(prologue, x, given, column_sums=0)
    if has_weight:
      found["weight"] = _sharded_as(rest[0], operands["weight"])
    pairs = zip(self.active, wanted, strict=True)
    return [found[name] if is_wanted else None for name, is_wanted in pairs]


def _sharded_as(x: jax.Array, like: jax.Array) -> jax.Array:
  if mesh_axes.mesh_of([x]) is None:
    return x
  return mesh_axes.reshard(x, mesh_axes.spec_of(like))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Quantized(linear_calls.Linear):
  """Returns its array, whose quantized copies are the constants.

  Attributes:
    prologue: the gradient that computes the array.
    specs, quantized: see `_Gradient`.
  """

  prologue: prologues.Prologue
  specs: tuple[operands_lib.QuantizeSpec, ...]
  quantized: Any

  def apply(self, linear: Arrays, constants: Arrays) -> jax.Array:
    return linear[0]

  def transpose(
    self, wanted: Sequence[bool], g: jax.Array, constants: Arrays
  ) -> list[jax.Array | None]:
    return [g if wanted[0] else None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gradient(linear_calls.Linear):
  """The gradient of an activation, from the cotangent of its result.

  Attributes:
    prologue: computes the gradient. Its operands end with the cotangent, and
      the others are the first constants.
    dtype: of the gradient.
    specs, quantized: how the gradient is quantized in the other constants, and
      their structure. Nothing here reads them.
  """

  prologue: prologues.Prologue
  dtype: np.dtype
  specs: tuple[operands_lib.QuantizeSpec, ...] = ()
  quantized: Any = None

  @classmethod
  def of(
    cls, prologue: prologues.Prologue, name: str, dtype: np.dtype
  ) -> _Gradient:
    """Returns the gradient of an activation with respect to an operand."""
    operands = (*prologue.operands, "cotangent")
    prologue = dataclasses.replace(prologue, operands=operands, gradient=name)
    return cls(prologue=prologue, dtype=dtype)

  def call(self, linear: Arrays, constants: Arrays) -> prologues.PrologueCall:
    x, *more = (*constants[: len(self.prologue.operands)], *linear)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputedGradient:
  """The gradient of an attached activation or norm.

  Attributes:
    call: computes it; None if that would compute it again.
    quantized: the results of the call that are quantized already.
  """

  call: prologues.PrologueCall | None
  quantized: Mapping[operands_lib.QuantizeSpec, Any]


def find(g: Any) -> ComputedGradient | None:
  """Returns how g is computed, if an attached activation or norm computes it.

  Returns None for another array. Conversions of floats and reshapes of rows may
  come after the call. Also returns None if another operation has read the
  gradient of an activation, such as a sum with another gradient: then it is
  computed anyway, and a prologue would compute it again. The found arrays are
  in the `vmap`s of g.
  """
  x = binding_private.below_vmaps(g)
  if x is None:
    return None
  shape, after, has_others = np.shape(x), None, False
  while (made := binding_private.maker(x)) is not None:
    eqn, _ = made
    users = binding_private.users(x)
    has_others = has_others or any(user is not after for user in users)
    if eqn.primitive is linear_calls.linear_call_p:
      function, is_by_first = _without_vmaps(eqn.params["function"])
      is_known = not has_others or isinstance(function, _Quantized)
      if not (is_known and is_by_first):
        return None
      return _found(function, eqn.in_tracers, shape, g)
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


def _found(
  function: linear_calls.Linear, arrays: Arrays, shape: Sequence[Any], g: Any
) -> ComputedGradient:
  """Returns how a function, or `vmap`s of one, computes g of a shape below."""
  assert isinstance(function, (_Gradient, _Quantized))
  linear, *constants = arrays
  as_g = functools.partial(binding_private.mapped_as, g)
  call = None
  if isinstance(function, _Gradient):
    call = function.call([linear], constants).canonical(shape).with_rows(as_g)
    constants = constants[len(function.prologue.operands) :]
  quantized = ()
  if function.specs:
    quantized = jax.tree.unflatten(function.quantized, map(as_g, constants))
  return ComputedGradient(
    call=call, quantized=dict(zip(function.specs, quantized, strict=True))
  )


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
  if isinstance(function, _Quantized):
    return function, all(set(each) == {0} for each in mapped)
  if not isinstance(function, _Gradient):
    return function, False
  names = ("cotangent", "x", *function.prologue.operands[:-1])
  dims = tuple(None if name == "bias" else 0 for name in names)
  if function.specs:
    dims += (0,) * function.quantized.num_leaves
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
  if not isinstance(function, (_Gradient, _Quantized)):
    return "", ""
  readers = lambda x: [
    e for e in jaxpr.eqns if any(v is x for v in e.invars) and e is not eqn
  ]
  if isinstance(function, _Quantized) and any(map(readers, eqn.invars[1:])):
    return "", ""  # a matmul reads a copy
  (result,) = eqn.outvars
  users = [e.primitive for e in readers(result)]
  others = {
    _NAMES.get(p.name, p.name): None for p in users if p not in tangents.GUARDS
  }
  # With a prologue, a matmul's only use of the gradient is this guard.
  is_fused = tangents.derivative_guard_p in users
  if not others or is_fused:
    return "", ""
  if not is_by_first:
    reason = "jax.vmap maps another dimension than the first"
  elif tangents.without_derivative_p in users:  # which the matmul reads
    reason = f"{' and '.join(others)} also needs its floats"
  else:
    reason = f"{' and '.join(others)} is between it and the matmul"
  return str(function.prologue), reason
