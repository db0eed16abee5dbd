# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot_p`: the primitive, and its rules for JAX.

Its operands are the arrays of a `Call`, in the order of its `ARRAYS`.
Parameters:

  call: the `Call.form`, everything about the call that is not an array.
  target: the `Target` of an enclosing `use_target`, or None.

The primitive keeps general dimension numbers, so batching only renumbers
dimensions: a side that is not mapped is not broadcast. (Of a side of which only
values or only scales are mapped, the other is.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import calls
from jaxplugin.dot import epilogue
from jaxplugin.dot import sides
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.dot.plugins import registry
from jaxplugin.dot.sharding import explicit
from jaxplugin.dot.sharding import per_device
from jaxplugin.jaxext import explicit_axes
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import split
from jaxplugin.runtime import exporting
from jaxplugin.runtime import fingerprints
from jaxplugin.runtime import lowering
from jaxplugin.tables import ranks
from jaxplugin.tables import resolution

block_scaled_dot_p = extend_core.Primitive("block_scaled_dot")


def bind(call: calls.Call, target: targets.Target | None) -> jax.Array:
  """The result of a call whose rules were checked (`rules`)."""
  return block_scaled_dot_p.bind(
    *call.flatten(), call=call.form(), target=target
  )


def _abstract_eval(*flat, call, target):
  del target
  call = call.filled(flat)
  return call.lhs.values.update(
    shape=call.shape,
    dtype=call.preferred_element_type,
    weak_type=False,
    sharding=explicit.result_sharding(call),
  )


# Derivatives.


def _jvp(primals, tangents, *, call, target):
  return derivatives.jvp(
    functools.partial(bind, target=target),
    call.filled(primals),
    call.named(tangents),
  )


def _transpose(g, *flat, call, target):
  return derivatives.transpose(
    functools.partial(bind, target=target), g, flat, call
  )


# Batching.


def _batch(args, dims, *, call, target):
  form, call = call, call.filled(args)
  mapped = form.named(dims)
  size = next(
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  )
  lhs_is_mapped, lhs = _batch_side(call.lhs, mapped, size)
  rhs_is_mapped, rhs = _batch_side(call.rhs, mapped, size)
  if not (lhs_is_mapped or rhs_is_mapped):
    return _batch_epilogue(call, mapped, target, size)

  position = 0
  if lhs_is_mapped and rhs_is_mapped:
    lhs = lhs.replace(batch=(0, *lhs.batch))
    rhs = rhs.replace(batch=(0, *rhs.batch))
  elif lhs_is_mapped:
    # One side only: the mapped dimension joins its rows (or columns), and the
    # other side, a weight perhaps, stays as it is.
    position = len(lhs.batch)
  else:
    position = len(lhs.batch) + len(lhs.free)
  call = call.replace(lhs=lhs, rhs=rhs)
  if call.out_sharding is not None:
    # What is mapped keeps its sharding, which all that are mapped share.
    side = lhs if lhs_is_mapped else rhs
    axes = jax.typeof(side.values).sharding.spec[0]
    spec = list(call.out_sharding.spec)
    spec.insert(position, axes)
    sharding = call.out_sharding.update(spec=PartitionSpec(*spec))
    call = call.replace(out_sharding=sharding)
  ndim = len(call.shape) - 1
  changes = _batched_epilogue(call, mapped, position, ndim)
  return bind(call.replace(**changes), target), position


def _batch_side(
  side: sides.Side, mapped: Mapping[str, int | None], size: int
) -> tuple[bool, sides.Side]:
  """Moves the mapped dimension of values and scale to the front.

  What was a dimension before is one more then; the first one has no kind yet.
  """
  values_dim = mapped[side.name]
  scale_dim = mapped.get(f"{side.name}_scale")
  if values_dim is None and scale_dim is None:
    return False, side
  values = batching.bdim_at_front(side.values, values_dim, size)
  scale = side.scale
  if scale is not None:
    scale = batching.bdim_at_front(scale, scale_dim, size)
  return True, side.replace(
    values=values,
    scale=scale,
    axis=None if side.axis is None else side.axis + 1,
    contracting=tuple(d + 1 for d in side.contracting),
    batch=tuple(d + 1 for d in side.batch),
  )


def _batched_epilogue(
  call: calls.Call, mapped: Mapping[str, int | None], position: int, ndim: int
) -> dict[str, jax.Array]:
  """Gives the epilogue's operands the result's new dimension at `position`.

  Global scales of which the product is mapped are forgotten.
  """
  changes = {}
  for name in ("global_scale", "global_power", "bias", "residual"):
    operand, dim = getattr(call, name), mapped.get(name)
    if operand is None:
      continue
    # A global scale may be one number, whatever the rank of the result.
    is_scale = name in ("global_scale", "global_power")
    is_number = is_scale and operand.ndim == (dim is not None)
    if dim is None:
      changes[name] = (
        operand if is_number else jnp.expand_dims(operand, position)
      )
    elif is_number:
      shape = [1] * (ndim + 1)
      shape[position] = operand.shape[0]
      changes[name] = operand.reshape(shape)
    else:
      changes[name] = jnp.moveaxis(operand, dim, position)
  of_product = ("first_global_scale", "second_global_scale")
  if all(mapped.get(name) is None for name in of_product):
    changes |= {name: getattr(call, name) for name in of_product}
  return changes


def _batch_epilogue(
  call: calls.Call,
  mapped: Mapping[str, int | None],
  target: targets.Target | None,
  size: int,
) -> tuple[jax.Array, int]:
  """Neither side is mapped: one dot in f32, then the epilogue of each row."""
  result = bind(call.bare(), target)
  changes = _batched_epilogue(call, mapped, 0, result.ndim)
  result = jnp.broadcast_to(result, (size, *result.shape))
  return epilogue.apply(result, call.replace(**changes)), 0


# Lowering.


def _lower(ctx, *flat, call, target, platform=None):
  platform = platform or ctx.module_context.platforms[0]
  target = lowering.resolve_target(target, platform)
  ranks.check()
  module = lowering.module_of(ctx)
  lowering.require_shardy("block_scaled_dot", module)
  unportable = None
  if module.is_exported and call.implementation is None:
    # Where the module is loaded, the libraries need not be; and jax.export
    # does not take calls whose stability nobody guarantees.
    unportable = decisions.Unsupported(lowering.PORTABLE)

  def local(call):
    decision = backends.choose(
      call.problem(),
      target,
      call.implementation,
      unportable=unportable,
      overlay=call.overlay,
      for_export=exporting.current() is not None,
      is_of_layer=call.is_of_layer,
    )
    return backends.emit(decision, call, target)

  mesh = explicit_axes.mesh_of(ctx.avals_in)

  def function(*flat):
    whole = call.filled(flat)
    if mesh is not None or module.is_split:
      # A device's part of a layer is not its part of the stack, and NVFP4 of a
      # part has another global scale.
      whole = whole.without_origins_of_sides()
    # Each device's part is lowered as a call by itself.
    share = functools.partial(bind, target=target)
    if mesh is not None:
      return explicit.split_dot(share, whole, ctx.avals_out[0].sharding)
    if not module.is_split or not per_device.can_partition(whole):
      return local(whole)
    # Two global scales stay apart: only backends that cannot read both get
    # their product.
    exact = whole.with_bytes().with_linear_scales().with_scales_alone()
    parts = per_device.to_bytes(exact)
    form = exact.form()
    operation = per_device.operation(form, local, share)
    key = _key_of_shares(form, target)
    return split.partitioned(operation, key)(*parts.flatten())[0]

  out = mlir.lower_fun(function, multiple_results=False)(ctx, *flat)
  return [
    jax_private.lower_with_sharding_in_types(ctx, out[0], ctx.avals_out[0])
  ]


def _key_of_shares(form: calls.Call, target: targets.Target) -> str | None:
  """Names what decides how devices compute their shares of a call."""
  return fingerprints.of(
    block_scaled_dot_p.name,
    form.replace(overlay=None),
    target,
    registry.usable(),  # of which nothing is known: then there is no name
    resolution.decides(form.overlay),
  )


block_scaled_dot_p.def_impl(
  functools.partial(lowering.impl, block_scaled_dot_p)
)
block_scaled_dot_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[block_scaled_dot_p] = _jvp
ad.primitive_transposes[block_scaled_dot_p] = _transpose
batching.primitive_batchers[block_scaled_dot_p] = _batch
lowering.register_kernels(block_scaled_dot_p, _lower)
