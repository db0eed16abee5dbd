# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Global scales of arrays whose parts lie on several devices.

`partial_scales_p` computes the global scales that a part of an array needs.
Their maximum over the devices that have the parts is the scale of the array. On
a GPU one kernel reads x once for all blockings. It finds largest magnitudes of
pieces of x. The kernel that quantizes takes these as they are, after a maximum
over devices.

partial_scales_p: x -> f32[n], one for each blocking, 0 if no block asks for
  one; or largest magnitudes, u32[n, num_maxima], f32 bits. Parameters: problem,
  that of the part, which computes its global scales; num_maxima, or None;
  target and overlay, as for `quantize_p`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as extend_core

from jaxplugin.core import blocking
from jaxplugin.core import extents
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.operation import primitive
from jaxplugin.quantization import backends
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import xla
from jaxplugin.tables import resolution

AxisName = str | Sequence[str]

partial_scales_p: Final = extend_core.Primitive("block_partial_scales")


def partial_scales(
  x: jax.Array,
  problem: problems.QuantizeProblem,
  target: targets.Target | None,
  overlay: resolution.Overlay | None,
  num_maxima: int | None = None,
) -> jax.Array:
  """Computes the global scales that `x` asks for, f32[n].

  They are 0 if no block asks for one. With num_maxima, returns the largest
  magnitudes that they are computed from, f32 bits as u32[n, num_maxima]. A
  maximum over devices can be taken of both.

  Args:
    x: a part of an array.
    problem: the problem of the part. The rounding of values does not matter.
    target, overlay: those of an enclosing `use_target` and `tuning`, or None.
    num_maxima: as `backends.num_maxima` returns it.
  """
  first, *more = (
    dataclasses.replace(
      extras, scale_up=False, is_stochastic=False, key_impl=None, strides=None
    )
    for extras in problem.extras_each
  )
  problem = dataclasses.replace(
    problem,
    has_global_scale=False,
    extras=first,
    more_extras=tuple(more) if {*more} - {problems.NO_EXTRAS} else (),
  )
  return partial_scales_p.bind(
    x, problem=problem, num_maxima=num_maxima, target=target, overlay=overlay
  )


@functools.partial(
  jax.jit, static_argnames=("problem", "num_maxima"), inline=True
)
def _by_operations(
  x: jax.Array, problem: problems.QuantizeProblem, num_maxima: int | None
) -> jax.Array:
  if num_maxima is None:
    return xla.partial_scales(x, problem)
  return extents.pad_axis(xla.maxima(x, problem), 1, num_maxima)


def _abstract_eval(
  x: Any,
  *,
  problem: problems.QuantizeProblem,
  num_maxima: int | None,
  **params: Any,
) -> Any:
  """Returns the type of the operations' result."""
  del params
  traced = _by_operations.trace(x, problem=problem, num_maxima=num_maxima)
  (aval,) = traced.jaxpr.out_avals
  return aval


def _batch(
  args: Any,
  dims: Any,
  *,
  problem: problems.QuantizeProblem,
  num_maxima: int | None,
  **params: Any,
) -> tuple[jax.Array, int]:
  """Computes a scale for each batch entry, which kernels do not support."""
  del params
  function = functools.partial(
    _by_operations, problem=problem, num_maxima=num_maxima
  )
  return jax.vmap(function, in_axes=dims)(*args), 0


def _lower(
  site: primitive.Site,
  *,
  problem: problems.QuantizeProblem,
  num_maxima: int | None,
  target: targets.Target | None,
  overlay: resolution.Overlay | None,
) -> Callable[..., jax.Array]:
  del target  # `site.target` follows from it
  parts = backends.decide(problem, site.module, site.target, overlay)
  if num_maxima is None:
    return functools.partial(
      backends.partial_scales, parts=parts, target=site.target
    )
  return functools.partial(
    backends.maxima, parts=parts, target=site.target, count=num_maxima
  )


primitive.register(
  partial_scales_p,
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
  axis_name: AxisName | None,
  given: jax.Array | None,
  batch_dims: int = 0,
) -> jax.Array | None:
  """Computes the global scale of an array whose parts a `shard_map` has.

  Args:
    who: the function that errors name.
    x: a part.
    format: the format to quantize to.
    axes: the blocked axes, each of a separate result.
    axis_name: the mesh axes, or those of `vmap`, that have the parts.
    given: a global scale to use instead, or None.
    batch_dims: as for `quantize`.

  Returns:
    f32[] or f32[batch], or f32[n] for several axes, the same on all devices; or
    `given` if axis_name is None or the format has no global scale.

  Raises:
    ValueError: If a name is not bound, or a global scale is also given.
  """
  names = _names(who, axis_name)
  if given is not None and names:
    raise ValueError(
      f"{who}: axis_name must be None if global_scale is given, got"
      f" axis_name={speaking.shown(axis_name)}; leave one of them out"
    )
  if not names or not format.has_global_scale:
    return given
  x = lax.stop_gradient(x)
  ndim = x.ndim - batch_dims
  problem = problems.QuantizeProblem(
    shape=tuple(x.shape[batch_dims:]),
    dtype=np.dtype(x.dtype),
    format=format,
    blockings=tuple(
      blocking.Blocking.along(axis - batch_dims, ndim, format.block_size)
      for axis in axes
    ),
  )
  function = functools.partial(
    partial_scales,
    problem=problem,
    target=targets.overriding_target(),
    overlay=resolution.overlay(),
  )
  for _ in range(batch_dims):
    function = jax.vmap(function)  # type: ignore[assignment]
  # f32[batch, n], with n first in the result.
  each = jnp.moveaxis(function(x), -1, 0)
  each = each if len(axes) > 1 else each[0]
  # If types say which axes x varies over, `pmax` needs axes of one kind.
  varying = jax_private.varying_axes(each)
  groups = (
    tuple(name for name in names if name in varying),
    tuple(name for name in names if name not in varying),
  )
  for group in groups:
    if group:
      each = lax.pmax(each, group)
  return operations.global_scale_of_partial(each)


def _names(who: str, axis_name: Any) -> tuple[str, ...]:
  if axis_name is None:
    return ()
  names = (axis_name,) if isinstance(axis_name, str) else axis_name
  if not isinstance(names, (tuple, list)) or not all(
    isinstance(name, str) for name in names
  ):
    raise TypeError(
      f"{who}: axis_name must be the name of a mesh axis or a tuple of names,"
      f" got {speaking.shown(axis_name)}"
    )
  for name in names:
    try:
      lax.axis_size(name)
    except NameError:
      raise ValueError(
        f"{who}: no enclosing jax.shard_map or jax.vmap has axis"
        f" {speaking.shown(name)}, got axis_name={speaking.shown(name)}. Leave"
        " axis_name out: the scale then covers the whole array"
      ) from None
  return tuple(names)
