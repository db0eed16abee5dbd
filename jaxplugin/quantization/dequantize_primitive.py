# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dequantize_p`: the primitive that converts a quantized array to floats.

It computes `operations.dequantize`. `backends.decide_dequantize` chooses the
backend of its lowering.

dequantize_p: (values, scale[, global_scale]) -> floats. Parameters: format,
  axis, dtype; target, the target of an enclosing `use_target`, or None;
  overlay, the tables of an enclosing `tuning`, or None.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching

from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.jaxext import explicit_axes
from jaxplugin.operation import choice
from jaxplugin.operation import primitive
from jaxplugin.quantization import backends
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import explicit
from jaxplugin.quantization.sharding import operation
from jaxplugin.tables import resolution

dequantize_p = extend_core.Primitive("block_dequantize")


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  axis: int,
  dtype: np.dtype,
) -> jax.Array:
  """Computes `operations.dequantize` with a chosen backend."""
  params = {"format": format, "axis": axis, "dtype": dtype}
  if 0 in values.shape:  # Only XLA ops support empty arrays.
    return _by_operations(values, scale, global_scale, **params)
  given: tuple[jax.Array, ...] = ()
  if global_scale is not None:
    # A scalar stays a scalar, which kernels fuse.
    given = (operations.expand_global_scale(global_scale, values.ndim),)
  target = targets.overriding_target()
  return dequantize_p.bind(
    values,
    scale,
    *given,
    **params,
    target=target,
    overlay=resolution.overlay(),
  )


def problem_of(
  avals: Sequence[Any], params: Mapping[str, Any]
) -> problems.DequantizationProblem:
  """Returns the problem of an equation of `dequantize_p`."""
  values, _, *given = avals
  return problems.DequantizationProblem(
    shape=tuple(values.shape),
    dtype=np.dtype(values.dtype),
    format=params["format"],
    axis=params["axis"],
    out_dtype=params["dtype"],
    global_shape=tuple(given[0].shape) if given else None,
  )


def _by_operations(
  values, scale, global_scale=None, *, target=None, overlay=None, **params
):
  del target, overlay
  return operations.dequantize(values, scale, global_scale, **params)


# Rules.


def _abstract_eval(
  values, scale, global_scale=None, *, target, overlay, **params
):
  """Returns the result type of `operations.dequantize`."""
  del target, overlay
  given = [x for x in (values, scale, global_scale) if x is not None]
  mesh = explicit_axes.mesh_of(given)
  if mesh is not None:
    values, scale, *rest = explicit.whole(given)
    global_scale = rest[0] if rest else None
  traced = operations.dequantize.trace(values, scale, global_scale, **params)
  avals = traced.jaxpr.out_avals
  if mesh is not None:
    avals = explicit.sharded(avals, [explicit_axes.spec_of(given[0])], mesh)
  return avals[0]


def _jvp(primals, tangents, **params):
  """Returns the result of the primitive and the tangent of its XLA ops."""
  active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

  def function(*args):
    given = dict(zip(active, args, strict=True))
    merged = [given.get(i, x) for i, x in enumerate(primals)]
    return _by_operations(*merged, **params)

  _, tangent = jax.jvp(
    function,
    tuple(primals[i] for i in active),
    tuple(tangents[i] for i in active),
  )
  return dequantize_p.bind(*primals, **params), tangent


def _batch(args, dims, *, axis, **params):
  if None in dims[:2]:
    function = functools.partial(_by_operations, axis=axis, **params)
    return jax.vmap(function, in_axes=tuple(dims))(*args), 0
  size = args[0].shape[dims[0]]
  values, scale = (
    jnp.moveaxis(x, d, 0) for x, d in zip(args[:2], dims[:2], strict=True)
  )
  given = args[2:]
  # An unmapped scalar stays a scalar. Other global scales get the new leading
  # dimension.
  if given and not (dims[2] is None and given[0].ndim == 0):
    given = (batching.bdim_at_front(given[0], dims[2], size),)
  return dequantize_p.bind(values, scale, *given, axis=axis + 1, **params), 0


def _emit(values, scale, global_scale=None, *, problem, decision, target):
  backend = choice.backend_of(backends.DEQUANTIZE_OPERATION, decision)
  return backend.emit(values, scale, global_scale, problem, target)


def _bind(
  operands: Sequence[jax.Array],
  problem: problems.DequantizationProblem,
  **params: Any,
) -> jax.Array:
  """Binds `dequantize_p` with the parameters of a problem."""
  return dequantize_p.bind(
    *operands,
    format=problem.format,
    axis=problem.axis,
    dtype=problem.out_dtype,
    **params,
  )


def _lower(context, *, target, overlay, **params):
  problem = problem_of(context.avals_in, params)
  # The function of each device binds the primitive for its shard.
  bind = functools.partial(_bind, target=target, overlay=overlay)
  function = operation.lowered(
    context,
    operation.dequantize(problem, bind),
    lambda *operands: [bind(operands, problem)],
    key=(dequantize_p.name, problem, overlay, "dequantize"),
  )
  if function is not None:
    return lambda *operands: function(*operands)[0]
  decision = backends.decide_dequantize(
    problem, context.module, context.target, overlay
  )
  return functools.partial(
    _emit, problem=problem, decision=decision, target=context.target
  )


primitive.register(
  dequantize_p,
  who="dequantize",
  abstract_eval=_abstract_eval,
  jvp=_jvp,
  batch=_batch,
  lower=_lower,
)
