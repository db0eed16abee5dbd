# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a lowering rule may assume about the module that it lowers into."""

from __future__ import annotations

from typing import Any

from jaxplugin import target as target_lib


def resolve_target(
  override: target_lib.Target | None, platform: str
) -> target_lib.Target:
  """The target a lowering for `platform` decides for."""
  if override is not None and override.platform == platform:
    return override
  return target_lib.detect_target(platform)


def is_partitioned(ctx: Any) -> bool:
  """Whether XLA's partitioner will split this module over several devices."""
  axis_context = ctx.module_context.axis_context
  manual = getattr(axis_context, "manual_axes", None)
  if manual is not None:  # inside shard_map
    return set(manual) != set(axis_context.mesh.axis_names)
  # Known also where the devices are not, as under an abstract mesh.
  return getattr(axis_context, "num_devices", 1) > 1


def device_of_kernels(
  ctx: Any, override: target_lib.Target | None
) -> target_lib.Target | None:
  """The one device whose kernels a rule may call; None: operations only.

  Kernels see the arrays of one device, and belong to one platform and to
  processes of this package. So they serve a module for one platform alone
  (where one for several would have to choose when it runs) that is not
  exported, which also is where symbolic sizes are, and not partitioned; the
  inside of a `shard_map` over all axes is not.

  Args:
    ctx: the rule's `LoweringRuleContext`.
    override: the target of an enclosing `use_target`, or None.
  """
  module = ctx.module_context
  platforms = tuple(ctx.platforms or module.platforms)
  if len(platforms) != 1:
    return None
  if module.lowering_parameters.for_export or is_partitioned(ctx):
    return None
  return resolve_target(override, platforms[0])


def cpu_kernels_serve(ctx: Any, override: target_lib.Target | None) -> bool:
  """Whether a rule may call the C++ kernels for CPUs; see `device_of_kernels`.

  Args:
    ctx: the rule's `LoweringRuleContext`.
    override: the target of an enclosing `use_target`, or None.
  """
  device = device_of_kernels(ctx, override)
  return device is not None and (
    device.platform == "cpu" and device.cpu_kernels is not None
  )
