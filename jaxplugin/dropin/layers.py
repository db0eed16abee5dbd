# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul by one layer of stacked weights.

XLA:CPU passes whole arrays to a custom call, so it copies the slice that a
`lax.scan` over weights takes at each step. The kernels of the ragged dot take
the stack, and read only groups with rows. A layer is then the only group with
rows. If these kernels do not support a call, the layer is sliced.

The lowering decides: `layer_dot_p` has both computations as jaxprs. Derivatives
are those of the sliced layer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.core import targets
from jaxplugin.dot import epilogue
from jaxplugin.dot import offsets
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.dot.backends import cpu
from jaxplugin.jaxext import jax_private
from jaxplugin.ragged import api as ragged
from jaxplugin.runtime import cpu_library
from jaxplugin.runtime import lowering

layer_dot_p = extend_core.Primitive("block_scaled_dot_of_layer")
layer_dot_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _InPlace:
  """The jaxpr that reads the stack without a slice; None if not supported.

  It is wrapped, so that code which walks jaxprs counts the matmul once.
  """

  jaxpr: Any


def layer_dot(
  x: dot.Operand,
  stack: scaled_array.ScaledArray,
  layer: jax.Array,
  bias: jax.Array | None,
  *,
  out_sharding: Any = None,
  **options: Any,
) -> jax.Array:
  """Multiplies x (..., k) by stack[layer] (n, k), and adds bias[layer].

  Args:
    x: plain, or blocked along k.
    stack: (layers, n, k), blocked along k.
    layer: integer[], in range.
    bias: floats[layers, n], or None.
    out_sharding: see `block_scaled_dot`. If given, the layer is sliced, because
      a device's part of a stack may not be whole groups.
    **options: activation, preferred_element_type, precision, reduce_dtype and
      implementation, see `block_scaled_dot`.
  """
  if isinstance(x, scaled_array.ScaledArray) and x.offset is not None:
    x = x.dequantize()
  args = x, stack, layer, bias
  leaves, tree = jax.tree.flatten(args)
  if out_sharding is not None:
    return _sliced(*args, out_sharding=out_sharding, **options)
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    # Outside of a trace, each call would compile its own jaxprs.
    return _sliced(*args, **options)

  if stack.offset is not None:
    return _with_offset(*args, **options)

  def traced(function: Any) -> Any:
    def of_leaves(*leaves: Any) -> list[Any]:
      return [function(*jax.tree.unflatten(tree, leaves), **options)]

    return jax.make_jaxpr(of_leaves)(*leaves)

  in_place = traced(_in_place) if _has_groups(x, stack, **options) else None
  (result,) = layer_dot_p.bind(
    *leaves,
    sliced=traced(_sliced),
    in_place=_InPlace(in_place),
    target=targets.overriding_target(),
  )
  return result


def _sliced(x: Any, stack: Any, layer: Any, bias: Any, **options: Any) -> Any:
  """Slices the layer, and calls `block_scaled_dot`."""
  return dot.block_scaled_dot(
    x,
    stack[layer],
    dimension_numbers=(((x.ndim - 1,), (1,)), ((), ())),
    bias=None if bias is None else bias[layer],
    **options,
  )


def _with_offset(
  x: Any,
  stack: scaled_array.ScaledArray,
  layer: Any,
  bias: Any,
  *,
  activation: Any,
  preferred_element_type: Any,
  **options: Any,
) -> jax.Array:
  """Adds the offsets of one layer to the dot without them (`dot.offsets`)."""
  options |= {"activation": None, "preferred_element_type": jnp.float32}
  result = layer_dot(x, stack.without_offset(), layer, None, **options)

  def function(result: jax.Array, x: Any, own: Any, bias: Any) -> jax.Array:
    plain = x.dequantize() if isinstance(x, scaled_array.ScaledArray) else x
    with jax.named_scope(offsets.SCOPE):
      result = offsets.add_offsets(
        *(result, plain, own.scale, own.offset, own.format),
        implementation=options.get("implementation"),
      )
    if bias is not None:
      result += bias[layer].astype(jnp.float32)
    return epilogue.activate(result, activation).astype(preferred_element_type)

  return derivatives.partitioned(function, result)(
    result, x, stack[layer], bias
  )


def _has_groups(x: Any, stack: Any, *, implementation: Any, **_: Any) -> bool:
  """Whether the layers can be groups of a ragged dot."""
  if implementation not in (None, cpu.BACKEND.name):
    return False
  if isinstance(x, scaled_array.ScaledArray) and x.ndim != 2:
    return False  # cannot be reshaped to rows
  k = x.shape[-1]
  for side in (x, stack):
    if isinstance(side, scaled_array.ScaledArray) and (
      side.surrogate is not None
      or cpu_library.format_refusal(side.format.along(k), k) is not None
    ):
      return False
  scale = scaled_array.full_global_scale(stack)
  return scale is None or scale.shape[1:] == (1, 1)


def _in_place(
  x: Any, stack: Any, layer: Any, bias: Any, *, implementation: Any, **options
) -> Any:
  """Calls `ragged_dot` with all rows in the group `layer`."""
  del implementation  # the lowering uses this jaxpr only for the CPU kernels
  lead = x.shape[:-1]
  if not isinstance(x, scaled_array.ScaledArray):
    x = x.reshape(math.prod(lead), x.shape[-1])
  layers, n, _ = stack.shape
  sizes = jnp.where(jnp.arange(layers, dtype=jnp.int32) == layer, x.shape[0], 0)
  result = ragged.ragged_dot(x, stack, sizes, bias=bias, **options)
  return result.reshape(*lead, n)


# Rules.


def _impl(*args, sliced, in_place, target):
  del in_place, target
  return extend_core.jaxpr_as_fun(sliced)(*args)


def _abstract_eval(*args, sliced, in_place, target):
  del args, in_place, target
  return sliced.out_avals


def _jvp(primals, tangents, **params):
  result = layer_dot_p.bind(*primals, **params)
  moved = [
    i
    for i, t in enumerate(tangents)
    if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0
  ]
  if not moved:
    return result, [ad.Zero(jax.typeof(x)) for x in result]
  function = extend_core.jaxpr_as_fun(params["sliced"])

  def of_moved(*values):
    merged = list(primals)
    for i, value in zip(moved, values, strict=True):
      merged[i] = value
    return function(*merged)

  _, tangent = jax.jvp(
    of_moved, [primals[i] for i in moved], [tangents[i] for i in moved]
  )
  return result, tangent


def _batch(args, dims, *, sliced, in_place, target):
  def mapped(jaxpr):
    function = jax.vmap(extend_core.jaxpr_as_fun(jaxpr), tuple(dims))
    return jax.make_jaxpr(function)(*args)

  # If more than the rows of a plain x is mapped, the ragged dot is a loop.
  is_simple = all(dim is None for dim in dims[1:])
  stays = in_place.jaxpr is not None and is_simple
  result = layer_dot_p.bind(
    *args,
    sliced=mapped(sliced),
    in_place=_InPlace(mapped(in_place.jaxpr) if stays else None),
    target=target,
  )
  return result, [0] * len(result)


def _lower(ctx, *args, sliced, in_place, target):
  module = lowering.module_of(ctx)
  jaxpr = sliced
  if in_place.jaxpr is not None and module.kernels_refusal() is None:
    target = lowering.resolve_target(target, module.platforms[0])
    if cpu.missing(target) is None:
      jaxpr = in_place.jaxpr
  function = extend_core.jaxpr_as_fun(jaxpr)
  return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


layer_dot_p.def_impl(_impl)
layer_dot_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[layer_dot_p] = _jvp
batching.primitive_batchers[layer_dot_p] = _batch
jax_private.require_devices_during_lowering(layer_dot_p)
mlir.register_lowering(layer_dot_p, _lower)
