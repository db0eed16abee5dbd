# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the C++ kernels: all that are one way of computing each."""

from __future__ import annotations

from typing import Final

from jaxplugin.core import targets
from jaxplugin.dot import problems
from jaxplugin.dot.backends import cpu_configs
from jaxplugin.lab.tuning.candidates import spaces

_NAME: Final = "cpu"


def space(
  problem: problems.DotProblem, target: targets.Target, limits: spaces.Limits
) -> spaces.Space:
  """What the kernels have for a problem that they serve.

  They are so few that none is estimated. Engines that do not serve the problem
  are told with the library's reason.
  """
  del limits
  kept = cpu_configs.candidates(problem, target)
  pruned = []
  for engine in cpu_configs.ENGINES:
    config = cpu_configs.CpuConfig(engine=engine)
    error = cpu_configs.config_error(problem, target, config)
    fields = cpu_configs.fields_of(config)
    if error is not None:
      pruned.append(
        spaces.Pruned(
          rule="resources", reason=error, implementation=_NAME, example=fields
        )
      )
    elif config not in kept:
      pruned.append(
        spaces.Pruned(
          rule="dominated",
          reason="it is what the rule chooses",
          implementation=_NAME,
          example=fields,
        )
      )
  return spaces.Space(
    configs=tuple(map(cpu_configs.fields_of, kept)), pruned=tuple(pruned)
  )
