# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The triton implementation: which problems its kernels can serve."""

from __future__ import annotations

from typing import Final

from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib

NAME: Final = "triton"


def supports(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  """No problem yet: the kernels are not part of this version."""
  del problem
  if target.platform not in ("cuda", "rocm"):
    return problem_lib.Unsupported(
      f"needs an NVIDIA or AMD GPU, the target's platform is {target.platform}"
    )
  return problem_lib.Unsupported("this version has no Triton kernels yet")
