# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`block_scaled_dot_p`: the primitive, and its rules for JAX.

Operands are those of `call.Operands` that are present, in order. Parameters:

  config: `call.DotConfig`, everything about the call that is not an array.
  target: the `Target` of an enclosing `use_target`, or None.

The primitive keeps general dimension numbers, so batching only renumbers
dimensions: a side that is not mapped is not broadcast. (Of a side of which only
values or only scales are mapped, the other is.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import core
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.dot import backends
from jaxplugin.dot import call
from jaxplugin.dot import call_rules
from jaxplugin.dot import canonical
from jaxplugin.dot import reference
from jaxplugin.dot.autodiff import derivatives
from jaxplugin.dot.sharding import assigning
from jaxplugin.dot.sharding import partitioning
from jaxplugin.jaxext import jax_private
from jaxplugin.jaxext import mesh_axes
from jaxplugin.runtime import lowering

PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")

block_scaled_dot_p = extend_core.Primitive("block_scaled_dot")


def bind(
  operands: call.Operands,
  config: call.DotConfig,
  target: targets.Target | None,
) -> jax.Array:
  return block_scaled_dot_p.bind(
    *operands.flatten(), config=config, target=target
  )


@functools.partial(jax.jit, static_argnames=("config", "target"))
def _eager(*flat, config, target):
  return block_scaled_dot_p.bind(*flat, config=config, target=target)


def _impl(*flat, config, target):
  with jax.disable_jit(False):  # or `_eager` would come back here
    return _eager(*flat, config=config, target=target)


def _abstract_eval(*flat, config, target):
  del target
  operands = call.Operands.unflatten(config, flat)
  call_rules.validate(config, operands)
  shape = call.result_shape(config, operands)
  return operands.lhs.update(
    shape=shape,
    dtype=config.preferred_element_type,
    weak_type=False,
    sharding=_result_sharding(config, operands, flat, len(shape)),
  )


def _result_sharding(
  config: call.DotConfig,
  operands: call.Operands,
  flat: Sequence[core.ShapedArray],
  ndim: int,
) -> NamedSharding:
  """The result's sharding in its type (all of it under explicit axes only)."""
  mesh = next(
    (a.sharding.mesh for a in flat if not a.sharding.mesh.empty),
    operands.lhs.sharding.mesh,
  )
  spec: mesh_axes.Spec = ((),) * ndim
  if not mesh.empty:
    normalize = lambda x: mesh_axes.normalize_spec(x.sharding.spec, x.ndim)
    spec = assigning.result_spec(
      config,
      operands,
      normalize(operands.lhs),
      normalize(operands.rhs),
      mesh.shape,
    )
  return NamedSharding(mesh, mesh_axes.partition_spec(spec))


# Derivatives.


def _jvp(primals, tangents, *, config, target):
  return derivatives.jvp(
    functools.partial(bind, target=target), primals, tangents, config
  )


def _transpose(g, *flat, config, target):
  return derivatives.transpose(
    functools.partial(bind, target=target), g, flat, config
  )


# Batching.


def _shift(dims: call.Dims, by_dim: int) -> call.Dims:
  return tuple(d + by_dim for d in dims)


def _batch(args, dims, *, config, target):
  operands = call.Operands.unflatten(config, args)
  mapped = call.Operands.unflatten(config, dims)
  size = next(
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  )
  lhs_is_mapped, operands = _batch_side("lhs", operands, mapped, size)
  rhs_is_mapped, operands = _batch_side("rhs", operands, mapped, size)
  if not (lhs_is_mapped or rhs_is_mapped):
    return _batch_epilogue(operands, mapped, config, target, size)

  (lhs_k, rhs_k), (lhs_batch, rhs_batch) = config.dimension_numbers
  lhs_ndim = operands.lhs.ndim - lhs_is_mapped
  num_batch, num_m = len(lhs_batch), len(call.lhs_free(config, lhs_ndim))
  lhs_batch = _shift(lhs_batch, int(lhs_is_mapped))
  rhs_batch = _shift(rhs_batch, int(rhs_is_mapped))
  if lhs_is_mapped and rhs_is_mapped:
    lhs_batch, rhs_batch = (0, *lhs_batch), (0, *rhs_batch)
    position = 0
  else:
    # One side only: the mapped dimension joins its rows (or columns), and the
    # other side, a weight perhaps, stays as it is.
    position = num_batch if lhs_is_mapped else num_batch + num_m
  dimension_numbers = (
    (_shift(lhs_k, int(lhs_is_mapped)), _shift(rhs_k, int(rhs_is_mapped))),
    (lhs_batch, rhs_batch),
  )
  new_config = config.replace(
    dimension_numbers=dimension_numbers,
    lhs=_shift_axis(config.lhs, lhs_is_mapped),
    rhs=_shift_axis(config.rhs, rhs_is_mapped),
  )
  ndim = len(call.result_shape(new_config, operands)) - 1
  operands = operands._replace(
    **_batched_epilogue_operands(operands, mapped, position, ndim)
  )
  return bind(operands, new_config, target), position


def _batch_side(
  side: str, operands: call.Operands, mapped: call.Operands, size: int
) -> tuple[bool, call.Operands]:
  """Moves the mapped dimension of values and scale to the front."""
  names = [side]
  if getattr(operands, f"{side}_scale") is not None:
    names.append(f"{side}_scale")
  if all(getattr(mapped, name) is None for name in names):
    return False, operands
  return True, operands._replace(
    **{
      name: batching.bdim_at_front(
        getattr(operands, name), getattr(mapped, name), size
      )
      for name in names
    }
  )


def _shift_axis(operand: call.OperandConfig, is_mapped: bool):
  if operand.axis is None or not is_mapped:
    return operand
  return call.OperandConfig(
    format=operand.format,
    axis=operand.axis + 1,
    scale_layout=operand.scale_layout,
  )


def _batched_epilogue_operands(
  operands: call.Operands, mapped: call.Operands, position: int, ndim: int
) -> dict[str, jax.Array]:
  """Gives the epilogue's operands the result's new dimension at `position`."""
  changes = {}
  for name in ("global_scale", "global_power", "bias", "residual"):
    operand, dim = getattr(operands, name), getattr(mapped, name)
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
  return changes


def _batch_epilogue(
  operands: call.Operands,
  mapped: call.Operands,
  config: call.DotConfig,
  target: targets.Target | None,
  size: int,
) -> tuple[jax.Array, int]:
  """Neither side is mapped: one dot in f32, then the epilogue of each row."""
  result = bind(
    call.bare_operands(operands),
    call.bare_config(config),
    target,
  )
  changes = _batched_epilogue_operands(operands, mapped, 0, result.ndim)
  result = jnp.broadcast_to(result, (size, *result.shape))
  operands = operands._replace(**changes)
  return reference.apply_epilogue(result, operands, config), 0


# Lowering.


def _lower(ctx, *flat, config, target, platform=None):
  platform = platform or ctx.module_context.platforms[0]
  target = lowering.resolve_target(target, platform)
  is_export = ctx.module_context.lowering_parameters.for_export
  # A partitioner's callback cannot be exported.
  is_split = not is_export and lowering.is_partitioned(ctx)
  unportable = None
  if is_export and config.implementation is None:
    # Where the module is loaded, the libraries need not be; and jax.export
    # does not take calls whose stability nobody guarantees.
    unportable = decisions.Unsupported("jax.export needs a portable module")
  elif is_split and lowering.is_partly_manual_under_gspmd(ctx):
    # The process would abort, in JAX's callback as on a kernel's call.
    is_split = False
    unportable = decisions.Unsupported(
      "inside a shard_map over some axes needs Shardy"
    )

  def local(operands, config):
    problem = call.problem_of(config, operands)
    decision = backends.choose(
      problem, target, config.implementation, unportable=unportable
    )
    return backends.emit(decision.implementation, operands, config, target)

  def function(*flat):
    operands = call.Operands.unflatten(config, flat)
    if not is_split or not partitioning.can_partition(config, operands):
      return local(operands, config)
    # The partitioner traces `local_dot` again for each device's share.
    operands, bytewise = canonical.with_bytes(operands, config)
    exact, operands = partitioning.with_exact_scales(bytewise, operands)
    parts = partitioning.to_bytes(exact, operands)
    abstract = functools.partial(bind, target=target)
    return partitioning.partitioned(abstract, local, exact)(*parts)

  out = mlir.lower_fun(function, multiple_results=False)(ctx, *flat)
  return [
    jax_private.lower_with_sharding_in_types(ctx, out[0], ctx.avals_out[0])
  ]


block_scaled_dot_p.def_impl(_impl)
block_scaled_dot_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[block_scaled_dot_p] = _jvp
ad.primitive_transposes[block_scaled_dot_p] = _transpose
batching.primitive_batchers[block_scaled_dot_p] = _batch
jax_private.require_devices_during_lowering(block_scaled_dot_p)
mlir.register_lowering(block_scaled_dot_p, _lower)
for _platform in PLATFORMS:
  mlir.register_lowering(
    block_scaled_dot_p,
    functools.partial(_lower, platform=_platform),
    platform=_platform,
  )
