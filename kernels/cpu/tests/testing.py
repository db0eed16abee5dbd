# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds, loads and calls the handlers, and makes operands, for their tests."""

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
import ml_dtypes
import numpy as np
from absl.testing import absltest
from jaxplugin.kernels.cpu import library as installed

LIBRARY_VARIABLE = "JAXPLUGIN_CPU_LIBRARY"
ISA_LEVELS = {
  "baseline": 1,
  "avx2": 2,
  "avx512": 3,
  "avx512_bf16": 4,
  "amx_bf16": 5,
}
# Not the names that the package registers: both may live in one process.
_TARGET = "{}_under_test".format
_HANDLERS = (
  "jaxplugin_block_scaled_dot",
  "jaxplugin_quantize",
  "jaxplugin_quantize_operand",
  "jaxplugin_dequantize",
  "jaxplugin_copy",
  "jaxplugin_ragged_dot",
)
_NONE = np.zeros((0,), np.float32)

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
E2M3 = ml_dtypes.float6_e2m3fn
E3M2 = ml_dtypes.float6_e3m2fn
E2M1 = ml_dtypes.float4_e2m1fn
E8M0 = ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16

# name -> (values dtype, scale dtype, block size)
FORMATS = {
  "mxfp8": (E4M3, E8M0, 32),
  "mxfp8_e5m2": (E5M2, E8M0, 32),
  "mxfp4": (E2M1, E8M0, 32),
  "nvfp4": (E2M1, E4M3, 16),
  "mxfp6_e2m3": (E2M3, E8M0, 32),
  "mxfp6_e3m2": (E3M2, E8M0, 32),
  "f32": (np.float32, None, 32),
  "bf16": (BF16, None, 32),
  "f16": (np.float16, None, 32),
}
# In the order of the handlers' `format` attribute.
QUANTIZED = (
  *("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"),
  *("mxfp6_e2m3", "mxfp6_e3m2"),
)
# Of the `element` attributes: what XLA has no arrays of comes as u8.
ELEMENTS = {E2M3: 1, E3M2: 2}
# The ragged dot's `activation` attributes of which two columns make one:
# swiglu, swigluoai.
GATES = (4, 5)
# NaN of f32 with all bits set, the least of them, and both signs.
NAN_BITS = (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001)


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
  source = pathlib.Path(__file__).resolve().parents[1]
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


# Tests have rows for these only.
ISAS = tuple(dict.fromkeys(isa_levels()))


def bits(dtype) -> int:
  """How many bits a code of a format's values has."""
  return int(ml_dtypes.finfo(dtype).bits)


def one_a_byte(values, name: str) -> np.ndarray:
  """Codes that `quantize` gave, unpacked."""
  values = np.asarray(values)
  if FORMATS[name][0] != E2M1:
    return values
  codes = np.stack([values & 15, values >> 4], -1)
  return codes.reshape(*values.shape[:-1], 2 * values.shape[-1])


def _element(name: str, values) -> dict[str, np.int64]:
  """The attribute that says what u8 values are, where it is needed."""
  number = ELEMENTS.get(values.dtype.type)
  return {} if number is None else {name: np.int64(number)}


def _given(values):
  """Values as XLA takes them."""
  return values.view(np.uint8) if values.dtype.type in ELEMENTS else values


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
  attributes=None,
):
  """Calls jaxplugin_block_scaled_dot; see README.md for its operands.

  `attributes` are more of them, or others.
  """
  library()
  if shape is None:
    shape = (lhs.shape[0], lhs.shape[1], rhs.shape[1])
  return jax.ffi.ffi_call(
    _TARGET("jaxplugin_block_scaled_dot"), jax.ShapeDtypeStruct(shape, dtype)
  )(
    _given(lhs),
    _or_none(lhs_scale),
    _given(rhs),
    _or_none(rhs_scale),
    _or_none(global_scale),
    _or_none(bias),
    _or_none(residual),
    **{
      "lhs_block_size": np.int64(lhs_block_size),
      "rhs_block_size": np.int64(rhs_block_size),
      "activation": np.int64(activation),
      "isa": np.int64(isa),
      **_element("lhs_element", lhs),
      **_element("rhs_element", rhs),
      **(attributes or {}),
    },
  )


def ragged_dot(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  group_sizes,
  global_scale=None,
  bias=None,
  *,
  lhs_block_size=32,
  rhs_block_size=32,
  activation=0,
  isa=0,
  dtype=jnp.float32,
  shape=None,
  attributes=None,
):
  """Calls jaxplugin_ragged_dot; see README.md for its operands.

  `attributes` are more of them, or others.
  """
  library()
  if shape is None:
    columns = rhs.shape[1] // 2 if activation in GATES else rhs.shape[1]
    shape = (lhs.shape[0], columns)
  return jax.ffi.ffi_call(
    _TARGET("jaxplugin_ragged_dot"), jax.ShapeDtypeStruct(shape, dtype)
  )(
    _given(lhs),
    _or_none(lhs_scale),
    _given(rhs),
    _or_none(rhs_scale),
    group_sizes,
    _or_none(global_scale),
    _or_none(bias),
    **{
      "lhs_block_size": np.int64(lhs_block_size),
      "rhs_block_size": np.int64(rhs_block_size),
      "activation": np.int64(activation),
      "isa": np.int64(isa),
      **_element("lhs_element", lhs),
      **_element("rhs_element", rhs),
      **(attributes or {}),
    },
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
    dtype, _, block = FORMATS[QUANTIZED[format]]
    k_bytes = k // 2 if dtype == E2M1 else k
    results = (
      jax.ShapeDtypeStruct((rows, k_bytes), jnp.uint8),
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


def quantize_operand(
  x,
  global_scale=None,
  key=None,
  *,
  format,
  rounding=0,
  compute_global=0,
  hadamard=1,
  square=0,
  four_over_six=0,
  scale_up=0,
  isa=0,
  padded=None,
  results=None,
):
  """Calls jaxplugin_quantize_operand; returns (u8 values, u8 scale, f32[])."""
  library()
  if results is None:
    outer, k, inner = x.shape
    dtype, _, block = FORMATS[QUANTIZED[format]]
    padded = k if padded is None else padded
    stored = padded // 2 if dtype == E2M1 else padded
    results = (
      jax.ShapeDtypeStruct((outer * inner, stored), jnp.uint8),
      jax.ShapeDtypeStruct((outer * inner, padded // block), jnp.uint8),
      jax.ShapeDtypeStruct((), jnp.float32),
    )
  return jax.ffi.ffi_call(_TARGET("jaxplugin_quantize_operand"), results)(
    x,
    _or_none(global_scale),
    np.zeros((0,), np.uint32) if key is None else key,
    format=np.int64(format),
    rounding=np.int64(rounding),
    compute_global=np.int64(compute_global),
    hadamard=np.int64(hadamard),
    square=np.int64(square),
    four_over_six=np.int64(four_over_six),
    scale_up=np.int64(scale_up),
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
    _given(values),
    scale,
    _or_none(global_scale),
    block_size=np.int64(block_size),
    isa=np.int64(isa),
    **_element("element", values),
  )


def copy(x, result=None):
  """Calls jaxplugin_copy; returns an array like x, or like `result`."""
  library()
  result = result or jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.ffi.ffi_call(_TARGET("jaxplugin_copy"), result)(x)


# Operands, and what they mean in float64.


def isa_number(test: absltest.TestCase, name: str) -> int:
  if name not in isa_levels():
    test.skipTest(f"this machine has no {name}")
  return ISA_LEVELS[name]


def e8m0_value(code: np.ndarray) -> np.ndarray:
  value = np.ldexp(1.0, code.astype(np.int64) - 127)
  return np.where(code == 255, np.nan, value)


class Side:
  """An operand: what a handler gets, and its exact value in float64."""

  def __init__(self, name, values, scale, packed=False):
    dtype, scale_dtype, self.block = FORMATS[name]
    self.values = values.astype(dtype)
    exact = self.values.astype(np.float64)
    self.scale = None
    if scale_dtype is not None:
      self.scale = scale.astype(np.uint8).view(scale_dtype)
      factor = (
        e8m0_value(scale)
        if scale_dtype == E8M0
        else self.scale.astype(np.float64)
      )
      factor = np.repeat(factor, self.block, axis=-1)[..., : values.shape[-1]]
      with np.errstate(invalid="ignore"):
        exact = exact * factor
    self.exact = exact
    if packed and dtype == E2M1:
      codes = self.values.view(np.uint8) & 15
      self.values = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def integers(name, shape, rng, packed=False) -> Side:
  """Small integers and power-of-two scales: every sum is exact in f32."""
  values = rng.integers(-4, 5, shape).astype(np.float64)
  values = np.where(np.abs(values) == 5, 4, values)
  block = FORMATS[name][2]
  scale_shape = (*shape[:-1], -(-shape[-1] // block))
  if FORMATS[name][1] == E4M3:
    scale = rng.choice(np.array([0x30, 0x38, 0x40]), scale_shape)
  else:
    scale = rng.integers(126, 129, scale_shape)
  return Side(name, values, scale, packed)


def gaussians(name, shape, rng, spread=0, packed=False) -> Side:
  """Normal values, rounded to the format, with scales over 2^+-spread."""
  values = rng.standard_normal(shape) * (1 if FORMATS[name][1] is None else 2)
  if FORMATS[name][1] is not None:
    most = float(ml_dtypes.finfo(FORMATS[name][0]).max)
    values = np.clip(values, -most, most)
  block = FORMATS[name][2]
  scale_shape = (*shape[:-1], -(-shape[-1] // block))
  if FORMATS[name][1] == E4M3:
    scale = rng.integers(1, 0x7F, scale_shape)
  else:
    scale = rng.integers(127 - spread, 128 + spread, scale_shape)
  return Side(name, values, scale, packed)


def call(lhs: Side, rhs: Side, *args, **kwargs) -> np.ndarray:
  return np.asarray(
    dot(
      lhs.values,
      lhs.scale,
      rhs.values,
      rhs.scale,
      *args,
      lhs_block_size=lhs.block,
      rhs_block_size=rhs.block,
      shape=(*lhs.exact.shape[:2], rhs.exact.shape[1]),
      **kwargs,
    )
  )


def oracle(lhs: Side, rhs: Side) -> np.ndarray:
  with np.errstate(invalid="ignore", over="ignore"):
    return lhs.exact @ np.swapaxes(rhs.exact, -1, -2)
