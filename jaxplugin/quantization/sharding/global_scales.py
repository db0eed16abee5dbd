# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Global scales of sharded arrays.

`maxima_p` finds partial amax values of a shard, each of one piece of x. Their
maximum over devices determines the global scale of the array. On a GPU one
kernel reads x once for all blockings, and the kernel that quantizes reads the
maxima over devices directly.

maxima_p: x -> u32[n, count], f32 bits of the partial amax values of each
  blocking, each over blocks without NaN or Inf. Parameters: problem, the
  problem of the shard, which computes its global scales; count; target and
  overlay, as for `quantize_p`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core

from jaxplugin.core import blocking, error_context, formats, targets
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import primitive
from jaxplugin.quantization import backends, operations, problems
from jaxplugin.quantization.backends import xla
from jaxplugin.tables import resolution

AxisName = str | Sequence[str]

maxima_p: Final = extend_core.Primitive("block_maxima")


def maxima(
  x: jax.Array,
  problem: problems.QuantizationProblem,
  target: targets.Request | None,
  overlay: resolution.Overlay | None,
  count: int,
) -> jax.Array:
  """Computes u32[n, count]: `count` partial amax values of each blocking.

  The rounding of the shard's problem has no effect.
  """
  options = tuple(
    dataclasses.replace(
      options, scale_up=False, is_stochastic=False, key_impl=None, strides=None
    )
    for options in problem.options
  )
  return maxima_p.bind(
    x,
    problem=dataclasses.replace(problem, options=options),
    count=count,
    target=target,
    overlay=overlay,
  )


def _abstract_eval(
  x: Any, *, problem: problems.QuantizationProblem, count: int, **params: Any
) -> Any:
  del params
  return primitive.result_type(
    x, (len(problem.blockings), count), np.dtype(np.uint32)
  )


def _batch(
  args: Any,
  dims: Any,
  *,
  problem: problems.QuantizationProblem,
  count: int,
  **params: Any,
) -> tuple[jax.Array, int]:
  """Computes the values of each batch entry with XLA ops, not kernels."""
  del params
  function = lambda x: blocking.pad_axis(xla.maxima(x, problem), 1, count)
  return jax.vmap(function, in_axes=dims)(*args), 0


def _lower(
  context: primitive.LoweringContext,
  *,
  problem: problems.QuantizationProblem,
  count: int,
  target: targets.Request | None,
  overlay: resolution.Overlay | None,
) -> Callable[..., jax.Array]:
  del target  # `context.target` is derived from it.
  parts = backends.decide(problem, context.module, context.target, overlay)
  return functools.partial(
    backends.maxima, parts=parts, target=context.target, count=count
  )


primitive.register(
  maxima_p,
  who="quantize",
  abstract_eval=_abstract_eval,
  batch=_batch,
  lower=_lower,
)


# Inside a shard_map.


def global_scale(
  who: str,
  x: jax.Array,
  format: formats.BlockFormat,
  axes: Sequence[int],
  *,
  axis_name: AxisName,
  given: jax.Array | None,
  batch_dims: int = 0,
) -> jax.Array | None:
  """Computes the global scale of an array from its shards in a `shard_map`.

  Args:
    x: shard of the array.
    axis_name: mesh or `vmap` axes that the array is sharded over.
    given: global scale argument of the caller, or None.
    batch_dims: as for `quantize`.

  Returns:
    f32[] or f32[batch], or f32[n] for several axes, equal on all devices.
    `given` if the format has no global scale or there are no axis names.

  Raises:
    ValueError: If an axis name is not bound, or `given` is passed too.
  """
  names = bound_names(who, axis_name)
  if given is not None and names:
    raise ValueError(
      f"{who}: axis_name must be None if global_scale is given, got"
      f" axis_name={error_context.shown(axis_name)}; leave one of them out"
    )
  if not names or not format.has_global_scale:
    return given
  x = lax.stop_gradient(x)
  ndim = x.ndim - batch_dims
  problem = problems.QuantizationProblem(
    shape=tuple(x.shape[batch_dims:]),
    dtype=np.dtype(x.dtype),
    format=format,
    blockings=tuple(
      blocking.Blocking.along(axis - batch_dims, ndim, format.block_size)
      for axis in axes
    ),
  )
  function = functools.partial(of_axes, problem=problem, names=names)
  for _ in range(batch_dims):
    function = jax.vmap(function)  # type: ignore[assignment]
  # `function` returns f32[batch, n]; the result has n first.
  scales = jnp.moveaxis(function(x), -1, 0)
  return scales if len(axes) > 1 else scales[0]


def of_axes(
  x: jax.Array, problem: problems.QuantizationProblem, names: Sequence[str]
) -> jax.Array:
  """Computes f32[n], the global scale of each blocking, over bound axes.

  Args:
    x: shard of the array.
    problem: problem of the shard, which computes its global scales.
  """
  each = maxima(x, problem, targets.request(), resolution.overlay(), count=1)
  # `pmax` needs axes that x either varies or does not vary over.
  varying = jax_private.varying_axes(each)
  groups = (
    tuple(name for name in names if name in varying),
    tuple(name for name in names if name not in varying),
  )
  for group in groups:
    if group:
      each = lax.pmax(each, group)
  return jnp.stack(
    [
      operations.global_scale_of_maxima(
        own, problem.format, options.four_over_six
      )
      for own, options in zip(each, problem.options, strict=True)
    ]
  )


def bound_names(who: str, axis_name: Any) -> tuple[str, ...]:
  """Returns axis names as a tuple. Raises ValueError if one is not bound."""
  names = axis_names(who, axis_name)
  for name in names:
    try:
      lax.axis_size(name)
    except NameError:
      raise ValueError(
        f"{who}: no enclosing jax.shard_map or jax.vmap has axis"
        f" {error_context.shown(name)}, got"
        f" axis_name={error_context.shown(name)}. Name an axis of one that is"
        " around the call, or leave axis_name out"
      ) from None
  return names


def axis_names(
  who: str, axis_name: Any, argument: str = "axis_name"
) -> tuple[str, ...]:
  """Returns axis names as a tuple; errors name the argument."""
  names = (axis_name,) if isinstance(axis_name, str) else axis_name
  if not isinstance(names, (tuple, list)) or not all(
    isinstance(name, str) for name in names
  ):
    raise TypeError(
      f"{who}: {argument} must be the name of a mesh axis or a tuple of names,"
      f" got {error_context.shown(axis_name)}"
    )
  return tuple(names)
