# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPU architectures as the kernels see them: plain data, no Triton."""

from __future__ import annotations

import dataclasses
from typing import Final

_KIB: Final = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """What a kernel's config and its compiler need to know of a GPU.

  Attributes:
    name: "sm_90", "gfx950", ...: NVIDIA's and LLVM's names.
    backend: Triton's backend, "cuda" or "hip".
    triton_arch: how that backend calls it: 90, "gfx950".
    warp_size: threads of a warp (a wavefront).
    shared_memory_bytes: per block, opt-in maximum (LDS on AMD).
    registers_per_thread: 32-bit registers that one thread can address.
    registers_per_core: 32-bit registers of an SM or CU.
    tensor_memory_columns: of 128 lanes x 32 bits, per SM; 0 where there is no
      tensor memory.
    has_scaled_dot: whether its matrix instructions take block scales, so that
      `tl.dot_scaled` is native and not a register upcast.
    has_fp8_pointers: whether Triton accepts E4M3 pointers for it.
    has_tma: whether it has the tensor memory accelerator of `descriptors`.
  """

  name: str
  backend: str
  triton_arch: int | str
  warp_size: int
  shared_memory_bytes: int
  registers_per_thread: int
  registers_per_core: int
  tensor_memory_columns: int = 0
  has_scaled_dot: bool = False
  has_fp8_pointers: bool = True
  has_tma: bool = False

  @property
  def is_nvidia(self) -> bool:
    return self.backend == "cuda"


def _nvidia(
  number: int,
  shared_memory_kib: int,
  *,
  tensor_memory_columns: int = 0,
  has_scaled_dot: bool = False,
) -> Architecture:
  return Architecture(
    name=f"sm_{number}",
    backend="cuda",
    triton_arch=number,
    warp_size=32,
    shared_memory_bytes=shared_memory_kib * _KIB,
    registers_per_thread=255,
    registers_per_core=64 * _KIB,
    tensor_memory_columns=tensor_memory_columns,
    has_scaled_dot=has_scaled_dot,
    has_fp8_pointers=number >= 89,
    has_tma=number >= 90,
  )


def _amd(
  name: str,
  warp_size: int,
  lds_kib: int,
  registers_per_thread: int,
  *,
  has_scaled_dot: bool = False,
) -> Architecture:
  return Architecture(
    name=name,
    backend="hip",
    triton_arch=name,
    warp_size=warp_size,
    shared_memory_bytes=lds_kib * _KIB,
    registers_per_thread=registers_per_thread,
    # 512 vector registers a lane of four SIMDs; AGPRs are among them.
    registers_per_core=4 * 512 * 64,
    has_scaled_dot=has_scaled_dot,
  )


# NVIDIA: CUDA programming guide, "Compute capabilities"; PTX ISA, "Tensor
# memory" (512 columns). AMD: CDNA 3 and CDNA 4 ISA guides and white papers;
# gfx1250 as LLVM's AMDGPU usage guide has it (320 KiB of LDS, wave32).
ARCHITECTURES: Final = {
  architecture.name: architecture
  for architecture in (
    _nvidia(80, 163),
    _nvidia(89, 99),
    _nvidia(90, 227),
    _nvidia(100, 227, tensor_memory_columns=512, has_scaled_dot=True),
    _nvidia(103, 227, tensor_memory_columns=512, has_scaled_dot=True),
    _nvidia(120, 99, has_scaled_dot=True),
    _nvidia(121, 99, has_scaled_dot=True),
    _amd("gfx942", 64, 64, 512),
    _amd("gfx950", 64, 160, 512, has_scaled_dot=True),
    _amd("gfx1250", 32, 320, 1024, has_scaled_dot=True),
  )
}


def by_name(name: str) -> Architecture:
  """Returns the architecture called `name`; `ValueError` lists the known."""
  architecture = ARCHITECTURES.get(name)
  if architecture is None:
    raise ValueError(
      f"unknown architecture {name!r}; known ones: {', '.join(ARCHITECTURES)}"
    )
  return architecture
