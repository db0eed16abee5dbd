# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cudnn implementation: which problems XLA's cuDNN call can serve."""

from __future__ import annotations

from typing import Final

from jaxplugin import formats
from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib

NAME: Final = "cudnn"

MIN_VERSION: Final = (9, 10, 0)
MIN_COMPUTE_CAPABILITY: Final = (10, 0)


def supports(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  """The gates of XLA's own rewriter, most basic first."""
  return (
    _device_gate(target)
    or _problem_gate(problem)
    or (problem_lib.Unsupported("this version has no cudnn lowering yet"))
  )


def _device_gate(
  target: target_lib.Target,
) -> problem_lib.Unsupported | None:
  if target.platform != "cuda":
    return problem_lib.Unsupported(
      f"needs an NVIDIA GPU, the target's platform is {target.platform}"
    )
  dotted = target_lib.format_version
  capability = (
    f"needs compute capability {dotted(MIN_COMPUTE_CAPABILITY)} or higher, the"
    " target"
  )
  if target.compute_capability is None:
    return problem_lib.Unsupported(f"{capability}'s is not known")
  if target.compute_capability < MIN_COMPUTE_CAPABILITY:
    return problem_lib.Unsupported(
      f"{capability} has {dotted(target.compute_capability)}"
    )
  version = f"needs cuDNN {dotted(MIN_VERSION)} or newer, the target has"
  if target.cudnn_version is None:
    return problem_lib.Unsupported(f"{version} none")
  if target.cudnn_version < MIN_VERSION:
    return problem_lib.Unsupported(f"{version} {dotted(target.cudnn_version)}")
  return None


def _problem_gate(
  problem: problem_lib.DotProblem,
) -> problem_lib.Unsupported | None:
  lhs, rhs = problem.lhs.format, problem.rhs.format
  if lhs is None or rhs is None:
    return problem_lib.Unsupported("needs both operands quantized")
  if not (lhs.is_standard and rhs.is_standard):
    return problem_lib.Unsupported(f"does not know {lhs} x {rhs}")
  mx_pair = {lhs, rhs} <= {formats.MXFP8, formats.MXFP8_E5M2}
  if lhs == rhs == formats.MXFP8_E5M2:
    return problem_lib.Unsupported("does not multiply E5M2 by E5M2")
  if not mx_pair and not lhs == rhs == formats.NVFP4:
    return problem_lib.Unsupported(
      f"serves mxfp8 pairs and nvfp4 x nvfp4, got {lhs} x {rhs}"
    )
  if not problem.sizes_are_static:
    return problem_lib.Unsupported("needs static sizes")
  if problem.k is not None and problem.k % lhs.block_size:
    return problem_lib.Unsupported(
      f"needs k divisible by {lhs.block_size}, got k={problem.k}"
    )
  return None
