# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the Triton and the ptxas that compile this process's kernels.

A module does not name a ptxas. jaxlib assembles a kernel at its first launch.
It uses the first working ptxas of these places:

* `bin` of the working directory
* the folders of PATH
* /usr/local/cuda and /opt/cuda
* the package nvidia-cuda-nvcc next to jaxlib's plugin
* the root of the environment

Sources: openxla/xla, FindCudaExecutable in subprocess_compilation.cc and
CandidateCudaRoots in cuda_root_path.cc. jaxlib's triton_kernels.cc has no
preferred directory. An older toolkit on PATH therefore precedes a newer
package. This module omits Bazel's runfiles, where XLA looks too.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

Version = tuple[int, int, int]

_RELEASE: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)\b")
# XLA rejects older versions, and the broken one.
_OLDEST: Final = (11, 8, 0)
_BROKEN: Final = (12, 3, 103)
# Folder of the toolkit in `site-packages`, by the package of jaxlib's plugin.
_TOOLKITS: Final = {
  "xla_cuda13": "nvidia/cu13",
  "xla_cuda12": "nvidia/cuda_nvcc",
}


def ptxas_of_launches() -> Version | None:
  """Returns the version of the ptxas that assembles this process's kernels.

  None if no ptxas is found, if jaxlib's CUDA plugin is not installed, or if two
  plugins are installed.
  """
  plugins = _plugins()
  if len(plugins) != 1:
    return None
  found = first(candidates(plugins[0], os.environ))
  return None if found is None else found[0]


@functools.cache
def triton_version() -> tuple[int, int] | None:
  """Returns (major, minor) of the installed Triton; None if there is none."""
  try:
    text = importlib.metadata.version("triton")
  except importlib.metadata.PackageNotFoundError:
    return None
  major, minor, *_ = text.split(".")
  return int(major), int(minor)


def candidates(
  plugin: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[str]:
  """Yields the paths at which XLA looks for ptxas, in order.

  Args:
    plugin: folder of jaxlib's plugin.
    environment: environment variables of the process.
  """
  yield "bin/ptxas"
  if "PATH" in environment:
    for folder in environment["PATH"].split(":"):
      yield os.path.join(folder, "ptxas")
  toolkit = _TOOLKITS[plugin.name]
  for root in (
    "/usr/local/cuda",
    "/opt/cuda",
    f"../{toolkit}",
    f"../../{toolkit}",
    "cuda",
    "../../../..",
    "../../../../..",
  ):
    yield str(plugin / root / "bin/ptxas")


def first(paths: Iterable[str]) -> tuple[Version, str] | None:
  """Returns version and path of the first ptxas that XLA accepts, or None."""
  for path in paths:
    version = ptxas_version(path)
    if version is not None and version >= _OLDEST and version != _BROKEN:
      return version, path
  return None


def ptxas_version(path: str) -> Version | None:
  """Returns the version that a ptxas prints; None if the path does not run."""
  if not pathlib.Path(path).is_file():
    return None
  try:
    done = subprocess.run(
      [os.path.abspath(path), "--version"], capture_output=True, text=True
    )
  except OSError:
    return None
  release = _RELEASE.search(done.stdout)
  if done.returncode != 0 or release is None:
    return None
  major, minor, patch = map(int, release.groups())
  return major, minor, patch


def _plugins() -> list[pathlib.Path]:
  """Returns the folders of jaxlib's plugins for CUDA."""
  found = []
  for name in _TOOLKITS:
    try:
      spec = importlib.util.find_spec(f"jax_plugins.{name}")
    except ModuleNotFoundError:  # there are no plugins at all
      return []
    for folder in (spec and spec.submodule_search_locations) or ():
      found.append(pathlib.Path(folder))
  return found
