# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF files, by the reader of the `gguf` package."""

from __future__ import annotations

import functools
import pathlib
from typing import Any
from typing import Final

import ml_dtypes
import numpy as np

from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import stored

BLOCKS: Final = ("MXFP4", "NVFP4")
_BF16: Final = np.dtype(ml_dtypes.bfloat16)
# Types that are numbers of NumPy; BF16 comes as bytes.
_PLAIN: Final = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")


def open_file(path: pathlib.Path) -> stored.StoredTensors:
  """The tensors of one file; reads what stands before them.

  Those of types that have no format here are there too, and raise
  CheckpointError when they are read.

  Raises:
    OSError: the file cannot be read.
    CheckpointError: it is no GGUF file, or the `gguf` package is not there.
  """
  try:
    import gguf
  except ImportError:
    raise errors.CheckpointError(
      f"{path}: GGUF files are read by the gguf package, which is not"
      " installed; pip install 'jaxplugin[gguf]'"
    ) from None
  try:
    reader = gguf.GGUFReader(path)
    tensors = {x.name: _tensor(path, x) for x in reader.tensors}
  except OSError:
    raise
  except Exception as error:  # whatever the reader stumbles on
    raise errors.CheckpointError(
      f"{path}: the gguf package cannot read it: {type(error).__name__}:"
      f" {error}"
    ) from error
  return stored.StoredTensors(tensors=tensors, metadata={})


def _tensor(path: pathlib.Path, x: Any) -> stored.StoredTensor:
  data = x.data
  type_name = x.tensor_type.name
  dtype, shape = data.dtype, tuple(map(int, data.shape))
  if type_name == "BF16" and dtype != _BF16:
    dtype, shape = _BF16, (*shape[:-1], shape[-1] // _BF16.itemsize)
  return stored.StoredTensor(
    file=str(path),
    name=x.name,
    type_name=type_name,
    dtype=dtype,
    shape=shape,
    nbytes=int(data.nbytes),
    read=functools.partial(_read, path, x.name, type_name, data, dtype),
  )


def _read(
  path: pathlib.Path,
  name: str,
  type_name: str,
  data: np.ndarray,
  dtype: np.dtype,
) -> np.ndarray:
  if type_name not in (*_PLAIN, *BLOCKS):
    raise errors.CheckpointError(
      f"{path}: {name}: {type_name} has no format here; {', '.join(BLOCKS)} and"
      f" {', '.join(_PLAIN)} are read"
    )
  return np.asarray(data).view(dtype)
