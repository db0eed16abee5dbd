# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets: the facts about a device and its libraries that decisions need.

`detect_target` is the only function that queries hardware or libraries. All
other code takes a `Target`. Decisions, lowerings and tests can therefore be
made for a device that is not attached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

import jax
import jax.ffi

from jaxplugin.core import call_options, error_context
from jaxplugin.jaxext import jax_private
from jaxplugin.kernels import architectures, toolkits
from jaxplugin.kernels.cpu import library

Version = tuple[int, int, int]

_MIB: Final = 1 << 20

# Libraries that `Target.missing_libraries` may name.
CPU_KERNELS: Final = "cpu-kernels"  # library of kernels/cpu
JAX_TRITON: Final = "jax-triton"

# The limit of the CPU kernels' instruction set. kernels/cpu/isa.cc ignores
# "avx512".
_CPU_LIMIT: Final = "JAXPLUGIN_CPU_ISA"
_CPU_LIMITS: Final = tuple(
  name for name in library.INSTRUCTION_SETS if name != "avx512"
)

# The first cuDNN, and the first compute capability, with block-scaled matmuls.
MIN_BLOCK_SCALED_CUDNN: Final[Version] = (9, 10, 0)
MIN_BLOCK_SCALED_CAPABILITY: Final = (10, 0)


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and value != ""


def _is_version(value: Any, parts: int = 3) -> bool:
  return (
    isinstance(value, tuple)
    and len(value) == parts
    and all(type(part) is int and part >= 0 for part in value)
  )


def _is_count(value: Any) -> bool:
  return error_context.is_integer(value) and value > 0


def _are_pairs_of_text(value: Any) -> bool:
  return isinstance(value, tuple) and all(
    isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_text, pair))
    for pair in value
  )


# Fields of `Target`: what each must be, and the check. None is checked apart.
_FIELD_RULES: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
  **dict.fromkeys(
    ("name", "platform", "architecture", "cpu_kernels"),
    ("a string that is not empty", _is_text),
  ),
  "compute_capability": (
    "(major, minor)",
    lambda value: _is_version(value, parts=2),
  ),
  **dict.fromkeys(
    ("cudnn_version", "ptxas_version"), ("(major, minor, patch)", _is_version)
  ),
  **dict.fromkeys(
    ("core_count", "shared_memory_bytes", "l2_bytes"),
    ("a positive integer", _is_count),
  ),
  "memory_bandwidth": (
    "a positive number",
    lambda value: error_context.is_number(value) and 0 < value < math.inf,
  ),
  "missing_libraries": (
    "a tuple of pairs (name, reason)",
    _are_pairs_of_text,
  ),
  "options": (
    "a result of jp.options",
    lambda value: isinstance(value, call_options.Options),
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A device, with the versions of the libraries that it uses.

  Attributes:
    name: its name in messages.
    platform: a JAX lowering platform: "cpu", "cuda", "rocm", "tpu" or another.
    compute_capability: (major, minor) of an NVIDIA GPU, else None.
    architecture: LLVM name of an AMD GPU, for example "gfx950", else None.
    cudnn_version: (major, minor, patch), or None if cuDNN is missing or its
      version is unknown.
    ptxas_version: (major, minor, patch) of the ptxas that assembles kernels, or
      None if unknown. Unknown counts as old: kernels then avoid instructions
      that an old ptxas rejects.
    core_count: number of SMs, CUs or CPU cores, or None.
    shared_memory_bytes: maximum per block, with opt-in (LDS on AMD), or None.
    l2_bytes: size of the last-level cache, or None.
    memory_bandwidth: published bytes per second, or None.
    cpu_kernels: instruction set of the C++ kernels: "amx_bf16", "avx512_bf16",
      "avx512", "avx2" or "baseline"; on Arm "neon_i8mm", "neon_dotprod" or
      "baseline_neon". None if they cannot run, and for every named target.
    missing_libraries: (name, reason) of each library that cannot be used.
    options: limits of `jp.options` for the call that is decided.

  Raises:
    TypeError: If a field has another type or form.
    ValueError: If ptxas_version is given and the platform is not "cuda".

  Example:
    >>> import jaxplugin as jp
    >>> b200 = jp.named_target("b200", cudnn="9.13")
    >>> b200.compute_capability, b200.cudnn_version
    ((10, 0), (9, 13, 0))

  See also:
    `jp.named_target`, `jp.detect_target`, `jp.use_target`.
  """

  name: str
  platform: str
  compute_capability: tuple[int, int] | None = None
  architecture: str | None = None
  cudnn_version: Version | None = None
  ptxas_version: Version | None = None
  core_count: int | None = None
  shared_memory_bytes: int | None = None
  l2_bytes: int | None = None
  memory_bandwidth: float | None = None
  cpu_kernels: str | None = None
  missing_libraries: tuple[tuple[str, str], ...] = ()
  options: call_options.Options = dataclasses.field(
    default=call_options.NONE, repr=False
  )

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is None and field.default is None:
        continue
      if field.name in _FIELD_RULES:
        rule, is_valid = _FIELD_RULES[field.name]
        if not is_valid(value):
          or_none = " or None" if field.default is None else ""
          raise TypeError(
            f"Target: {field.name} must be {rule}{or_none}, got"
            f" {error_context.shown(value)}; jp.named_target(name, cudnn=,"
            " ptxas=) returns known devices"
          )
    version = self.ptxas_version
    if version is None:
      return
    if self.platform != "cuda":
      raise ValueError(
        "Target: ptxas_version must be None unless the platform is cuda, got"
        f" {version} for {self.name}, of {self.platform}"
      )

  @property
  def has_block_scaled_cudnn(self) -> bool:
    """Whether its cuDNN multiplies block-scaled arrays."""
    have = self.cudnn_version, self.compute_capability
    least = MIN_BLOCK_SCALED_CUDNN, MIN_BLOCK_SCALED_CAPABILITY
    return self.platform == "cuda" and all(
      version is not None and version >= minimum
      for version, minimum in zip(have, least, strict=True)
    )

  def missing(self, library: str) -> str:
    """Returns why a library cannot be used, or ""."""
    return dict(self.missing_libraries).get(library, "")

  def with_library(self, library: str) -> Self:
    """Returns the device with a library marked as usable."""
    others = {k: v for k, v in self.missing_libraries if k != library}
    return dataclasses.replace(self, missing_libraries=tuple(others.items()))

  def without_library(self, library: str, reason: str) -> Self:
    """Returns the device with a library marked as unusable."""
    missing = {**dict(self.missing_libraries), library: reason}
    return dataclasses.replace(self, missing_libraries=tuple(missing.items()))

  def __str__(self) -> str:
    details = [self.platform]
    if self.compute_capability is not None:
      details.append("sm_{}{}".format(*self.compute_capability))
    if self.architecture is not None:
      details.append(self.architecture)
    if self.cudnn_version is not None:
      details.append(f"cuDNN {format_version(self.cudnn_version)}")
    if self.ptxas_version is not None:
      details.append(f"ptxas {format_version(self.ptxas_version)}")
    if self.cpu_kernels is not None:
      details.append(f"{self.cpu_kernels} kernels")
    if self.options != call_options.NONE:
      details.append(str(self.options))
    return f"{self.name} ({', '.join(details)})"


# jax-triton 0.3 and 0.4 query the attached device for its architecture. They
# put the path of a file with the code into the module, not the code.
_NAMED_AMD_TRITON_ERROR: Final = (
  "jax-triton lowers for AMD GPUs only if one is attached"
)
# By name: JAX's `device_kind`, which is the name that the driver returns from
# cuDeviceGetName or hipDeviceGetName; the compute capability or LLVM's name;
# SMs or CUs; MiB of last-level cache; GB/s of memory.
# Sources: the vendors' data sheets and architecture papers. A100 and H100 are
# the 80 GB SXM models. B300 has 148 of its silicon's 160 SMs, as the driver
# reports for HGX boards. AMD's last-level cache is the Infinity Cache.
_GPUS: Final[dict[str, tuple[str, tuple[int, int] | str, int, int, int]]] = {
  "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 2039),
  "l40s": ("NVIDIA L40S", (8, 9), 142, 96, 864),
  "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 3350),
  "h200": ("NVIDIA H200", (9, 0), 132, 50, 4800),
  "h20": ("NVIDIA H20", (9, 0), 78, 60, 4000),
  "b200": ("NVIDIA B200", (10, 0), 148, 126, 8000),
  "b300": ("NVIDIA B300 SXM6 AC", (10, 3), 148, 126, 8000),
  "rtx5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 1792),
  "gb10": ("NVIDIA GB10", (12, 1), 48, 24, 273),
  "mi300x": ("AMD Instinct MI300X", "gfx942", 304, 256, 5300),
  "mi355x": ("AMD Instinct MI355X", "gfx950", 256, 256, 8000),
}
# Superchips: the Grace CPU comes with GPUs that have a name above.
_GRACE_GPUS: Final = {"gb200": "b200", "gb300": "b300"}
DEVICE_KINDS: Final = {name: kind for name, (kind, *_) in _GPUS.items()}


def _gpu(name: str) -> Target:
  _, chip, core_count, l2_mib, bandwidth_gb_s = _GPUS[name]
  if isinstance(chip, str):
    known: Any = architectures.by_name(chip)
    own: Any = dict(
      platform="rocm",
      architecture=chip,
      missing_libraries=((JAX_TRITON, _NAMED_AMD_TRITON_ERROR),),
    )
  else:
    known = architectures.of_compute_capability(chip)
    own = dict(platform="cuda", compute_capability=chip)
  return Target(
    name=name,
    core_count=core_count,
    shared_memory_bytes=known.shared_memory_bytes,
    l2_bytes=l2_mib * _MIB,
    memory_bandwidth=bandwidth_gb_s * 1e9,
    **own,
  )


_NAMED: Final = {
  **{name: _gpu(name) for name in _GPUS},
  "cpu": Target(name="cpu", platform="cpu"),
}
TARGET_NAMES: Final = tuple(_NAMED)
_OTHER_NAMES: Final = {name: _NAMED[gpu] for name, gpu in _GRACE_GPUS.items()}
KNOWN_NAMES: Final = (*TARGET_NAMES, *_OTHER_NAMES)  # of `named_target`
_BANDWIDTHS: Final = {
  kind: _NAMED[name].memory_bandwidth for name, kind in DEVICE_KINDS.items()
}


def named_target(
  name: str,
  *,
  cudnn: str | Version | None = None,
  ptxas: str | Version | None = None,
) -> Target:
  """Returns a device by name, to lower for it and to inspect the result.

  The device need not be attached. "cpu" is a CPU without the C++ kernels, so
  its programs run on any CPU. `detect_target("cpu")` includes the kernels.

  Args:
    name: one of "a100", "l40s", "h100", "h200", "h20", "b200", "b300",
      "rtx5090", "gb10", "mi300x", "mi355x", "cpu"; any case. "gb200" and
      "gb300" return "b200" and "b300".
    cudnn: version of cuDNN: "9.13", "9.13.0" or (9, 13, 0). None means that
      cuDNN is missing, so the cudnn backend is refused.
    ptxas: version of CUDA's ptxas, in the same forms. None means unknown.

  Returns:
    A `Target`.

  Raises:
    TypeError: If name is not a string.
    ValueError: If the name is unknown, a version is malformed, or a version is
      given for a device that is not NVIDIA's.

  Example:
    >>> import jaxplugin as jp
    >>> jp.named_target("h100").compute_capability
    (9, 0)
  """
  if not isinstance(name, str):
    raise TypeError(
      "named_target: name must be a string, got"
      f" {error_context.shown(name)}; pass one of {', '.join(KNOWN_NAMES)}"
    )
  target = (_NAMED | _OTHER_NAMES).get(name.lower())
  if target is None:
    known = ", ".join(KNOWN_NAMES)
    raise ValueError(
      f"named_target: name must be one of {known}, got"
      f" {error_context.shown(name)}; pass a GPU of the same architecture, or"
      " in Python a jp.Target with the figures of the device"
    )
  versions: dict[str, Any] = {}
  for tool, given in (("cuDNN", cudnn), ("ptxas", ptxas)):
    if given is None:
      continue
    parameter = tool.lower()
    if target.platform != "cuda":
      raise ValueError(
        f"named_target: {parameter} must be None, because {target.name} is not"
        f" an NVIDIA GPU and has no {tool}, got {error_context.shown(given)};"
        " leave it out"
      )
    versions[f"{parameter}_version"] = parse_version(
      given, f"named_target: {parameter}"
    )
  return dataclasses.replace(target, **versions)


def parse_version(version: str | tuple[int, ...], who: str) -> Version:
  """Parses "9.13", "9.13.0" or a tuple; missing parts are 0.

  Raises:
    ValueError: If the version has another form.
  """
  text = version
  if isinstance(version, tuple) and all(type(p) is int for p in version):
    text = ".".join(map(str, version))
  if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+){0,2}", text):
    raise ValueError(
      f"{who} must be a version of one to three numbers, got"
      f" {error_context.shown(version)}; write it as '9.13' or '9.13.0'"
    )
  parts = [int(part) for part in text.split(".")]
  parts += [0] * (3 - len(parts))
  return parts[0], parts[1], parts[2]


def format_version(version: tuple[int, ...]) -> str:
  return ".".join(map(str, version))


def require(who: str, target: Any, kinds: str = "a jp.Target") -> None:
  """Raises TypeError unless `target` is a `Target`.

  Args:
    kinds: description of valid arguments.
  """
  if isinstance(target, Target):
    return
  remedy = "see jp.named_target"
  if isinstance(target, str) and target.lower() in _NAMED | _OTHER_NAMES:
    remedy = f"pass jp.named_target({target.lower()!r})"
  raise TypeError(
    f"{who}: target must be {kinds}, got {error_context.shown(target)};"
    f" {remedy}"
  )


_override = jax_private.make_context(None)


def use_target(
  target: Target,
) -> contextlib.AbstractContextManager[Target]:
  """Chooses backends for `target` in the dots traced inside of it.

  Each call records the target when it is traced. The target is part of `jit`'s
  cache key. It changes the lowering for its own platform only. To lower for a
  GPU that is not attached, pass that platform to `lower`.

  Args:
    target: a `Target`.

  Returns:
    A context that yields `target`.

  Raises:
    TypeError: If target is not a `Target`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> x_q = jp.quantize(jnp.ones((128, 128)), "mxfp8")
    >>> with jp.use_target(jp.named_target("b200", cudnn="9.13")):
    ...   traced = jax.jit(jp.block_scaled_dot).trace(x_q, x_q)
    ...   text = traced.lower(lowering_platforms=("cuda",)).as_text()
    >>> "__op$block_scaled_dot" in text
    True
  """
  require("use_target", target)
  return _using(target)


@contextlib.contextmanager
def _using(target: Target) -> Iterator[Target]:
  with _override(target):
    yield target


def overriding_target() -> Target | None:
  """Returns the target of the innermost `use_target`, or None."""
  return _override.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """The wishes of the contexts in which a call is traced.

  Attributes:
    target: target of the innermost `use_target`, or None.
    options: options of the innermost `options`, or those of the environment.
    layer: names of the enclosing `jax.named_scope`s, for logs. It is not
      compared, because JAX lowers equal calls once.
  """

  target: Target | None = None
  options: call_options.Options = call_options.NONE
  layer: str = dataclasses.field(default="", compare=False)


def request() -> Request | None:
  """Returns the request of a call that is traced now; None if it is empty."""
  found = Request(
    target=overriding_target(),
    options=call_options.current(),
    layer=jax_private.layer_and_phase(jax_private.scopes())[0],
  )
  return found if found.layer or found != Request() else None


def requested(
  request: Request | None, find: Callable[[Target | None], Target]
) -> Target:
  """Returns the target of a request, with its options.

  Args:
    find: function of the request's target, which may be None.
  """
  if request is None:
    return find(None)
  target = find(request.target)
  return dataclasses.replace(target, options=request.options)


def resolved(
  request: Request | None,
  given: Target | None = None,
  *,
  for_export: bool = False,
) -> Target:
  """Returns the target to decide for, with the options of a request.

  Args:
    given: the target; None is that of the request, or the local one.
    for_export: whether to detect the local target as `jp.export` does.
  """
  detect = detect_for_export if for_export else detect_target
  return requested(request, lambda asked: given or asked or detect())


def current_target() -> Target:
  """Returns the overriding target, or the detected target."""
  return resolved(request())


def local_targets() -> list[Target]:
  """Returns the overriding target, or those of JAX's default and of the CPU."""
  if (override := overriding_target()) is not None:
    return [override]
  default = detect_target()
  if default.platform == "cpu":
    return [default]
  return [default, detect_target("cpu")]


def detect_target(platform: str | None = None) -> Target:
  """Returns a description of the local device of a platform.

  If there is no such device, only the platform is known. Backends that need
  more refuse it with that reason.

  Args:
    platform: a JAX platform. None is JAX's default backend.

  Returns:
    A `Target`.

  Raises:
    TypeError: If platform is neither a string nor None.

  Example:
    >>> import jaxplugin as jp
    >>> jp.detect_target("cpu").platform
    'cpu'
  """
  if not isinstance(platform, str | None):
    raise TypeError(
      "detect_target: platform must be a string, such as 'cpu' or 'cuda', or"
      f" None, got {error_context.shown(platform)}"
    )
  return _detected(platform)


def detect_for_export(platform: str | None = None) -> Target:
  """Returns the detected target without facts that an export cannot assume.

  The process that loads the module may have another ptxas.
  """
  return dataclasses.replace(detect_target(platform), ptxas_version=None)


@functools.cache
def _detected(platform: str | None) -> Target:
  if platform is None:
    platform = _default_platform()
  if platform == "cpu":
    kernels, cores, reason = _local_cpu_kernels()
    return Target(
      name="local cpu",
      platform="cpu",
      core_count=cores or _affinity_cores(),
      cpu_kernels=kernels,
      missing_libraries=_missing({CPU_KERNELS: reason}),
    )
  try:
    device = jax.local_devices(backend=platform)[0]
  except RuntimeError:  # JAX raises it for a platform without devices
    return Target(name=f"unknown {platform} device", platform=platform)
  target = target_of_device(device, platform)
  if platform != "cuda":
    return target
  version = toolkits.ptxas_of_launches()
  return dataclasses.replace(target, ptxas_version=version)


def target_of_device(device: jax.Device, platform: str) -> Target:
  """Returns the target of a device, which may be of a deviceless topology.

  The ptxas version stays unknown.
  """
  capability = str(getattr(device, "compute_capability", ""))
  is_cuda = platform == "cuda" and re.fullmatch(r"\d+\.\d+", capability)
  major, minor = capability.split(".") if is_cuda else ("0", "0")
  return Target(
    name=device.device_kind,
    platform=platform,
    compute_capability=(int(major), int(minor)) if is_cuda else None,
    architecture=capability if platform == "rocm" else None,
    cudnn_version=_local_cudnn_version() if platform == "cuda" else None,
    core_count=getattr(device, "core_count", None),
    shared_memory_bytes=getattr(device, "shared_memory_per_block_optin", None),
    memory_bandwidth=_BANDWIDTHS.get(device.device_kind),
    missing_libraries=_missing({JAX_TRITON: _local_triton_error()}),
  )


def _missing(reasons: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
  return tuple((name, reason) for name, reason in reasons.items() if reason)


def _default_platform() -> str:
  platform = jax.local_devices()[0].platform
  if platform != "gpu":
    return platform
  version = jax.local_devices()[0].client.platform_version
  return "rocm" if "rocm" in version.lower() else "cuda"


def _affinity_cores() -> int:
  return (
    len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else (os.cpu_count() or 1)
  )


@functools.cache
def _local_cpu_kernels() -> tuple[str | None, int, str]:
  """Returns instruction set and cores of CPU kernels, or why there are none.

  Raises:
    ValueError: If the environment limits them by an unknown name, which the
      library would ignore.
  """
  limit = os.environ.get(_CPU_LIMIT)
  if limit and limit not in _CPU_LIMITS:
    raise ValueError(
      f"jaxplugin: {_CPU_LIMIT} must be one of {_CPU_LIMITS}, got {limit!r}."
      " Unset the variable for no limit"
    )
  try:
    loaded = library.load(jax.ffi.include_dir())
  except library.LibraryError as error:
    return None, 0, str(error)
  instruction_set = loaded.jaxplugin_cpu_isa().decode()
  return instruction_set, library.available_cores(loaded), ""


@functools.cache
def _local_triton_error() -> str:
  """Returns which package the Triton kernels lack, without importing it."""
  for package in ("triton", "jax_triton"):
    if importlib.util.find_spec(package) is None:
      name = package.replace("_", "-")
      return f"needs {name}, which is not installed; pip install jax-triton"
  return ""


@functools.cache
def _local_cudnn_version() -> Version | None:
  number = jax_private.cudnn_version_number()
  if number is None:
    return None
  return number // 10000, number // 100 % 100, number % 100
