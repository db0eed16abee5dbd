# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares packaged tables with this checkout's kernels."""

from __future__ import annotations

import dataclasses

from jaxplugin.core import targets
from jaxplugin.lab.tuning.operations import registry
from jaxplugin.tables import records, resolution


def target_of(table: records.Table) -> targets.Target:
  """A target that a table was measured for."""
  device = table.header.device
  if device.platform == "cpu":
    return targets.Target(
      name="local cpu",
      platform="cpu",
      core_count=device.core_count,
      cpu_kernels=device.architecture,
    )
  made = (targets.named_target(name) for name in targets.TARGET_NAMES)
  (found,) = (t for t in made if resolution.device_of(t) == device)
  cudnn = dict(table.header.sources).get("cudnn")
  if cudnn is None:
    return found
  version = dict(cudnn.toolchain)["cudnn"]
  return targets.named_target(found.name, cudnn=version)


def misfit_but_for_sources(table: records.Table) -> str:
  """Why rows cannot be asked here, as if they had been measured here today."""
  operation = registry.BY_NAME[table.header.operation].operation
  target = target_of(table)
  names = [name for name, _ in table.header.sources]
  sources = resolution.sources_of(operation, target, names)
  header = dataclasses.replace(table.header, sources=sources)
  today = records.table_of(header, table.rows)
  return resolution.misfit(today, operation, target)


def staleness(table: records.Table) -> str:
  """Which kernels are others than the measured ones; "" where none are.

  Versions of libraries are not compared, because each may have a table.

  Raises:
    ValueError: If this process does not know the sources of the kernels.
  """
  operation = registry.BY_NAME[table.header.operation].operation
  names = [name for name, _ in table.header.sources]
  here = dict(resolution.sources_of(operation, target_of(table), names))
  changed = [
    f"{name} (measured {(source.kernels or 'none')[:12]}, here"
    f" {(here[name].kernels or 'none')[:12]})"
    for name, source in table.header.sources
    if source.kernels != here[name].kernels
  ]
  return ", ".join(changed)
