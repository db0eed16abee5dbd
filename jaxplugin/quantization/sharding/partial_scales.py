# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`partial_scales_p`: the global scales that a part of an array asks for.

A maximum over the devices that have the parts makes them the array's. On a GPU
the kernels that compute a whole array's read x once for all of its blockings.

partial_scales_p: x -> f32[n], one for each blocking, 0 where no block has one.
Parameters: problem, of the part, which computes its global scales; target and
overlay, as of `quantize_p`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from typing import Final

import jax
from jax.extend import core as extend_core
from jax.interpreters import batching
from jax.interpreters import mlir

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
) -> jax.Array:
  """f32[n]: the global scales that `x` asks for, 0 where no block has one.

  Args:
    x: a part of an array.
    problem: of the part; how values are rounded does not count.
    target, overlay: those of an enclosing `use_target` and `tuning`, or None.
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
    x, problem=problem, target=target, overlay=overlay
  )


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _by_operations(
  x: jax.Array, problem: problems.QuantizeProblem
) -> jax.Array:
  return xla.partial_scales(x, problem)


def _abstract_eval(
  x: Any, *, problem: problems.QuantizeProblem, **params: Any
) -> Any:
  """The type that the operations' result has."""
  del params
  (aval,) = _by_operations.trace(x, problem=problem).jaxpr.out_avals
  return aval


def _batch(
  args: Any, dims: Any, *, problem: problems.QuantizeProblem, **params: Any
) -> tuple[jax.Array, int]:
  """Each of a batch has its own, which is more than a kernel makes."""
  del params
  function = functools.partial(_by_operations, problem=problem)
  return jax.vmap(function, in_axes=dims)(*args), 0


def _lower(
  ctx: Any,
  x: Any,
  *,
  problem: problems.QuantizeProblem,
  target: targets.Target | None,
  overlay: resolution.Overlay | None,
  platform: str | None = None,
) -> Any:
  del platform  # the module's, which is one of several
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  parts = backends.decide(problem, module, device, overlay)
  function = functools.partial(
    backends.partial_scales, parts=parts, target=device
  )
  return mlir.lower_fun(function, multiple_results=False)(ctx, x)


partial_scales_p.def_impl(functools.partial(lowering.impl, partial_scales_p))
partial_scales_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[partial_scales_p] = _batch
lowering.register_kernels(partial_scales_p, _lower)
