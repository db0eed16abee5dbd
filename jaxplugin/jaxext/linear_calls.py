# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`linear_call`: a linear function whose transpose is a function of its own.

As `jax.custom_derivatives.linear_call`; but that has neither `vmap` nor
derivatives by its constants. Here they are those of a third function, the same
in other operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

linear_call_p = extend_core.Primitive("jaxplugin_linear_call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
  """A function that is linear in its first argument.

  Attributes:
    call: (x, *constants) -> y.
    transpose: (y's cotangent, *constants) -> x's cotangent. It may itself be
      differentiated by all of them.
    by_constants: the same as `call`, of which derivatives by constants are
      taken.
  """

  call: Callable[..., jax.Array]
  transpose: Callable[..., jax.Array]
  by_constants: Callable[..., jax.Array]


def linear_call(
  linear: Linear, x: jax.Array, *constants: jax.Array
) -> jax.Array:
  """`linear.call(x, *constants)`, with its derivatives."""
  # A parameter, so that what looks for operations in a program sees its own.
  jaxpr = jax.make_jaxpr(linear.call)(x, *constants)
  return linear_call_p.bind(x, *constants, jaxpr=jaxpr, linear=linear)


def _impl(*args, jaxpr, linear):
  del linear
  with jax.disable_jit(False):
    return jax.jit(extend_core.jaxpr_as_fun(jaxpr))(*args)[0]


def _abstract_eval(*args, jaxpr, linear):
  del args, linear
  return jaxpr.out_avals[0]


def _jvp(primals, tangents, *, jaxpr, linear):
  del jaxpr
  x, *constants = primals
  result = linear_call(linear, x, *constants)
  terms = []
  if type(tangents[0]) is not ad.Zero:
    terms.append(linear_call(linear, tangents[0], *constants))
  active = [i for i, t in enumerate(tangents) if i and type(t) is not ad.Zero]
  if active:

    def of_active(*args):
      merged = list(primals)
      for i, arg in zip(active, args, strict=True):
        merged[i] = arg
      return linear.by_constants(*merged)

    terms.append(
      jax.jvp(
        of_active,
        tuple(primals[i] for i in active),
        tuple(tangents[i] for i in active),
      )[1]
    )
  return result, sum(terms[1:], start=terms[0])


def _transpose(cotangent, x, *constants, jaxpr, linear):
  del jaxpr
  assert ad.is_undefined_primal(x)
  assert not any(map(ad.is_undefined_primal, constants))
  if type(cotangent) is ad.Zero:
    return [ad.Zero(x.aval), *(None for _ in constants)]
  return [
    linear.transpose(cotangent, *constants),
    *(None for _ in constants),
  ]


def _batch(args, dims, *, jaxpr, linear):
  del jaxpr
  x, *constants = args
  size = next(
    a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None
  )
  # So that its cotangent is mapped too, and no sum.
  x = batching.bdim_at_front(x, dims[0], size)
  in_axes = (0, *dims[1:])
  mapped = Linear(
    call=jax.vmap(linear.call, in_axes),
    transpose=jax.vmap(linear.transpose, in_axes),
    by_constants=jax.vmap(linear.by_constants, in_axes),
  )
  return linear_call(mapped, x, *constants), 0


def _lower(ctx, *args, jaxpr, linear):
  del linear
  function = extend_core.jaxpr_as_fun(jaxpr)
  return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


linear_call_p.def_impl(_impl)
linear_call_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_call_p] = _jvp
ad.primitive_transposes[linear_call_p] = _transpose
batching.primitive_batchers[linear_call_p] = _batch
mlir.register_lowering(linear_call_p, _lower)
