# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings about checkpoints, and opening their files."""

from __future__ import annotations

import pathlib
import stat
from collections.abc import Mapping
from typing import BinaryIO, Final

from jaxplugin.checkpoints import names


class CheckpointError(ValueError):
  """A checkpoint breaks a rule, or cannot be written.

  The message names the file, the tensor and the rule.
  """


# Errors of a weight whose parts do not fit each other.
REFUSALS: Final = (CheckpointError, TypeError, NotImplementedError)


def fault(path: pathlib.Path, rule: str) -> CheckpointError:
  """Returns the error of a file that breaks a rule."""
  return CheckpointError(f"{path}: {rule}")


def malformed(path: pathlib.Path, rule: str) -> CheckpointError:
  """Returns `fault` with a remedy for a file that breaks its own format."""
  return fault(path, f"{rule}; download the file, or write it, again")


def open_regular(path: pathlib.Path) -> BinaryIO:
  """Opens a file for reading.

  Raises:
    OSError: If it cannot be read.
    CheckpointError: If it is a folder, or a pipe or a device, which may not
      end.
  """
  mode = path.stat().st_mode
  if not stat.S_ISREG(mode):
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
    raise fault(path, f"it must be a regular file, got {kind}")
  return open(path, "rb")


def misfit_error(
  misfits: Mapping[str, str], remedy: str = ""
) -> CheckpointError:
  """Returns one error that lists all misfits, whose reasons name the file."""
  lines = misfit_lines(misfits)
  if len(misfits) > 1:
    lines.insert(0, f"{len(misfits)} tensors cannot be read:")
  if len(lines) == 1 and remedy:
    return CheckpointError(f"{lines[0]}; {remedy}")
  return CheckpointError("\n  ".join(lines + [remedy] * bool(remedy)))


def misfit_lines(misfits: Mapping[str, str]) -> list[str]:
  """Returns a line for each group of misfits: a reason, and other names.

  Misfits are a group if their reasons differ at most in numbers.
  """
  alike: dict[str, list[str]] = {}
  for name, reason in misfits.items():
    alike.setdefault(names.starred(reason), []).append(name)
  lines = []
  for first, *others in alike.values():
    line = misfits[first]
    if others:
      kinds = dict.fromkeys(map(names.starred, others))
      line += f" (and {len(others)} more: {', '.join(kinds)})"
    lines.append(line)
  return lines


class NumbersWarning(UserWarning):
  """A checkpoint has NaNs, infinities or global scales that are zero."""


class LayoutWarning(UserWarning):
  """The layout of some weights is open: two layouts read different numbers."""


class PreQuantScaleWarning(UserWarning):
  """Some weights need inputs that are multiplied by a pre_quant_scale (AWQ)."""


class PatternWarning(UserWarning):
  """A pattern of `load` matches no tensor, or requantize= changes none."""
