# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A launch of a Triton kernel, as plain data that planners return."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from jaxplugin.kernels import descriptors

# The oldest PTX version that supports all architectures (8.8, from CUDA 12.9).
# By default Triton writes the version of its ptxas. XLA may find an older one,
# which refuses it: "Unsupported .version 9.4; current version is '9.0'".
# jax-triton 0.4 has an option for the version. `triton_calls` sets it for
# every jax-triton.
PTX_VERSION: Final = 88
# The oldest version that converts E2M1 to bf16 (PTX ISA 9.2, "cvt"); see
# `architectures.Architecture.converts_e2m1`.
E2M1_CONVERSION_PTX_VERSION: Final = 92


# A size of `Output.shape` that is read from the array "m".
READ: Final = -1


class Output(NamedTuple):
  """An array that a kernel writes; `dtype` is NumPy's name of the dtype."""

  name: str
  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One kernel launch.

  A kernel's arguments are the inputs, the outputs, and its constants.

  Attributes:
    kernel: key of the kernel in `KERNELS` of its module.
    name: name in profiles; a C identifier.
    inputs: names of the arrays that the kernel reads. For an absent array it is
      the name of another array, whose pointer the kernel does not read.
    outputs: arrays that the kernel writes.
    constexprs: the other arguments of the kernel, by name.
    grid: number of programs.
    num_warps, num_stages: Triton's options.
    ptx_version: PTX version of the code as 10 * major + minor: the oldest one
      that has its instructions. Unused for AMD GPUs.
    fp_fusion: whether the compiler may contract a * b + c, which rounds once.
    views: (name, view) of inputs that are passed with another dtype: "u32"
      (eight FP4 values in a word), "u8" or "e4m3". Other scales are passed as
      bytes, and other arrays unchanged.
    descriptors: descriptor that replaces the pointer of each input, or None;
      empty if the launch has no descriptors.
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

  def with_size(self, size: Any) -> Launch:
    """Returns the launch with outputs of a size, in place of `READ`."""

    def sized(output: Output) -> Output:
      shape = tuple(size if d == READ else d for d in output.shape)
      return output._replace(shape=shape)

    return dataclasses.replace(self, outputs=tuple(map(sized, self.outputs)))

  def described(self, arrays: Sequence[Any]) -> list[Any]:
    """Returns the inputs, each with its descriptor if it has one."""
    if not self.descriptors:
      return list(arrays)
    return [
      array if spec is None else descriptors.Described(array, spec)
      for array, spec in zip(arrays, self.descriptors, strict=True)
    ]
