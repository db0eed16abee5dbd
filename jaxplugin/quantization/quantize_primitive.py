# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_p`: the primitive that quantizes an array along its blockings.

A matmul and its gradients contract an operand along different dimensions, and
one read of the operand can quantize it for all of them. Each result has the
bits of `operations.quantize` along its dimension. `backends.decide` chooses the
backends.

quantize_p: (x, prologue operands...[, global_scale], key data...) -> (values,
  scale[, global_scale]) for each blocking[, amax][, sums][, sum]. The operands
  and the sum of a prologue are those of `prologues.Prologue`, amax is the
  largest finite magnitude of its result, and sums are its `column_sums`. A
  computed global scale is a result. A given
  global scale is f32[] for all blockings or f32[n], one for each. For a shard,
  partial amax values u32[n, maxima] may be given instead (`global_scales`).
  Each blocking with stochastic rounding has key data.
  Parameters: problem; target, the `targets.Request` of the enclosing contexts,
  or None; overlay, the tables of an enclosing `tuning`, or None.

If no result of a blocking is used, the blocking is dropped. Without a blocking
XLA ops compute the other results.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, partial_eval
from jax.sharding import NamedSharding

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking, formats, targets
from jaxplugin.jaxext import jax_private, mesh_axes
from jaxplugin.operation import logs, primitive
from jaxplugin.quantization import backends, problems, prologues
from jaxplugin.quantization.backends import xla
from jaxplugin.quantization.sharding import assignment, global_scales, operation
from jaxplugin.tables import resolution

# Values, scale, and global scale or None.
Quantized = tuple[jax.Array, jax.Array, jax.Array | None]

quantize_p = extend_core.Primitive("block_quantize")
quantize_p.multiple_results = True


def produce(
  x: jax.Array,
  global_scale: jax.Array | None,
  *,
  blockings: Sequence[blocking.Blocking],
  options: Sequence[problems.RecipeOptions] | None = None,
  keys: Sequence[jax.Array | None] | None = None,
  packed: bool,
  for_products: bool = False,
  prologue: prologues.Prologue | None = None,
  more: Mapping[str, jax.Array] = types.MappingProxyType({}),
  **fields: Any,
) -> tuple[
  list[Quantized], jax.Array | None, jax.Array | None, jax.Array | None
]:
  """Quantizes x, or the result of a prologue, with a chosen backend.

  Args:
    x: f32, bf16, f16 or f64 array.
    global_scale: f32[] for all blockings, f32[n] for each, or None.
    options: options of each blocking. `keys` sets the fields about keys.
    keys: key or None for each blocking. None rounds to nearest.
    more: the prologue's operands by name, of the types that it says.
    blockings, packed, for_products, prologue, **fields: of the
      `QuantizationProblem`.

  Returns:
    The results of each blocking, and the amax, the column sums and the
    prologue's sum, each or None.
  """
  count = len(blockings)
  with_keys = [
    _with_key(e, key)
    for e, key in zip(
      options or [problems.NO_OPTIONS] * count,
      keys or [None] * count,
      strict=True,
    )
  ]
  if x.dtype not in formats.FLOAT_DTYPES:
    x = x.astype(jnp.float32)
  shape = x.shape if prologue is None else prologue.shape_of(x.shape)
  problem = problems.QuantizationProblem(
    shape=tuple(shape),
    dtype=np.dtype(x.dtype),
    blockings=tuple(blockings),
    options=tuple(e for e, _ in with_keys),
    has_global_scale=global_scale is not None,
    packed=packed,
    for_products=for_products,
    prologue=prologue,
    **fields,
  )
  given = [global_scale, *(data for _, data in with_keys)]
  operands = [
    x,
    *([] if prologue is None else [more[name] for name in prologue.operands]),
    *(operand for operand in given if operand is not None),
  ]
  if 0 in problem.shape:  # Only XLA ops support empty arrays.
    # The jnp.where of an empty array forgets over which mesh axes it varies.
    results = [
      jax_private.varying_as(y, *operands)
      for y in quantize_by_operations(*operands, problem=problem)
    ]
  else:
    results = primitive.bind_problem(
      quantize_p,
      operands,
      problem,
      target=targets.request(),
      overlay=resolution.overlay(),
    )
  size = problem.results_each
  each = [results[i * size :][:size] for i in range(count)]
  quantized = [
    (r[0], r[1], r[2] if size == 3 else _own_scales(global_scale, i, 1))
    for i, r in enumerate(each)
  ]
  rest = iter(results[count * size :])
  are_given = problem.returns_amax, problem.column_sums is not None
  amax, sums, total = (
    next(rest) if is_given else None
    for is_given in (*are_given, problem.returns_sum)
  )
  return quantized, amax, sums, total


def quantize_in_whole_tiles(
  x: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  target: targets.Target,
) -> tuple[jax.Array, jax.Array]:
  """Quantizes to values and scale that cuDNN reads: padded and swizzled.

  The codes are the same as those of `quantize` along the last axis. Padding
  rows are zero.

  Args:
    x: f32, bf16 or f16[..., rows, k].
    global_scale: f32[] if the format has one; else None.
    format, target: those of the dot that reads the result.

  Returns:
    Values, format.array_dtype[..., rows padded to 128, k], and scale,
    format.scale_dtype[..., rows padded to 128, k / block size padded to 4] in
    the layout "swizzled_128x4".
  """
  problem = problems.QuantizationProblem.along(
    x.ndim - 1,
    shape=tuple(x.shape),
    dtype=np.dtype(x.dtype),
    format=format,
    has_global_scale=global_scale is not None,
    scale_layout=layouts.SWIZZLED,
    pads_values=True,
  )
  operands = [x] if global_scale is None else [x, global_scale]
  request = targets.Request(target=target, options=target.options)
  values, scale = primitive.bind_problem(
    quantize_p, operands, problem, target=request, overlay=None
  )
  return values, scale


def _with_key(
  options: problems.RecipeOptions, key: jax.Array | None
) -> tuple[problems.RecipeOptions, jax.Array | None]:
  """Returns options with the fields about a key set, and the key's data."""
  if key is None:
    return options, None
  partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
  options = dataclasses.replace(
    options,
    is_stochastic=True,
    key_impl=jax.random.key_impl(key),
    is_partitionable=bool(partitionable),
  )
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.key_data(key)
  return options, key


# `explain` finds this call in a traced function by its name.
@functools.partial(jax.jit, static_argnames="problem")
def quantize_by_operations(*args, problem):
  """Computes the results of `quantize_p` with XLA ops."""
  with jax.named_scope(logs.scope(problem, "xla")):
    args, problem, rest = xla.after_prologue(args, problem)
    x, _, global_scale, keys = _operands(args, problem)
    singles = zip(problem.singles(), keys, strict=True)
    results = [
      leaf
      for i, (single, key) in enumerate(singles)
      for leaf in xla.quantize(
        x, _own_scales(global_scale, i, 1), single, keys=[key]
      )
    ]
  return [*results, *rest]


def _operands(
  args: Sequence[jax.Array], problem: problems.QuantizationProblem
) -> tuple[
  jax.Array, dict[str, jax.Array], jax.Array | None, list[jax.Array | None]
]:
  """Returns x, the prologue's operands, and the scale and keys or None."""
  x, more, scales, given = problem.split_operands(args)
  given_keys = iter(given)
  keys = [
    next(given_keys) if options.is_stochastic else None
    for options in problem.options
  ]
  return x, more, scales[0] if scales else None, keys


def _own_scales(
  global_scale: jax.Array | None, start: int, size: int
) -> jax.Array | None:
  """Returns the global scales of blockings `start` to `start + size`."""
  if global_scale is None or global_scale.ndim == 0:
    return global_scale
  return global_scale[start] if size == 1 else global_scale[start:][:size]


# Rules.


def _abstract_eval(x, *given, problem, target, overlay):
  del target, overlay
  types = problem.result_types()
  shardings: list[NamedSharding | None] = [None] * len(types)
  if (mesh := mesh_axes.mesh_of([x, *given])) is not None:
    shardings = [
      NamedSharding(mesh, mesh_axes.partition_spec(spec))
      for spec in assignment.quantize_specs(problem, x, mesh)
    ]
  return [
    primitive.result_type(x, shape, dtype, sharding)
    for (shape, dtype), sharding in zip(types, shardings, strict=True)
  ]


def _jvp(primals, tangents, *, problem, **params):
  """Returns zero tangents of codes, and the tangent of a prologue's sum.

  Operands of a gradient come from `tangents.without_derivative`.
  """
  results = quantize_p.bind(*primals, problem=problem, **params)
  found = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
  prologue = problem.prologue
  if prologue is not None and prologue.has_residual and not prologue.gradient:
    x, more, _, _ = problem.split_operands(tangents)
    found[-1] = ad.add_tangents(x, more["residual"])
  return results, found


def _separately(*args, problem, **params):
  """Computes `quantize_p` after its prologue, or without one by XLA ops."""
  if problem.prologue is None:
    return quantize_by_operations(*args, problem=problem)
  args, problem, rest = xla.after_prologue(args, problem)
  if not problem.blockings:
    return rest
  return [*quantize_p.bind(*args, problem=problem, **params), *rest]


def _batch(args, dims, *, problem, **params):
  _, more, _, _ = problem.split_operands(dims)
  rows = [0, *(i for i, n in enumerate(more, 1) if n in prologues.OF_X)]
  others = set(range(len(args))) - {*rows}
  # Kernels do not support an amax, a global scale, a key, or a norm's weight
  # for each batch entry.
  if (
    problem.returns_amax
    or problem.computes_global_scale
    or problem.num_keys
    or any(dims[i] is not None for i in others)
  ):
    function = functools.partial(_separately, problem=problem, **params)
    results = jax.vmap(function, in_axes=tuple(dims))(*args)
  else:
    size = next(args[i].shape[dims[i]] for i in rows if dims[i] is not None)
    moved = [
      batching.bdim_at_front(x, dims[i], size) if i in rows else x
      for i, x in enumerate(args)
    ]
    results = quantize_p.bind(
      *moved, problem=problem.under_leading_dimension(size), **params
    )
  return results, (0,) * len(results)


def _without_unused(
  used_outputs: Sequence[bool], *args: Any
) -> tuple[list[bool], Any]:
  """Drops blockings whose results are unused, in dead code elimination.

  Args:
    *args: the equation; in jax 0.12 the live inputs come before it.

  Returns:
    Whether each input is used, and the equation or None.
  """
  eqn = args[-1]
  problem = eqn.params["problem"]
  at = problem.results_each * len(problem.blockings)
  for name, absent in (("returns_amax", False), ("column_sums", None)):
    if getattr(problem, name) == absent:
      continue
    if used_outputs[at]:
      at += 1
      continue
    problem = dataclasses.replace(problem, **{name: absent})
    used_outputs = [*used_outputs[:at], *used_outputs[at + 1 :]]
    eqn = eqn.replace(
      outvars=[*eqn.outvars[:at], *eqn.outvars[at + 1 :]],
      params=eqn.params | {"problem": problem},
    )
  has_columns = problem.column_sums is not None
  sums = eqn.outvars[-1:] if problem.returns_sum and used_outputs[-1] else []
  size, count = problem.results_each, len(problem.blockings)
  kept = [i for i in range(count) if any(used_outputs[i * size :][:size])]
  x, more, scales, _ = problem.split_operands(eqn.invars)
  has_scale_each = any(scale.aval.ndim for scale in scales)
  if problem.returns_amax or (kept and has_scale_each):
    kept = list(range(count))
  if not kept and not sums and not has_columns:
    return [False] * len(eqn.invars), None
  is_used = [True] * len(eqn.invars)
  is_gradient = problem.prologue is not None and problem.prologue.gradient
  if not kept and not has_columns and not is_gradient:
    pair = [x, more["residual"]]
    is_used = [v in pair for v in eqn.invars]
    eqn = eqn.replace(invars=pair, outvars=sums, primitive=lax.add_p, params={})
  elif len(kept) < count:
    has_key = [i for i, e in enumerate(problem.options) if e.is_stochastic]
    if has_key:
      is_used[-len(has_key) :] = [i in kept for i in has_key]
    eqn = eqn.replace(
      invars=[v for v, used in zip(eqn.invars, is_used, strict=True) if used],
      outvars=[v for i in kept for v in eqn.outvars[i * size :][:size]]
      + eqn.outvars[count * size :],
      params=eqn.params | {"problem": problem.with_blockings(kept)},
    )
  return is_used, eqn


def _emit(*args, problem, parts, target):
  rest: list[jax.Array] = []
  if problem.prologue != parts[0].problem.prologue:  # no kernel computes it
    args, problem, rest = xla.after_prologue(args, problem)
  x, more, global_scale, keys = _operands(args, problem)
  results, start = [], 0
  for part in parts:
    size = len(part.problem.blockings)
    scales = _own_scales(global_scale, start, size)
    given = keys[start : start + size]
    results += backends.emit(part, x, scales, given, target, more)
    start += size
  return [*results, *rest]


def _maxima(x, problem, *, context, target, overlay):
  """Finds partial amax values of a shard, as many as a kernel reads."""
  count = backends.num_maxima(
    problem, context.module.of_device(), context.target, overlay
  )
  return global_scales.maxima(x, problem, target, overlay, count)


def _lower(context, *, problem, target, overlay):
  # The functions of each device bind the primitives for its shard.
  bind = functools.partial(
    primitive.bind_problem, quantize_p, target=target, overlay=overlay
  )
  is_split = context.mesh is not None or context.module.is_split
  of_halves = problem.prologue and problem.prologue.gradient_of_halves
  if not problem.blockings or (is_split and of_halves):
    # Halves of x and of the result are one dimension, which XLA may split.
    return functools.partial(
      _separately, problem=problem, target=target, overlay=overlay
    )
  if is_split:
    maxima = functools.partial(
      _maxima, context=context, target=target, overlay=overlay
    )
    function = operation.lowered(
      context,
      operation.quantize(problem, bind, maxima),
      lambda *operands: bind(operands, problem),
      key=(quantize_p.name, problem, overlay, "quantize"),
    )
    if function is not None:
      return function
  parts = backends.decide(problem, context.module, context.target, overlay)
  return functools.partial(
    _emit, problem=problem, parts=parts, target=context.target
  )


primitive.register(
  quantize_p,
  who="quantize",
  abstract_eval=_abstract_eval,
  jvp=_jvp,
  batch=_batch,
  lower=_lower,
)
partial_eval.dce_rules[quantize_p] = _without_unused
