# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The xla implementation: XLA ops, for every platform and all sizes."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.core import blocking, decisions, targets
from jaxplugin.operation import choice
from jaxplugin.quantization import operations, problems, prologues

_SUMMARY: Final = "operations that XLA compiles"


def quantize(
  x: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.QuantizationProblem,
  target: targets.Target | None = None,
  keys: Sequence[jax.Array | None] = (),
  more: Mapping[str, jax.Array] = types.MappingProxyType({}),
) -> list[jax.Array]:
  """Computes the results of `quantize_p` with one blocking."""
  del target
  rest: list[jax.Array] = []
  if problem.prologue is not None:
    x, *rest = prologues.compute(
      problem.prologue,
      x,
      more,
      returns_amax=problem.returns_amax,
      column_sums=problem.column_sums,
    )
  (options,), (key,) = problem.options, keys or (None,)
  if key is not None and options.strides is None:
    key = jax.random.wrap_key_data(key, impl=options.key_impl)
  # The setting from tracing; the thread that lowers may have another one.
  with jax.threefry_partitionable(options.is_partitionable):
    quantized = operations.quantize(x, global_scale, key, problem)
  values, *scales = quantized[: problem.results_each]
  if problem.pads_values:
    values = blocking.pad_axis(values, -2, problem.written_shape[-2])
  return [values, *scales, *rest]


def after_prologue(
  operands: Sequence[jax.Array], problem: problems.QuantizationProblem
) -> tuple[
  tuple[jax.Array, ...], problems.QuantizationProblem, list[jax.Array]
]:
  """Computes the prologue of `quantize_p`'s operands, if there is one.

  Returns:
    Operands and problem of quantizing its result; and its other results, which
    follow those of quantizing.
  """
  if problem.prologue is None:
    return tuple(operands), problem, []
  x, more, *given = problem.split_operands(operands)
  x, *rest = prologues.compute(
    problem.prologue,
    x,
    more,
    returns_amax=problem.returns_amax,
    column_sums=problem.column_sums,
  )
  return (x, *given[0], *given[1]), problem.without_prologue(), rest


def maxima(x: jax.Array, problem: problems.QuantizationProblem) -> jax.Array:
  """Returns uint32[blockings, 1]: f32 bits of the amax of finite blocks."""
  found = [operations.finite_amax(x, single) for single in problem.singles()]
  return jnp.stack(found).astype(jnp.uint32)[:, None]


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  global_scale: jax.Array | None,
  problem: problems.DequantizationProblem,
  target: targets.Target | None = None,
) -> jax.Array:
  """Computes the result of `dequantize_p`."""
  del target
  return operations.dequantize(values, scale, global_scale, problem=problem)


QUANTIZE: Final[decisions.BackendRecord[problems.QuantizationProblem]] = (
  choice.xla_backend(summary=_SUMMARY, emit=quantize)
)
DEQUANTIZE: Final[decisions.BackendRecord[problems.DequantizationProblem]] = (
  choice.xla_backend(summary=_SUMMARY, emit=dequantize)
)
