# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the weights of a checkpoint, by names, dtypes, shapes and marks.

Only torchao's metadata and ComfyUI's marks are read. A tensor that looks
quantized and fits no layout is an error. All other tensors pass through.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from jaxplugin.checkpoints import comfyui_marks
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import layouts
from jaxplugin.checkpoints import records
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints import unsupported


def recognize(
  source: stored.StoredTensors,
  layout: str | None = None,
  misfits: MutableMapping[str, str] | None = None,
  config: str = "",
) -> dict[str, records.Entry]:
  """Returns the entries of a checkpoint by name, in the order of its tensors.

  Args:
    source: the tensors.
    layout: the layout of weights that fit several; None if the file and its
      configuration decide.
    config: the quantization in the configuration files, "" if nothing.
    misfits: gets the reason of each tensor that is left out, by its name. None
      raises an error that lists them.

  Raises:
    CheckpointError: If the header breaks a rule. If `misfits` is None, also if
      parts of a weight are missing or do not fit, or a quantization is not
      supported.
  """
  wrong: MutableMapping[str, str] = {} if misfits is None else misfits
  wrong.update(source.misfits)
  contents = records.Contents(
    source=source,
    marks=comfyui_marks.Marks(source),
    layout=layout,
    config=config,
  )
  found: list[records.Entry] = []
  for name, tensor in source.tensors.items():
    if name in wrong:
      continue
    try:
      entry = _weight(contents, tensor)
    except errors.REFUSALS as error:
      wrong[name] = str(stored.fault(tensor, str(error)))
      continue
    if entry is not None:
      found.append(entry)
  # A part belongs to its weight, in any order of the file.
  taken = {part.name for entry in found for part in entry.parts}
  weights = {entry.parts[0].name: entry for entry in found}
  signs = unsupported.Signs(source, config)
  for name, tensor in source.tensors.items():
    if name in taken or name in wrong:
      continue
    if (reason := signs.find(tensor)) is not None:
      wrong[name] = str(stored.fault(tensor, reason))
  entries: dict[str, records.Entry] = {}
  for name, tensor in source.tensors.items():
    if name in wrong or (name in taken and name not in weights):
      continue
    entry = weights.get(name) or _plain(tensor)
    if entry.name in entries:
      first = entries[entry.name].parts[0]
      rule = f"two weights have the name {entry.name!r}, this one and"
      wrong[name] = str(stored.fault(tensor, f"{rule} {first.name!r}"))
      wrong[first.name] = str(stored.fault(first, f"{rule} {name!r}"))
      continue
    entries[entry.name] = entry
  entries = {
    name: entry
    for name, entry in entries.items()
    if entry.parts[0].name not in wrong
  }
  if misfits is None and wrong:
    raise errors.misfit_error(wrong)
  return entries


def _weight(
  contents: records.Contents, tensor: stored.StoredTensor
) -> records.Entry | None:
  """Returns the weight that has a tensor as its values, or None."""
  for layout in layouts.LAYOUTS:
    if layout.recognize is not None:
      entry = layout.recognize(contents, tensor)
      if entry is not None:
        return entry
  return None


def _plain(tensor: stored.StoredTensor) -> records.Entry:
  return records.Entry(
    name=tensor.name,
    layout=None,
    format=None,
    shape=tensor.logical_shape,
    parts=(tensor,),
    make=lambda _: tensor.read(),
  )
