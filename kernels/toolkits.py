# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which ptxas assembles the kernels that this process launches.

A module does not name it. jaxlib assembles a kernel when it is first launched,
and uses the first working ptxas of these places: `bin` of the working
  directory,
the folders of PATH, /usr/local/cuda, /opt/cuda, the package nvidia-cuda-nvcc
next to jaxlib's plugin, and the environment's root
(openxla/xla, FindCudaExecutable in subprocess_compilation.cc and
CandidateCudaRoots in cuda_root_path.cc; jaxlib's triton_kernels.cc prefers no
directory). So a package of a new one does not help where an older toolkit is on
PATH. Bazel's runfiles, which XLA knows as well, are left out.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Final

Version = tuple[int, int, int]

_RELEASE: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)\b")
# XLA takes none that is older, and not this one.
_OLDEST: Final = (11, 8, 0)
_BROKEN: Final = (12, 3, 103)
# Where packages of jaxlib's plugins have the toolkit, from `site-packages` on.
_TOOLKITS: Final = {
  "xla_cuda13": "nvidia/cu13",
  "xla_cuda12": "nvidia/cuda_nvcc",
}


def ptxas_of_launches() -> Version | None:
  """Returns the version of the ptxas that assembles this process's kernels.

  None if there is no ptxas, or if it is unknown: without jaxlib's plugin for
  CUDA, or with two plugins.
  """
  plugins = _plugins()
  if len(plugins) != 1:
    return None
  found = first(candidates(plugins[0], os.environ))
  return None if found is None else found[0]


def candidates(
  plugin: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[str]:
  """Paths at which XLA looks for ptxas, in order.

  Args:
    plugin: the folder of jaxlib's plugin.
    environment: of the process.
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
  """The first ptxas that XLA would take: its version and its path."""
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
  """Folders of jaxlib's plugins for CUDA."""
  found = []
  for name in _TOOLKITS:
    try:
      spec = importlib.util.find_spec(f"jax_plugins.{name}")
    except ModuleNotFoundError:  # there are no plugins at all
      return []
    for folder in (spec and spec.submodule_search_locations) or ():
      found.append(pathlib.Path(folder))
  return found
