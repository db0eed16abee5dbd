# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize_both_p`: one array, quantized along more than one axis.

A product and its gradients contract an operand along different dimensions. Each
result has the bits of `quantize` along its own; together they can be made from
one read.

quantize_both_p: (x[, global_scale]) -> for each blocking (values, scale
  [, global_scale]), the latter where it is computed: each its own, since a NaN
  or an Inf spoils other blocks along another axis. Parameters: format,
  blockings, scale_rounding, packed, target, the latter as of `quantize_p`.

In a module for one GPU two blockings of matrices are lowered to the Triton
kernel that reads once (`quantization_both_triton`). Everywhere else each is
lowered as `quantize_p` is there. Results that nobody uses are not computed: the
blocking is dropped, and with one left the kernel is that of `quantize_p`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as extend_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.interpreters import partial_eval

from jaxplugin.core import blocking
from jaxplugin.core import decisions
from jaxplugin.core import formats
from jaxplugin.core import targets
from jaxplugin.quantization import quantization_both_triton
from jaxplugin.quantization import quantization_ops
from jaxplugin.quantization import quantization_primitive
from jaxplugin.quantization import quantization_triton
from jaxplugin.runtime import lowering
from jaxplugin.runtime import triton_library

Blockings = tuple[blocking.Blocking, ...]

quantize_both_p = extend_core.Primitive("block_quantize_both")
quantize_both_p.multiple_results = True


def quantize_both(
  x: jax.Array,
  global_scale: jax.Array | None,
  format: formats.BlockFormat,
  blockings: Blockings,
  scale_rounding: quantization_ops.ScaleRounding,
  packed: bool = False,
) -> list[quantization_both_triton.Quantized]:
  """`quantization_primitive.quantize` of each blocking of `x`."""
  if not quantization_primitive.is_served(x, format):
    return [
      quantization_primitive.quantize(
        b.apply(x), global_scale, format, b.axis(), scale_rounding, packed
      )
      for b in blockings
    ]
  if x.dtype not in quantization_primitive.FLOATS:
    x = x.astype(np.float32)
  results = quantize_both_p.bind(
    x,
    *(() if global_scale is None else (global_scale,)),
    format=format,
    blockings=blockings,
    scale_rounding=scale_rounding,
    packed=packed,
    target=targets.overriding_target(),
  )
  size = len(results) // len(blockings)
  each = [results[i : i + size] for i in range(0, len(results), size)]
  return [(r[0], r[1], r[2] if size == 3 else global_scale) for r in each]


def _by_primitive(
  x: jax.Array,
  global_scale: jax.Array | None = None,
  *,
  format: formats.BlockFormat,
  blockings: Blockings,
  **params: Any,
) -> list[jax.Array]:
  """The results of `quantize_both_p`, one blocking after the other."""
  given = () if global_scale is None else (global_scale,)
  results: list[jax.Array] = []
  for b in blockings:
    results += quantization_primitive.quantize_p.bind(
      b.apply(x), *given, format=format, axis=b.axis(), **params
    )
  return results


@functools.partial(
  jax.jit,
  static_argnames=("format", "blockings", "scale_rounding", "packed"),
  inline=True,
)
def _by_operations(
  x: jax.Array,
  global_scale: jax.Array | None,
  *,
  format: formats.BlockFormat,
  blockings: Blockings,
  scale_rounding: quantization_ops.ScaleRounding,
  packed: bool,
) -> list[jax.Array]:
  """The results of `quantize_both_p`."""
  is_computed = global_scale is None and format.has_global_scale
  results: list[jax.Array] = []
  for b in blockings:
    quantized = quantization_ops.quantize(
      b.apply(x), global_scale, None, format, b.axis(), scale_rounding, packed
    )
    results += quantized if is_computed else quantized[:2]
  return results


def _by_triton(
  x: jax.Array,
  global_scale: jax.Array | None = None,
  *,
  problem: quantization_both_triton.QuantizeBothProblem,
  target: targets.Target,
  packed: bool,
) -> list[Any]:
  size = 3 if problem.computes_global_scale else 2
  results = quantization_both_triton.emit(
    x, global_scale, problem, target, packed=packed
  )
  return [leaf for quantized in results for leaf in quantized[:size]]


# Rules.


def _abstract_eval(
  x: Any, global_scale: Any = None, *, target: Any, **params: Any
) -> Any:
  """The types that the operations' results have, shardings and all."""
  del target
  return _by_operations.trace(x, global_scale, **params).jaxpr.out_avals


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
  """As of `quantize_p`: nothing has a derivative."""
  del tangents
  results = quantize_both_p.bind(*primals, **params)
  return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _batch(args: Any, dims: Any, *, blockings: Blockings, **params: Any) -> Any:
  x, *given = args
  format = params["format"]
  # One global scale an entry: as of `quantize_p`.
  if (format.has_global_scale and not given) or any(
    d is not None for d in dims[1:]
  ):
    function = functools.partial(_by_primitive, blockings=blockings, **params)
    results = jax.vmap(function, in_axes=tuple(dims))(*args)
  else:
    x = jnp.moveaxis(x, dims[0], 0)
    results = quantize_both_p.bind(
      x,
      *given,
      blockings=tuple(b.under_leading_dimension() for b in blockings),
      **params,
    )
  return results, (0,) * len(results)


def _without_unused(
  used_outputs: Sequence[bool], *args: Any
) -> tuple[list[bool], Any]:
  """Drops the blockings of which no result is used.

  Args:
    used_outputs: of the equation.
    *args: the equation is the last (jax 0.12 has its live inputs before it).
  """
  eqn = args[-1]
  blockings = eqn.params["blockings"]
  size = len(eqn.outvars) // len(blockings)
  kept = [
    i for i in range(len(blockings)) if any(used_outputs[i * size :][:size])
  ]
  if not kept:
    return [False] * len(eqn.invars), None
  if len(kept) < len(blockings):
    eqn = eqn.replace(
      outvars=[v for i in kept for v in eqn.outvars[i * size :][:size]],
      params=eqn.params | {"blockings": tuple(blockings[i] for i in kept)},
    )
  return [True] * len(eqn.invars), eqn


def problem_of(
  avals: Sequence[Any], params: Mapping[str, Any]
) -> quantization_both_triton.QuantizeBothProblem:
  """What an equation of `quantize_both_p` asks for."""
  x = avals[0]
  return quantization_both_triton.QuantizeBothProblem(
    shape=tuple(x.shape),
    dtype=np.dtype(x.dtype),
    has_global_scale=len(avals) > 1,
    format=params["format"],
    blockings=params["blockings"],
    scale_rounding=params["scale_rounding"],
  )


def decide(
  problem: quantization_both_triton.QuantizeBothProblem,
  module: lowering.Module,
  target: targets.Target,
) -> quantization_primitive.Choice:
  """What `quantize_both_p` is lowered to in a module for a target.

  Where one kernel does not serve all blockings, each is lowered as `quantize_p`
  is: `implementation` then names those, and `reason` why.
  """
  refusal = _one_kernel_refusal(problem, module, target)
  if refusal is None:
    return quantization_primitive.Choice(implementation="triton")
  if len(problem.blockings) == 1:
    (single,) = _each(problem)
    return quantization_primitive.decide(single, module, target)
  choices = [
    quantization_primitive.decide(single, module, target)
    for single in _each(problem)
  ]
  names = [choice.implementation for choice in choices]
  reasons = [f"not one kernel for all: triton {refusal.reason}"]
  reasons += [choice.reason for choice in choices if choice.reason]
  return quantization_primitive.Choice(
    implementation=" and ".join(dict.fromkeys(names)),
    reason="; ".join(dict.fromkeys(reasons)),
  )


def _one_kernel_refusal(
  problem: quantization_both_triton.QuantizeBothProblem,
  module: lowering.Module,
  target: targets.Target,
) -> decisions.Unsupported | None:
  return (
    module.kernels_refusal()
    or quantization_both_triton.supports(problem, target)
    or triton_library.lowering_refusal(target)
  )


def _each(
  problem: quantization_both_triton.QuantizeBothProblem,
) -> list[quantization_triton.QuantizeProblem]:
  """The blockings, as problems of `quantize_p`."""
  return [
    quantization_triton.QuantizeProblem(
      shape=tuple(b.shape(problem.shape)),
      dtype=problem.dtype,
      format=problem.format,
      axis=b.axis(),
      scale_rounding=problem.scale_rounding,
      has_global_scale=problem.has_global_scale,
    )
    for b in problem.blockings
  ]


def _lower(
  ctx: Any, *args: Any, target: targets.Target | None, **params: Any
) -> Any:
  problem = problem_of(ctx.avals_in, params)
  module = lowering.module_of(ctx)
  device = lowering.resolve_target(target, module.platforms[0])
  function = functools.partial(_by_primitive, target=target, **params)
  if _one_kernel_refusal(problem, module, device) is None:
    function = functools.partial(
      _by_triton, problem=problem, target=device, packed=params["packed"]
    )
  return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


quantize_both_p.def_impl(
  functools.partial(quantization_primitive.impl, quantize_both_p)
)
quantize_both_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[quantize_both_p] = _jvp
batching.primitive_batchers[quantize_both_p] = _batch
mlir.register_lowering(quantize_both_p, _lower)
partial_eval.dce_rules[quantize_both_p] = _without_unused
