# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Implementations of quantizing and dequantizing, and the choice between them.

Lowerings and `explain` call the same functions here, so they cannot disagree.
Bits of `quantize` are the same in all; a module for which kernels cannot serve
(`lowering.Module`) gets operations, and the decision says why.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.quantization import problems
from jaxplugin.quantization.backends import cpu
from jaxplugin.quantization.backends import triton
from jaxplugin.quantization.backends import xla
from jaxplugin.runtime import lowering

QUANTIZE: Final = decisions.table(triton.QUANTIZE, cpu.QUANTIZE, xla.QUANTIZE)
DEQUANTIZE: Final = decisions.table(cpu.DEQUANTIZE, xla.DEQUANTIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
  """What was decided about an equation, for `explain`.

  Attributes:
    implementation: by name; those of each blocking, where they differ.
    reason: why no kernel; empty where one serves.
    decisions: what lowering follows, with the refusals of every other
      implementation; one for each blocking, unless a kernel serves all.
  """

  implementation: str
  reason: str
  decisions: tuple[decisions.Decision, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Some of the blockings of a problem, and what makes all of them at once."""

  problem: problems.QuantizeProblem
  decision: decisions.Decision


def decide(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> list[Part]:
  """What makes each of the blockings of a problem, in order.

  One part where a kernel makes all of them from one read; else one for each.
  """
  whole = _choose(problem, module, target)
  if len(problem.blockings) == 1 or whole.implementation != xla.QUANTIZE.name:
    return [Part(problem=problem, decision=whole)]
  return [
    Part(problem=single, decision=_choose(single, module, target))
    for single in problem.singles()
  ]


def explained(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> Told:
  """What `decide` says, and why not kernels, in words."""
  parts = decide(problem, module, target)
  reasons = []
  if len(parts) > 1:
    refusals = _refusals(_choose(problem, module, target), QUANTIZE, target)
    reasons.append(f"not one kernel for all: {'; '.join(refusals)}")
  for part in parts:
    reasons += _refusals(part.decision, QUANTIZE, target)
  names = dict.fromkeys(part.decision.implementation for part in parts)
  return Told(
    implementation=" and ".join(names),
    reason="; ".join(dict.fromkeys(reasons)),
    decisions=tuple(part.decision for part in parts),
  )


def decide_dequantize(
  problem: problems.DequantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> decisions.Decision:
  """What `dequantize_p` is lowered to."""
  return decisions.choose(
    DEQUANTIZE,
    problem,
    target,
    who="dequantize",
    unportable=module.kernels_refusal(),
  )


def explained_dequantize(
  problem: problems.DequantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> Told:
  """What `decide_dequantize` says, and why no kernel, in words."""
  decision = decide_dequantize(problem, module, target)
  reasons = _refusals(decision, DEQUANTIZE, target)
  return Told(
    implementation=decision.implementation,
    reason="; ".join(reasons),
    decisions=(decision,),
  )


def _choose(
  problem: problems.QuantizeProblem,
  module: lowering.Module,
  target: targets.Target,
) -> decisions.Decision:
  """As `decisions.choose`, but where this process cannot lower a kernel.

  Nobody could ask for operations instead of an error, as `quantize` takes no
  implementation, and the bits are the same.
  """
  unportable = module.kernels_refusal()
  for name in decisions.order(QUANTIZE, target):
    unportable = unportable or QUANTIZE[name].lowering_refusal(target)
  return decisions.choose(
    QUANTIZE, problem, target, who="quantize", unportable=unportable
  )


def _refusals(
  decision: decisions.Decision,
  backends: dict[str, decisions.Backend],
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
