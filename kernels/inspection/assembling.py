# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The ptxas at hand, and PTX assembled as a launch through jax-triton has it.

A kernel that jax-triton emits is assembled where it runs, by the first ptxas
of: `bin` of the working directory, PATH, /usr/local/cuda, /opt/cuda and the
package nvidia-cuda-nvcc (openxla/xla, subprocess_compilation.cc and
cuda_root_path.cc; jaxlib's triton_kernels.cc prefers no directory). So a
package of a new one does not help where an older toolkit is installed.
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
from typing import Final

import triton

from jaxplugin.kernels import architectures
from jaxplugin.kernels import launching

Version = tuple[int, ...]

_RELEASE: Final = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)\b")


class AssemblyError(Exception):
  """ptxas refuses a kernel; the text has its words."""


@functools.cache
def assemblers() -> dict[Version, str]:
  """A path for each version of ptxas that is here: Triton's two, and others."""
  found: dict[Version, str] = {}
  for path in _places():
    if not pathlib.Path(path).is_file():
      continue
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    release = _RELEASE.search(done.stdout)
    if done.returncode == 0 and release is not None:
      found.setdefault(tuple(map(int, release.groups())), path)
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
  ptx: str, architecture: architectures.Architecture, ptxas: str
) -> Assembled:
  """A kernel as `ptxas` assembles it.

  Args:
    ptx: of any version; it is assembled as `launching.PTX_VERSION`.
    architecture: an NVIDIA one.
    ptxas: path of the assembler.

  Raises:
    AssemblyError: ptxas or nvdisasm refuses it.
  """
  major, minor = divmod(launching.PTX_VERSION, 10)
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
