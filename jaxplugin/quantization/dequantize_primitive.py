# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dequantize_p`: the primitive that converts a quantized array to floats.

It computes `operations.dequantize`. `backends.decide_dequantize` chooses the
backend of its lowering.

dequantize_p: (values, scale[, global_scale]) -> floats. Parameters: problem;
  target, the `targets.Request` of the enclosing contexts, or None; overlay, the
  tables of an enclosing `tuning`, or None.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.sharding import NamedSharding

from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes
from jaxplugin.operation import choice
from jaxplugin.operation import primitive
from jaxplugin.quantization import backends
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import xla
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
  given: tuple[jax.Array, ...] = ()
  if global_scale is not None:
    # A scalar stays a scalar, which kernels fuse.
    given = (operations.expand_global_scale(global_scale, values.ndim),)
  problem = problems.DequantizationProblem(
    shape=tuple(values.shape),
    dtype=np.dtype(values.dtype),
    format=format,
    axis=axis,
    out_dtype=dtype,
    global_shape=tuple(given[0].shape) if given else None,
  )
  if 0 in values.shape:  # Only XLA ops support empty arrays.
    return _by_operations(values, scale, *given, problem=problem)
  return _bind(
    [values, scale, *given],
    problem,
    target=targets.request(),
    overlay=resolution.overlay(),
  )


def _bind(
  operands: Sequence[jax.Array],
  problem: problems.DequantizationProblem,
  **params: Any,
) -> jax.Array:
  values, *given = operands
  for operand in given:  # The result varies over the same mesh axes as values.
    values = jax_private.varying_as(values, operand)
  return dequantize_p.bind(values, *given, problem=problem, **params)


def _by_operations(values, scale, global_scale=None, *, problem):
  return xla.dequantize(values, scale, global_scale, problem)


# Rules.


def _abstract_eval(values, *given, problem, target, overlay):
  del target, overlay
  mesh = explicit_axes.mesh_of([values, *given])
  if mesh is None:
    mesh = values.sharding.mesh
  spec = mesh_axes.partition_spec(explicit_axes.spec_of(values))
  return values.update(
    shape=problem.logical_shape,
    dtype=jax.dtypes.canonicalize_dtype(problem.out_dtype),
    weak_type=False,
    sharding=NamedSharding(mesh, spec),
  )


def _jvp(primals, tangents, *, problem, **params):
  """Returns the result of the primitive and the tangent of its XLA ops."""
  active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

  def function(*args):
    given = dict(zip(active, args, strict=True))
    merged = [given.get(i, x) for i, x in enumerate(primals)]
    return _by_operations(*merged, problem=problem)

  _, tangent = jax.jvp(
    function,
    tuple(primals[i] for i in active),
    tuple(tangents[i] for i in active),
  )
  return dequantize_p.bind(*primals, problem=problem, **params), tangent


def _batch(args, dims, *, problem, **params):
  if None in dims[:2]:
    function = functools.partial(_by_operations, problem=problem)
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
  problem = dataclasses.replace(
    problem,
    shape=tuple(values.shape),
    axis=problem.axis + 1,
    global_shape=tuple(given[0].shape) if given else None,
  )
  return dequantize_p.bind(values, scale, *given, problem=problem, **params), 0


def _emit(values, scale, global_scale=None, *, problem, decision, target):
  return choice.emit(
    *(backends.DEQUANTIZE_OPERATION, decision, problem, target),
    *(values, scale, global_scale),
  )


def _lower(context, *, problem, target, overlay):
  # The function of each device binds the primitive for its shard.
  bind = functools.partial(_bind, target=target, overlay=overlay)
  if context.mesh is not None or context.module.is_split:
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
