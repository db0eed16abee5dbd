# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of arrays whose blocks have zero points or minima.

A dequantized value is `stored * scale + term`, where the term is one f32 for
each block. So the dot with `x` is the dot of stored values and scales, which
every backend computes, plus a second dot::

    dot(sums of x over the blocks, terms)

The second dot has one product where the first has a block. XLA computes it, or
for few rows on a CPU a kernel, which does not write the terms to memory.

add_offsets_p: (result, x, scale, offset) -> f32. Parameters: format, the format
  of the weight; target, the target of an enclosing `use_target`, or None.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad

from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.dot import arguments
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import reference
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.jaxext import tangents
from jaxplugin.operation import primitive
from jaxplugin.runtime import cpu_library

SCOPE: Final = "block_offsets"  # named scope of the second dot
_F32: Final = np.dtype(np.float32)


def terms(
  scale: jax.Array, offset: jax.Array, format: formats.BlockFormat
) -> jax.Array:
  """Returns f32 terms such that values are `stored * scale + term`."""
  scale, offset = tangents.without_derivative(
    (scale, offset),
    f"{sides.who()}: scales and offsets of quantized operands have no"
    f" derivative. {derivatives.REMEDY}",
  )
  scale, offset = scale.astype(jnp.float32), offset.astype(jnp.float32)
  if format.has_zero_points:
    return (format.code_offset - offset) * scale
  return format.code_offset * scale + offset


def block_sums(x: jax.Array, axis: int, block_size: int) -> jax.Array:
  """Returns f32 sums over blocks of `axis`, the last of which may be short."""
  count = extents.divide_up(x.shape[axis], block_size)
  x = extents.pad_axis(x.astype(jnp.float32), axis, count * block_size)
  shape = (*x.shape[:axis], count, block_size, *x.shape[axis + 1 :])
  return jnp.sum(x.reshape(shape), axis=axis + 1)


def with_offset(
  call: calls.DotCall,
  offset: arguments.Offset,
  bind: Callable[[calls.DotCall], jax.Array],
) -> jax.Array:
  """Computes a call of which one operand has an offset.

  Args:
    call: a checked call of the operands without the offset.
    offset: the offset.
    bind: computes a call.
  """
  result = bind(call.bare())
  form = call.form()

  def function(
    result: jax.Array, offset: arguments.Offset, *arrays: jax.Array
  ) -> jax.Array:
    call = form.filled(arrays)
    with jax.named_scope(SCOPE):
      both = _added(result, call, offset)
    return epilogue.apply(both, call)

  return derivatives.partitioned(function, result)(
    result, offset, *call.flatten()
  )


def _added(
  result: jax.Array, call: calls.DotCall, offset: arguments.Offset
) -> jax.Array:
  """Returns the sum of `result` and the second dot."""
  k = call.lhs.values.ndim - 1
  if (
    offset.name == "rhs"
    and call.dimension_numbers == (((k,), (1,)), ((), ()))
    and call.rhs.values.ndim == 2
  ):
    x = call.lhs.in_usual_order().dequantized()
    scale = call.rhs.linear_scale()
    return add_offsets(
      *(result, x, scale, offset.array),
      offset.format,
      implementation=call.implementation,
    )
  lhs, rhs = operands(call, offset)
  return result + reference.plain_dot(lhs, rhs, call.dimension_numbers, _F32)


def operands(
  call: Any, offset: arguments.Offset
) -> tuple[jax.Array, jax.Array]:
  """Returns lhs and rhs of the second dot in f32, without global scales.

  Args:
    call: a `DotCall` or a `RaggedDotCall` of operands without the offset.
    offset: the offset of one of them.
  """
  side, other = call.lhs, call.rhs
  if offset.name == "rhs":
    side, other = other, side
  position = side.blocked_position
  assert side.format is not None and position is not None
  axis = other.contracting[position]
  both = {
    side.name: terms(side.linear_scale(), offset.array, offset.format),
    other.name: block_sums(
      other.in_usual_order().dequantized(), axis, side.format.block_size
    ),
  }
  return both["lhs"], both["rhs"]


# The primitive of the second dot.

add_offsets_p = extend_core.Primitive("add_block_offsets")
_CPU: Final = "cpu"
# From here on XLA's dot of two matrices is faster (Zen 5, 2026-11).
_MOST_ROWS: Final = 8


def add_offsets(
  result: jax.Array,
  x: jax.Array,
  scale: jax.Array,
  offset: jax.Array,
  format: formats.BlockFormat,
  *,
  implementation: str | None,
) -> jax.Array:
  """Returns f32[..., n]: `result` plus the dot of block sums and terms.

  Args:
    result: f32[..., n].
    x: f32, bf16 or f16[..., k].
    scale, offset: [n, blocks], of a weight.
    format: the format of the weight.
    implementation: the backend of the first dot; None chooses.
  """
  arrays = (result, x, scale, offset)
  is_empty = any(0 in array.shape for array in arrays)
  if is_empty or implementation not in (None, _CPU):
    return _by_xla(*arrays, format=format)
  target = targets.overriding_target()
  return add_offsets_p.bind(*arrays, format=format, target=target)


def _by_xla(
  result: jax.Array,
  x: jax.Array,
  scale: jax.Array,
  offset: jax.Array,
  *,
  format: formats.BlockFormat,
  target: targets.Target | None = None,
) -> jax.Array:
  del target
  k = x.ndim - 1
  sums = block_sums(x, k, format.along(x.shape[k]).block_size)
  numbers = (((k,), (1,)), ((), ()))
  second = terms(scale, offset, format)
  return result + reference.plain_dot(sums, second, numbers, _F32)


def _by_kernel(
  result: jax.Array,
  x: jax.Array,
  scale: jax.Array,
  offset: jax.Array,
  *,
  format: formats.BlockFormat,
) -> jax.Array:
  cpu_library.register()
  rows = result.reshape(-1, result.shape[-1])
  call = jax.ffi.ffi_call(
    "jaxplugin_add_offsets", jax.ShapeDtypeStruct(rows.shape, _F32)
  )
  k = x.shape[-1]
  return call(
    rows,
    x.reshape(-1, k),
    scale,
    offset,
    block_size=np.int64(format.along(k).block_size),
    code_offset=np.int64(format.code_offset),
    isa=np.int64(0),
  ).reshape(result.shape)


def _abstract_eval(*avals: Any, **params: Any) -> Any:
  function = jax.jit(functools.partial(_by_xla, **params))
  return function.trace(*avals).jaxpr.out_avals[0]


def _jvp(
  primals: Sequence[Any], tangents_in: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
  active = [i for i, t in enumerate(tangents_in) if type(t) is not ad.Zero]

  def function(*arrays: jax.Array) -> jax.Array:
    given = dict(zip(active, arrays, strict=True))
    return _by_xla(*(given.get(i, x) for i, x in enumerate(primals)), **params)

  _, tangent = jax.jvp(
    function,
    tuple(primals[i] for i in active),
    tuple(tangents_in[i] for i in active),
  )
  return add_offsets_p.bind(*primals, **params), tangent


def _transpose(
  g: jax.Array, *arrays: Any, **params: Any
) -> list[jax.Array | None]:
  """Returns the cotangents of XLA's operations."""
  wanted = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]

  def function(*linear: jax.Array) -> jax.Array:
    given = dict(zip(wanted, linear, strict=True))
    return _by_xla(*(given.get(i, x) for i, x in enumerate(arrays)), **params)

  transposed = jax.linear_transpose(function, *(arrays[i].aval for i in wanted))
  cotangents = dict(zip(wanted, transposed(g), strict=True))
  return [cotangents.get(i) for i in range(len(arrays))]


def _batch(
  arrays: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[jax.Array, int]:
  first, second, *weight = dims
  if first is not None and second is not None and weight == [None, None]:
    result, x = (
      jnp.moveaxis(array, dim, 0)
      for array, dim in zip(arrays, (first, second), strict=False)
    )
    return add_offsets_p.bind(result, x, *arrays[2:], **params), 0
  function = functools.partial(_by_xla, **params)
  return jax.vmap(function, in_axes=tuple(dims))(*arrays), 0


def _lower(
  context: primitive.LoweringContext,
  *,
  format: formats.BlockFormat,
  target: targets.Target | None,
) -> Callable[..., jax.Array]:
  del target
  shapes = [aval.shape for aval in context.avals_in]
  may_call_kernel = (
    context.module.kernels_refusal() is None
    and context.target.platform == _CPU
    and context.target.cpu_kernels is not None
    and extents.are_static(itertools.chain(*shapes))
    and math.prod(shapes[0][:-1]) <= _MOST_ROWS
  )
  function = _by_kernel if may_call_kernel else _by_xla
  return functools.partial(function, format=format)


primitive.register(
  add_offsets_p,
  who=sides.WHO,
  abstract_eval=_abstract_eval,
  batch=_batch,
  jvp=_jvp,
  lower=_lower,
)
ad.primitive_transposes[add_offsets_p] = _transpose
