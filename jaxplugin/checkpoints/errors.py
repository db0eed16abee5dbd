# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings about checkpoints, and checks of paths."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import Any
from typing import BinaryIO
from typing import Final

from jaxplugin.core import speaking


class CheckpointError(ValueError):
  """A checkpoint breaks a rule, or cannot be written.

  The message names the file, the tensor and the rule.
  """


# What making a weight of its parts raises if they do not fit each other.
REFUSALS: Final = (CheckpointError, TypeError, NotImplementedError)


def require_path(who: str, name: str, path: Any) -> None:
  """Raises TypeError, of `who`, unless an argument can be a path."""
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"{who}: {name} must be a path, a string or an os.PathLike, got"
      f" {speaking.shown(path)}"
    )


def open_regular(path: pathlib.Path) -> BinaryIO:
  """Opens a file for reading.

  Raises:
    OSError: it cannot be read.
    CheckpointError: it is a folder, or a pipe or a device, which may not end.
  """
  mode = path.stat().st_mode
  if not stat.S_ISREG(mode):
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
    raise CheckpointError(f"{path}: it must be a regular file, got {kind}")
  return open(path, "rb")


class NumbersWarning(UserWarning):
  """A checkpoint has NaNs, infinities or global scales that are zero."""


class LayoutWarning(UserWarning):
  """The layout of some weights is open: two layouts read different numbers."""


class PreQuantScaleWarning(UserWarning):
  """Some weights need inputs that are multiplied by a pre_quant_scale (AWQ)."""
