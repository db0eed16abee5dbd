# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cpu implementation: which problems the CPU custom call can serve."""

from __future__ import annotations

from typing import Final

from jaxplugin import problem as problem_lib
from jaxplugin import target as target_lib

NAME: Final = "cpu"


def supports(
  problem: problem_lib.DotProblem, target: target_lib.Target
) -> problem_lib.Unsupported | None:
  """No problem yet: the custom call is not part of this version."""
  del problem
  if target.platform != "cpu":
    return problem_lib.Unsupported(
      f"needs a CPU, the target's platform is {target.platform}"
    )
  return problem_lib.Unsupported("this version has no CPU custom call yet")
