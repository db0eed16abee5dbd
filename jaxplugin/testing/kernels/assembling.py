# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds every ptxas on this machine, and assembles PTX as jax-triton does.

`kernels.toolkits` says which one assembles the kernels that a process launches.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import triton

from jaxplugin.kernels import architectures, launching, toolkits


class AssemblyError(Exception):
  """ptxas refuses a kernel; the text has its message."""


@functools.cache
def assemblers() -> dict[toolkits.Version, str]:
  """Returns a path for each version of ptxas: Triton's two, and others."""
  found: dict[toolkits.Version, str] = {}
  for path in _places():
    version = toolkits.ptxas_version(path)
    if version is not None:
      found.setdefault(version, path)
  return dict(sorted(found.items()))


def _places() -> Iterator[str]:
  nvidia = triton.knobs.nvidia
  yield nvidia.ptxas.path
  yield nvidia.ptxas_blackwell.path
  yield shutil.which("ptxas") or ""
  yield from sorted(glob.glob("/usr/local/cuda*/bin/ptxas"))
  yield "/opt/cuda/bin/ptxas"
  packages = importlib.util.find_spec("nvidia")
  for folder in (packages and packages.submodule_search_locations) or ():
    for name in ("cu13", "cuda_nvcc"):
      yield f"{folder}/{name}/bin/ptxas"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssembledKernel:
  """A kernel that ptxas assembled.

  Attributes:
    sass: the output of `nvdisasm -c`.
    notes: the output of ptxas.
  """

  sass: str
  notes: str

  @property
  def wgmma_notes(self) -> list[str]:
    """The lines about changes of a kernel's wgmma that make it slower.

    ptxas may serialize wgmma (C7510), so that each waits for the one before, or
    insert waits (C7517).
    """
    return [line for line in self.notes.splitlines() if "wgmma" in line]


def assembled(
  ptx: str,
  architecture: architectures.Architecture,
  ptxas: str,
  *,
  ptx_version: int = launching.PTX_VERSION,
) -> AssembledKernel:
  """Assembles a kernel.

  Args:
    ptx: PTX of any version; it is assembled as `ptx_version`.
    architecture: an NVIDIA architecture.
    ptxas: path of the assembler.
    ptx_version: the version of `launching.Launch`.

  Raises:
    AssemblyError: If ptxas or nvdisasm refuses the kernel.
  """
  major, minor = divmod(ptx_version, 10)
  ptx = re.sub(
    r"^\.version .*$", f".version {major}.{minor}", ptx, flags=re.MULTILINE
  )
  # jaxlib enables the features of this generation only, too.
  suffix = "a" if int(architecture.triton_arch) >= 90 else ""
  with tempfile.TemporaryDirectory() as directory:
    source = pathlib.Path(directory) / "kernel.ptx"
    source.write_text(ptx)
    cubin = str(source.with_suffix(".cubin"))
    done = _run(
      *(ptxas, f"-arch={architecture.name}{suffix}", str(source), "-o", cubin)
    )
    sass = _run(triton.knobs.nvidia.nvdisasm.path, "-c", cubin).stdout
    return AssembledKernel(sass=sass, notes=done.stdout + done.stderr)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise AssemblyError(f"{' '.join(command)} failed: {done.stderr.strip()}")
  return done
