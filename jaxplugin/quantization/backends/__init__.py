# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Implementations of quantizing and dequantizing, and the choice between them.

Lowerings and `explain` call the same functions here, so they cannot disagree.
Bits of `quantize` are the same in all; a module for which kernels cannot serve
(`lowering.Module`) gets operations, and the decision says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.core import decisions
from jaxplugin.core import extents
from jaxplugin.core import targets
from jaxplugin.operation import choice
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import cpu
from jaxplugin.quantization.backends import problem_fields
from jaxplugin.quantization.backends import triton
from jaxplugin.quantization.backends import xla
from jaxplugin.runtime import lowering
from jaxplugin.tables import fitting
from jaxplugin.tables import resolution

QUANTIZE: Final = decisions.table(triton.QUANTIZE, cpu.QUANTIZE, xla.QUANTIZE)
DEQUANTIZE: Final = decisions.table(cpu.DEQUANTIZE, xla.DEQUANTIZE)
# What has kernels for the global scale of a device's part; others take xla's.
_PARTIAL_SCALES: Final[dict[str, Callable[..., jax.Array]]] = {
  triton.QUANTIZE.name: triton.partial_scales
}

# Both, as tables of measured choices speak of them.
QUANTIZE_OPERATION: Final[fitting.Operation[problems.QuantizeProblem]] = (
  fitting.Operation(
    name="quantize",
    bucketed="m",
    fields_of=problem_fields.fields_of,
    problem_of=problem_fields.problem_of,
    backends=lambda: QUANTIZE,
  )
)
DEQUANTIZE_OPERATION: Final[fitting.Operation[problems.DequantizeProblem]] = (
  fitting.Operation(
    name="dequantize",
    bucketed="m",
    fields_of=problem_fields.dequantize_fields_of,
    problem_of=problem_fields.dequantize_problem_of,
    backends=lambda: DEQUANTIZE,
  )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
  """What was decided about an equation, for `explain`.

  Attributes:
    implementation: by name; those of each blocking, where they differ.
    reason: why no kernel; empty where one serves.
    decisions: what lowering follows, with the refusals of every other
      implementation; one for each blocking, unless a kernel serves all.
    problems: what each decision is about.
  """

  implementation: str
  reason: str
  decisions: tuple[decisions.Decision, ...]
  problems: tuple[
    problems.QuantizeProblem | problems.DequantizeProblem, ...
  ] = ()

  def with_notes(self, notes: tuple[str, ...]) -> Told:
    """The same, with more notes on what was decided."""
    each = tuple(
      dataclasses.replace(d, notes=(*d.notes, *notes)) for d in self.decisions
    )
    return dataclasses.replace(self, decisions=each)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Some of the blockings of a problem, and what makes all of them at once."""

  problem: problems.QuantizeProblem
  decision: decisions.Decision


def decide(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> list[Part]:
  """What makes each of the blockings of a problem, in order.

  One part where a kernel makes all of them from one read; else one for each.
  Tables of measured choices are asked about the whole, then about each.
  """
  problem = as_products_read(problem, target)
  whole = choose(problem, module, target, overlay)
  if len(problem.blockings) == 1 or whole.implementation != xla.QUANTIZE.name:
    return [Part(problem=problem, decision=whole)]
  return [
    Part(problem=single, decision=choose(single, module, target, overlay))
    for single in problem.singles()
  ]


def as_products_read(
  problem: problems.QuantizeProblem, target: targets.Target
) -> problems.QuantizeProblem:
  """The same, whose packed values lie in memory as a target's products read
  them, so that nothing is transposed.

  For cuDNN the blocked dimension is last. Triton's kernels take one dimension
  where it is; of several that a product merges they get a copy, with it last.
  """
  is_by_triton = target.platform in ("cuda", "rocm") and (
    not target.has_block_scaled_cudnn
  )
  if not (problem.for_products and is_by_triton):
    return problem
  if any(b.as_in_product(problem.shape) != b for b in problem.blockings):
    return problem
  return dataclasses.replace(problem, for_products=False)


def partial_scales(
  x: jax.Array, parts: Sequence[Part], target: targets.Target
) -> jax.Array:
  """f32[blockings]: the global scales that a part of an array asks for.

  0 where no block has one; `operations.global_scale_of_partial` of the largest
  of all parts is the array's.

  Args:
    parts: of a problem that computes them, as `decide` gives them.
  """
  each = [
    _PARTIAL_SCALES.get(part.decision.implementation, xla.partial_scales)(
      x, part.problem, target
    )
    for part in parts
  ]
  return each[0] if len(each) == 1 else jnp.concatenate(each)


def num_maxima(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None,
) -> int:
  """How many largest magnitudes of parts of x serve each blocking.

  Where a kernel finds them and another one computes a global scale of them; 0
  where none does, which takes `partial_scales`.

  Args:
    problem: that computes its global scales.
  """
  parts = decide(problem, module, target, overlay)
  if [p.decision.implementation for p in parts] != [triton.QUANTIZE.name]:
    return 0
  return triton.num_maxima(problem, target)


def maxima(
  x: jax.Array, parts: Sequence[Part], target: targets.Target, count: int
) -> jax.Array:
  """uint32[blockings, count]: largest magnitudes of parts of x, as f32 bits.

  Args:
    parts: of a problem that computes global scales, as `decide` gives them.
    count: as many as `num_maxima` says, or others.
  """
  each = [
    triton.maxima(x, part.problem, target)
    if part.decision.implementation == triton.QUANTIZE.name
    else xla.maxima(x, part.problem)
    for part in parts
  ]
  if len(each) == 1 and each[0].shape[1] == count:
    return each[0]
  largest = jnp.concatenate([jnp.max(one, axis=1) for one in each])
  return extents.pad_axis(largest[:, None], 1, count)


def explained(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> Told:
  """What `decide` says, and why not kernels, in words."""
  parts = decide(problem, module, target, overlay)
  reasons = []
  if len(parts) > 1:
    whole = choose(problem, module, target, overlay)
    refusals = _refusals(whole, QUANTIZE, target)
    reasons.append(f"a kernel per blocking: {'; '.join(refusals)}")
  for part in parts:
    reasons += _refusals(part.decision, QUANTIZE, target)
  names = dict.fromkeys(part.decision.implementation for part in parts)
  return Told(
    implementation=" and ".join(names),
    reason="; ".join(dict.fromkeys(reasons)),
    decisions=tuple(part.decision for part in parts),
    problems=tuple(part.problem for part in parts),
  )


def decide_dequantize(
  problem: problems.DequantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> decisions.Decision:
  """What `dequantize_p` is lowered to."""
  return choice.choose(
    DEQUANTIZE_OPERATION,
    problem,
    target,
    unportable=module.kernels_refusal(),
    overlay=overlay,
  )


def explained_dequantize(
  problem: problems.DequantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> Told:
  """What `decide_dequantize` says, and why no kernel, in words."""
  decision = decide_dequantize(problem, module, target, overlay)
  reasons = _refusals(decision, DEQUANTIZE, target)
  return Told(
    implementation=decision.implementation,
    reason="; ".join(reasons),
    decisions=(decision,),
    problems=(problem,),
  )


def choose(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
  overlay: resolution.Overlay | None = None,
) -> decisions.Decision:
  """As `decisions.choose`, but where this process cannot lower a kernel.

  Nobody could ask for operations instead of an error, as `quantize` takes no
  implementation, and the bits are the same.
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
  backends: Mapping[str, decisions.Backend[Any]],
  target: targets.Target,
) -> list[str]:
  """Why no kernel serves: of those tried on the target, or of all."""
  chosen = backends[decision.implementation]
  if not chosen.is_portable:
    return []
  tried = decisions.order(backends, target)
  refusals = [r for r in decision.refusals if r.implementation in tried]
  return [
    f"{r.implementation}: {r.reason}" for r in refusals or decision.refusals
  ]
