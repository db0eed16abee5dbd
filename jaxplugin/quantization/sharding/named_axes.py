# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Global scales of arrays of which an enclosing `shard_map` has the parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxplugin.core import blocking
from jaxplugin.core import formats
from jaxplugin.core import speaking
from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.quantization import operations
from jaxplugin.quantization import problems
from jaxplugin.quantization.sharding import partial_scales
from jaxplugin.tables import resolution

AxisName = str | Sequence[str]


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
  """The global scale of all parts of an array, as of one device's.

  Args:
    who: the function that errors name.
    x: a part.
    format: to quantize to.
    axes: the blocked axes, each of a separate result.
    axis_name: the mesh axes, or those of `vmap`, that have the parts.
    given: a global scale to use instead, or None.
    batch_dims: as for `quantize`.

  Returns:
    f32[] or f32[batch], of several axes f32[n]: the same on all devices. What
    is given, where there is no axis_name or format has no global scale.

  Raises:
    ValueError: a name is not bound, or a global scale is given as well.
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
    partial_scales.partial_scales,
    problem=problem,
    target=targets.overriding_target(),
    overlay=resolution.overlay(),
  )
  for _ in range(batch_dims):
    function = jax.vmap(function)  # type: ignore[assignment]
  # f32[batch, n]; those of several axes come first in the result.
  each = jnp.moveaxis(function(x), -1, 0)
  each = each if len(axes) > 1 else each[0]
  # Where types say over which axes x varies, JAX takes either kind at once.
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
