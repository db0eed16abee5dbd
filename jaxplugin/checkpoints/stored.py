# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tensor as a file describes it, read when it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
  """A tensor of a file.

  Attributes:
    file: the path, for messages.
    name: as the file has it.
    type_name: the file's word for its dtype, "BF16".
    dtype: that of `read`.
    shape: that of `read`.
    read: makes the array, a view of the mapped file.
    begin: where its bytes begin in the file; None where they are no one run.
  """

  file: str
  name: str
  type_name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  nbytes: int
  read: Callable[[], np.ndarray]
  begin: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensors:
  """The tensors of a checkpoint, by name, and its files' own remarks.

  Attributes:
    tensors: by name, in the order of the files.
    metadata: `__metadata__` of safetensors files, all together.
  """

  tensors: Mapping[str, StoredTensor]
  metadata: Mapping[str, str]
