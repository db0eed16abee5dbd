# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said of a checkpoint that breaks a rule, or has one of its own."""

from __future__ import annotations

import os
from typing import Any

from jaxplugin.core import speaking


class CheckpointError(ValueError):
  """A checkpoint breaks a rule, or cannot be written.

  The message names the file, the tensor and the rule.
  """


def require_path(who: str, name: str, path: Any) -> None:
  """Raises TypeError, of `who`, unless an argument can be a path."""
  if not isinstance(path, (str, os.PathLike)):
    raise TypeError(
      f"{who}: {name} must be a path, a string or an os.PathLike, got"
      f" {speaking.shown(path)}"
    )


class PreQuantScaleWarning(UserWarning):
  """Some weights are right only with inputs multiplied by a pre_quant_scale."""
