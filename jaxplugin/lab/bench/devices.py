# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The device, its caches, and the versions of what runs on it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import platform
import subprocess
from typing import Any, Final

import jax

from jaxplugin.core import targets
from jaxplugin.explanation import information
from jaxplugin.runtime import fingerprints

PLATFORMS: Final = ("cpu", "gpu")

_PACKAGES: Final = (
  *information.PACKAGES,
  "jax-rocm7-plugin",
  "torch",
  "openvino",
  "onnxruntime",
)
_MIB: Final = 1 << 20
# Assumed size of an unknown cache: at least the size on common devices.
_DEFAULT_CACHE_BYTES: Final = {"cpu": 64 * _MIB, "gpu": 256 * _MIB}
_CPU_CACHES: Final = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
_NVIDIA_DRIVER: Final = pathlib.Path("/proc/driver/nvidia/version")
_GIT_SECONDS: Final = 10
_XLA_FLAGS: Final = "XLA_FLAGS"
KERNELS_LIMIT: Final = "JAXPLUGIN_CPU_ISA"  # kernels/cpu/isa.cc


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchDevice:
  """The device of a measurement, and the size of its last-level cache."""

  device: jax.Device
  target: targets.Target
  cache_bytes: int
  cache_source: str

  @property
  def is_gpu(self) -> bool:
    return self.target.platform != "cpu"

  @property
  def max_set_bytes(self) -> int:
    """Memory limit of the sets of operands of one call."""
    return 8 << 30 if self.is_gpu else 1 << 30


def add_arguments(group: argparse._ActionsContainer) -> None:
  """Adds the arguments --platform and --isa, which `find` is passed."""
  group.add_argument(
    "--platform", choices=PLATFORMS, help="default: JAX's device"
  )
  group.add_argument(
    "--isa",
    choices=("avx2",),
    help="limit XLA and the CPU kernels to this instruction set",
  )


def find(
  name: str | None, *, isa: str | None = None, who: str = "bench"
) -> BenchDevice:
  """Returns the first local device of a platform.

  Args:
    name: the platform. None is JAX's default platform.
    isa: the instruction set to limit XLA and the CPU kernels to, before JAX has
      devices. NumPy is not limited.
    who: the command, for errors.

  Raises:
    ValueError: If JAX has no such device, the device is not a CPU or GPU, or
      the instruction set cannot be limited.
  """
  if isa is not None:
    flags = os.environ.get(_XLA_FLAGS, "")
    limit = f"--xla_cpu_max_isa={isa.upper()}"
    os.environ[_XLA_FLAGS] = f"{flags} {limit}".strip()
    os.environ[KERNELS_LIMIT] = isa
  try:
    device = jax.local_devices(backend=name)[0]
  except RuntimeError as error:
    here = ", ".join(sorted({d.platform for d in jax.local_devices()}))
    raise ValueError(
      f"{who}: JAX has no {name} device, only {here} ({error}); for a GPU"
      " install jaxplugin[cuda13]"
    ) from error
  if device.platform not in PLATFORMS:
    raise ValueError(
      f"{who}: cannot measure on {device.platform}; pass --platform cpu"
    )
  if device.platform == "cpu":
    target = targets.detect_target("cpu")
    size, source = cpu_cache_bytes()
  else:
    version = device.client.platform_version.lower()
    name = "rocm" if "rocm" in version else "cuda"
    target = targets.detect_target(name)
    size, source = gpu_cache_bytes(target)
  if isa is not None and target.cpu_kernels != isa:
    raise ValueError(
      f"{who}: --isa {isa} needs a CPU with kernels and a process in which JAX"
      f" has no devices yet, got {target}"
    )
  return BenchDevice(
    device=device, target=target, cache_bytes=size, cache_source=source
  )


def cpu_cache_bytes(caches: pathlib.Path = _CPU_CACHES) -> tuple[int, str]:
  """Returns the size of the last-level cache, and the source of the size."""
  sizes = []
  for path in caches.glob("index*/size"):
    text = path.read_text().strip()
    units = {"K": 1 << 10, "M": _MIB}
    if text[-1:] in units and text[:-1].isdecimal():
      sizes.append(int(text[:-1]) * units[text[-1]])
  if not sizes:
    return _DEFAULT_CACHE_BYTES["cpu"], "assumed"
  return max(sizes), str(caches)


def gpu_cache_bytes(target: targets.Target) -> tuple[int, str]:
  """Returns the size of the L2 cache, and the source of the size."""
  if target.l2_bytes is not None:
    return target.l2_bytes, "the target"
  words = target.name.lower().replace("-", " ").split()
  for name in targets.KNOWN_NAMES:
    known = targets.named_target(name)
    if name in words and known.l2_bytes is not None:
      return known.l2_bytes, f"the data sheet of {name}"
  return _DEFAULT_CACHE_BYTES["gpu"], "assumed"


def environment(device: BenchDevice) -> dict[str, Any]:
  """Returns the device and versions, for a file of results."""
  target = device.target
  return {
    "device": device.device.device_kind if device.is_gpu else cpu_name(),
    "target": str(target),
    "platform": "gpu" if device.is_gpu else "cpu",
    "instruction_set": target.cpu_kernels,
    "xla_flags": os.environ.get(_XLA_FLAGS),
    "cores": target.core_count,
    "cache_bytes": device.cache_bytes,
    "cache_source": device.cache_source,
    "cudnn": target.cudnn_version
    and targets.format_version(target.cudnn_version),
    "driver": _driver() if device.is_gpu else None,
    "runtime": str(device.device.client.platform_version).strip(),
    "python": platform.python_version(),
    "system": platform.platform(),
    "versions": {
      p: v for p in _PACKAGES if (v := fingerprints.version(p)) is not None
    },
    "commit": _commit(),
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def cpu_name() -> str:
  """Returns the system's name of the CPU model."""
  return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(field: str) -> str:
  """Returns a field of the first CPU in /proc/cpuinfo; "" if unknown."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text(errors="replace").splitlines() if info.exists() else ()
  for line in lines:
    name, _, value = line.partition(":")
    if name.strip() == field:
      return value.strip()
  return ""


def _driver() -> str | None:
  if not _NVIDIA_DRIVER.exists():
    return None
  return _NVIDIA_DRIVER.read_text(errors="replace").splitlines()[0]


def _commit() -> str | None:
  """Returns the commit of a checkout, with "+" if files have changed."""
  here = pathlib.Path(__file__).resolve().parents[3]
  if not (here / ".git").exists():
    return None

  def git(*arguments: str) -> str:
    command = ["git", "-C", str(here), *arguments]
    return subprocess.check_output(
      command, stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
    ).strip()

  try:
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if changed else "")
  except (OSError, subprocess.SubprocessError):
    return None  # git is missing, or refuses another user's checkout
