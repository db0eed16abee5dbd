# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small PTX programs, for tests of what executes them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from jaxplugin.lab.inspection.ptx import launching

_TEXT: Final = """
.version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry small(
{parameters}
)
.reqntid {threads}
{{
\t.reg .pred \t%p<9>;
\t.reg .b16 \t%rs<9>;
\t.reg .b32 \t%r<99>;
\t.reg .b64 \t%rd<9>;
{body}
\tret;
}}
"""
_LOADED: Final = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_REGISTERS: Final = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
SHARED_BYTES: Final = 1024


def text(body: str, parameters: int, threads: int = 32) -> str:
  """A kernel `small` of that body; parameters are pointers p0, p1, ..."""
  declared = (
    f"\t.param .u64 .ptr .global .align 1 p{i}" for i in range(parameters)
  )
  return _TEXT.format(
    parameters=",\n".join(declared), threads=threads, body=body
  )


def run(
  body: str,
  *arrays: np.ndarray,
  threads: int = 32,
  shared_memory_bytes: int = SHARED_BYTES,
  grid: int = 1,
  **options: Any,
) -> launching.Launched:
  """Executes `text` of it on arrays."""
  return launching.launch(
    text(body, len(arrays), threads),
    arrays,
    grid=grid,
    shared_memory_bytes=shared_memory_bytes,
    **options,
  )


def apply(
  instructions: str, *inputs: np.ndarray, out: np.dtype | type
) -> np.ndarray:
  """Applies PTX instructions to each element of the inputs.

  Args:
    instructions: on registers x0, x1, ..., and y, which is stored.
    *inputs: arrays[threads] of one length, a multiple of 32.
    out: the dtype of the result.
  """
  (threads,) = inputs[0].shape
  result = np.zeros(threads, out)
  arrays = [*inputs, result]
  body = ["mov.u32 %r0, %tid.x;"]
  for i, array in enumerate(arrays):
    name = "y" if array is result else f"x{i}"
    body += [
      f".reg .{_REGISTERS[array.itemsize]} {name};",
      f"ld.param.b64 %rd{i}, [p{i}];",
      f"mad.wide.u32 %rd{i}, %r0, {array.itemsize}, %rd{i};",
    ]
    if array is not result:
      body.append(f"ld.global.{_LOADED[array.itemsize]} {name}, [%rd{i}];")
  kind = _LOADED[result.itemsize]
  body += [instructions, f"st.global.{kind} [%rd{len(inputs)}], y;"]
  return run("\n".join(body), *arrays, threads=threads).arrays[-1]
