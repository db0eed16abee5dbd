# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The matrix instructions that kernels must use on each architecture.

If a compiler has no instruction for the types of a product, it may silently
upcast both sides. The result is right, but several times slower. So a table,
which is written by hand, has the machine instructions of each architecture.
Tests check that kernels use them.

Sources: `nvdisasm` of CUDA 13 and LLVM's AMDGPU assembler, as they print what
the PTX ISA calls `mma.sync`, `wgmma.mma_async` and `tcgen05.mma`, and the CDNA
4 ISA guide `V_MFMA_SCALE_*`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

# Products of other formats, with both sides decoded to bf16.
UPCAST: Final = "upcast"

_FP8: Final = ("mxfp8", "mxfp8_e5m2")
# Warps of HMMA, warp groups of HGMMA, tensor memory's UTCHMMA.
_HMMA: Final = r"HMMA\.16816\.F32\.BF16"
_SCALED_MFMA: Final = r"v_mfma_scale_f32_(32x32x64|16x16x128)_f8f6f4"
_SCALED_WMMA: Final = r"v_wmma_scale_f32_16x16x128_f8f6f4"
# Scales are in tensor memory, the operand after the instruction's descriptor.
# kind::f8f6f4 has the same mnemonic, but no scales.
_SCALED_OPERANDS: Final = r" .*\bidesc tmem"

_DATACENTER_BLACKWELL: Final = {
  UPCAST: r"UTCHMMA(\.2CTA)?",
  "mxfp8": rf"UTCQMMA(\.2CTA)?{_SCALED_OPERANDS}",
  "mxfp8_mxfp4": rf"UTCQMMA(\.2CTA)?{_SCALED_OPERANDS}",
  "mxfp4": rf"UTCOMMA(\.2CTA)?{_SCALED_OPERANDS}",
}
_CONSUMER_BLACKWELL: Final = {
  UPCAST: _HMMA,
  "mxfp8": r"QMMA\.SF\.16832\.F32\.E[45]M[23]\.E[45]M[23]\.E8",
  "mxfp4": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.E8",
  "nvfp4": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
}

# By architecture and kind: a regular expression of the whole mnemonic, or of
# the mnemonic and its operands.
CLAIMS: Final[Mapping[str, Mapping[str, str]]] = {
  "sm_80": {UPCAST: _HMMA},
  "sm_89": {UPCAST: _HMMA},
  "sm_90": {UPCAST: r"HGMMA\.64x\d+x16\.F32\.BF16"},
  "sm_100": {
    **_DATACENTER_BLACKWELL,
    "nvfp4": rf"UTCOMMA(\.2CTA)?\.4X{_SCALED_OPERANDS}",
  },
  "sm_103": {
    **_DATACENTER_BLACKWELL,
    "nvfp4": rf"UTCOMMA(\.2CTA)?\.(4X|BLOCK16){_SCALED_OPERANDS}",
  },
  "sm_120": _CONSUMER_BLACKWELL,
  "sm_121": _CONSUMER_BLACKWELL,
  "gfx942": {UPCAST: r"v_mfma_f32_(32x32x8|16x16x16)_bf16"},
  "gfx950": {
    UPCAST: r"v_mfma_f32_(32x32x16|16x16x32)_bf16",
    "mxfp8": _SCALED_MFMA,
    "mxfp4": _SCALED_MFMA,
    "mxfp8_mxfp4": _SCALED_MFMA,
  },
  "gfx1250": {
    UPCAST: r"v_wmma_f32_16x16x32_bf16",
    "mxfp8": _SCALED_WMMA,
    "mxfp4": _SCALED_WMMA,
    "mxfp8_mxfp4": _SCALED_WMMA,
  },
}


def kind(architecture: str, lhs_format: str, rhs_format: str) -> str:
  """Returns the key in `CLAIMS` of a product: its formats, or `UPCAST`.

  Args:
    architecture: the name of the architecture, "sm_100".
    lhs_format, rhs_format: a name in `kernels.formats`, or of a float dtype.
  """
  names = ["mxfp8" if x in _FP8 else x for x in (lhs_format, rhs_format)]
  name = names[0] if names[0] == names[1] else "_".join(sorted(names)[::-1])
  return name if name in CLAIMS[architecture] else UPCAST


def broken(
  architecture: str, kind: str, instructions: Mapping[str, int]
) -> str:
  """Returns a sentence if machine code breaks its claim; "" if it does not.

  Args:
    architecture: the name of the architecture.
    kind: a key of `CLAIMS[architecture]`.
    instructions: number of matrix instructions, with operands, from
      `machine_code.matrix_instructions`. All of them must match the claim.
  """
  claim = CLAIMS[architecture][kind]
  pattern = re.compile(rf"{claim}( .*)?")
  others = [x for x in instructions if not pattern.fullmatch(x)]
  if instructions and not others:
    return ""
  return (
    f"{kind} on {architecture} must have the instruction {claim}, and its"
    f" machine code has {', '.join(others) or 'no matrix instruction'}"
  )
