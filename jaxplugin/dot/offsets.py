# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of arrays whose blocks have zero points or minima.

A dequantized value is `stored * scale + term`, where the term is one f32 for
each block. So the dot with `x` is the dot of stored values and scales, which
every backend computes, plus a second dot::

    dot(sums of x over the blocks, terms)

The second dot has one product where the first has a block. XLA computes it, or
the CPU's kernel of the first dot, which does not write the terms to memory.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, formats
from jaxplugin.dot import (
  arguments,
  backends,
  calls,
  derivatives,
  epilogue,
  sides,
)
from jaxplugin.dot.backends import cpu, xla
from jaxplugin.jaxext import mesh_axes, tangents
from jaxplugin.operation import alternatives, primitive

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
  count = blocking.divide_up(x.shape[axis], block_size)
  x = blocking.pad_axis(x.astype(jnp.float32), axis, count * block_size)
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
    bind: computes a call.
  """
  bare = call.bare()
  total = _DotWithOffset(
    call=bare.form(),
    side=offset.name,
    format=offset.format,
    backends=backends,
    bind=bind,
  )
  operands = (*bare.flatten(), offset.array)
  if _may_have_kernel(call, offset):
    result = alternatives.compute(total, *operands)
  else:
    result = total.operations(*operands)
  form = call.form()

  def function(result: jax.Array, *arrays: jax.Array) -> jax.Array:
    return epilogue.apply(result, form.filled(arrays))

  sharding = mesh_axes.explicit_sharding_of(result)
  return mesh_axes.automatic(function, sharding)(result, *call.flatten())


def _may_have_kernel(call: calls.DotCall, offset: arguments.Offset) -> bool:
  """Whether a kernel may add the offset on some device.

  A swizzled scale of lhs has padded rows, which cannot be merged.
  """
  k = call.lhs.values.ndim - 1
  return (
    offset.name == "rhs"
    and call.dimension_numbers == (((k,), (1,)), ((), ()))
    and call.rhs.values.ndim == 2
    and call.lhs.scale_layout == layouts.LINEAR
    and call.implementation in (None, cpu.BACKEND.name)
    and mesh_axes.mesh_of([call.lhs.values]) is None
    and not any(0 in array.shape for array in call.flatten())
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumWithOffset(alternatives.Forms):
  """The sum of both dots, without an epilogue.

  Its operands are the arrays of the call and the offset.

  Attributes:
    call: form of the call.
    side, format: as in `arguments.Offset`.
    backends: the package of the operation's backends: `choose_for`, `emit`.
  """

  call: Any
  side: str
  format: formats.BlockFormat
  backends: Any

  def kernel_call(self, arrays: Sequence[Any]) -> Any:
    """Returns the call whose kernel adds the offset."""
    return self.call.filled(arrays)

  def offset(self, array: Any) -> arguments.Offset:
    return arguments.Offset(name=self.side, format=self.format, array=array)

  def fused(self, *operands: Any) -> tuple[alternatives.FusedCall, list[Any]]:
    *arrays, offset = operands
    call = self.kernel_call(arrays)
    form = alternatives.FusedCall(call=call.form(), format=self.format)
    return form, [*call.flatten(), offset]

  @abc.abstractmethod
  def has_kernel(self, call: Any) -> bool:
    """Returns whether the CPU's kernel may compute the `kernel_call`."""

  def kernel(
    self, context: primitive.LoweringContext
  ) -> Callable[..., jax.Array] | None:
    call = self.kernel_call(context.avals_in[:-1])
    if not self.has_kernel(call):
      return None
    decision = self.backends.choose_for(call, context.target)
    if decision.implementation != cpu.BACKEND.name:
      return None
    (result,) = context.avals_out

    def function(*operands: jax.Array) -> jax.Array:
      *arrays, offset = operands
      total = self.backends.emit(
        decision,
        self.kernel_call(arrays),
        context.target,
        offset=(offset, self.format.code_offset),
      )
      return total.reshape(result.shape)

    return function


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DotWithOffset(SumWithOffset):
  """The sum for a `DotCall`; `bind` computes a call."""

  bind: Callable[[calls.DotCall], jax.Array]

  @property
  def rows(self) -> frozenset[int]:
    names = enumerate(self.call.arrays())
    return frozenset(i for i, x in names if x in ("lhs", "lhs_scale"))

  def operations(self, *operands: Any) -> jax.Array:
    # The second dot multiplies rows of floats, so the first one does too.
    call = self.call.filled(operands[:-1]).replace(fastest_precision=False)
    result = self.bind(call)

    def second(result: jax.Array, *operands: Any) -> jax.Array:
      *arrays, offset = operands
      call = self.call.filled(arrays)
      lhs, rhs = operands_of(call, self.offset(offset))
      numbers = call.dimension_numbers
      with jax.named_scope(SCOPE):
        return result + xla.plain_dot(lhs, rhs, numbers, _F32)

    sharding = mesh_axes.explicit_sharding_of(result)
    return mesh_axes.automatic(second, sharding)(result, *operands)

  def kernel_call(self, arrays: Sequence[Any]) -> calls.DotCall:
    # Rows are [m, k].
    call = self.call.filled(
      _as_rows(x) if i in self.rows else x for i, x in enumerate(arrays)
    )
    lhs = call.lhs
    axis = None if lhs.axis is None else 1
    lhs = dataclasses.replace(lhs, axis=axis, contracting=(1,), batch=())
    return call.replace(lhs=lhs).without_origins()

  def has_kernel(self, call: calls.DotCall) -> bool:
    problem = call.problem()
    is_turned = cpu.is_turned(problem.m, problem.n)
    return problem.sizes_are_static and not is_turned


def _as_rows(x: Any) -> Any:
  shape = math.prod(x.shape[:-1]), x.shape[-1]
  if isinstance(x, jax.core.ShapedArray):
    return x.update(shape=shape)
  return x.reshape(shape)


def operands_of(
  call: Any, offset: arguments.Offset
) -> tuple[jax.Array, jax.Array]:
  """Returns lhs and rhs of the second dot in f32, without global scales.

  Args:
    call: a `DotCall` or a `RaggedDotCall` of operands without the offset.
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
