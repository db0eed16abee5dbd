# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds, loads and calls the handlers, for their test only."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jaxplugin.kernels.cpu import library as installed

LIBRARY_VARIABLE = "JAXPLUGIN_CPU_LIBRARY"
ISA_LEVELS = {
  "baseline": 1,
  "avx2": 2,
  "avx512": 3,
  "avx512_bf16": 4,
}
# Not the names that the package registers: both may live in one process.
_TARGET = "{}_under_test".format
_HANDLERS = (
  "jaxplugin_block_scaled_dot",
  "jaxplugin_quantize",
  "jaxplugin_dequantize",
)
_NONE = np.zeros((0,), np.float32)


@functools.cache
def library() -> ctypes.CDLL:
  """The loaded library, its handlers registered.

  It is the one that `LIBRARY_VARIABLE` names, or the installed one, or a build
  of the sources made here.
  """
  path = os.environ.get(LIBRARY_VARIABLE)
  if not path:
    with contextlib.suppress(installed.LibraryError):
      path = str(installed.find())
  if not path:
    directory = tempfile.mkdtemp(prefix="jaxplugin_cpu_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = build(directory)
  loaded = ctypes.CDLL(path)
  loaded.jaxplugin_cpu_isa.restype = ctypes.c_char_p
  for name in _HANDLERS:
    jax.ffi.register_ffi_target(
      _TARGET(name), jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu"
    )
  return loaded


def build(directory: str) -> str:
  """Builds with CMake into `directory` and returns the library's path."""
  source = pathlib.Path(__file__).parent
  subprocess.run(
    [
      "cmake",
      "-S",
      str(source),
      "-B",
      directory,
      f"-DJAXPLUGIN_XLA_FFI_INCLUDE_DIR={jax.ffi.include_dir()}",
    ],
    check=True,
    stdout=subprocess.DEVNULL,
  )
  subprocess.run(
    ["cmake", "--build", directory, "--parallel", "2"],
    check=True,
    stdout=subprocess.DEVNULL,
  )
  return str(pathlib.Path(directory) / "libjaxplugin_cpu.so")


def isa_levels() -> list[str]:
  """Names of the levels that this machine has, the best one last.

  With those that the library emulates, for a test of their sources.
  """
  best = library().jaxplugin_cpu_isa().decode()
  names = list(ISA_LEVELS)
  found = ["baseline"]
  if best in names:
    found = names[: names.index(best) + 1]
  if hasattr(library(), "jaxplugin_cpu_emulates_avx512"):
    found += ["avx512", "avx512_bf16"]
  return found


def _or_none(x):
  return _NONE if x is None else x


def dot(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  global_scale=None,
  bias=None,
  residual=None,
  *,
  lhs_block_size=32,
  rhs_block_size=32,
  activation=0,
  isa=0,
  dtype=jnp.float32,
  shape=None,
):
  """Calls jaxplugin_block_scaled_dot; see README.md for its operands."""
  library()
  if shape is None:
    shape = (lhs.shape[0], lhs.shape[1], rhs.shape[1])
  return jax.ffi.ffi_call(
    _TARGET("jaxplugin_block_scaled_dot"), jax.ShapeDtypeStruct(shape, dtype)
  )(
    lhs,
    _or_none(lhs_scale),
    rhs,
    _or_none(rhs_scale),
    _or_none(global_scale),
    _or_none(bias),
    _or_none(residual),
    lhs_block_size=np.int64(lhs_block_size),
    rhs_block_size=np.int64(rhs_block_size),
    activation=np.int64(activation),
    isa=np.int64(isa),
  )


def quantize(
  x,
  global_scale=None,
  *,
  format,
  rounding=0,
  compute_global=0,
  isa=0,
  results=None,
):
  """Calls jaxplugin_quantize; returns (u8 values, u8 scale, f32[])."""
  library()
  if results is None:
    rows, k = x.shape
    block = 16 if format == 3 else 32
    results = (
      jax.ShapeDtypeStruct((rows, k // 2 if format >= 2 else k), jnp.uint8),
      jax.ShapeDtypeStruct((rows, k // block), jnp.uint8),
      jax.ShapeDtypeStruct((), jnp.float32),
    )
  return jax.ffi.ffi_call(_TARGET("jaxplugin_quantize"), results)(
    x,
    _or_none(global_scale),
    format=np.int64(format),
    rounding=np.int64(rounding),
    compute_global=np.int64(compute_global),
    isa=np.int64(isa),
  )


def dequantize(
  values, scale, global_scale=None, *, k, block_size, isa=0, dtype=jnp.float32
):
  """Calls jaxplugin_dequantize; returns dtype[rows, k]."""
  library()
  return jax.ffi.ffi_call(
    _TARGET("jaxplugin_dequantize"),
    jax.ShapeDtypeStruct((values.shape[0], k), dtype),
  )(
    values,
    scale,
    _or_none(global_scale),
    block_size=np.int64(block_size),
    isa=np.int64(isa),
  )
