# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dequantize`: block-scaled arrays to floats, with one of `backends`.

dequantize_p: (values, scale[, global_scale]) -> floats. It computes
  `operations.dequantize`. Parameters: problem; target, the `targets.Request` of
  the enclosing contexts, or None; overlay, the tables of an enclosing `tuning`,
  or None.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding

from jaxplugin.arrays import quantized_weight, scaled_array
from jaxplugin.core import error_context, formats, targets
from jaxplugin.jaxext import jax_private, mesh_axes, tangents
from jaxplugin.operation import choice, primitive
from jaxplugin.quantization import arguments, backends, operations, problems
from jaxplugin.quantization.sharding import operation
from jaxplugin.tables import resolution

dequantize_p = extend_core.Primitive("block_dequantize")


def dequantize(
  x: scaled_array.ScaledArray | quantized_weight.QuantizedWeight,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Returns the floats that a block-scaled array stands for.

  The product is computed in f32 and cast once::

    result = cast(values * scale * global_scale)
    result = cast((code - zero_point) * scale)   (integer format.offset_dtype)
    result = cast(code * scale + minimum)        (floating format.offset_dtype)

  It is exact in f32 for MX formats. For NVFP4 the product with the global scale
  is rounded once. A NaN scale makes its whole block NaN.

  XLA:CPU flushes results below 2^-126 to zero. The C++ kernels do not; they
  dequantize the last axis in programs for one CPU.

  The global scale has a derivative. The argument of
  `quantize(..., derivative="straight_through")` has one too.

  Args:
    x: a `ScaledArray` in any layout, or a `QuantizedWeight`.
    dtype: f32, bf16, f16 or f64. JAX replaces f64 by f32 unless x64 is enabled.

  Returns:
    dtype[x.shape].

  Raises:
    TypeError: If x is neither of these classes, or dtype is another one.
    NotImplementedError: If differentiated with respect to values or scales.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.arange(32.0).reshape(1, 32), "mxfp8")
    >>> jp.dequantize(x_q)[0, -4:]
    Array([28., 28., 30., 32.], dtype=float32)
  """
  if isinstance(x, quantized_weight.QuantizedWeight):
    return x.restored(dequantize(x.array, dtype))
  if not isinstance(x, scaled_array.ScaledArray):
    raise TypeError(
      "dequantize: x must be a ScaledArray or a QuantizedWeight, got"
      f" {error_context.shown(x)}. Pass a result of jaxplugin.quantize or"
      " jaxplugin.quantize_params."
    )
  scaled_array.require_arrays("dequantize", "x", x)
  if x.surrogate is None:
    return _dequantize(x, arguments.float_dtype(dtype))
  return _dequantize_straight_through(arguments.float_dtype(dtype), x)


scaled_array.provide(dequantize=dequantize)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dequantize_straight_through(
  dtype: np.dtype, x: scaled_array.ScaledArray
) -> jax.Array:
  return _dequantize(x.without_surrogate(), dtype)


@functools.partial(_dequantize_straight_through.defjvp, symbolic_zeros=True)
def _dequantize_straight_through_jvp(
  dtype: np.dtype,
  primals: tuple[scaled_array.ScaledArray],
  given: tuple[scaled_array.ScaledArray],
) -> tuple[jax.Array, jax.Array]:
  (x,), (tangent,) = primals, given
  function = functools.partial(_dequantize, dtype=dtype)
  bare, bare_tangent = x.without_surrogate(), tangent.without_surrogate()
  result = _dequantize_straight_through(dtype, x)
  terms = [tangents.tangent_of(function, bare, bare_tangent)]
  if not tangents.is_constant(tangent.surrogate):
    surrogate = tangent.surrogate.astype(result.dtype)
    if mesh_axes.mesh_of([surrogate]) is not None:
      # An axis that cuts blocks is not in the type of the result.
      surrogate = mesh_axes.reshard(surrogate, mesh_axes.spec_of(result))
    terms.append(surrogate)
  present = [term for term in terms if term is not None]
  return result, sum(present, start=jnp.zeros_like(result))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(x: scaled_array.ScaledArray, dtype: np.dtype) -> jax.Array:
  values, scale, offset = tangents.without_derivative(
    (x.values, x.scale, x.offset),
    "dequantize: quantized values and block scales have no derivative."
    " Differentiate with respect to the array before quantize(...,"
    ' derivative="straight_through"), or with respect to the global scale,'
    " with jax.lax.stop_gradient around values and scale",
  )
  if offset is not None:
    format = x.format.along(x.shape[x.axis])
    return dequantize_with_offset(
      values, scale, offset, format=format, axis=x.axis, dtype=dtype
    )
  x = scaled_array.replace(x, values=values, scale=scale, surrogate=None)
  x = x.to_floats().in_rows()
  if x.is_interleaved:
    x = x.pack()
  return dequantize_arrays(
    x.values, x.linear_scale(), x.global_scale, x.format, x.axis, dtype
  )


# `explain` finds this call in a traced function by its name.
@functools.partial(jax.jit, static_argnames=("format", "axis", "dtype"))
def dequantize_with_offset(
  values: jax.Array,
  scale: jax.Array,
  offset: jax.Array,
  *,
  format: formats.BlockFormat,
  axis: int,
  dtype: np.dtype,
) -> jax.Array:
  """Returns the floats of a format with zero points or minima."""
  with jax.named_scope(f"{format} to {dtype.name} by xla"):
    result = operations.dequantize_raw(
      values, scale, format, axis=axis, offset=offset
    )
    return result.astype(dtype)


# The primitive.


def dequantize_arrays(
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
    operands = (values, scale, *given)
    y = operations.dequantize(*operands, problem=problem)
    return jax_private.varying_as(y, *operands)
  return primitive.bind_problem(
    dequantize_p,
    [values, scale, *given],
    problem,
    target=targets.request(),
    overlay=resolution.overlay(),
  )


# Rules.


def _abstract_eval(values, *given, problem, target, overlay):
  del target, overlay
  sharding = None
  if (mesh := mesh_axes.mesh_of([values, *given])) is not None:
    spec = mesh_axes.partition_spec(mesh_axes.spec_of(values))
    sharding = NamedSharding(mesh, spec)
  dtype = jax.dtypes.canonicalize_dtype(problem.out_dtype)
  return primitive.result_type(values, problem.logical_shape, dtype, sharding)


def _jvp(primals, moved, *, problem, **params):
  """Returns the result of the primitive and the tangent of its XLA ops."""
  result = dequantize_p.bind(*primals, problem=problem, **params)
  tangent = tangents.tangent_of(
    lambda args: operations.dequantize(*args, problem=problem),
    list(primals),
    list(moved),
  )
  if tangent is None:
    tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
  return result, tangent


def _batch(args, dims, *, problem, **params):
  if None in dims[:2]:
    function = functools.partial(operations.dequantize, problem=problem)
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
  bind = functools.partial(
    primitive.bind_problem, dequantize_p, target=target, overlay=overlay
  )
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
