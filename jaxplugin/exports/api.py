# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`export`: `jax.export` with kernels in the module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.export

from jaxplugin.core import error_context, targets
from jaxplugin.dot import primitive
from jaxplugin.dot.backends import cudnn
from jaxplugin.jaxext import exports_private
from jaxplugin.kernels.cpu import library
from jaxplugin.plugins import registry
from jaxplugin.quantization import dequantization, quantize_primitive
from jaxplugin.ragged import primitive as ragged_primitive
from jaxplugin.runtime import lowering, triton_calls

# The custom calls of all backends. docs/how_to/export.md says which package
# registers each, and which releases load it.
CALL_TARGETS: Final = (
  *library.HANDLERS,
  *triton_calls.NAMES,
  cudnn.DOT_TARGET,
  cudnn.SWIZZLED_DOT_TARGET,
)
_PRIMITIVES: Final = (
  primitive.block_scaled_dot_p,
  quantize_primitive.quantize_p,
  dequantization.dequantize_p,
  *ragged_primitive.PRIMITIVES,
)
PLATFORMS: Final = lowering.PLATFORMS
# Platforms for which a decision needs no facts about the device.
_NEED_NO_TARGET: Final = ("cpu", "tpu")
_EXAMPLES: Final = {"cuda": "h100", "rocm": "mi300x"}  # of targets
# Names of GPUs that JAX accepts elsewhere, for the error's remedy.
_GPU_WORDS: Final = ("gpu", "nvidia", "amd")
# Fast compilation. The export uses only the partitioner's callbacks.
_COMPILER_OPTIONS: Final[dict[str, str | bool]] = {
  "xla_backend_optimization_level": "0"
}


def export(
  fn: Callable[..., Any],
  platforms: Sequence[str] | None = None,
  *,
  target: targets.Target | Sequence[targets.Target] | None = None,
  disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., jax.export.Exported]:
  """Returns `jax.export.export` of `fn`, with the kernels that `jit` runs.

  The process that loads the module imports jaxplugin, which registers its
  kernels with XLA. `jax.export.export` itself writes a portable module of XLA
  operations instead. docs/how_to/export.md has the custom calls, the releases
  that load them, and how shardings are exported.

  On CPUs kernels accept symbolic m, n and batch. On GPUs, kernels of dots,
  ragged dots and `quantize` accept a symbolic m, and XLA operations compute
  other symbolic sizes. Measured configs of CPU kernels are not exported.

  Args:
    fn: a function, jitted or not.
    platforms: some of "cpu", "cuda", "rocm" and "tpu"; by default those of
      `target`, or else JAX's default. Each is decided separately.
    target: a `jp.Target`, or several of different platforms. By default the
      attached devices, with an old ptxas. A `use_target` in `fn` comes first.
    disabled_checks: see `jax.export.export`; for other custom calls.

  Returns:
    A function of arrays or `jax.ShapeDtypeStruct`s, sharded or not, that
    returns a `jax.export.Exported`.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If platforms are unknown, repeated or missing, or do not match
      the targets. Also if a GPU platform has neither a target nor a device.
    NotImplementedError: From the result, if a forced implementation does not
      support a call. Also for symbolic sizes on several devices, and for
      automatic shardings (Auto axes) over devices that are not attached.

  See also `jp.explain(..., for_export=True)`.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> w = jp.quantize(jnp.ones((32, 64)), "mxfp8")
    >>> export = jp.export(lambda x: jp.linear(x, w), ["cpu"])
    >>> exported = export(jnp.ones((2, 64)))
    >>> print(exported.platforms, exported.out_avals[0].shape)
    ('cpu',) (2, 32)
  """
  error_context.require_function("export", fn)
  given = _targets_of(target)
  platforms = _platforms(platforms, given)
  for platform in platforms:
    _check_known(platform, given)
  jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
  _validate_checks(disabled_checks)
  checks = [
    *map(
      jax.export.DisabledSafetyCheck.custom_call,
      (*CALL_TARGETS, *registry.call_targets()),
    ),
    *disabled_checks,
  ]
  exporter = functools.partial(
    jax.export.export, jitted, platforms=platforms, disabled_checks=checks
  )

  def exported_of(*args: Any, **kwargs: Any) -> jax.export.Exported:
    context = lambda: _going_on(given, len(platforms))
    with context() as current:
      try:
        exported = exporter()(*args, **kwargs)
      except lowering.UnheardError:
        pass
      except ValueError as error:
        _check_devices((args, kwargs), error)
        raise
      else:
        return exports_private.with_vjp_exported_in(exported, context)
      # Equal calls may be split in different ways, so each is lowered again.
      with exports_private.lowered_anew(_PRIMITIVES) as rules:
        _listen(current, jitted, rules, args, kwargs)
        current.begin("exporting")
        return exporter(_override_lowering_rules=rules)(*args, **kwargs)

  return exported_of


@contextlib.contextmanager
def _going_on(
  given: Mapping[str, targets.Target], num_platforms: int
) -> Iterator[lowering.Export]:
  current = lowering.Export(targets=given, num_platforms=num_platforms)
  # Tracing checks a forced implementation for one target.
  override: Any = contextlib.nullcontext()
  if len(given) == 1 and targets.overriding_target() is None:
    override = targets.use_target(*given.values())
  with lowering.exporting(current), override:
    yield current


def _targets_of(given: Any) -> dict[str, targets.Target]:
  """Returns the targets by platform; raises if a platform has two."""
  several = given if isinstance(given, (tuple, list)) else (given,)
  found: dict[str, targets.Target] = {}
  for target in () if given is None else several:
    targets.require("export", target, "a jp.Target or a sequence of these")
    if target.platform in found:
      raise ValueError(
        "export: target must have at most one target for each platform, got"
        f" {found[target.platform].name} and {target.name}, both of"
        f" {target.platform}; export a module for each"
      )
    found[target.platform] = target
  return found


def _platforms(
  platforms: Sequence[str] | None, given: Mapping[str, targets.Target]
) -> tuple[str, ...]:
  if platforms is None:
    return tuple(given) or (jax.export.default_export_platform(),)
  if isinstance(platforms, str):
    platforms = (platforms,)
  _validate_platforms(platforms)
  missing = set(given) - set(platforms)
  if missing:
    raise ValueError(
      f"export: target must be of the platforms {tuple(platforms)}, got one of"
      f" {', '.join(sorted(missing))}; add its platform to platforms, or leave"
      " the target out"
    )
  return tuple(platforms)


def _validate_platforms(platforms: Any) -> None:
  """Raises unless `platforms` are names in `PLATFORMS`, each once."""
  if not isinstance(platforms, Sequence) or not all(
    isinstance(platform, str) for platform in platforms
  ):
    remedy = ""
    if isinstance(platforms, targets.Target):
      remedy = "; pass it as target="
    raise TypeError(
      "export: platforms must be a sequence of strings, of"
      f" {', '.join(PLATFORMS)}, got {error_context.shown(platforms)}{remedy}"
    )
  for platform in platforms:
    if platform in PLATFORMS:
      continue
    remedy, name = "", platform.lower()
    if name in PLATFORMS:
      remedy = f"; write it as {name!r}"
    elif name in _GPU_WORDS:
      remedy = "; of GPUs, cuda is NVIDIA's and rocm AMD's"
    elif name in targets.KNOWN_NAMES:
      remedy = f"; a device is target=jp.named_target({name!r})"
    raise ValueError(
      f"export: platforms must be of {', '.join(PLATFORMS)}, got"
      f" {error_context.shown(platform)}{remedy}"
    )
  if not platforms or len({*platforms}) != len(platforms):
    raise ValueError(
      "export: platforms must have at least one name, each once, got"
      f" {tuple(platforms)}; leave it out for this machine's platform"
    )


def _validate_checks(checks: Any) -> None:
  is_sequence = isinstance(checks, Sequence) and not isinstance(checks, str)
  if not is_sequence or not all(
    isinstance(check, jax.export.DisabledSafetyCheck) for check in checks
  ):
    raise TypeError(
      "export: disabled_checks must be a sequence of"
      f" jax.export.DisabledSafetyCheck, got {error_context.shown(checks)}; for"
      " a custom call pass jax.export.DisabledSafetyCheck.custom_call(name)"
    )


def _check_known(platform: str, given: Mapping[str, targets.Target]) -> None:
  """Raises ValueError if a GPU platform has neither a target nor a device."""
  if platform in given or platform in _NEED_NO_TARGET:
    return
  override = targets.overriding_target()
  if override is not None and override.platform == platform:
    return
  try:
    jax.local_devices(backend=platform)
  except RuntimeError:
    name = _EXAMPLES[platform]
    raise ValueError(
      f"export: no {platform} device is attached, got target=None. Pass"
      f" target=jp.named_target({name!r}) or another"
    ) from None


def _check_devices(args: Any, error: ValueError) -> None:
  """Raises NotImplementedError if an argument's mesh has no devices."""
  for x in jax.tree.leaves(args):
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh) and not mesh.empty:
      raise NotImplementedError(
        f"export: the mesh must have devices, got {mesh}. Use a mesh of CPUs"
        " of the same shape for any platform: set jax_num_cpu_devices and"
        " call jax.make_mesh"
      ) from error


def _listen(
  current: lowering.Export,
  jitted: Any,
  rules: Any,
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> None:
  """Records the shardings that the partitioner chooses for each call.

  Raises:
    NotImplementedError: If sizes are symbolic.
  """
  error = lowering.symbolic_error(jax.tree.leaves((args, kwargs)))
  if error is not None:
    raise NotImplementedError(f"export: {error}")
  current.begin("listening")
  traced = jitted.trace(*args, **kwargs)
  lowered = exports_private.lowered_with(traced, rules)
  lowered.compile(compiler_options=dict(_COMPILER_OPTIONS))
