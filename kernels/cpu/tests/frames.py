# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls XLA FFI handlers on NumPy arrays without XLA, so nothing is compiled.

The structures are those of xla/ffi/api/c_api.h. XLA adds fields only at the
end of a structure.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np

THREADS: Final = 4  # of the pool that a handler gets, its caller included
INVALID_FILL: Final = 0xA5  # bytes of a result before the call
# XLA_FFI_DataType
_DATA_TYPES: Final = {
  np.dtype(dtype): number
  for dtype, number in (
    (np.int8, 2),
    (np.int32, 4),
    (np.int64, 5),
    (np.uint8, 6),
    (np.uint32, 8),
    (np.float16, 10),
    (np.float32, 11),
    (ml_dtypes.bfloat16, 16),
    (ml_dtypes.float8_e5m2, 19),
    (ml_dtypes.float8_e4m3fn, 20),
    (ml_dtypes.int4, 21),
    (ml_dtypes.float4_e2m1fn, 32),
    (ml_dtypes.float8_e8m0fnu, 33),
  )
}
_PACKED: Final = (np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.int4))
_EXECUTE: Final = 3  # XLA_FFI_ExecutionStage
_BUFFER: Final = 1  # XLA_FFI_ArgType and XLA_FFI_RetType
_ARRAY: Final = 1  # XLA_FFI_AttrType
_SCALAR: Final = 3
_P: Final = ctypes.c_void_p
_Function: Final = ctypes.CFUNCTYPE(_P, _P)
_Task: Final = ctypes.CFUNCTYPE(None, _P)


def _fields(*fields: tuple[str, Any]) -> list[tuple[str, Any]]:
  return [("struct_size", ctypes.c_size_t), ("extension", _P), *fields]


class _Buffer(ctypes.Structure):
  _fields_ = _fields(
    ("dtype", ctypes.c_int),
    ("data", _P),
    ("rank", ctypes.c_int64),
    ("dims", _P),
  )


class _Scalar(ctypes.Structure):
  _fields_: ClassVar = [("dtype", ctypes.c_int), ("value", _P)]


class _Array(ctypes.Structure):
  _fields_: ClassVar = [
    ("dtype", ctypes.c_int),
    ("size", ctypes.c_size_t),
    ("data", _P),
  ]


class _Name(ctypes.Structure):
  _fields_: ClassVar = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class _Values(ctypes.Structure):  # XLA_FFI_Args, XLA_FFI_Rets
  _fields_ = _fields(("size", ctypes.c_int64), ("types", _P), ("items", _P))


class _Attributes(ctypes.Structure):
  _fields_ = _fields(
    ("size", ctypes.c_int64), ("types", _P), ("names", _P), ("items", _P)
  )


class _Api(ctypes.Structure):
  _fields_ = _fields(
    ("version", _P * 3),
    ("internal", _P),
    ("error_create", _Function),
    ("others", _P * 10),
    ("schedule", _Function),
    ("thread_count", _Function),
    ("later", _P * 16),
  )


class _Frame(ctypes.Structure):
  _fields_ = _fields(
    ("api", _P),
    ("context", _P),
    ("stage", ctypes.c_int),
    ("arguments", _Values),
    ("results", _Values),
    ("attributes", _Attributes),
    ("future", _P),
  )


class _ErrorCreate(ctypes.Structure):
  _fields_ = _fields(("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _Schedule(ctypes.Structure):
  _fields_ = _fields(("context", _P), ("task", _P), ("data", _P))


class _ThreadCount(ctypes.Structure):
  _fields_ = _fields(("context", _P), ("count", ctypes.POINTER(ctypes.c_int64)))


class HandlerError(Exception):
  """An error that a handler returned."""


_pool: Final = concurrent.futures.ThreadPoolExecutor(THREADS - 1)
_messages: Final[dict[int, str]] = {}  # of errors that a handler has made
_numbers: Final = itertools.count(1)


@_Function
def _error_create(given: int) -> int:
  number = next(_numbers)
  _messages[number] = _ErrorCreate.from_address(given).message.decode()
  return number


@_Function
def _schedule(given: int) -> None:
  schedule = _Schedule.from_address(given)
  _pool.submit(_Task(schedule.task), schedule.data)


@_Function
def _thread_count(given: int) -> None:
  _ThreadCount.from_address(given).count[0] = THREADS


def _sized(kind: type[ctypes.Structure], *values: Any, **more: Any) -> Any:
  return kind(ctypes.sizeof(kind), None, *values, **more)


_api: Final = _sized(
  _Api,
  error_create=_error_create,
  schedule=_schedule,
  thread_count=_thread_count,
)


def _stored(x: np.ndarray) -> np.ndarray:
  """Returns the bytes of `x` in XLA's layout: two 4-bit codes in each byte."""
  x = np.ascontiguousarray(x).reshape(-1)
  if x.dtype not in _PACKED:
    return x
  codes = np.resize(x.view(np.uint8) & 15, (len(x) + 1) // 2 * 2)
  return codes[0::2] | codes[1::2] << 4


def _addresses(items: Sequence[Any]) -> ctypes.Array:
  return (_P * len(items))(*map(ctypes.addressof, items))


def _kinds(kinds: Sequence[int]) -> ctypes.Array:
  return (ctypes.c_int * len(kinds))(*kinds)


def call(
  handler: Any,
  arguments: Sequence[Any],
  results: Sequence[Any],
  attributes: Mapping[str, np.generic | np.ndarray],
) -> list[np.ndarray]:
  """Calls a handler, and returns its results.

  Args:
    handler: the ctypes function of the handler's symbol.
    arguments: arrays.
    results: shapes and dtypes of the results.
    attributes: NumPy scalars and vectors by name.

  Raises:
    HandlerError: If the handler returns an error.
  """
  kept: list[Any] = []  # alive during the call

  def addresses(items: Sequence[Any]) -> Any:
    kept.append((items, _addresses(items)))
    return ctypes.addressof(kept[-1][1])

  def kinds(numbers: Sequence[int]) -> Any:
    kept.append(_kinds(numbers))
    return ctypes.addressof(kept[-1])

  def values(arrays: Sequence[tuple[Any, np.ndarray]]) -> Any:
    buffers = []
    for like, stored in arrays:
      dims = (ctypes.c_int64 * len(like.shape))(*like.shape)
      kept.append((stored, dims))
      number = _DATA_TYPES[np.dtype(like.dtype)]
      data = (number, stored.ctypes.data, len(dims), ctypes.addressof(dims))
      buffers.append(_sized(_Buffer, *data))
    types = kinds([_BUFFER] * len(buffers))
    return _sized(_Values, len(buffers), types, addresses(buffers))

  given = [np.asarray(x) for x in arguments]
  filled = []
  for x in results:
    found = np.empty(x.shape, x.dtype)
    found.reshape(-1).view(np.uint8)[:] = INVALID_FILL
    filled.append(found)
  names: list[_Name] = []
  values_of_names: list[ctypes.Structure] = []
  for name, value in sorted(attributes.items()):
    number = np.array(value)
    kept.append(number)
    names.append(_Name(name.encode(), len(name)))
    dtype, data = _DATA_TYPES[number.dtype], number.ctypes.data
    values_of_names.append(
      _Array(dtype, number.size, data) if number.ndim else _Scalar(dtype, data)
    )
  frame = _sized(
    _Frame,
    ctypes.addressof(_api),
    None,
    _EXECUTE,
    values([(x, _stored(x)) for x in given]),
    values([(x, x) for x in filled]),
    _sized(
      _Attributes,
      len(names),
      kinds(
        [_ARRAY if isinstance(x, _Array) else _SCALAR for x in values_of_names]
      ),
      addresses(names),
      addresses(values_of_names),
    ),
  )
  # XLA does not count the last field, and a handler compares for equality.
  frame.struct_size = _Frame.future.offset
  handler.restype = _P
  error = handler(ctypes.byref(frame))
  if error:
    raise HandlerError(_messages.pop(error))
  return filled
