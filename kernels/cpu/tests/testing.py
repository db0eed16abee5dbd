# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds, loads and calls the handlers, and creates operands for tests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl.testing import parameterized
from jaxplugin.kernels.cpu import library as installed

from jaxplugin.core import formats
from jaxplugin.testing.oracles import quantization_oracle

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import frames

HandlerError = frames.HandlerError

LIBRARY_VARIABLE = "JAXPLUGIN_CPU_LIBRARY"
ISA_LEVELS = {
  "baseline": 1,
  "avx2": 2,
  "avx512": 3,
  "avx512_bf16": 4,
  "amx_bf16": 5,
  "neon_dotprod": 6,
  "neon_i8mm": 7,
}
# Differs from the names that the package registers, because one process may
# register both.
_TARGET = "{}_under_test".format
_NONE = np.zeros((0,), np.float32)
_DOT_OPTIONS = {
  "lhs_block_size": 32,
  "rhs_block_size": 32,
  "activation": 0,
  "isa": 0,
}

E4M3 = ml_dtypes.float8_e4m3fn
E5M2 = ml_dtypes.float8_e5m2
E2M3 = ml_dtypes.float6_e2m3fn
E3M2 = ml_dtypes.float6_e3m2fn
E2M1 = ml_dtypes.float4_e2m1fn
E8M0 = ml_dtypes.float8_e8m0fnu
INT8 = np.int8
INT4 = ml_dtypes.int4
BF16 = ml_dtypes.bfloat16
F16 = np.float16
F32 = np.float32

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
# Formats that the dots and dequantize read. The block size None is a whole row.
CHECKPOINTS = {
  "fp8_1x128": (E4M3, F32, 128),
  "fp8_1x128_e8m0": (E4M3, E8M0, 128),
  "fp8_row": (E4M3, F32, None),
  "e5m2_64": (E5M2, BF16, 64),
  "e2m1_48": (E2M1, F32, 48),
  "e2m1_64": (E2M1, E8M0, 64),
  "e2m3_32": (E2M3, E5M2, 32),
  "int8_row": (INT8, F32, None),
  "int8_32": (INT8, F16, 32),
  "int8_16": (INT8, E4M3, 16),
  "int4_32": (INT4, F16, 32),
  "int4_16": (INT4, F32, 16),
  "int4_128": (INT4, F16, 128),
  "int4_128_bf16": (INT4, BF16, 128),
  "mxint8": (INT8, E8M0, 32),
}
# Formats of int4 codes that index a codebook. Only dots read them.
CODEBOOKS = {
  "nf4": (INT4, F32, 64),
  "codebook_16": (INT4, E4M3, 16),
  "codebook_32": (INT4, E8M0, 32),
  "codebook_48": (INT4, F16, 48),
}
CHECKPOINTS |= CODEBOOKS
FRACTION_BITS = {"mxint8": 6}
_INTEGERS = np.array([(5 * i + 3) % 16 - 8 for i in range(16)], np.float32)
# Dtypes of results.
FLOATS = tuple(map(np.dtype, (np.float32, BF16, np.float16)))
# In the order of the handlers' `format` attribute.
QUANTIZED = (
  *("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"),
  *("mxfp6_e2m3", "mxfp6_e3m2"),
)
# The `element` attributes of formats that XLA has no dtype for. Their arrays
# are u8.
ELEMENTS = {E2M3: 1, E3M2: 2}
# The gated `activation` attributes of the ragged dot: swiglu, swigluoai.
GATES = (4, 5)
# NaNs of f32 of both signs: all bits set, the default one, the smallest.
NAN_BITS = (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001)


@functools.cache
def library() -> ctypes.CDLL:
  """Loads the library and registers its handlers.

  It is the library that `LIBRARY_VARIABLE` names, else the installed one, else
  a new build of the sources.
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
  for name in installed.HANDLERS:
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
  """Returns the instruction sets of this machine, with the best one last.

  If the library emulates AVX-512, the emulated ones follow.
  """
  best = library().jaxplugin_cpu_isa().decode()
  is_arm = "neon" in best
  others = list(ISA_LEVELS)[1:]
  names = ["baseline", *(x for x in others if ("neon" in x) == is_arm)]
  found = ["baseline"]
  if best in names:
    found = names[: names.index(best) + 1]
  if hasattr(library(), "jaxplugin_cpu_emulates_avx512"):
    found += ["avx512", "avx512_bf16"]
  return found


# Tests have rows for these instruction sets.
ISAS = tuple(dict.fromkeys(isa_levels()))


def rows(**axes):
  """Makes a test that loops over the combinations of the values in `axes`.

  Operands take most of the time of a row. So a test of `rows` passes its
  operands to every instruction set (`assert_exact`, `assert_close`).
  """

  def decorate(test):
    @functools.wraps(test)
    def run_rows(self, **given):
      for values in itertools.product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        with self.subTest(**row):
          test(self, **given, **row)

    return run_rows

  return decorate


def each(**axes):
  """Makes a test of `rows` for each instruction set, which is its `isa`."""
  isas = [{"isa": isa} for isa in ISAS]
  return lambda test: parameterized.parameters(*isas)(rows(**axes)(test))


def bits(dtype) -> int:
  """Returns the number of bits of a code."""
  return int(ml_dtypes.finfo(dtype).bits)


def one_a_byte(values, name: str) -> np.ndarray:
  """Returns the codes of values that `quantize` returned, one per byte."""
  values = np.asarray(values)
  if FORMATS[name][0] != E2M1:
    return values
  codes = np.stack([values & 15, values >> 4], -1)
  return codes.reshape(*values.shape[:-1], 2 * values.shape[-1])


def _handle(name: str, arguments, results, attributes: dict[str, Any]):
  """Calls a handler. If an argument is traced, the call goes through XLA.

  `isa` is a name or a number. MXFP6 values are passed as bytes, because XLA has
  no such dtype.
  """
  isa = attributes.pop("isa")
  attributes["isa"] = ISA_LEVELS.get(isa, isa)
  attributes = {
    key: value
    if isinstance(value, np.generic | np.ndarray)
    else np.int64(value)
    for key, value in attributes.items()
  }
  arguments = [
    x.view(np.uint8) if x.dtype.type in ELEMENTS else x for x in arguments
  ]
  several = isinstance(results, tuple)
  if any(isinstance(x, jax.core.Tracer) for x in arguments):
    library()
    return jax.ffi.ffi_call(_TARGET(name), results)(*arguments, **attributes)
  found = frames.call(
    getattr(library(), name),
    arguments,
    results if several else (results,),
    attributes,
  )
  return found if several else found[0]


def _elements(**values) -> dict[str, int]:
  """Returns the `element` attributes of values that are passed as bytes."""
  return {
    f"{name}_element" if name else "element": ELEMENTS[x.dtype.type]
    for name, x in values.items()
    if x.dtype.type in ELEMENTS
  }


def _present(*arguments) -> list[Any]:
  return [_NONE if x is None else x for x in arguments]


def dot(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  global_scale=None,
  bias=None,
  residual=None,
  *,
  shape=None,
  **options,
):
  """Calls jaxplugin_block_scaled_dot; README.md describes its operands."""
  if shape is None:
    shape = (lhs.shape[0], lhs.shape[1], rhs.shape[1])
  arrays = lhs, lhs_scale, rhs, rhs_scale, global_scale, bias, residual
  return _product("jaxplugin_block_scaled_dot", arrays, shape, **options)


def ragged_dot(
  lhs,
  lhs_scale,
  rhs,
  rhs_scale,
  group_sizes,
  global_scale=None,
  bias=None,
  *,
  shape=None,
  **options,
):
  """Calls jaxplugin_ragged_dot; README.md describes its operands."""
  if shape is None:
    is_gated = options.get("activation") in GATES
    shape = (lhs.shape[0], rhs.shape[1] // (2 if is_gated else 1))
  arrays = lhs, lhs_scale, rhs, rhs_scale, group_sizes, global_scale, bias
  return _product("jaxplugin_ragged_dot", arrays, shape, **options)


def _product(
  name,
  arrays,
  shape,
  *,
  dtype=np.float32,
  rhs_offset=None,
  out=None,
  attributes=None,
  **options,
):
  """Calls a handler.

  `attributes` are added to the other attributes, or replace them. With `out`
  the result is quantized.
  """
  lhs, _, rhs, *_ = arrays
  return _handle(
    name,
    [
      *_present(*arrays),
      *([] if rhs_offset is None else [rhs_offset]),
      *([] if out is None else out.arguments()),
    ],
    jax.ShapeDtypeStruct(shape, dtype) if out is None else out.results(shape),
    _DOT_OPTIONS
    | _elements(lhs=lhs, rhs=rhs)
    | (out.attributes() if out else {})
    | options
    | (attributes or {}),
  )


@dataclasses.dataclass(frozen=True)
class QuantizedResult:
  """A dot's result in a format of `QUANTIZED`, with a global scale or None."""

  name: str
  global_scale: float | None = None
  rounding: int = 0
  has_amax: bool = True

  def arguments(self):
    return _present(
      None if self.global_scale is None else np.float32(self.global_scale)
    )

  def results(self, shape) -> tuple:
    rows, format = math.prod(shape[:-1]), QUANTIZED.index(self.name)
    # amax has the type of a global scale.
    return _quantized(rows, shape[-1], format)[: 2 + self.has_amax]

  def attributes(self):
    return {
      "result_format": QUANTIZED.index(self.name),
      "result_rounding": self.rounding,
    }

  def of(self, x: np.ndarray, isa) -> list[np.ndarray]:
    """Returns what a dot must return whose f32 result is x."""
    *arrays, _ = quantize(
      x.reshape(-1, x.shape[-1]),
      *self.arguments(),
      format=QUANTIZED.index(self.name),
      rounding=self.rounding,
      isa=isa,
    )
    amax = np.max(np.abs(x), where=np.isfinite(x), initial=0)
    return [*arrays, amax][: 2 + self.has_amax]


def _quantized(rows: int, k: int, format: int) -> tuple:
  dtype, _, block = FORMATS[QUANTIZED[format]]
  k_bytes = k // 2 if dtype == E2M1 else k
  return (
    jax.ShapeDtypeStruct((rows, k_bytes), np.uint8),
    jax.ShapeDtypeStruct((rows, k // block), np.uint8),
    jax.ShapeDtypeStruct((), np.float32),
  )


def quantize(x, global_scale=None, *, format, more=(), results=None, **options):
  """Calls jaxplugin_quantize; returns (u8 values, u8 scale, f32[]).

  `more` are the arguments of a prologue.
  """
  return _handle(
    "jaxplugin_quantize",
    _present(x, global_scale, *more),
    results or _quantized(*x.shape, format),
    {"rounding": 0, "compute_global": 0, "isa": 0, "format": format} | options,
  )


def prologue(
  x,
  global_scale=None,
  *,
  format=0,
  function=1,
  halves=0,
  up=None,
  weight=None,
  bias=None,
  residual=None,
  cotangent=None,
  results=(),
  along=1,
  padded=None,
  key=None,
  entries=0,
  **options,
):
  """Calls jaxplugin_quantize with a prologue.

  Returns values, scale and the global scale of each side, the sum if there is a
  residual or the gradient of a norm, amax, the prologue's result, and its
  column sums if there are `entries`. `results` replaces the types of the last
  ones. `padded` is the size of a run with its padding.
  """
  merges = halves and not options.get("gradient")
  rows, k = x.shape[0], x.shape[1] // (2 if merges else 1)
  sides = _quantized(rows, k, format) if along & 1 else ()
  if along & 2:
    run = options.get("run") or max(rows, 1)
    block = FORMATS[QUANTIZED[format]][2]
    padded = -(-run // block) * block if padded is None else padded
    sides += _quantized(rows // run * k, padded, format)
  is_norm_gradient = function < 3 and options.get("gradient", 0) > 0
  returns_sum = residual is not None or is_norm_gradient
  sums = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * returns_sum
  f32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
  last = results or (*sums, f32(), f32(rows, k))
  last = (*last, *([f32(entries, 1, k)] if entries else []))
  return quantize(
    x,
    global_scale,
    format=format,
    more=(
      *(up, weight, bias, residual),
      *(array for array in (cotangent, key) if array is not None),
    ),
    results=(*sides, *last),
    prologue=function,
    halves=halves,
    along=along,
    **options,
  )


def quantize_operand(
  x,
  global_scale=None,
  key=None,
  *,
  format,
  padded=None,
  results=None,
  **options,
):
  """Calls jaxplugin_quantize_operand; returns (u8 values, u8 scale, f32[])."""
  if results is None:
    outer, k, inner = x.shape
    results = _quantized(outer * inner, padded or k, format)
  return _handle(
    "jaxplugin_quantize_operand",
    [*_present(x, global_scale), np.zeros(0, "u4") if key is None else key],
    results,
    {
      "format": format,
      "rounding": 0,
      "compute_global": 0,
      "hadamard": 1,
      "square": 0,
      "four_over_six": 0,
      "scale_up": 0,
      "isa": 0,
    }
    | options,
  )


def quantized_reference(x, name, rounding, global_scale):
  """Returns (codes u8, scale u8, global scale or None), by NumPy in float64."""
  if name == "nvfp4":
    return quantization_oracle.reference_nvfp4(x, global_scale)
  format = getattr(formats, name.upper())
  how = quantization_oracle.ROUNDINGS[rounding]
  return (*quantization_oracle.reference_mx(x, format, how), None)


def quantize_changed(handler, x, change):
  """Calls `handler` for 2 rows of MXFP8 with other arguments or results."""
  results = {
    "values": ((2, 32), "u1"),
    "scale": ((2, 1), "u1"),
    "global_result": ((), "f4"),
  }
  arguments = {"x": x, "format": 0} | change
  shapes = [arguments.pop(name, default) for name, default in results.items()]
  return handler(
    **arguments, results=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
  )


def dequantize(
  values, scale, global_scale=None, *, k, dtype=np.float32, **options
):
  """Calls jaxplugin_dequantize; returns dtype[rows, k]."""
  return _handle(
    "jaxplugin_dequantize",
    _present(values, scale, global_scale),
    jax.ShapeDtypeStruct((values.shape[0], k), dtype),
    {"isa": 0} | _elements(**{"": values}) | options,
  )


# Operands, and their values in float64.


def e8m0_value(code: np.ndarray) -> np.ndarray:
  value = np.ldexp(1.0, code.astype(np.int64) - 127)
  return np.where(code == 255, np.nan, value)


class Side:
  """The arrays of an operand, and its exact value in float64.

  `format` is a name, or a triple like the values of `FORMATS`. `scale` has
  codes for scales of one byte, else numbers.
  """

  def __init__(self, format, values, scale, packed=False):
    known = FORMATS | CHECKPOINTS
    dtype, scale_dtype, block = known.get(format, format)
    self.block = block or max(values.shape[-1], 1)
    self.fraction_bits = FRACTION_BITS.get(format, 0)
    self.codebook = codebook_of(format)
    if self.codebook is None:
      self.values = values.astype(dtype)
      exact = self.values.astype(np.float64)
      if self.fraction_bits:
        exact = np.ldexp(exact, -self.fraction_bits)
    else:
      distance = np.abs(np.asarray(values)[..., None] - self.codebook)
      code = np.argmin(distance, -1)
      self.values = (code - 8).astype(dtype)
      exact = self.codebook[code].astype(np.float64)
    self.scale = None
    if scale_dtype is not None:
      if np.dtype(scale_dtype).itemsize > 1:
        self.scale = scale.astype(scale_dtype)
      else:
        self.scale = scale.astype(np.uint8).view(scale_dtype)
      factor = (
        e8m0_value(scale)
        if scale_dtype == E8M0
        else self.scale.astype(np.float64)
      )
      factor = np.repeat(factor, self.block, axis=-1)[..., : values.shape[-1]]
      with np.errstate(invalid="ignore"):
        exact *= factor
    self.exact = exact
    self.element = 6 if packed and dtype == INT4 else 0
    if packed and dtype in (E2M1, INT4):
      codes = self.values.view(np.uint8) & 15
      self.values = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def constant(name, shape, value=1, code=None) -> Side:
  """Returns one value, with one scale code: 1's by default."""
  _, scale_dtype, block = FORMATS[name]
  values = np.full(shape, value, np.float64)
  if scale_dtype is None:
    return Side(name, values, None)
  if code is None:
    code = 127 if scale_dtype == E8M0 else 0x38
  return Side(
    name, values, np.full((*shape[:-1], -(-shape[-1] // block)), code)
  )


def integers(name, shape, rng, packed=False) -> Side:
  """Returns small integers with scales of 1/2, 1 and 2: f32 sums are exact."""
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
  """Returns random numbers, with E8M0 scales within 2^+-spread."""
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


def codebook_of(format) -> np.ndarray | None:
  """Returns the 16 values of codes -8 to 7 of a format with a codebook."""
  if format not in CODEBOOKS:
    return None
  if format == "nf4":
    return np.asarray(formats.NF4.codebook, np.float32)
  return _INTEGERS


def operand(side: Side, prefix: str = "") -> dict[str, Any]:
  """Returns the attributes of an operand, which are 0 unless present."""
  numbers = {
    "block_size": side.block,
    "element": side.element,
    "fraction_bits": side.fraction_bits,
  }
  given = {prefix + name: value for name, value in numbers.items() if value}
  if side.codebook is not None:
    given[f"{prefix}codebook"] = side.codebook
  return given


def random_scales(scale_dtype, shape, rng, exact=False) -> np.ndarray:
  """Returns scales for `Side`: powers of two if `exact`, else any near 1."""
  exponents = rng.integers(-1, 2, shape)
  if scale_dtype == E8M0:
    return exponents + 127
  numbers = np.exp2(exponents) * rng.choice([1, 1, 1, -1], shape)
  if not exact:
    numbers = numbers * rng.uniform(1, 2, shape)
  if np.dtype(scale_dtype).itemsize > 1:
    return numbers
  return numbers.astype(scale_dtype).view(np.uint8)


def checkpoint(name, shape, rng, exact=False, packed=False) -> Side:
  """Returns random values of a format of `CHECKPOINTS`.

  If `exact`, they are small integers, and sums of products are exact in f32.
  """
  dtype, scale_dtype, block = CHECKPOINTS[name]
  if exact:
    values = rng.integers(-4, 5, shape).astype(np.float64)
  elif dtype in (INT8, INT4):
    most = 128 if dtype == INT8 else 8
    values = rng.integers(-most, most, shape)
  else:
    values = np.clip(rng.standard_normal(shape) * 2, -6, 6)
  columns = -(-shape[-1] // (block or max(shape[-1], 1)))
  scale = random_scales(scale_dtype, (*shape[:-1], columns), rng, exact)
  return Side(name, values, scale, packed)


def any_side(name, shape, rng, exact) -> Side:
  """Returns random values of any format, small integers if `exact`."""
  if name in CHECKPOINTS:
    return checkpoint(name, shape, rng, exact, packed=bool(rng.integers(2)))
  if exact:
    return integers(name, shape, rng)
  return gaussians(name, shape, rng, 3)


def call(lhs: Side, rhs: Side, *args, **kwargs) -> np.ndarray:
  return dot(
    *(lhs.values, lhs.scale, rhs.values, rhs.scale, *args),
    **operand(lhs, "lhs_"),
    **operand(rhs, "rhs_"),
    **kwargs,
  )


def call_ragged(lhs: Side, rhs: Side, sizes, *args, **kwargs) -> np.ndarray:
  return ragged_dot(
    *(lhs.values, lhs.scale, rhs.values, rhs.scale),
    *(np.asarray(sizes, np.int32), *args),
    **operand(lhs, "lhs_"),
    **operand(rhs, "rhs_"),
    **kwargs,
  )


def oracle(lhs: Side, rhs: Side) -> np.ndarray:
  with np.errstate(invalid="ignore", over="ignore"):
    return lhs.exact @ np.swapaxes(rhs.exact, -1, -2)


def magnitudes(lhs: Side, rhs: Side) -> np.ndarray:
  """Returns the sums of the products' magnitudes, for error bounds."""
  return np.abs(lhs.exact) @ np.abs(np.swapaxes(rhs.exact, -1, -2))


# The bound of a dot in units of these sums, before the final cast
# (docs/concepts/numerics.md, "The contract"). The large dots in AVX2's float32
# have twice the bound (README.md, "Accumulation").
DOT_ERROR = 16 * 2.0**-24
LARGE_DOT_ERROR = 2 * DOT_ERROR


def results(
  lhs: Side, rhs: Side, *, isas=ISAS, **options
) -> dict[str, np.ndarray]:
  """Returns the dot by each instruction set, by default of this machine."""
  return {isa: call(lhs, rhs, isa=isa, **options) for isa in isas}


def assert_exact(lhs: Side, rhs: Side, **options) -> None:
  """Checks dots whose sums have no rounding errors before the final cast."""
  with np.errstate(over="ignore"):
    expected = oracle(lhs, rhs).astype(np.float32)
  for isa, got in results(lhs, rhs, **options).items():
    np.testing.assert_array_equal(got, expected, isa)


def assert_close(lhs: Side, rhs: Side, **limits) -> None:
  """Checks the dot by each instruction set as `assert_within` does."""
  assert_within(results(lhs, rhs), lhs, rhs, **limits)


def assert_within(
  got, lhs: Side, rhs: Side, bound=DOT_ERROR, least=0.0
) -> None:
  """Checks that errors are at most `bound` times the magnitudes, plus `least`.

  NaN must be where it is expected. `got` is a result, or results by names.
  """
  with np.errstate(invalid="ignore"):
    limit = bound * magnitudes(lhs, rhs) + least
    expected = oracle(lhs, rhs)
    for name, y in (got if isinstance(got, dict) else {"": got}).items():
      error = np.abs(y.astype(np.float64) - expected)
      is_right = (error <= limit) | (np.isnan(y) & np.isnan(limit))
      assert is_right.all(), (
        f"{name} {np.nanmax(error / limit)} times the bound"
      )
