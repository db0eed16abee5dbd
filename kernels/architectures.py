# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""GPU architectures, as kernels need them: plain data, no Triton."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

_KIB: Final = 1 << 10

# The first ptxas that supports PTX 9.2, which has `cvt.rn.bf16x2.e2m1x2`: ptxas
# of CUDA 13.2 (CUDA's release notes; PTX ISA, "Release Notes").
E2M1_CONVERSION_PTXAS: Final = (13, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """Properties of a GPU that kernel configs and the compiler need.

  Attributes:
    name: "sm_90", "gfx950", ...: NVIDIA's and LLVM's names.
    backend: Triton's backend, "cuda" or "hip".
    triton_arch: the backend's name of the architecture: 90, "gfx950".
    compute_capabilities: first and last compute capability that its kernels
      support; None for an AMD GPU.
    warp_size: threads of a warp (a wavefront).
    shared_memory_bytes: per block, opt-in maximum (LDS on AMD).
    registers_per_core: 32-bit registers of an SM or CU.
    tensor_memory_columns: columns of 128 lanes x 32 bits per SM; 0 without
      tensor memory, which tcgen05's matrix instructions write to.
    has_wgmma: whether four warps multiply together, with one operand in
      registers.
    has_scaled_dot: whether its matrix instructions read block scales. Then
      `tl.dot_scaled` is native; otherwise Triton upcasts in registers.
    scales_by_e4m3: whether these scales may be E4M3, as in NVFP4.
    mixes_fp4_and_fp8: whether Triton uses that instruction for FP4 times FP8.
    converts_e4m3: whether an instruction converts E4M3 to wider floats.
    casts_to_fp8: whether an instruction converts f32 to E4M3 and E5M2, to
      nearest even and saturating.
    casts_to_fp4: whether an instruction converts f32 to E2M1 in this way.
    has_e2m1_conversion: whether an instruction converts two E2M1 values to
      bf16.
    has_e2m1_conversion_to_f32: whether an instruction converts two E2M1 values
      to f32.
    ptxas_version: version of the ptxas that assembles the kernels. None if
      unknown, as in the table below; an unknown version counts as old.
    has_fp8_dot: whether its FP8 matrix instructions have no block scales.
    has_int8_dot: whether kernels use its INT8 matrix instructions.
    multiplies_bf16: whether it has an instruction, besides matrix instructions,
      that multiplies bf16.
    has_tma: whether it has the tensor memory accelerator of `descriptors`.
  """

  name: str
  backend: str
  triton_arch: int | str
  compute_capabilities: tuple[tuple[int, int], tuple[int, int]] | None = None
  warp_size: int
  shared_memory_bytes: int
  registers_per_core: int
  tensor_memory_columns: int = 0
  has_wgmma: bool = False
  has_scaled_dot: bool = False
  scales_by_e4m3: bool = False
  mixes_fp4_and_fp8: bool = False
  converts_e4m3: bool = True
  casts_to_fp8: bool = False
  casts_to_fp4: bool = False
  has_e2m1_conversion: bool = False
  has_e2m1_conversion_to_f32: bool = False
  ptxas_version: tuple[int, ...] | None = None
  multiplies_bf16: bool = True
  has_fp8_dot: bool = False
  has_int8_dot: bool = False
  has_tma: bool = False

  @property
  def is_nvidia(self) -> bool:
    return self.backend == "cuda"

  @property
  def has_tensor_memory(self) -> bool:
    return self.tensor_memory_columns > 0

  @property
  def multiplies_by_warp(self) -> bool:
    """Whether matrix instructions are executed by one warp (`mma.sync`)."""
    return self.is_nvidia and not (self.has_wgmma or self.has_tensor_memory)

  @property
  def converts_e2m1(self) -> bool:
    """Whether kernels may use the instruction from E2M1 to bf16."""
    return self.has_e2m1_conversion and (
      self.ptxas_version is not None
      and self.ptxas_version >= E2M1_CONVERSION_PTXAS
    )

  @property
  def reads_interleaved(self) -> bool:
    """Whether kernels benefit from interleaved FP4.

    These kernels decode FP4 themselves, with PTX instructions. On newer
    architectures the matrix instruction decodes FP4 in the usual order.
    """
    return self.is_nvidia and not self.has_scaled_dot


def _nvidia(
  number: int,
  first: tuple[int, int],
  last: tuple[int, int],
  shared_memory_kib: int,
  **capabilities: Any,
) -> Architecture:
  return Architecture(
    name=f"sm_{number}",
    backend="cuda",
    triton_arch=number,
    compute_capabilities=(first, last),
    warp_size=32,
    shared_memory_bytes=shared_memory_kib * _KIB,
    registers_per_core=64 * _KIB,
    **capabilities,
  )


def _amd(
  name: str, warp_size: int, lds_kib: int, **capabilities: Any
) -> Architecture:
  return Architecture(
    name=name,
    backend="hip",
    triton_arch=name,
    warp_size=warp_size,
    shared_memory_bytes=lds_kib * _KIB,
    # 512 vector registers a lane of four SIMDs, including AGPRs.
    registers_per_core=4 * 512 * 64,
    **capabilities,
  )


# By generation. A later one has the features of the earlier ones, except wgmma.
_ADA: Final = {"casts_to_fp8": True, "has_fp8_dot": True, "has_int8_dot": True}
_HOPPER: Final = {**_ADA, "has_tma": True, "has_wgmma": True}
_BLACKWELL: Final = {
  **_ADA,
  "has_fp8_dot": False,
  "has_int8_dot": False,
  "casts_to_fp4": True,
  "has_e2m1_conversion": True,
  "has_tma": True,
  "has_scaled_dot": True,
  "scales_by_e4m3": True,
}
_DATACENTER_BLACKWELL: Final = {
  **_BLACKWELL,
  "tensor_memory_columns": 512,
  "mixes_fp4_and_fp8": True,
}
_CDNA_4: Final = {"has_scaled_dot": True, "mixes_fp4_and_fp8": True}

# NVIDIA: CUDA programming guide, "Compute capabilities"; PTX ISA, "Tensor
# memory" (512 columns), `cvt`, `mma`. AMD: CDNA 3 and CDNA 4 ISA guides and
# white papers. gfx1250: LLVM's AMDGPU usage guide (320 KiB of LDS, wave32). The
# E4M3 of CDNA 3 has another bias.
ARCHITECTURES: Final = {
  architecture.name: architecture
  for architecture in (
    _nvidia(80, (8, 0), (8, 8), 163, converts_e4m3=False, has_int8_dot=True),
    _nvidia(89, (8, 9), (8, 9), 99, **_ADA),
    _nvidia(90, (9, 0), (9, 0), 227, **_HOPPER),
    _nvidia(100, (10, 0), (10, 2), 227, **_DATACENTER_BLACKWELL),
    _nvidia(103, (10, 3), (10, 9), 227, **_DATACENTER_BLACKWELL),
    _nvidia(120, (12, 0), (12, 0), 99, **_BLACKWELL),
    _nvidia(121, (12, 1), (12, 9), 99, **_BLACKWELL),
    _amd("gfx942", 64, 64, converts_e4m3=False, multiplies_bf16=False),
    _amd(
      "gfx950",
      64,
      160,
      multiplies_bf16=False,
      has_e2m1_conversion_to_f32=True,
      **_CDNA_4,
    ),
    _amd("gfx1250", 32, 320, **_CDNA_4),
  )
}


def by_name(name: str) -> Architecture:
  """Returns the architecture called `name`; ValueError lists known names."""
  architecture = ARCHITECTURES.get(name)
  if architecture is None:
    raise ValueError(
      f"unknown architecture {name!r}; known ones: {', '.join(ARCHITECTURES)}"
    )
  return architecture


def of_compute_capability(capability: tuple[int, int]) -> Architecture | None:
  """Returns the architecture whose kernels support an NVIDIA GPU, or None."""
  for architecture in ARCHITECTURES.values():
    served = architecture.compute_capabilities
    if served is not None and served[0] <= capability <= served[1]:
      return architecture
  return None
