# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that lower a primitive, and what they may assume about the module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import Final

import jax
from jax.extend import core as extend_core
from jax.interpreters import mlir

from jaxplugin.core import decisions
from jaxplugin.core import targets
from jaxplugin.jaxext import jax_private
from jaxplugin.runtime import exporting

PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
# Why kernels do not serve what `jax.export` exports.
PORTABLE: Final = (
  "jax.export needs a portable module; to keep kernels call jp.export"
)


def resolve_target(
  override: targets.Target | None, platform: str
) -> targets.Target:
  """The target a lowering for `platform` decides for."""
  if override is not None and override.platform == platform:
    return override
  export = exporting.current()
  if export is not None and platform in export.targets:
    return export.targets[platform]
  if export is not None:
    return targets.detect_for_export(platform)
  return targets.detect_target(platform)


def is_portable(ctx: Any) -> bool:
  """Whether processes without this package are to load the module.

  Any that `jax.export` makes, unless `jp.export` does.
  """
  is_exported = ctx.module_context.lowering_parameters.for_export
  return is_exported and exporting.current() is None


def is_partitioned(ctx: Any) -> bool:
  """Whether XLA's partitioner will split this module over several devices."""
  axis_context = ctx.module_context.axis_context
  manual = getattr(axis_context, "manual_axes", None)
  if manual is not None:  # inside shard_map
    return set(manual) != set(axis_context.mesh.axis_names)
  # Known also where the devices are not, as under an abstract mesh.
  return getattr(axis_context, "num_devices", 1) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """What of a module decides whether a rule may call kernels in it.

  Attributes:
    platforms: that it is for.
    is_exported: whether processes without this package are to load it.
    is_partitioned: whether the rule's arrays lie on several devices.
    is_split: whether the partitioner then calls back for each device's share.
      A module of `jax.export` has no callback.
  """

  platforms: tuple[str, ...]
  is_exported: bool = False
  is_partitioned: bool = False
  is_split: bool = False

  def of_device(self) -> Module:
    """That of a device's share of what is split."""
    return dataclasses.replace(self, is_partitioned=False, is_split=False)

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
      return decisions.Unsupported(
        f"the module is for several platforms: {names}"
      )
    if self.is_exported:
      return decisions.Unsupported(PORTABLE)
    if self.is_partitioned:
      return decisions.Unsupported(
        "XLA partitions the module, and kernels need the arrays of one"
        " device; call it inside a shard_map over all axes"
      )
    return None


def module_of(ctx: Any) -> Module:
  """The module that a rule's `LoweringRuleContext` lowers into."""
  module = ctx.module_context
  is_exported, is_split = is_portable(ctx), is_partitioned(ctx)
  return Module(
    platforms=tuple(ctx.platforms or module.platforms),
    is_exported=is_exported,
    is_partitioned=is_split,
    is_split=is_split and not is_exported,
  )


def require_shardy(who: str, module: Module) -> None:
  """Raises NotImplementedError if GSPMD would partition a call.

  Args:
    who: the function that the error names.
    module: the module of the call.
  """
  is_shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
  if module.is_split and not is_shardy:
    raise NotImplementedError(
      f"{who}: jax_use_shardy_partitioner must be True if arrays are sharded"
      " over several devices, got False. Call"
      " jax.config.update('jax_use_shardy_partitioner', True)."
    )


def register_kernels(
  primitive: extend_core.Primitive, rule: Callable[..., Any]
) -> None:
  """Registers the lowering of a primitive that kernels of devices may serve.

  Args:
    rule: takes also `platform`, one of `PLATFORMS`; None of any other.
  """
  jax_private.require_devices_during_lowering(primitive)
  mlir.register_lowering(primitive, rule)
  for platform in PLATFORMS:
    mlir.register_lowering(
      primitive, functools.partial(rule, platform=platform), platform=platform
    )


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _bind_jitted(*args: Any, primitive: Any, params: Any) -> Any:
  return primitive.bind(*args, **dict(params))


def impl(primitive: extend_core.Primitive, *args: Any, **params: Any) -> Any:
  """A primitive that is evaluated by itself, also under `jax.disable_jit`."""
  with jax.disable_jit(False):  # or this would come back here
    return _bind_jitted(
      *args, primitive=primitive, params=tuple(params.items())
    )
