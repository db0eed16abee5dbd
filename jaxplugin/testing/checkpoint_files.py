# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints in files, and the numbers that their bytes mean."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.testing import contract, folders

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
E8 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def fp4(packed: np.ndarray, high_first: bool = False) -> np.ndarray:
  """Returns the f64 numbers of FP4 values, two in a byte."""
  pairs = [packed & 15, packed >> 4]
  pairs = np.stack(pairs[::-1] if high_first else pairs, -1)
  return _E2M1[pairs.reshape(*packed.shape[:-1], -1)]


def fp8(codes: np.ndarray) -> np.ndarray:
  """Returns the f64 numbers of E4M3."""
  return codes.view(F8).astype(np.float64)


def e8m0(codes: np.ndarray) -> np.ndarray:
  """Returns the f64 numbers of E8M0."""
  return np.ldexp(1.0, codes.view(np.uint8).astype(np.int64) - 127)


def _places(rows: int, columns: int) -> np.ndarray:
  """Returns the offset of each scale in tiles of 128 rows and 4 columns."""
  r, c = np.indices((rows, columns))
  tile = r // 128 * -(-columns // 4) + c // 4
  return tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def tiled(scale: np.ndarray) -> np.ndarray:
  """Returns scales in cuBLAS's tiles, padded with zeros."""
  *lead, rows, columns = scale.shape
  shape = (*lead, -(-rows // 128) * 128, -(-columns // 4) * 4)
  flat = np.zeros((*lead, shape[-2] * shape[-1]), np.uint8)
  flat[..., _places(rows, columns)] = scale.view(np.uint8)
  return flat.view(scale.dtype).reshape(shape)


def numbers_of(array: jp.ScaledArray) -> np.ndarray:
  """Returns the f64 numbers of NVFP4 or of an MX format."""
  codes = np.asarray(array.values).view(np.uint8)
  values = fp4(codes) if array.format.is_fp4 else fp8(codes)
  block_size = array.format.block_size
  scale = np.asarray(array.scale).view(np.uint8)
  if array.scale_layout != "linear":
    n, k = values.shape[-2:]
    scale = scale.reshape(*scale.shape[:-2], -1)
    scale = scale[..., _places(n, k // block_size)]
  decode = e8m0 if array.format.scale_is_power_of_two else fp8
  numbers = values * np.repeat(decode(scale), block_size, -1)
  if array.global_scale is not None:
    numbers = numbers * np.asarray(array.global_scale, np.float64)
  return numbers


def weight(values: np.ndarray, **parts: Any) -> dict[str, Any]:
  """Returns the tensors of "w.weight"; its other parts are "w.NAME"."""
  return {f"w.{name}": x for name, x in {"weight": values, **parts}.items()}


def entry(dtype: Any, shape: Any, begin: int, end: int) -> dict[str, Any]:
  """Returns a tensor's entry in the header of a safetensors file."""
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
  """Returns the bytes of a safetensors file, which may be malformed.

  Args:
    header: a dict, text or bytes.
    data: the bytes of the tensors.
    length: the size of the header in the file, by default that of `header`.
  """
  if isinstance(header, dict):
    header = json.dumps(header)
  if isinstance(header, str):
    header = header.encode()
  length = len(header) if length is None else length
  return length.to_bytes(8, "little") + header + data


def write_gguf(
  path: pathlib.Path,
  tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]],
  **values: int,
) -> None:
  """Writes a file by the gguf package.

  Args:
    path: the file.
    tensors: arrays by name, or the type and the bytes of blocks.
    **values: metadata, with _ for the dots of a name.
  """
  import gguf

  writer = gguf.GGUFWriter(path, "llama")
  for name, number in values.items():
    writer.add_uint16(name.replace("_", "."), number)
  for name, x in tensors.items():
    kind = None
    if isinstance(x, tuple):
      kind, x = gguf.GGMLQuantizationType[x[0]], x[1]
    writer.add_tensor(name, x, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class CheckpointTestCase(parameterized.TestCase):
  """Writes checkpoints to folders that are deleted after the test."""

  def empty(self) -> pathlib.Path:
    """Returns a new folder."""
    return folders.new(self)

  def write(self, data: bytes, name: str = "x.safetensors") -> pathlib.Path:
    """Returns a new file of these bytes."""
    path = self.empty() / name
    path.write_bytes(data)
    return path

  def file(
    self,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    path: pathlib.Path | None = None,
  ) -> pathlib.Path:
    """Returns a file that the safetensors package wrote."""
    path = path or self.empty() / "x.safetensors"
    given = {name: np.array(x, order="C") for name, x in tensors.items()}
    path.write_bytes(safetensors.numpy.save(given, metadata))
    return path

  def folder(
    self, tensors: Mapping[str, Any], metadata: Any = None, config: Any = None
  ) -> pathlib.Path:
    """Returns the folder of a file and, with `config`, a config.json."""
    folder = self.file(tensors, metadata).parent
    if config is not None:
      (folder / "config.json").write_text(json.dumps(config))
    return folder

  def load(
    self,
    tensors: Mapping[str, Any],
    metadata: Any = None,
    config: Any = None,
    **options: Any,
  ) -> jp.checkpoints.Checkpoint:
    """Loads a folder of these tensors."""
    folder = self.folder(tensors, metadata, config)
    return jp.checkpoints.load(folder, **options)

  def quietly(self, *args: Any, **options: Any) -> jp.checkpoints.Checkpoint:
    """Loads a folder, where each warning is an error."""
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      return self.load(*args, **options)

  def assert_numbers(self, array: Any, numbers: np.ndarray) -> None:
    """Asserts that an array has exactly these numbers, rounded to f32."""
    has_offset = array.offset is not None
    got = jp.dequantize(array) if has_offset else contract.dequantized(array)
    np.testing.assert_array_equal(got, np.asarray(numbers, np.float32))
