# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear_call`: a linear function that comes with its own transpose.

JAX computes reverse mode by transposing the tangents of forward mode. Forward
mode runs the function of a `linear_call`, and reverse mode runs its transpose.
The constants of the call are the residuals saved for the backward pass.

`jax.custom_derivatives.linear_call` supports neither `vmap` nor derivatives
with respect to its constants.

linear_call_p: (*linear, *constants) -> results. Parameters: function;
  num_linear; operations, the `Operations` of `function.apply`, which lets
  functions that search a program for operations find them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, mlir

from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import tangents as tangents_lib

linear_call_p = extend_core.Primitive("jaxplugin_linear_call")
linear_call_p.multiple_results = True

Arrays = Sequence[jax.Array]


class Linear:
  """A linear function of some arrays, with constants. It must be hashable.

  Attributes:
    is_value: whether equal functions compute the same and hold no arrays. Such
      functions are traced once, and the trace is cached for later calls.
  """

  is_value: ClassVar[bool] = True

  def apply(self, linear: Arrays, constants: Arrays) -> Any:
    """Returns an array, or a list, that is jointly linear in `linear`."""
    raise NotImplementedError

  def by_constants(self, linear: Arrays, constants: Arrays) -> Any:
    """Returns the result of `apply`, from differentiable operations.

    JAX differentiates this function with respect to the constants.
    """
    return self.apply(linear, constants)

  def transpose(
    self, wanted: Sequence[bool], g: Any, constants: Arrays
  ) -> list[jax.Array | None]:
    """Returns the cotangents of the wanted linear arrays.

    It must be differentiable with respect to `g` and the constants.

    Args:
      wanted: whether each of the linear arrays needs its cotangent.
      g: cotangent of the result; of a list, a list with None for zeros.
      constants: as for `apply`.
    """
    raise NotImplementedError


class Operations:
  """The operations of the function of a call, traced when something reads them.

  Reverse mode runs only the transpose, so it never reads them.

  Attributes:
    types: of the results.
  """

  def __init__(
    self,
    function: Linear,
    linear: Arrays,
    constants: Arrays,
    types: Sequence[Any],
  ):
    self._function, self._num_linear = function, len(linear)
    self._arguments = [jax.typeof(x) for x in (*linear, *constants)]
    self._contexts = jax_private.snapshot(with_devices=True)
    self.types = types

  @functools.cached_property
  def jaxpr(self) -> extend_core.ClosedJaxpr:
    jitted = _jitted(self._function, self._num_linear)
    with self._contexts.restored(), jax.disable_jit(False):
      return jitted.trace(*self._arguments).jaxpr


def linear_call(
  function: Linear, linear: Arrays, constants: Arrays, like: Any
) -> Any:
  """Returns `function.apply(linear, constants)`, with its derivatives.

  Args:
    function: a function without tracers. It is traced only if something runs it
      or reads its operations, when the trace of the call may have ended.
    linear: at least one array.
    constants: arrays in which the function need not be linear.
    like: arrays of the types of the results, or the types.
  """
  leaves, structure = jax.tree.flatten(like)
  types = [
    x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in leaves
  ]
  operations = Operations(function, linear, constants, types)
  results = linear_call_p.bind(
    *linear,
    *constants,
    function=function,
    num_linear=len(linear),
    operations=operations,
  )
  return jax.tree.unflatten(structure, results)


def _jitted(function, num_linear):
  """Returns a jitted `function.apply` that takes all arrays in a row.

  A model calls equal functions in each layer. Functions with `is_value` share
  one cached `jit`. Other functions are closures that may hold arrays, so they
  must not be cached.
  """
  make = _jitted_once if function.is_value else _jitted_once.__wrapped__
  return make(function, num_linear)


@functools.lru_cache(maxsize=1024)
def _jitted_once(function, num_linear):
  return jax.jit(
    lambda *args: function.apply(args[:num_linear], args[num_linear:])
  )


def _impl(*args, function, num_linear, operations):
  del operations
  with jax.disable_jit(False):
    return jax.tree.leaves(_jitted(function, num_linear)(*args))


def _abstract_eval(*args, function, num_linear, operations):
  del args, function, num_linear
  return operations.types


def _jvp(primals, tangents, *, function, num_linear, operations):
  params = dict(function=function, num_linear=num_linear, operations=operations)
  results = linear_call_p.bind(*primals, **params)
  linear, constants = primals[:num_linear], primals[num_linear:]
  terms = []
  active = [type(t) is not ad.Zero for t in tangents[:num_linear]]
  if any(active):
    # `function` needs every tangent. An inactive argument gets zeros.
    given = [
      t if is_active else jnp.zeros_like(x)
      for x, t, is_active in zip(linear, tangents, active, strict=False)
    ]
    terms.append(linear_call_p.bind(*given, *constants, **params))
  by_constants = tangents_lib.tangent_of(
    lambda constants: function.by_constants(linear, constants),
    list(constants),
    list(tangents[num_linear:]),
  )
  if by_constants is not None:
    terms.append(jax.tree.leaves(by_constants))
  if not terms:
    return results, [ad.Zero(jax.typeof(x)) for x in results]
  return results, [sum(t[1:], start=t[0]) for t in zip(*terms, strict=True)]


def _transpose(cotangents, *args, function, num_linear, operations):
  del operations
  given = [None if type(g) is ad.Zero else g for g in cotangents]
  if all(g is None for g in given):
    return [None] * len(args)
  g = given if len(given) > 1 else given[0]
  wanted = [ad.is_undefined_primal(x) for x in args[:num_linear]]
  cotangents = function.transpose(wanted, g, args[num_linear:])
  return [*cotangents, *[None] * (len(args) - num_linear)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mapped(Linear):
  """The `vmap` of a linear function, and of its transpose.

  Attributes:
    function: the function for one element of the batch.
    linear_dims, constant_dims: the mapped dimension of each array, or None.
    size: size of the mapped dimensions.
  """

  function: Linear
  linear_dims: tuple[int | None, ...]
  constant_dims: tuple[int | None, ...]
  size: int

  @property
  def is_value(self) -> bool:  # type: ignore[override]
    return self.function.is_value

  def apply(self, linear: Arrays, constants: Arrays) -> Any:
    return self._mapped(self.function.apply)(list(linear), list(constants))

  def by_constants(self, linear: Arrays, constants: Arrays) -> Any:
    mapped = self._mapped(self.function.by_constants)
    return mapped(list(linear), list(constants))

  def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(
      function,
      in_axes=(list(self.linear_dims), list(self.constant_dims)),
      axis_size=self.size,
    )

  def transpose(
    self, wanted: Sequence[bool], g: Any, constants: Arrays
  ) -> list[jax.Array | None]:
    mapped = jax.vmap(
      lambda g, constants: self.function.transpose(wanted, g, constants),
      in_axes=(0, list(self.constant_dims)),
      axis_size=self.size,
    )
    cotangents = []
    for dim, x in zip(
      self.linear_dims, mapped(g, list(constants)), strict=True
    ):
      if x is not None:
        # An argument that is not mapped gets the sum of its cotangents.
        x = x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)
      cotangents.append(x)
    return cotangents


def _batch(args, dims, *, function, num_linear, operations):
  x, dim = next(
    pair for pair in zip(args, dims, strict=True) if pair[1] is not None
  )
  size, axes = x.shape[dim], jax.typeof(x).sharding.spec[dim]
  mapped = Mapped(
    function=function,
    linear_dims=tuple(dims[:num_linear]),
    constant_dims=tuple(dims[num_linear:]),
    size=size,
  )
  types = [_under_leading_dimension(t, size, axes) for t in operations.types]
  results = linear_call(mapped, args[:num_linear], args[num_linear:], types)
  return results, [0] * len(results)


def _under_leading_dimension(type, size, axes):
  """Returns a type with another first dimension, sharded over mesh axes."""
  spec = type.sharding.spec
  spec = spec.update(partitions=(axes, *spec))
  return type.update(
    shape=(size, *type.shape), sharding=type.sharding.update(spec=spec)
  )


def _lower(ctx, *args, function, num_linear, operations):
  del function, num_linear
  traced = extend_core.jaxpr_as_fun(operations.jaxpr)
  return mlir.lower_fun(traced, multiple_results=True)(ctx, *args)


linear_call_p.def_impl(_impl)
linear_call_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_call_p] = _jvp
ad.primitive_transposes[linear_call_p] = _transpose
batching.primitive_batchers[linear_call_p] = _batch
mlir.register_lowering(linear_call_p, _lower)
