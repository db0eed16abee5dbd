# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends of quantizing and dequantizing, and the choice between them.

Lowerings and `explain` call the same functions, so they cannot disagree. All
backends of `quantize` compute the same bits. A module that must not contain
kernels (`lowering.Module`) gets XLA ops, and the decision states the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.core import blocking, decisions, targets
from jaxplugin.operation import choice
from jaxplugin.plugins import registry
from jaxplugin.quantization import operations, problems, views
from jaxplugin.quantization.backends import cpu, triton, xla
from jaxplugin.runtime import lowering
from jaxplugin.tables import resolution

Problem = problems.QuantizationProblem | problems.DequantizationProblem

QUANTIZE: Final = decisions.table(triton.QUANTIZE, cpu.QUANTIZE, xla.QUANTIZE)
DEQUANTIZE: Final = decisions.table(cpu.DEQUANTIZE, xla.DEQUANTIZE)

QUANTIZE_OPERATION: Final[
  resolution.MeasuredOperation[problems.QuantizationProblem]
] = resolution.MeasuredOperation(
  name="quantize",
  fields_of=problems.fields_of,
  problem_of=problems.problem_of,
  backends=lambda: QUANTIZE | registry.table(views.QUANTIZE),
)
DEQUANTIZE_OPERATION: Final[
  resolution.MeasuredOperation[problems.DequantizationProblem]
] = resolution.MeasuredOperation(
  name="dequantize",
  fields_of=problems.dequantize_fields_of,
  problem_of=problems.dequantize_problem_of,
  backends=lambda: DEQUANTIZE | registry.table(views.DEQUANTIZE),
)


SEPARATE: Final = "the prologue is a separate XLA operation, because "
_TWO_PASSES: Final = (
  "the prologue is computed twice, because a first pass computes the global"
  " scale; pass OutFormat(global_scale=...) to avoid it"
)
STATISTICS_FIRST: Final = (
  "x is read once more, because a first pass computes the statistics of each"
  " row"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
  """An equation and the decisions about it, for `explain`.

  Attributes:
    implementation: name of the backend, or names joined by "and" if blockings
      have different ones.
    reason: why no kernel is used; empty if one is.
    decisions: decisions of the lowering: one if a kernel computes all
      blockings, else one for each blocking.
    problems: problem of each decision.
  """

  implementation: str
  reason: str
  decisions: tuple[decisions.Decision, ...]
  problems: tuple[Problem, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Some blockings of a problem, and the decision that computes them."""

  problem: problems.QuantizationProblem
  decision: decisions.Decision


def decide(
  problem: problems.QuantizationProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> list[Part]:
  """Divides the blockings of a problem into parts and chooses their backends.

  If a kernel computes all blockings from one read, they are one part. Otherwise
  each blocking is a part with a separate choice. If no kernel computes the
  prologue, the parts quantize its result, which XLA ops compute.
  """
  if not problem.blockings:  # XLA ops compute the other results
    return []
  problem = as_products_read(problem, target)
  whole = choose(problem, module, target, overlay)
  if whole.implementation != xla.QUANTIZE.name:
    part = Part(problem=problem, decision=whole)
    if problem.prologue is not None and problem.computes_global_scale:
      part = _with_note(part, _TWO_PASSES)
    is_triton = whole.implementation == triton.QUANTIZE.name
    if is_triton and triton.computes_statistics(problem, target):
      part = _with_note(part, STATISTICS_FIRST)
    return [part]
  is_single = len(problem.blockings) == 1
  is_measured = is_single and whole.implementation_from != decisions.RULE
  if problem.prologue is not None and not is_measured:
    parts = decide(problem.without_prologue(), module, target, overlay)
    reasons = _refusals(whole, QUANTIZE_OPERATION.backends(), target)
    note = SEPARATE + "; ".join(reasons)
    return [_with_note(part, note) for part in parts]
  if is_single:
    return [Part(problem=problem, decision=whole)]
  return [
    Part(problem=single, decision=choose(single, module, target, overlay))
    for single in problem.singles()
  ]


def _with_note(part: Part, note: str) -> Part:
  if part.decision.implementation == xla.QUANTIZE.name:
    return part  # XLA may fuse the prologue.
  notes = (*part.decision.notes, note)
  decision = dataclasses.replace(part.decision, notes=notes)
  return dataclasses.replace(part, decision=decision)


def as_products_read(
  problem: problems.QuantizationProblem, target: targets.Target
) -> problems.QuantizationProblem:
  """Returns the problem with values in the order that matmuls read.

  The CPU kernels read values with the blocked dimension last, and so does cuDNN
  if they are packed. The Triton matmul kernels read any single blocked
  dimension. For several merged dimensions they read a copy of packed values
  with the blocked dimension last.
  """
  if target.platform == "cpu":
    last = len(problem.shape) - 1
    is_read = any(b.dims != (last,) for b in problem.blockings)
  else:
    is_by_triton = target.platform in ("cuda", "rocm") and (
      not target.has_block_scaled_cudnn
    )
    is_read = problem.packed and (
      not is_by_triton
      or any(b.as_in_product(problem.shape) != b for b in problem.blockings)
    )
  if problem.for_products and not is_read:
    return dataclasses.replace(problem, for_products=False)
  return problem


def emit(
  part: Part,
  x: jax.Array,
  global_scale: jax.Array | None,
  keys: Sequence[jax.Array | None],
  target: targets.Target,
  more: Mapping[str, jax.Array],
) -> list[jax.Array]:
  """Computes the results of a part with its backend.

  Args:
    global_scale: global scales or maxima of the part's blockings, or None.
    keys: key data of each blocking, or None.
    more: operands of the prologue by name, if the part has one.
  """
  problem, scales = part.problem, []
  if problem.num_maxima is not None and not _reads_maxima(part):
    (options,) = problem.options
    assert global_scale is not None
    global_scale = operations.global_scale_of_maxima(
      global_scale, problem.format, options.four_over_six
    )
    problem, scales = problem.with_global_scale(), [global_scale]
  # Backends of other packages take neither keys nor prologues.
  arguments: dict[str, Any] = {}
  if any(key is not None for key in keys):
    arguments["keys"] = keys
  if problem.prologue is not None:
    arguments["more"] = more
  results = choice.emit(
    QUANTIZE_OPERATION,
    part.decision,
    problem,
    target,
    x,
    global_scale,
    **arguments,
  )
  return [*results, *scales]


def _reads_maxima(part: Part) -> bool:
  return part.decision.implementation == triton.QUANTIZE.name


def num_maxima(
  problem: problems.QuantizationProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> int:
  """Returns the number of partial amax values of each blocking.

  It is the number that one kernel finds for all blockings and another kernel
  reads, or else 1.

  The problem computes its global scales.
  """
  parts = decide(problem, module, target, overlay)
  is_one_kernel = len(parts) == 1 and _reads_maxima(parts[0])
  return triton.num_maxima(problem, target) if is_one_kernel else 1


def maxima(
  x: jax.Array, parts: Sequence[Part], target: targets.Target, count: int
) -> jax.Array:
  """Returns uint32[blockings, count]: f32 bits of partial amax values of x.

  `parts` were decided for `target` and compute their global scales.
  """
  each = [
    triton.maxima(x, part.problem, target)
    if _reads_maxima(part)
    else xla.maxima(x, part.problem)
    for part in parts
  ]
  if len(each) == 1 and each[0].shape[1] == count:
    return each[0]
  largest = jnp.concatenate([jnp.max(one, axis=1) for one in each])
  return blocking.pad_axis(largest[:, None], 1, count)


def explained(
  problem: Problem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> Decided:
  """Returns the decisions of the lowering, and why kernels are not used."""
  reasons: list[str] = []
  decided: list[tuple[Problem, decisions.Decision]]
  if isinstance(problem, problems.DequantizationProblem):
    table: Any = DEQUANTIZE_OPERATION.backends()
    whole = decide_dequantize(problem, module, target, overlay)
    decided = [(problem, whole)]
  else:
    table = QUANTIZE_OPERATION.backends()
    parts = decide(problem, module, target, overlay)
    decided = [(part.problem, part.decision) for part in parts]
    if len(parts) > 1:
      if parts[0].problem.prologue is None:
        problem = problem.without_prologue()
      whole = choose(problem, module, target, overlay)
      refusals = _refusals(whole, table, target)
      reasons.append(f"a kernel per blocking: {'; '.join(refusals)}")
  for _, decision in decided:
    reasons += _refusals(decision, table, target)
  names = dict.fromkeys(decision.implementation for _, decision in decided)
  return Decided(
    implementation=" and ".join(names) or xla.QUANTIZE.name,
    reason="; ".join(dict.fromkeys(reasons)),
    decisions=tuple(decision for _, decision in decided),
    problems=tuple(problem for problem, _ in decided),
  )


def decide_dequantize(
  problem: problems.DequantizationProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> decisions.Decision:
  """Chooses the backend of `dequantize_p`."""
  return choice.choose(
    DEQUANTIZE_OPERATION,
    problem,
    target,
    unportable=module.kernels_refusal(),
    overlay=overlay,
  )


def choose(
  problem: problems.QuantizationProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> decisions.Decision:
  """Chooses the backend of one part.

  If this process cannot lower a kernel, XLA ops are chosen without an error,
  because `quantize` has no `implementation` argument and the bits are the same.
  """
  unportable = module.kernels_refusal()
  for name in decisions.order(QUANTIZE, target):
    unportable = unportable or QUANTIZE[name].lowering_refusal(target)
  return choice.choose(
    QUANTIZE_OPERATION,
    problem,
    target,
    unportable=unportable,
    overlay=overlay,
  )


def _refusals(
  decision: decisions.Decision,
  backends: Mapping[str, decisions.BackendRecord[Any]],
  target: targets.Target,
) -> list[str]:
  """Returns why no kernel is used; an empty list if one is.

  The reasons are those of the backends tried on the target, or those of all
  backends if none is tried.
  """
  chosen = backends[decision.implementation]
  if not chosen.is_portable:
    return []
  tried = decisions.order(backends, target)
  refusals = [r for r in decision.refusals if r.implementation in tried]
  return [
    f"{r.implementation}: {r.reason}" for r in refusals or decision.refusals
  ]
