# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`partial_scales_p`: the global scales of a part of an array.

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
from typing import Any
from typing import Final

import jax
from jax.extend import core as extend_core
from jax.interpreters import batching
from jax.interpreters import mlir

from jaxplugin.core import extents
from jaxplugin.core import targets
from jaxplugin.quantization import backends
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import xla
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

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
  ctx: Any,
  x: Any,
  *,
  problem: problems.QuantizeProblem,
  num_maxima: int | None,
  target: targets.Target | None,
  overlay: resolution.Overlay | None,
  platform: str | None = None,
) -> Any:
  del platform  # the module's, which is one of several
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  parts = backends.decide(problem, module, device, overlay)
  function: Callable[..., jax.Array] = functools.partial(
    backends.partial_scales, parts=parts, target=device
  )
  if num_maxima is not None:
    function = functools.partial(
      backends.maxima, parts=parts, target=device, count=num_maxima
    )
  return mlir.lower_fun(function, multiple_results=False)(ctx, x)


partial_scales_p.def_impl(functools.partial(lowering.impl, partial_scales_p))
partial_scales_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[partial_scales_p] = _batch
lowering.register_kernels(partial_scales_p, _lower)
