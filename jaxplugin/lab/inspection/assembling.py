# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every ptxas at hand, and PTX assembled as a launch through jax-triton has it.

Which of them assembles what this process launches is `kernels.toolkits`'.
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

from jaxplugin.kernels import architectures
from jaxplugin.kernels import launching
from jaxplugin.kernels import toolkits


class AssemblyError(Exception):
  """ptxas refuses a kernel; the text has its words."""


@functools.cache
def assemblers() -> dict[toolkits.Version, str]:
  """A path for each version of ptxas that is here: Triton's two, and others."""
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
class Assembled:
  """A kernel that ptxas assembled.

  Attributes:
    sass: what `nvdisasm -c` prints of it.
    notes: what ptxas printed.
  """

  sass: str
  notes: str

  @property
  def wgmma_notes(self) -> list[str]:
    """Lines that say what ptxas changed of a kernel's wgmma, to be right.

    It serializes them (C7510), so that each waits for the one before, or puts
    waits in between (C7517): the kernel is slower than its PTX says.
    """
    return [line for line in self.notes.splitlines() if "wgmma" in line]


def assembled(
  ptx: str,
  architecture: architectures.Architecture,
  ptxas: str,
  *,
  ptx_version: int = launching.PTX_VERSION,
) -> Assembled:
  """A kernel as `ptxas` assembles it.

  Args:
    ptx: of any version; it is assembled as `ptx_version`.
    architecture: an NVIDIA one.
    ptxas: path of the assembler.
    ptx_version: of `launching.Launch`.

  Raises:
    AssemblyError: ptxas or nvdisasm refuses it.
  """
  major, minor = divmod(ptx_version, 10)
  ptx = re.sub(
    r"^\.version .*$", f".version {major}.{minor}", ptx, flags=re.MULTILINE
  )
  # As jaxlib has it: with what only this generation has.
  suffix = "a" if int(architecture.triton_arch) >= 90 else ""
  with tempfile.TemporaryDirectory() as directory:
    source = pathlib.Path(directory) / "kernel.ptx"
    source.write_text(ptx)
    cubin = str(source.with_suffix(".cubin"))
    done = _run(
      *(ptxas, f"-arch={architecture.name}{suffix}", str(source), "-o", cubin)
    )
    sass = _run(triton.knobs.nvidia.nvdisasm.path, "-c", cubin).stdout
    return Assembled(sass=sass, notes=done.stdout + done.stderr)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode != 0:
    raise AssemblyError(f"{' '.join(command)} failed: {done.stderr.strip()}")
  return done
