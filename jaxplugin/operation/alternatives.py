# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations that a kernel replaces on the devices that have it.

A `Forms` has both forms of a computation, and `compute` leaves the choice to
the lowering: the kernel if it supports the equation, else the operations.
Derivatives are those of the operations.

kernel_or_operations_p: operands -> arrays. Parameters: operations, a jaxpr;
  forms, or None if no kernel computes the mapped operands; target, the
  `targets.Request` of the enclosing contexts, or None.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as extend_core
from jax.interpreters import ad

from jaxplugin.core import formats, targets
from jaxplugin.jaxext import tangents as tangents_lib
from jaxplugin.operation import failures, primitive
from jaxplugin.runtime import lowering

kernel_or_operations_p = extend_core.Primitive("kernel_or_operations")
kernel_or_operations_p.multiple_results = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedCall:
  """The form of a call whose kernel also adds the offset of rhs.

  Attributes:
    call: form of the `OperationCall` without the offset.
    format: the format of rhs, with zero points or minima.
  """

  call: Any
  format: formats.BlockFormat

  @property
  def operation(self) -> str:
    """Name of the primitive of the call."""
    return str(self.call.PRIMITIVE.name)

  def filled(self, operands: Sequence[Any]) -> Any:
    """Returns the call without the offset, which is the last operand."""
    return self.call.filled(operands[:-1])


class Forms(abc.ABC):
  """Both forms of a computation; subclasses are hashable.

  Code that walks jaxprs sees only the operations, and counts a matmul once.
  """

  @property
  def rows(self) -> Set[int]:
    """The positions of operands that are rows [..., k].

    If vmap maps only these, the kernel gets another leading dimension.
    """
    return frozenset()

  def mapped(self) -> Forms | None:
    """Returns the forms under a `vmap` that maps other operands than `rows`.

    No kernel computes them. `explain` reads them.
    """
    return None

  @abc.abstractmethod
  def operations(self, *operands: Any) -> Any:
    """Returns the result of JAX's operations: an array, or a list of arrays."""

  @abc.abstractmethod
  def kernel(
    self, context: primitive.LoweringContext
  ) -> Callable[..., Any] | None:
    """Returns the function that calls the kernel, or None if it cannot.

    Args:
      context: the equation. Its module may have kernels.
    """

  def fused(self, *operands: Any) -> tuple[FusedCall, list[Any]] | None:
    """Returns the call of the kernel, and its operands.

    None if the function of `kernel` binds primitives, which are the calls.
    """
    del operands
    return None


def compute(forms: Forms, *operands: Any) -> Any:
  """Computes `forms` of the operands."""
  if any(isinstance(x, jax.core.Tracer) for x in operands):
    return _bind(forms, *operands)
  return _compiled(forms, *operands)


def _bind(forms: Forms, *operands: Any) -> Any:
  operations, result = jax.make_jaxpr(forms.operations, return_shape=True)(
    *operands
  )
  results = kernel_or_operations_p.bind(
    *operands, operations=operations, forms=forms, target=targets.request()
  )
  return jax.tree.unflatten(jax.tree.structure(result), results)


_compiled = jax.jit(_bind, static_argnums=0)


def _jvp(
  primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
  results = kernel_or_operations_p.bind(*primals, **params)
  operations = extend_core.jaxpr_as_fun(params["operations"])
  found = tangents_lib.tangent_of(
    lambda operands: operations(*operands), list(primals), list(tangents)
  )
  if found is None:
    found = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
  return results, found


def _transpose(
  cotangents: Sequence[Any], *operands: Any, operations: Any, **params: Any
) -> list[jax.Array | None]:
  del params
  wanted = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

  def function(*linear: jax.Array) -> list[jax.Array]:
    every = list(operands)
    for i, x in zip(wanted, linear, strict=True):
      every[i] = x
    return extend_core.jaxpr_as_fun(operations)(*every)

  transposed = jax.linear_transpose(
    function, *(operands[i].aval for i in wanted)
  )
  given = [ad.instantiate_zeros(g) for g in cotangents]
  found = dict(zip(wanted, transposed(given), strict=True))
  return [found.get(i) for i in range(len(operands))]


def _batch(
  operands: Sequence[Any],
  dims: Sequence[int | None],
  *,
  operations: Any,
  forms: Forms | None,
  target: targets.Request | None,
) -> tuple[list[jax.Array], list[int]]:
  mapped = {i for i, dim in enumerate(dims) if dim is not None}
  are_rows = forms is not None and mapped == forms.rows
  operands = [
    x if dim is None else jnp.moveaxis(x, dim, 0)
    for x, dim in zip(operands, dims, strict=True)
  ]
  in_axes = tuple(None if dim is None else 0 for dim in dims)
  function = jax.vmap(extend_core.jaxpr_as_fun(operations), in_axes)
  results = kernel_or_operations_p.bind(
    *operands,
    operations=jax.make_jaxpr(function)(*operands),
    forms=forms if forms is None or are_rows else forms.mapped(),
    target=target,
  )
  return results, [0] * len(results)


def _lower(
  context: primitive.LoweringContext,
  *,
  operations: Any,
  forms: Forms | None,
  target: targets.Request | None,
) -> Callable[..., list[jax.Array]]:
  del target
  kernel = _kernel(forms, context)
  if forms is None or kernel is None:
    return extend_core.jaxpr_as_fun(operations)
  if fused := forms.fused(*context.avals_in):
    form, avals = fused
    failures.remember(form.operation, {"call": form}, avals)
  return lambda *operands: jax.tree.leaves(kernel(*operands))


def _kernel(
  forms: Forms | None, context: primitive.LoweringContext
) -> Callable[..., Any] | None:
  if forms is None or context.module.kernels_refusal() is not None:
    return None
  return forms.kernel(context)


def kernel_of(
  eqn: Any,
  module: lowering.Module,
  target: targets.Target,
  avals: Sequence[Any],
) -> Callable[..., Any] | None:
  """Returns the function that calls the kernel of an equation, or None."""
  context = primitive.LoweringContext(
    module=module,
    target=target,
    avals_in=avals,
    avals_out=[x.aval for x in eqn.outvars],
    mesh=None,
  )
  return _kernel(eqn.params["forms"], context)


primitive.register(
  kernel_or_operations_p,
  who="block_scaled_dot",
  abstract_eval=lambda *avals, operations, **params: operations.out_avals,
  batch=_batch,
  jvp=_jvp,
  lower=_lower,
)
ad.primitive_transposes[kernel_or_operations_p] = _transpose
# Without jit, a compiled program would be used once.
kernel_or_operations_p.def_impl(
  lambda *operands, operations, **params: extend_core.jaxpr_as_fun(operations)(
    *operands
  )
)
