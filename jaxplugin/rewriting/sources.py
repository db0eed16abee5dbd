# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the array of an argument that a value is, perhaps in another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Final, Generic, TypeVar

import jax
import numpy as np

from jaxplugin.jaxext import jax_private, program
from jaxplugin.jaxext.tracing import binding_private

# Their results have all or some elements of the first operand, perhaps rounded.
# `pad` and `concatenate` add others.
_LAYOUTS: Final = frozenset(
  {
    *("reshape", "transpose", "squeeze", "broadcast_in_dim"),
    *("slice", "dynamic_slice", "split", "concatenate", "rev", "copy"),
    *("stack", "unstack", "tile", "pad"),
    *("convert_element_type", "reduce_precision", "name", "stop_gradient"),
    *("sharding_constraint", "layout_constraint", "reshard"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("ppermute", "all_to_all", "pbroadcast", "pvary", "preduced"),
    # Before JAX 0.12 the names of these two end in "_p".
    *("reduced_vary_cast", "reduced_vary_cast_p"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p"),
  }
)
# Each result has the elements of the operand with the same index.
_SIDE_BY_SIDE: Final = frozenset({"optimization_barrier", "device_put"})
# Its result is the second operand.
_TIE: Final = "tie"
_GATHER: Final = "gather"
# Operations whose results are those of the one function inside.
_CALLS: Final = program.CALLS | {"custom_vmap_call", "remat_opt", "shard_map"}


_Fact = TypeVar("_Fact")

# Operations whose results may have the elements of an operand.
LAYOUTS: Final = _LAYOUTS | _SIDE_BY_SIDE | {_TIE, _GATHER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """The array in an argument of the function whose elements a value has.

  Attributes:
    path: the path in the argument, such as "lm_head/kernel"; "" if not known.
    argument: None if the array is a parameter, otherwise position or name of
      the argument.
    is_guess: whether it counts as a parameter because an inner function that
      differentiates takes it.
    is_gathered: whether a gather selects several matrices of the array. They
      are weights of experts, or activations as rows of an embedding are.
  """

  path: str = ""
  argument: int | str | None = None
  is_guess: bool = False
  is_gathered: bool = False

  @property
  def is_parameter(self) -> bool:
    return self.argument is None


class TracedValues(Generic[_Fact]):
  """Facts about values, by identity below all transformations.

  It keeps the values alive, so that their identities stay valid.
  """

  def __init__(self) -> None:
    self._known: dict[int, tuple[Any, _Fact]] = {}

  def get(self, x: Any) -> _Fact | None:
    found = self._known.get(id(binding_private.identity(x)))
    return None if found is None else found[1]

  def put(self, x: Any, fact: _Fact) -> None:
    identity = binding_private.identity(x)
    self._known[id(identity)] = identity, fact

  def ids(self) -> Collection[int]:
    """Returns the `id` of each value's identity."""
    return self._known.keys()


class Origins:
  """The origins of values."""

  def __init__(self) -> None:
    self._known = TracedValues[Origin]()

  def add(self, x: Any, origin: Origin | None) -> None:
    is_array = isinstance(x, (jax.Array, np.ndarray)) and np.ndim(x)
    if origin is not None and is_array:
      self._known.put(x, origin)

  def of(self, x: Any) -> Origin | None:
    is_gathered = False
    while True:
      origin = self._known.get(x)
      if origin is not None:
        return _gathered(origin) if is_gathered else origin
      made = _source_of_traced(x)
      if made is None:
        return None
      operation, x = made
      is_gathered |= _gathers_several(operation)

  def of_all(self, args: Sequence[Any]) -> list[Origin | None]:
    return [self.of(x) for x in args]

  def note(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Adds results that have the elements of an operand in another layout.

    JAX stores which operation computed a traced value. For concrete arrays this
    table is the only record.
    """
    origins = self.of_all(operation.args)
    if not any(origins):
      return
    if _gathers_several(operation):
      origins = [origin and _gathered(origin) for origin in origins]
    for i, result in enumerate(results):
      source = source_of(operation, i)
      if source is not None:
        self.add(result, origins[source])


def source_of(
  operation: binding_private.BoundOperation, result: int
) -> int | None:
  """Returns the index of the operand whose elements a result has, or None."""
  name = operation.name
  if name in _LAYOUTS:
    return 0
  if name in _SIDE_BY_SIDE:
    return result
  if name == _TIE:
    return 1
  if name == _GATHER:
    return 0 if _is_of_matrices(operation) else None
  if name not in _CALLS:
    return None
  jaxprs = program.sub_jaxprs(operation)
  return _source_in(jaxprs[0], result) if len(jaxprs) == 1 else None


def _is_of_matrices(gather: binding_private.BoundOperation) -> bool:
  """Whether a gather selects matrices of a stack.

  A gather of vectors does not count: a row of an embedding is an activation.
  """
  return len(gather.params["dimension_numbers"].offset_dims) >= 2


def _gathers_several(operation: binding_private.BoundOperation) -> bool:
  """Whether an operation, or a function inside, gathers several matrices."""
  if operation.name == _GATHER:
    return bool(operation.args[1].ndim > 1)
  return operation.name in _CALLS and any(
    _gathers_several(binding_private.BoundOperation.of_equation(eqn))
    for jaxpr in program.sub_jaxprs(operation)
    for eqn in jaxpr.eqns
  )


def _gathered(origin: Origin) -> Origin:
  return dataclasses.replace(origin, is_gathered=True)


def without_gathered(
  origins: Sequence[Origin | None],
) -> Sequence[Origin | None]:
  """Returns origins of a matmul's operands, without gathered activations.

  If both operands are parameters and a gather selects one, the other one is the
  weight.
  """
  found = [o for o in origins[:2] if o is not None and o.is_parameter]
  if len({o.is_gathered for o in found}) < 2:
    return origins
  return [None if o and o.is_gathered else o for o in origins]


@jax_private.cache_by_jaxpr
def _source_in(jaxpr: Any, result: int) -> int | None:
  makers = {
    variable: (eqn, i)
    for eqn in jaxpr.eqns
    for i, variable in enumerate(eqn.outvars)
  }
  variable = jaxpr.outvars[result]
  if hasattr(variable, "val"):
    return None  # a literal
  while variable in makers:
    eqn, index = makers[variable]
    operation = binding_private.BoundOperation.of_equation(eqn)
    source = source_of(operation, index)
    if source is None or hasattr(eqn.invars[source], "val"):
      return None
    variable = eqn.invars[source]
  invars = list(jaxpr.invars)
  return invars.index(variable) if variable in invars else None


def _source_of_traced(
  x: Any,
) -> tuple[binding_private.BoundOperation, Any] | None:
  """Returns the traced value whose elements `x` has, and the operation between.

  Returns None if it has others.
  """
  made = binding_private.maker(x)
  if made is None:
    return None
  eqn, index = made
  operation = binding_private.BoundOperation(
    eqn.primitive, eqn.in_tracers, eqn.params
  )
  source = source_of(operation, index)
  return None if source is None else (operation, operation.args[source])


def is_given(x: Any, trace: Any) -> bool:
  """Whether a value is an argument of a traced function, in any layout."""
  if not binding_private.is_traced_by(x, trace):
    return False
  while binding_private.maker(x) is not None:
    made = _source_of_traced(x)
    if made is None:
      return False
    _, x = made
  return True


def parameters_among(args: Sequence[Any], trace: Any) -> list[Origin | None]:
  """Returns which values are parameters of a function that differentiates.

  Args:
    args: values of the function.
    trace: the trace of the function.

  Returns:
    An origin for an argument that the function differentiates by, and None for
    other values. If the function differentiates by none of them, an origin for
    each argument.
  """
  given = [is_given(x, trace) for x in args]
  active = [
    flag and binding_private.is_differentiated(x)
    for flag, x in zip(given, args, strict=True)
  ]
  are_parameters = active if any(active) else given
  guess = Origin(is_guess=True)
  return [guess if flag else None for flag in are_parameters]
