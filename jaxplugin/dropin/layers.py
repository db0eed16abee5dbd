# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matmul by one layer of stacked weights.

XLA:CPU passes whole arrays to a custom call, so it copies the slice that a
`lax.scan` over weights takes at each step. The kernels of the ragged dot take
the stack, and read only groups with rows. A layer is then the only group with
rows. If these kernels do not support a call, the layer is sliced.

The lowering decides (`operation.alternatives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxplugin import dot
from jaxplugin.arrays import scaled_array
from jaxplugin.dot import epilogue
from jaxplugin.dot import offsets
from jaxplugin.dot import reference
from jaxplugin.dot.backends import cpu
from jaxplugin.operation import alternatives
from jaxplugin.operation import primitive
from jaxplugin.quantization import out_format
from jaxplugin.quantization import quantized_results
from jaxplugin.ragged import api as ragged
from jaxplugin.runtime import cpu_library


def layer_dot(
  x: dot.Operand,
  stack: scaled_array.ScaledArray,
  layer: jax.Array,
  bias: jax.Array | None,
  *,
  out_sharding: Any = None,
  out: out_format.OutFormat | None = None,
  **options: Any,
) -> Any:
  """Multiplies x (..., k) by stack[layer] (n, k), and adds bias[layer].

  Args:
    x: plain, or blocked along k.
    stack: (layers, n, k), blocked along k.
    layer: integer[], in range.
    bias: floats[layers, n], or None.
    out_sharding: see `block_scaled_dot`. If given, the layer is sliced, because
      a device's part of a stack may not be whole groups.
    out: how to quantize the result, or None.
    **options: activation, preferred_element_type, precision, reduce_dtype and
      implementation, see `block_scaled_dot`.
  """
  if isinstance(x, scaled_array.ScaledArray) and x.offset is not None:
    x = x.dequantize()
  if out is not None and out.derivative is not None:
    operands = x, stack, layer, bias
    source = layer_dot(*operands, out_sharding=out_sharding, **options)
    if options["activation"] is not None:  # as in `quantized_results.compute`
      return out_format.quantized("linear", source, out)
    operands, bare = lax.stop_gradient((operands, out))
    bare = dataclasses.replace(bare, derivative=None)
    result = layer_dot(
      *operands, out_sharding=out_sharding, out=bare, **options
    )
    return out_format.with_source(result, out, source)
  args = x, stack, layer, bias, out
  if out_sharding is not None:
    return _sliced(*args, out_sharding=out_sharding, **options)
  if not _has_groups(x, stack, **options):
    return _sliced(*args, **options)
  leaves, tree = jax.tree.flatten(args)
  forms = _Layer(
    tree=tree,
    options=tuple(options.items()),
    is_plain=not isinstance(x, scaled_array.ScaledArray) and out is None,
  )
  return alternatives.compute(forms, *leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer(alternatives.Forms):
  """The matmul by a slice of the stack, and by a group of the stack.

  Its operands are the leaves of x, stack, layer, bias and out.

  Attributes:
    tree: structure of these arguments.
    options: options of `layer_dot`.
    is_plain: whether x is a plain array, and so is the result.
  """

  tree: Any
  options: tuple[tuple[str, Any], ...]
  is_plain: bool

  @property
  def rows(self) -> frozenset[int]:
    return frozenset([0] if self.is_plain else ())

  def operations(self, *operands: Any) -> Any:
    args = jax.tree.unflatten(self.tree, operands)
    return _sliced(*args, **dict(self.options))

  def kernel(
    self, context: primitive.LoweringContext
  ) -> Callable[..., Any] | None:
    if cpu.missing(context.target) is not None:
      return None

    def function(*operands: Any) -> Any:
      args = jax.tree.unflatten(self.tree, operands)
      return _in_place(*args, **dict(self.options))

    return function


def _sliced(
  x: Any, stack: Any, layer: Any, bias: Any, out: Any, **options: Any
) -> Any:
  """Slices the layer, and calls `block_scaled_dot`."""
  return dot.block_scaled_dot(
    x,
    stack[layer],
    dimension_numbers=(((x.ndim - 1,), (1,)), ((), ())),
    bias=None if bias is None else bias[layer],
    out_format=out,
    **options,
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
  x: Any,
  stack: Any,
  layer: Any,
  bias: Any,
  out: Any,
  *,
  implementation: Any,
  **options: Any,
) -> Any:
  """Calls `ragged_dot` with all rows in the group `layer`."""
  del implementation  # the lowering uses this jaxpr only for the CPU kernels
  lead = x.shape[:-1]
  has_few_rows = math.prod(lead) <= offsets.MOST_ROWS
  is_by_ragged_dot = stack.offset is None or has_few_rows
  layers, n, _ = stack.shape
  of_ragged_dot = None
  if (
    out is not None
    and is_by_ragged_dot
    and not quantized_results.refusal((*lead, n), out)
  ):
    of_ragged_dot = dataclasses.replace(out, axis=-1)
  if not isinstance(x, scaled_array.ScaledArray):
    x = x.reshape(math.prod(lead), x.shape[-1])
  sizes = jnp.where(jnp.arange(layers, dtype=jnp.int32) == layer, x.shape[0], 0)
  if is_by_ragged_dot:
    result = ragged.ragged_dot(
      x, stack, sizes, bias=bias, out_format=of_ragged_dot, **options
    )
  else:
    result = _many_rows(x, stack, sizes, layer, bias, **options)
  if of_ragged_dot is None or out is None:
    result = result.reshape(*lead, n)
    return (
      result if out is None else out_format.quantized("linear", result, out)
    )
  array, *amax = result if out.returns_amax else (result,)
  to_rank = lambda leaf: leaf.reshape(*lead, leaf.shape[1])
  global_scale = array.global_scale
  if global_scale is not None:
    global_scale = global_scale.reshape((1,) * (len(lead) + 1))
  array = scaled_array.ScaledArray(
    to_rank(array.values), to_rank(array.scale), global_scale, array.format
  )
  return (array, *amax) if amax else array


def _many_rows(
  x: Any,
  stack: scaled_array.ScaledArray,
  sizes: jax.Array,
  layer: Any,
  bias: Any,
  *,
  activation: Any,
  preferred_element_type: Any,
  **options: Any,
) -> jax.Array:
  """Adds the offsets of a layer by XLA's dot."""
  result = ragged.ragged_dot(x, stack.without_offset(), sizes, **options)
  own = stack[layer]
  plain = x.dequantize() if isinstance(x, scaled_array.ScaledArray) else x
  block_size = own.format.along(plain.shape[1]).block_size
  with jax.named_scope(offsets.SCOPE):
    result += reference.plain_dot(
      offsets.block_sums(plain, 1, block_size),
      offsets.terms(own.scale, own.offset, own.format),
      (((1,), (1,)), ((), ())),
      jnp.float32,
    )
  if bias is not None:
    result += bias[layer].astype(jnp.float32)
  return epilogue.activate(result, activation).astype(preferred_element_type)
