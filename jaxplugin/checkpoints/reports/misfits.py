# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that cannot be read, as a list and as an error."""

from __future__ import annotations

from collections.abc import Mapping

from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import names


def error(
  misfits: Mapping[str, str], remedy: str = ""
) -> errors.CheckpointError:
  """Returns one error that lists all misfits.

  Args:
    misfits: why each tensor cannot be read, by its name: whole sentences that
      name the file.
    remedy: what the caller can do.
  """
  lines = listed(misfits)
  if len(misfits) > 1:
    lines.insert(0, f"{len(misfits)} tensors cannot be read:")
  if len(lines) == 1 and remedy:
    return errors.CheckpointError(f"{lines[0]}; {remedy}")
  return errors.CheckpointError("\n  ".join(lines + [remedy] * bool(remedy)))


def listed(misfits: Mapping[str, str]) -> list[str]:
  """Returns a line for like misfits: the first one's reason, and the others.

  Misfits are alike if they have one reason, or differ in numbers.
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
