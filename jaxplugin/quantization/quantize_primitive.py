# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_p`: the primitive that quantizes an array along its blockings.

A matmul and its gradients contract an operand along different dimensions, and
one read of the operand can quantize it for all of them. Each result has the
bits of `operations.quantize` along its dimension. `backends.decide` chooses the
backends.

quantize_p: (x[, global_scale], key data...) -> (values, scale[, global_scale])
  for each blocking. A computed global scale is a result. A given global scale
  is f32[] for all blockings or f32[n], one for each. For a shard, partial amax
  values u32[n, maxima] may be given instead (`partial_scales_p`). Each blocking
  with stochastic rounding has key data. Parameters: format, blockings,
  scale_rounding, packed, for_products, scale_layout, pads_values, options and
  more_options, as for `QuantizationProblem`; target, the target of an enclosing
  `use_target`, or None; overlay, the tables of an enclosing `tuning`, or None.

If no result of a blocking is used, the blocking is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import partial_eval

from jaxplugin.arrays import layouts
from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.jaxext import explicit_axes
from jaxplugin.operation import choice
from jaxplugin.operation import primitive
from jaxplugin.quantization import backends
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import xla
from jaxplugin.quantization.sharding import explicit
from jaxplugin.quantization.sharding import operation
from jaxplugin.quantization.sharding import partial_scales
from jaxplugin.quantization.sharding import per_device
from jaxplugin.tables import resolution

# Values, scale, and global scale or None.
Quantized = tuple[jax.Array, jax.Array, jax.Array | None]


# The parameters that are fields of a problem.
_ASKED: Final = (
  "format",
  "blockings",
  "scale_rounding",
  "packed",
  "for_products",
  "scale_layout",
  "pads_values",
  "options",
  "more_options",
)

quantize_p = extend_core.Primitive("block_quantize")
quantize_p.multiple_results = True


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  *,
  blockings: tuple[blocking.Blocking, ...],
  options: Sequence[problems.RecipeOptions] | None = None,
  keys: Sequence[jax.Array | None] | None = None,
  for_products: bool = False,
  **params: Any,
) -> list[Quantized]:
  """Computes `operations.quantize` of each blocking, with a chosen backend.

  Args:
    x: f32, bf16, f16 or f64 array.
    global_scale: f32[] for all blockings, f32[n] for each, or None.
    blockings: blockings of the results, at least one.
    options: options of each blocking. `keys` sets the fields about keys.
    keys: key or None for each blocking. None rounds to nearest.
    for_products: as for `QuantizationProblem`.
    **params: the other parameters of `quantize_p`.
  """
  given = [] if global_scale is None else [global_scale]
  options = options or [problems.NO_OPTIONS] * len(blockings)
  with_keys = [
    _with_key(e, key)
    for e, key in zip(options, keys or [None] * len(blockings), strict=True)
  ]
  given += [data for _, data in with_keys if data is not None]
  params |= _params_of(blockings, [e for e, _ in with_keys])
  params["for_products"] = for_products and params["packed"]
  params["pads_values"] = False
  if 0 not in x.shape:
    if x.dtype not in formats.FLOAT_DTYPES:
      x = x.astype(jnp.float32)
    results = quantize_p.bind(
      x,
      *given,
      **params,
      target=targets.overriding_target(),
      overlay=resolution.overlay(),
    )
  else:  # Only XLA ops support empty arrays.
    results = _by_operations(x, *given, **params)
  size = len(results) // len(blockings)
  each = [results[i : i + size] for i in range(0, len(results), size)]
  return [
    (r[0], r[1], r[2] if size == 3 else _own_scales(global_scale, i, 1))
    for i, r in enumerate(each)
  ]


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
    format: the format to quantize to.
    target: target of the dot that reads the result.

  Returns:
    Values, format.array_dtype[..., rows padded to 128, k], and scale,
    format.scale_dtype[..., rows padded to 128, k / block size padded to 4] in
    the layout "swizzled_128x4".
  """
  along = blocking.Blocking.along(x.ndim - 1, x.ndim, format.block_size)
  values, scale = quantize_p.bind(
    x,
    *([] if global_scale is None else [global_scale]),
    format=format,
    **_params_of([along], [problems.NO_OPTIONS]),
    scale_rounding="up",
    packed=False,
    for_products=False,
    scale_layout=layouts.SWIZZLED,
    pads_values=True,
    target=target,
    overlay=None,
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


def _params_of(
  blockings: Sequence[blocking.Blocking],
  options: Sequence[problems.RecipeOptions],
) -> dict[str, Any]:
  """Returns `quantize_p`'s parameters for blockings and their options."""
  first, *more = options
  return {
    "blockings": tuple(blockings),
    "options": first,
    "more_options": tuple(more) if set(more) - {problems.NO_OPTIONS} else (),
  }


def _options_each(
  params: Mapping[str, Any],
) -> tuple[problems.RecipeOptions, ...]:
  more = params["more_options"]
  more = more or (problems.NO_OPTIONS,) * (len(params["blockings"]) - 1)
  return (params["options"], *more)


def _keys_of(params: Mapping[str, Any]) -> int:
  """Returns the number of key operands."""
  return sum(options.is_stochastic for options in _options_each(params))


def problem_of(
  avals: Sequence[Any], params: Mapping[str, Any]
) -> problems.QuantizationProblem:
  """Returns the problem of an equation of `quantize_p`."""
  fields = {n: params[n] for n in params if n not in ("target", "overlay")}
  is_given = len(avals) > 1 + _keys_of(params)
  num_maxima = None
  if is_given and avals[1].dtype == jnp.uint32:
    num_maxima = avals[1].shape[1]
  return problems.QuantizationProblem(
    shape=tuple(avals[0].shape),
    dtype=np.dtype(avals[0].dtype),
    has_global_scale=is_given and num_maxima is None,
    num_maxima=num_maxima,
    **fields,
  )


@functools.partial(
  jax.jit,
  static_argnames=_ASKED,
  inline=True,
)
def _by_operations(*args, **params):
  """Computes the results of `quantize_p` with XLA ops."""
  x, global_scale, keys = _operands(args, _options_each(params))
  singles = problem_of(args, params).singles()
  each = [
    xla.quantize(x, _own_scales(global_scale, i, 1), single, key=key)
    for i, (single, key) in enumerate(zip(singles, keys, strict=True))
  ]
  return [leaf for results in each for leaf in results]


def _operands(
  args: Sequence[jax.Array], options_each: Sequence[problems.RecipeOptions]
) -> tuple[jax.Array, jax.Array | None, list[jax.Array | None]]:
  """Returns x, the global scale, and each blocking's key data."""
  x, *given = args
  keys: list[jax.Array | None] = []
  for options in reversed(options_each):
    keys.insert(0, given.pop() if options.is_stochastic else None)
  return x, given[0] if given else None, keys


def _own_scales(
  global_scale: jax.Array | None, start: int, size: int
) -> jax.Array | None:
  """Returns the global scales of blockings `start` to `start + size`."""
  if global_scale is None or global_scale.ndim == 0:
    return global_scale
  return global_scale[start] if size == 1 else global_scale[start:][:size]


# Rules.


def _abstract_eval(*args, target, overlay, **params):
  """Returns the result types of `_by_operations`."""
  del target, overlay
  mesh = explicit_axes.mesh_of(args)
  if mesh is None:
    return _by_operations.trace(*args, **params).jaxpr.out_avals
  avals = _by_operations.trace(*explicit.whole(args), **params).jaxpr.out_avals
  problem = problem_of(args, params)
  return explicit.quantize_types(problem, args[0], avals, mesh)


def _jvp(primals, tangents, **params):
  """Returns the results with zero tangents: codes have no derivative."""
  del tangents
  results = quantize_p.bind(*primals, **params)
  return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _batch(args, dims, *, blockings, target, overlay, **params):
  x, *given = args
  each = _options_each({"blockings": blockings, **params})
  # Kernels do not support a global scale or a key for each batch entry.
  is_computed = params["format"].has_global_scale and not given
  if (
    is_computed
    or any(options.is_stochastic for options in each)
    or any(d is not None for d in dims[1:])
  ):
    function = functools.partial(_by_operations, blockings=blockings, **params)
    results = jax.vmap(function, in_axes=tuple(dims))(*args)
  else:
    results = quantize_p.bind(
      jnp.moveaxis(x, dims[0], 0),
      *given,
      target=target,
      overlay=overlay,
      **params
      | _params_of(
        [b.under_leading_dimension() for b in blockings],
        [options.under_leading_dimension() for options in each],
      ),
    )
  return results, (0,) * len(results)


def _has_scale_each(eqn: Any) -> bool:
  """Returns whether each blocking is given a separate global scale."""
  scales = eqn.invars[1 : len(eqn.invars) - _keys_of(eqn.params)]
  return any(scale.aval.ndim for scale in scales)


def _without_unused(
  used_outputs: Sequence[bool], *args: Any
) -> tuple[list[bool], Any]:
  """Drops blockings whose results are unused, in dead code elimination.

  Args:
    used_outputs: whether each result of the equation is used.
    *args: the equation; in jax 0.12 the live inputs come before it.

  Returns:
    Whether each input is used, and the equation or None.
  """
  eqn = args[-1]
  blockings = eqn.params["blockings"]
  size = len(eqn.outvars) // len(blockings)
  kept = [
    i for i in range(len(blockings)) if any(used_outputs[i * size :][:size])
  ]
  if kept and _has_scale_each(eqn):
    kept = list(range(len(blockings)))
  if not kept:
    return [False] * len(eqn.invars), None
  is_used = [True] * len(eqn.invars)
  if len(kept) < len(blockings):
    each = _options_each(eqn.params)
    has_key = [i for i, options in enumerate(each) if options.is_stochastic]
    if has_key:
      is_used[-len(has_key) :] = [i in kept for i in has_key]
    eqn = eqn.replace(
      invars=[v for v, used in zip(eqn.invars, is_used, strict=True) if used],
      outvars=[v for i in kept for v in eqn.outvars[i * size :][:size]],
      params=eqn.params
      | _params_of([blockings[i] for i in kept], [each[i] for i in kept]),
    )
  return is_used, eqn


def _emit(*args, parts, target):
  options_each = [e for part in parts for e in part.problem.options_each]
  x, global_scale, keys = _operands(args, options_each)
  results, start = [], 0
  for part in parts:
    backend = choice.backend_of(backends.QUANTIZE_OPERATION, part.decision)
    size = len(part.problem.blockings)
    given = keys[start : start + size]
    more: dict[str, Any] = {}
    if any(key is not None for key in given):
      more = {"key": given[0]} if size == 1 else {"keys": given}
    scales = _own_scales(global_scale, start, size)
    results += backend.emit(x, scales, part.problem, target, **more)
    start += size
  return results


def _bind(
  operands: Sequence[jax.Array],
  problem: problems.QuantizationProblem,
  **params: Any,
) -> list[jax.Array]:
  """Binds `quantize_p` with the parameters of a problem."""
  asked = {name: getattr(problem, name) for name in _ASKED}
  return quantize_p.bind(*operands, **asked, **params)


def _lower(context, *, target, overlay, **params):
  problem = problem_of(context.avals_in, params)
  # The functions of each device bind the primitives for its shard.
  under = {"target": target, "overlay": overlay}
  local = per_device.Local(
    quantize=functools.partial(_bind, **under),
    partial_scales=functools.partial(partial_scales.partial_scales, **under),
    num_maxima=functools.partial(
      backends.num_maxima,
      module=context.module.of_device(),
      target=context.target,
      overlay=overlay,
    ),
  )
  function = operation.lowered(
    context,
    operation.quantize(problem, local),
    lambda *operands: local.quantize(operands, problem),
    key=(quantize_p.name, problem, overlay, "quantize"),
  )
  if function is not None:
    return function
  parts = backends.decide(problem, context.module, context.target, overlay)
  return functools.partial(_emit, parts=parts, target=context.target)


primitive.register(
  quantize_p,
  who="quantize",
  abstract_eval=_abstract_eval,
  jvp=_jvp,
  batch=_batch,
  lower=_lower,
)
partial_eval.dce_rules[quantize_p] = _without_unused
