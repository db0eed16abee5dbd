# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the handlers of kernels/cpu with XLA on import.

A process may load an executable that another process compiled, for example with
`jax.experimental.serialize_executable`. Nothing is lowered then, but the
executable needs the handlers. A process that has not imported this package
fails with "NOT_FOUND: No FFI handler registered for
jaxplugin_block_scaled_dot".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import Any, Final

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from jaxplugin.core import decisions, formats, targets
from jaxplugin.kernels.cpu import library

# Formats that kernels quantize to, with their numbers in kernels/cpu/README.md.
# `format_refusal` has the formats that kernels read.
FORMATS: Final = {
  formats.MXFP8: 0,
  formats.MXFP8_E5M2: 1,
  formats.MXFP4: 2,
  formats.NVFP4: 3,
  formats.MXFP6_E2M3: 4,
  formats.MXFP6_E3M2: 5,
}
# Roundings of MX scales, with their numbers in kernels/cpu/README.md.
ROUNDINGS: Final = {"up": 0, "floor": 1}
# Element types of values that are passed as bytes. Other arrays have the
# element type of their dtype.
ELEMENTS: Final = {
  formats.E2M3: 1,
  formats.E3M2: 2,
  formats.E4M3: 3,
  formats.E5M2: 4,
  formats.INT8: 5,
  formats.INT4: 6,
}
SCALE_ELEMENTS: Final = {formats.E8M0: 1, formats.E4M3: 2, formats.E5M2: 3}

# Element types of values, with their numbers in kernels/cpu/simd/formats.h.
_VALUES: Final = {
  formats.E4M3: 0,
  formats.E5M2: 1,
  formats.E2M1: 2,
  np.dtype(np.float32): 3,
  formats.BF16: 4,
  np.dtype(np.float16): 5,
  formats.E2M3: 6,
  formats.E3M2: 7,
  formats.INT8: 8,
  formats.INT4: 9,
}
_CODEBOOK: Final = 10  # int4 that indexes a codebook
# Magnitudes of entries that dots read (kernels/cpu/arguments.cc).
_CODEBOOK_MAGNITUDES: Final = (2.0**-16, 2.0**16)
# Types of scales, with their numbers in kernels/cpu/simd/formats.h. 0 means no
# scales.
_SCALES: Final = {
  formats.E8M0: 1,
  formats.E4M3: 2,
  formats.E5M2: 3,
  formats.F32: 4,
  formats.BF16: 5,
  formats.F16: 6,
}
# Kernels read blocks of a multiple of this size, or blocks of a whole row.
_BLOCK_GRANULE: Final = 16
_MAX_FRACTION_BITS: Final = 8
BEST_ISA: Final = 0  # value of `isa` that selects the machine's best one
_PLAIN_BLOCK_SIZE: Final = 32  # passed for an operand without scale; not read
_MAX_ERROR_BYTES: Final = 512

_registration_lock = threading.Lock()


def register() -> None:
  """Registers the handlers with XLA once, from whichever thread is first.

  Raises:
    library.LibraryError: If no library is compatible with this jaxlib.
  """
  with _registration_lock:
    _register_once()


@functools.cache
def _register_once() -> None:
  loaded = library.load(jax.ffi.include_dir())
  for name in library.HANDLERS:
    jax.ffi.register_ffi_target(
      name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu"
    )


@functools.cache
def sources_digest() -> str | None:
  """Returns the SHA-256 of the kernels' sources; None if it is unknown."""
  try:
    return library.built_from(_library()) or None
  except library.LibraryError:
    return None


def source(target: targets.Target) -> decisions.Source | None:
  """Returns the kernels' digest as tuning tables store it; None if unknown."""
  digest = sources_digest() if target.platform == "cpu" else None
  return None if digest is None else decisions.Source(kernels=digest)


def call_attributes(target: targets.Target | None) -> dict[str, np.int64]:
  """Returns the attributes of every custom call: instructions and threads."""
  attributes = {"isa": np.int64(BEST_ISA)}
  threads = None if target is None else target.options.threads
  if threads is not None:
    attributes["max_threads"] = np.int64(min(threads, np.iinfo(np.int64).max))
  return attributes


def format_attributes(
  format: formats.BlockFormat, dtype: np.dtype, prefix: str = ""
) -> dict[str, Any]:
  """Returns the attributes of a custom call for an operand's values.

  Args:
    format: format of the operand.
    dtype: dtype of the array of values.
    prefix: prefix of the attributes' names.
  """
  attributes: dict[str, Any] = {
    f"{prefix}block_size": np.int64(format.block_size)
  }
  element = ELEMENTS.get(format.values_dtype)
  if element is not None and dtype == formats.PACKED:
    attributes[f"{prefix}element"] = np.int64(element)
  if format.fraction_bits:
    attributes[f"{prefix}fraction_bits"] = np.int64(format.fraction_bits)
  if format.codebook is not None:
    attributes[f"{prefix}codebook"] = np.asarray(format.codebook, np.float32)
  return attributes


def or_absent(x: jax.Array | None) -> jax.Array:
  """Returns the operand of a custom call for an array that may be absent."""
  # `jnp.zeros` is traced. custom_partitioning refuses constants like NumPy
  # arrays.
  return jnp.zeros((0,), jnp.float32) if x is None else x


def refusal(target: targets.Target) -> decisions.Unsupported | None:
  """Returns why a target has no CPU kernels, or None if it has them."""
  unsupported = decisions.platform_refusal(target, "cpu")
  if unsupported is not None:
    return unsupported
  if target.cpu_kernels is None:
    return decisions.Unsupported(
      target.missing(targets.CPU_KERNELS)
      or "the target has no CPU kernels (a named one assumes none; see"
      " jp.detect_target)"
    )
  return None


def format_refusal(
  format: formats.BlockFormat | None,
  k: int | None,
  *,
  reads_codebooks: bool = False,
) -> str | None:
  """Returns why kernels cannot read an operand, or None if they can.

  Args:
    format: format of the operand, or None for an unquantized one.
    k: size of its rows; None if it is symbolic.
    reads_codebooks: whether the kernels decode codebooks, as dots do.
  """
  if format is None:
    return None
  is_known = (
    not isinstance(format, formats.UnquantizedFormat)
    and format.values_dtype in _VALUES
    and format.scale_dtype in _SCALES
  )
  if not is_known or format.is_square:
    return f"reads the values and scales of jp.BlockFormat, got {format}"
  size = format.block_size
  assert size is not None
  if format.codebook is not None:
    if not reads_codebooks:
      return f"reads values without a codebook, got {format}"
    least, most = _CODEBOOK_MAGNITUDES
    if not all(x == 0 or least <= abs(x) <= most for x in format.codebook):
      return f"reads codebooks of 0 and {least} to {most}, got {format}"
  if size % _BLOCK_GRANULE and (k is None or size < k):
    return (
      f"reads blocks of a multiple of {_BLOCK_GRANULE} values or of a whole"
      f" row, got {format} with blocks of {size}"
    )
  is_odd = format.may_be_short if k is None else k % 2 == 1
  if format.has_pairs and is_odd:
    return f"reads an even number of 4-bit values, got k={k or 'symbolic'}"
  if format.fraction_bits > _MAX_FRACTION_BITS:
    return (
      f"reads integers with up to {_MAX_FRACTION_BITS} fraction bits, got"
      f" {format} with {format.fraction_bits}"
    )
  return None


def dot_numbers(
  instruction_set: str,
  operands: tuple[formats.BlockFormat | np.dtype, ...],
  sizes: tuple[int, int, int],
) -> tuple[int, ...]:
  """Returns a dot as the functions below take it, in config_error.cc's order.

  Args:
    instruction_set: a value of `Target.cpu_kernels`; this machine may lack it.
    operands: format of lhs and of rhs, or dtype of an unquantized one.
    sizes: m, n, k of operands [m, k] and [n, k].
  """
  values, block_sizes, scales = zip(*map(_numbers, operands), strict=True)
  isa = library.INSTRUCTION_SETS.get(instruction_set, -1)
  return (isa, *values, *block_sizes, *sizes, *scales)


def _numbers(operand: formats.BlockFormat | np.dtype) -> tuple[int, int, int]:
  """Returns numbers of values, block size, and of scales; -1 if unsupported."""
  if not isinstance(operand, formats.BlockFormat):
    return _VALUES.get(operand, -1), _PLAIN_BLOCK_SIZE, 0
  is_code = operand.codebook is not None
  return (
    _CODEBOOK if is_code else _VALUES.get(operand.values_dtype, -1),
    operand.block_size or _PLAIN_BLOCK_SIZE,
    _SCALES.get(operand.scale_dtype, -1),
  )


def dot_config_error(dot: tuple[int, ...], config: tuple[int, ...]) -> str:
  """Returns why the kernels do not support a config; "" if they do.

  Args:
    dot: the dot's `dot_numbers`.
    config: engine, panel_rows, task_rows and threads, as numbers.
  """
  text = ctypes.create_string_buffer(_MAX_ERROR_BYTES)
  try:
    _ask("dot_config_error", dot, _int64s(config), text, len(text))
  except library.LibraryError as error:
    return str(error)
  return text.value.decode()


def dot_engine(dot: tuple[int, ...]) -> int:
  """Returns the number of the engine that the kernels' rule selects for a dot.

  It is negative if the kernels do not support the dot.

  Raises:
    library.LibraryError: If the library cannot be loaded.
  """
  return _ask("dot_engine", dot)


def rows_form(dot: tuple[int, ...]) -> int:
  """Returns the form of a side of floats that the kernels may convert.

  It is the number of a `RowsForm` in kernels/cpu/kernels.h, and negative if the
  kernels do not support the dot.

  Raises:
    library.LibraryError: If the library cannot be loaded.
  """
  return _ask("dot_rows_form", dot)


def engine_name(engine: int) -> str | None:
  """Returns the name of an engine; None if no engine has the number."""
  function = _library().jaxplugin_cpu_engine_name
  function.restype = ctypes.c_char_p
  name = function(ctypes.c_int64(engine))
  return None if name is None else name.decode()


@functools.cache
def _library() -> ctypes.CDLL:
  return library.load(jax.ffi.include_dir())


def _ask(name: str, dot: tuple[int, ...], *more: Any) -> int:
  """Calls a function of the library that answers a question about a dot."""
  function = getattr(_library(), f"jaxplugin_cpu_{name}")
  function.restype = ctypes.c_int64
  more = tuple(ctypes.c_int64(x) if isinstance(x, int) else x for x in more)
  return int(function(_int64s(dot), *more))


def _int64s(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
  return (ctypes.c_int64 * len(numbers))(*numbers)


# `Target.missing_libraries` has the reason, and no call uses the kernels then.
with contextlib.suppress(library.LibraryError):
  register()
