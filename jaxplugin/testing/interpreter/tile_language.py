# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of cuTile that `kernels/gpu/cutile` uses, on NumPy arrays.

`run` runs the kernel's source with this module as cuda.tile, which has no
interpreter and need not be installed. Operations follow cuTile's documentation.
They refuse what the documentation leaves undefined: a tile entirely outside its
array, a missing padding mode, operands of two types. So a test checks the
kernel's source, and not the compiled code.

Source: cuTile Python's documentation, "Operations" and "Tile".
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import math
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final
from unittest import mock

import ml_dtypes
import numpy as np

from jaxplugin.kernels.gpu.cutile import plans

float32: Final = np.dtype(np.float32)
bfloat16: Final = np.dtype(ml_dtypes.bfloat16)
float16: Final = np.dtype(np.float16)
uint8: Final = np.dtype(np.uint8)
float8_e4m3fn: Final = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2: Final = np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu: Final = np.dtype(ml_dtypes.float8_e8m0fnu)
float4_e2m1fn: Final = np.dtype(ml_dtypes.float4_e2m1fn)

# Dtype of scales and block sizes, by that of the values.
_SCALED: Final[Mapping[np.dtype, Mapping[np.dtype, tuple[int, ...]]]] = {
  float8_e4m3fn: {float8_e8m0fnu: (32,)},
  float8_e5m2: {float8_e8m0fnu: (32,)},
  float4_e2m1fn: {float8_e8m0fnu: (16, 32), float8_e4m3fn: (16,)},
}
# E8M0 has no sign, so that a cast of 0 to it says nothing: never bytes of it.
_UNPADDABLE: Final = (float8_e8m0fnu,)


class PaddingMode(enum.Enum):
  UNDETERMINED = "undetermined"
  ZERO = "zero"


class Constant:
  """Only ever an annotation."""

  def __class_getitem__(cls, item: type) -> type[Constant]:
    return cls


class _Program:
  """What runs: its number, and what was stored by which."""

  number: ClassVar[int] = 0
  stored: ClassVar[list[Any]] = []


class Array:
  """An array in memory."""

  def __init__(self, x: np.ndarray) -> None:
    self.x = x
    self.shape = x.shape
    self.dtype = x.dtype


class Tile:
  """A tile, or a number as one of no dimensions."""

  def __init__(self, x: Any) -> None:
    self.x = np.asarray(x)
    if any(size & (size - 1) or size < 1 for size in self.x.shape):
      raise TypeError(f"tiles are of powers of two, got {self.x.shape}")

  @property
  def shape(self) -> tuple[int, ...]:
    return self.x.shape

  @property
  def dtype(self) -> np.dtype:
    return self.x.dtype

  def reshape(self, shape: Sequence[int]) -> Tile:
    return Tile(self.x.reshape(shape))

  def permute(self, axes: Sequence[int]) -> Tile:
    return Tile(self.x.transpose(axes))

  def astype(self, dtype: np.dtype) -> Tile:
    return Tile(self.x.astype(dtype))

  def __add__(self, other: Any) -> Tile:
    return Tile(self._f32() + _f32(other))

  def __mul__(self, other: Any) -> Tile:
    return Tile(self._f32() * _f32(other))

  def __truediv__(self, other: Any) -> Tile:
    return Tile(self._f32() / _f32(other))

  def __neg__(self) -> Tile:
    return Tile(-self._f32())

  __radd__ = __add__
  __rmul__ = __mul__

  def _f32(self) -> np.ndarray:
    if self.dtype != float32:
      raise TypeError(f"the kernels compute in f32, got {self.dtype}")
    return self.x


def _f32(x: Any) -> Any:
  return x._f32() if isinstance(x, Tile) else np.float32(x)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
  return function


def bid(axis: int) -> int:
  assert axis == 0
  return _Program.number


def cdiv(a: int, b: int) -> int:
  return -(-a // b)


def num_tiles(array: Array, *, axis: int, shape: Sequence[int]) -> int:
  return cdiv(array.shape[axis], shape[axis])


def zeros(shape: Sequence[int], dtype: np.dtype) -> Tile:
  return Tile(np.zeros(shape, dtype))


def _window(
  array: Array, index: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...]:
  """Where a tile lies; what of it is beyond the array is cut off."""
  starts = [i * size for i, size in zip(index, shape, strict=True)]
  for start, have in zip(starts, array.shape, strict=True):
    if not 0 <= start < have:
      raise IndexError(f"tile {index} of {shape} is beyond {array.shape}")
  return tuple(
    slice(start, start + size)
    for start, size in zip(starts, shape, strict=True)
  )


def load(
  array: Array,
  index: Sequence[int],
  shape: Sequence[int],
  *,
  padding_mode: PaddingMode = PaddingMode.UNDETERMINED,
) -> Tile:
  found = array.x[_window(array, index, shape)]
  if found.shape == tuple(shape):
    return Tile(found.copy())
  if padding_mode is not PaddingMode.ZERO or array.dtype in _UNPADDABLE:
    raise ValueError(f"padding of {array.dtype} tile {index} is undetermined")
  widths = [(0, s - f) for s, f in zip(shape, found.shape, strict=True)]
  return Tile(np.pad(found, widths))


def store(array: Array, index: Sequence[int], tile: Tile) -> None:
  if tile.dtype != array.dtype:
    raise TypeError(f"stored {tile.dtype} into {array.dtype}")
  window = _window(array, index, tile.shape)
  place = array.x[window]
  place[...] = tile.x[tuple(slice(size) for size in place.shape)]
  _Program.stored.append(window)


def unpack_from_bytes(tile: Tile, dtype: np.dtype) -> Tile:
  if tile.dtype != uint8 or len(tile.shape) != 1 or dtype != float4_e2m1fn:
    raise TypeError(f"unpacks u8[n] to FP4, got {tile.dtype}{tile.shape}")
  codes = np.stack([tile.x & 15, tile.x >> 4], axis=-1).reshape(-1)
  return Tile(codes.view(float4_e2m1fn))


def bitcast(tile: Tile, dtype: np.dtype) -> Tile:
  return Tile(np.ascontiguousarray(tile.x).view(dtype))


def maximum(x: Tile, y: float, *, propagate_nan: bool = False) -> Tile:
  function = np.maximum if propagate_nan else np.fmax
  return Tile(function(_f32(x), _f32(y)))


def tanh(x: Tile) -> Tile:
  return Tile(np.tanh(_f32(x)))


def exp(x: Tile) -> Tile:
  return Tile(np.exp(_f32(x)))


def mma_scaled(
  x: Tile, x_scale: Tile, y: Tile, y_scale: Tile, acc: Tile
) -> Tile:
  """acc + dequantized x @ dequantized y: its sum in f64, rounded once."""
  if x.dtype != y.dtype or x_scale.dtype != y_scale.dtype:
    raise TypeError(
      f"sides of one type, got {x.dtype} and {y.dtype}, scales {x_scale.dtype}"
      f" and {y_scale.dtype}"
    )
  sizes = _SCALED[x.dtype].get(x_scale.dtype, ())
  size = x.shape[1] // x_scale.shape[1]
  if size not in sizes or x.shape[0] != x_scale.shape[0]:
    raise TypeError(f"{x_scale.shape} does not scale {x.shape} of {x.dtype}")
  if (y.shape[0] // y_scale.shape[0], y.shape[1]) != (size, y_scale.shape[1]):
    raise TypeError(f"{y_scale.shape} does not scale {y.shape}")
  lhs = x.x.astype(np.float64) * np.repeat(
    x_scale.x.astype(np.float64), size, axis=1
  )
  rhs = y.x.astype(np.float64) * np.repeat(
    y_scale.x.astype(np.float64), size, axis=0
  )
  return Tile((acc._f32() + lhs @ rhs).astype(np.float32))


@functools.cache
def kernels() -> types.ModuleType:
  """Returns `matmul_kernel` with this module as its cuda.tile."""
  path = pathlib.Path(plans.__file__).with_name("matmul_kernel.py")
  spec = importlib.util.spec_from_file_location("numpy_matmul_kernel", path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  package = types.ModuleType("cuda")
  this = sys.modules[__name__]
  package.tile = this  # type: ignore[attr-defined]
  with mock.patch.dict(sys.modules, {"cuda": package, "cuda.tile": this}):
    spec.loader.exec_module(module)
  return module


def run(
  launch: plans.CutileLaunch, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
  """Runs every program of a launch, and returns its result.

  Args:
    launch: the launch.
    arrays: its inputs by name, or their bytes. Shapes may be split or merged.

  Raises:
    RuntimeError: If an element is not written exactly once.
  """
  out = np.full(launch.output.shape, np.nan, launch.output.dtype)
  arrays = {**arrays, launch.output.name: out}
  given = [
    Array(arrays[x.name].view(x.dtype).reshape(x.shape))
    if isinstance(x, plans.Argument)
    else x
    for x in launch.arguments
  ]
  _Program.stored = []
  with np.errstate(all="ignore"):
    for number in range(launch.grid):
      _Program.number = number
      kernels().block_scaled_matmul(*given)
  written = np.zeros(out.shape, np.int64)
  for window in _Program.stored:
    written[window] += 1
  if not (written == 1).all():
    raise RuntimeError(
      f"of {math.prod(out.shape)} elements {(written == 0).sum()} are not"
      f" written and {(written > 1).sum()} more than once"
    )
  return out
