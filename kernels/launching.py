# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""One launch of a Triton kernel, as plain data: what all planners make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import Final
from typing import NamedTuple

from jaxplugin.kernels import descriptors

# The oldest PTX version with all architectures (8.8, from CUDA 12.9). By
# default Triton writes the version of its ptxas. It may be newer than the ptxas
# that XLA finds: "Unsupported .version 9.4; current version is '9.0'".
# jax-triton 0.4 has an option for it; `triton_payload` writes it with any
# jax-triton.
PTX_VERSION: Final = 88
# The oldest that converts E2M1 to bf16 (PTX ISA 9.2, "cvt"); see
# `architectures.Architecture.converts_e2m1`.
E2M1_CONVERSION_PTX_VERSION: Final = 92


class Output(NamedTuple):
  """An array that a kernel writes; its dtype by NumPy's name."""

  name: str
  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One kernel launch.

  A kernel's arguments are the inputs, the outputs, and its constants.

  Attributes:
    kernel: a key of `KERNELS` in the kernel's module.
    name: under which profiles list it; a C identifier.
    inputs: names of the arrays that it reads. One that the call has not is
      another's name: its pointer is not read.
    outputs: the arrays that it writes.
    constexprs: the rest of the kernel's arguments, by name.
    grid: number of programs.
    num_warps, num_stages: Triton's.
    ptx_version: that its PTX says, 10 * major + minor: the oldest that has its
      instructions. AMD's GPUs have none.
    fp_fusion: whether the compiler may contract a * b + c, which rounds once.
    views: what inputs are to be given as, by name: "u32", eight FP4 values a
      word, "u8" or "e4m3". Other scales are given as bytes, and all else as it
      is.
    descriptors: for each of the inputs, what the kernel is given the descriptor
      of in the pointer's place, or None; empty where there are none.
  """

  kernel: str
  name: str
  inputs: tuple[str, ...]
  outputs: tuple[Output, ...]
  constexprs: tuple[tuple[str, Any], ...]
  grid: int
  num_warps: int
  num_stages: int = 1
  ptx_version: int = PTX_VERSION
  fp_fusion: bool = False
  views: tuple[tuple[str, str], ...] = ()
  descriptors: tuple[descriptors.Descriptor | None, ...] = ()

  def described(self, arrays: Sequence[Any]) -> list[Any]:
    """`arrays`, in the order of the inputs, with their descriptors if any."""
    if not self.descriptors:
      return list(arrays)
    return [
      array if spec is None else descriptors.Described(array, spec)
      for array, spec in zip(arrays, self.descriptors, strict=True)
    ]
