# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a lowering rule may assume about the module that it lowers into."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxplugin.core import decisions
from jaxplugin.core import targets


def resolve_target(
  override: targets.Target | None, platform: str
) -> targets.Target:
  """The target a lowering for `platform` decides for."""
  if override is not None and override.platform == platform:
    return override
  return targets.detect_target(platform)


def is_partitioned(ctx: Any) -> bool:
  """Whether XLA's partitioner will split this module over several devices."""
  axis_context = ctx.module_context.axis_context
  manual = getattr(axis_context, "manual_axes", None)
  if manual is not None:  # inside shard_map
    return set(manual) != set(axis_context.mesh.axis_names)
  # Known also where the devices are not, as under an abstract mesh.
  return getattr(axis_context, "num_devices", 1) > 1


def is_partly_manual_under_gspmd(ctx: Any) -> bool:
  """Whether this is inside a `shard_map` over some of the axes, under GSPMD.

  It aborts the process there on custom calls that are not its own.
  """
  manual = getattr(ctx.module_context.axis_context, "manual_axes", None)
  is_shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
  return bool(manual) and is_partitioned(ctx) and not is_shardy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """What of a module decides whether a rule may call kernels in it.

  Attributes:
    platforms: that it is for.
    is_exported: whether other processes are to load it.
    is_partitioned: whether the rule's arrays lie on several devices.
  """

  platforms: tuple[str, ...]
  is_exported: bool = False
  is_partitioned: bool = False

  def kernels_refusal(self) -> decisions.Unsupported | None:
    """Why a rule can lower to operations only; None where kernels may serve.

    Kernels see the arrays of one device, and belong to one platform and to
    processes of this package. So they serve a module for one platform alone
    (where one for several would have to choose when it runs) that is not
    exported, which also is where symbolic sizes are, and not partitioned; the
    inside of a `shard_map` over all axes is not.
    """
    if len(self.platforms) != 1:
      names = ", ".join(self.platforms)
      return decisions.Unsupported(f"the module is for {names} at once")
    if self.is_exported:
      return decisions.Unsupported("jax.export needs a portable module")
    if self.is_partitioned:
      return decisions.Unsupported(
        "XLA partitions the module, and kernels see the arrays of one device;"
        " inside of a shard_map over all axes they serve"
      )
    return None


def module_of(ctx: Any) -> Module:
  """The module that a rule's `LoweringRuleContext` lowers into."""
  module = ctx.module_context
  return Module(
    platforms=tuple(ctx.platforms or module.platforms),
    is_exported=module.lowering_parameters.for_export,
    is_partitioned=is_partitioned(ctx),
  )
