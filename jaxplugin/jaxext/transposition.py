# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear_call`: a linear function that comes with its own transpose.

Reverse mode transposes the tangents of forward mode. Of a function that is made
of `linear_call`s forward mode runs the one and reverse mode the other, and what
lives from the forward to the backward pass are the constants that it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

linear_call_p = extend_core.Primitive("linear_call_with_transpose")


class Linear(Protocol):
  """A linear function of some arrays, and of constants. It must be hashable."""

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    """Its result, linear in all of `linear` at once.

    A derivative with respect to the constants is that of this function.
    """

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
  ) -> list[jax.Array | None]:
    """The cotangent of each that is wanted, g being the result's."""


def linear_call(
  function: Linear,
  linear: Sequence[jax.Array],
  constants: Sequence[jax.Array],
  like: jax.Array,
) -> jax.Array:
  """function.apply(linear, constants), differentiated by its transpose.

  Args:
    function: what is called.
    linear: at least one array.
    constants: arrays.
    like: of the shape and the dtype of the result. Mesh axes are not explicit.
  """
  return linear_call_p.bind(
    *linear,
    *constants,
    function=function,
    num_linear=len(linear),
    shape=like.shape,
    dtype=like.dtype,
  )


def _impl(*args, function, num_linear, shape, dtype):
  del shape, dtype
  return function.apply(args[:num_linear], args[num_linear:])


def _abstract_eval(*args, function, num_linear, shape, dtype):
  del function, num_linear
  mesh = args[0].sharding.mesh
  return args[0].update(
    shape=shape,
    dtype=dtype,
    weak_type=False,
    sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))),
  )


def _jvp(primals, tangents, *, function, num_linear, shape, dtype):
  params = dict(function=function, shape=shape, dtype=dtype)
  result = linear_call_p.bind(*primals, num_linear=num_linear, **params)
  linear, constants = primals[:num_linear], primals[num_linear:]
  terms = []
  active = [type(t) is not ad.Zero for t in tangents[:num_linear]]
  if any(active):
    # A constant one adds zeros of its own shape, so that none is left out of
    # what `function` takes.
    given = [
      t if is_active else jnp.zeros_like(x)
      for x, t, is_active in zip(linear, tangents, active, strict=False)
    ]
    terms.append(
      linear_call_p.bind(*given, *constants, num_linear=num_linear, **params)
    )
  moved = [
    i
    for i, t in enumerate(tangents[num_linear:])
    if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0
  ]
  if moved:

    def of_moved(*values):
      merged = list(constants)
      for i, value in zip(moved, values, strict=True):
        merged[i] = value
      return function.apply(linear, merged)

    _, tangent = jax.jvp(
      of_moved,
      tuple(constants[i] for i in moved),
      tuple(tangents[num_linear + i] for i in moved),
    )
    terms.append(tangent)
  if not terms:
    return result, ad.Zero(jax.typeof(result))
  return result, sum(terms[1:], start=terms[0])


def _transpose(g, *args, function, num_linear, shape, dtype):
  del shape, dtype
  if type(g) is ad.Zero:
    return [None] * len(args)
  wanted = [ad.is_undefined_primal(x) for x in args[:num_linear]]
  cotangents = function.transpose(wanted, g, args[num_linear:])
  return [*cotangents, *[None] * (len(args) - num_linear)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mapped:
  """`vmap` of a linear function, and of its transpose.

  Attributes:
    function: of one.
    linear_dims, constant_dims: the mapped dimension of each array, or None.
    size: how many there are.
  """

  function: Linear
  linear_dims: tuple[int | None, ...]
  constant_dims: tuple[int | None, ...]
  size: int

  def apply(
    self, linear: Sequence[jax.Array], constants: Sequence[jax.Array]
  ) -> jax.Array:
    mapped = jax.vmap(
      self.function.apply,
      in_axes=(list(self.linear_dims), list(self.constant_dims)),
      axis_size=self.size,
    )
    return mapped(list(linear), list(constants))

  def transpose(
    self,
    wanted: Sequence[bool],
    g: jax.Array,
    constants: Sequence[jax.Array],
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
        # What is the same for all gets the sum.
        x = x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)
      cotangents.append(x)
    return cotangents


def _batch(args, dims, *, function, num_linear, shape, dtype):
  size = next(
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  )
  mapped = _Mapped(
    function=function,
    linear_dims=tuple(dims[:num_linear]),
    constant_dims=tuple(dims[num_linear:]),
    size=size,
  )
  result = linear_call_p.bind(
    *args,
    function=mapped,
    num_linear=num_linear,
    shape=(size, *shape),
    dtype=dtype,
  )
  return result, 0


linear_call_p.def_impl(_impl)
linear_call_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_call_p] = _jvp
ad.primitive_transposes[linear_call_p] = _transpose
batching.primitive_batchers[linear_call_p] = _batch
mlir.register_lowering(
  linear_call_p, mlir.lower_fun(_impl, multiple_results=False)
)
