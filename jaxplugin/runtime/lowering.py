# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lowering rules of primitives, and facts about the module they lower into."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.export
from jax.extend import core as extend_core
from jax.interpreters import mlir

from jaxplugin.core import decisions, targets
from jaxplugin.jaxext import jax_private

PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
# Why a module of `jax.export` has no kernels.
PORTABLE: Final = (
  "jax.export needs a portable module; to keep kernels call jp.export"
)
Phase = Literal["listening", "exporting"]


class UnheardError(Exception):
  """A call must be split, but its shardings are not recorded yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
  """The partitioner's arguments to `partition` for a call."""

  mesh: jax.sharding.Mesh
  arg_shapes: Any
  result_shape: Any


@dataclasses.dataclass(kw_only=True, eq=False)
class Export:
  """One export. It only equals itself, because it is part of `jit`'s key.

  Attributes:
    targets: target for each platform; targets of other platforms are detected.
    num_platforms: number of platforms of a module. Each lowers every call.
    phase: "listening" records the partitioner's shardings; "exporting" uses
      them.
    splits: recorded arguments of each call. Keys are the positions of calls in
      the order of lowering.
    mesh: mesh of the partitioner; None before the phase "listening".
  """

  targets: Mapping[str, targets.Target]
  num_platforms: int = 1
  phase: Phase = "exporting"
  splits: dict[int, list[Heard]] = dataclasses.field(default_factory=dict)
  mesh: jax.sharding.Mesh | None = None
  _num_calls: int = 0

  def begin(self, phase: Phase) -> None:
    self.phase = phase
    self._num_calls = 0

  def next_number(self) -> int:
    """Returns the position of the call being lowered.

    For export, each platform lowers a call before the next call is lowered.
    """
    number = self._num_calls
    self._num_calls += 1
    return number if self.phase == "listening" else number // self.num_platforms


_export: Final = jax.make_user_context(default_value=None)


def current_export() -> Export | None:
  """Returns the current export of this thread, or None."""
  return _export.value


@contextlib.contextmanager
def exporting(export: Export) -> Iterator[Export]:
  """Makes `export` the current export."""
  with _export(export):
    yield export


def symbolic_error(arrays: Sequence[Any]) -> str | None:
  """Returns why `jp.export` refuses arrays on several devices, or None.

  JAX 0.12 cannot compile a `shard_map` whose operations read a symbolic size.
  """
  shapes = [x.shape for x in arrays if hasattr(x, "shape")]
  if not any(map(jax.export.is_symbolic_dim, itertools.chain(*shapes))):
    return None
  return (
    f"sizes must be static on several devices, got symbolic ones in {shapes}."
    " Export the function of one device, and call the loaded function inside a"
    " jax.shard_map; or export XLA operations with Auto axes by"
    " jax.export.export"
  )


def resolve_target(
  override: targets.Target | None, platform: str
) -> targets.Target:
  """Returns the target that a lowering for `platform` decides for."""
  if override is not None and override.platform == platform:
    return override
  export = current_export()
  if export is not None and platform in export.targets:
    return export.targets[platform]
  if export is not None:
    return targets.detect_for_export(platform)
  return targets.detect_target(platform)


def is_partitioned(ctx: Any) -> bool:
  """Returns whether XLA partitions this module over several devices."""
  axis_context = ctx.module_context.axis_context
  manual = getattr(axis_context, "manual_axes", None)
  if manual is not None:  # inside shard_map
    return set(manual) != set(axis_context.mesh.axis_names)
  # An abstract mesh has this number too, but no devices.
  return getattr(axis_context, "num_devices", 1) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """The facts that decide whether a rule may call kernels in a module.

  Attributes:
    platforms: the platforms of the module.
    is_exported: whether processes without this package may load it.
    is_partitioned: whether the rule's arrays lie on several devices.
    is_split: whether the partitioner then calls back for each device's share.
      A module of `jax.export` has no callback.
  """

  platforms: tuple[str, ...]
  is_exported: bool = False
  is_partitioned: bool = False
  is_split: bool = False

  def of_device(self) -> Module:
    """Returns the module of one device's share of a split operation."""
    return dataclasses.replace(self, is_partitioned=False, is_split=False)

  def kernels_refusal(self) -> decisions.Unsupported | None:
    """Returns why a rule may not call kernels, or None if it may.

    A kernel belongs to one platform and to processes of this package, and it
    reads the arrays of one device. So a module with kernels is for one platform
    and neither exported nor partitioned. The inside of a `shard_map` over all
    axes is not partitioned. Only exported modules have symbolic sizes.
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
  """Returns the module of a rule's `LoweringRuleContext`."""
  module = ctx.module_context
  # Only processes with this package load the modules of `jp.export`.
  is_exported = (
    module.lowering_parameters.for_export and current_export() is None
  )
  is_split = is_partitioned(ctx)
  return Module(
    platforms=tuple(ctx.platforms or module.platforms),
    is_exported=is_exported,
    is_partitioned=is_split,
    is_split=is_split and not is_exported,
  )


def require_shardy(who: str, module: Module) -> None:
  """Raises NotImplementedError if GSPMD would partition a call."""
  is_shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
  if module.is_split and not is_shardy:
    raise NotImplementedError(
      f"{who}: jax_use_shardy_partitioner must be True if arrays are sharded"
      " over several devices, got False. Call"
      " jax.config.update('jax_use_shardy_partitioner', True)."
    )


def require_exportable(who: str, ctx: Any) -> None:
  """Raises NotImplementedError if `jp.export` cannot export a call."""
  axis_context = ctx.module_context.axis_context
  mesh = getattr(axis_context, "mesh", None)  # that of a shard_map
  num_devices = getattr(axis_context, "num_devices", 1)
  num_devices = num_devices if mesh is None else mesh.size
  if current_export() is None or num_devices == 1:
    return
  error = symbolic_error(ctx.avals_in)
  if error is not None:
    raise NotImplementedError(f"{who}: {error}")


def register_kernels(
  primitive: extend_core.Primitive, rule: Callable[..., Any]
) -> None:
  """Registers the lowering of a primitive that may call kernels.

  Args:
    rule: a lowering rule with another parameter, `platform`. It is one of
      `PLATFORMS`, or None for any other platform.
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
  """Evaluates a primitive outside of `jit`, also under `jax.disable_jit`."""
  with jax.disable_jit(False):  # or this would come back here
    return _bind_jitted(
      *args, primitive=primitive, params=tuple(params.items())
    )
