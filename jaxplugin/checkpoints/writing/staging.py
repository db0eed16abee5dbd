# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a folder NAME.partial, and renames it to NAME when it is complete.

If a call ends early, finished files stay, and the same call continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import records
from jaxplugin.checkpoints.writing import selection
from jaxplugin.checkpoints.writing import shards
from jaxplugin.checkpoints.writing import sources

_TASK: Final = ".jaxplugin-quantize.json"


@contextlib.contextmanager
def writing(who: str, target: pathlib.Path) -> Iterator[None]:
  """Turns OSError into CheckpointError that names the target."""
  try:
    yield
  except OSError as error:
    file = f"{error.filename}: " if error.filename else ""
    partial = _partial(target)
    rest = (
      f"; finished files are in {partial}, and the same call continues there"
      if partial.exists()
      else ""
    )
    raise errors.CheckpointError(
      f"{who}: {target} was not written: {file}{error.strerror or error}{rest}"
    ) from error


def _partial(target: pathlib.Path) -> pathlib.Path:
  return target.with_name(f"{target.name}.partial")


def require_new(who: str, target: pathlib.Path) -> None:
  """Raises CheckpointError if the target exists, or its parent does not."""
  is_empty = target.is_dir() and not any(target.iterdir())
  if os.path.lexists(target) and not is_empty:
    raise errors.CheckpointError(
      f"{who}: {target} already exists; remove it, or choose another name"
    )
  if not target.parent.is_dir():
    raise errors.CheckpointError(
      f"{who}: {target.parent} must be an existing folder"
    )


def require_space(who: str, target: pathlib.Path, size: int) -> None:
  """Raises CheckpointError if the disk has fewer free bytes."""
  free = shutil.disk_usage(target.parent).free
  if free < size:
    raise errors.CheckpointError(
      f"{who}: {target} needs {size:,} bytes, and its disk has {free:,} free;"
      " free space, or choose another disk"
    )


class Staging:
  """The folder NAME.partial, a context.

  An error removes the folder unless files are finished, which stay for the next
  call.

  Attributes:
    folder: its path.
    finished: the number of finished files.
  """

  finished = 0

  def __init__(
    self, who: str, target: pathlib.Path, task: Mapping[str, Any]
  ) -> None:
    """Continues an unfinished task, or starts it.

    The task identifies the files to write, and is stored as JSON.

    Raises:
      OSError: If the folder cannot be created.
      CheckpointError: If another folder has its name, or another process writes
        to it.
    """
    self._target = target
    self.folder = _partial(target)
    self.folder.mkdir(exist_ok=True)
    self._descriptor = _lock(who, self.folder)
    try:
      self._take_up(who, task)
    except BaseException:
      # Without its task, the next call would refuse the folder.
      with contextlib.suppress(OSError):
        _unfinished(self.folder / _TASK).unlink(missing_ok=True)
        self.folder.rmdir()
      os.close(self._descriptor)
      raise

  def _take_up(self, who: str, task: Mapping[str, Any]) -> None:
    task_file = self.folder / _TASK
    _unfinished(task_file).unlink(missing_ok=True)
    wanted = json.loads(json.dumps(task))
    if task_file.is_file():
      if json_text.read_object(task_file) == wanted:
        for path in self.folder.glob(".*.unfinished"):
          path.unlink()
        return
      for path in self.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif any(self.folder.iterdir()):
      raise errors.CheckpointError(
        f"{who}: {self.folder} exists and is not an unfinished result of this"
        " call; remove it, or choose another name"
      )
    write_json(task_file, wanted)

  def finish(self, file: str | None = None) -> None:
    """Gives the target's name to the folder, or to one file in it."""
    for folder, _, _ in os.walk(self.folder):
      shards.sync_folder(pathlib.Path(folder))
    os.replace(
      self.folder if file is None else self.folder / file, self._target
    )
    shards.sync_folder(self._target.parent)
    if file is None:
      (self._target / _TASK).unlink()
    else:
      shutil.rmtree(self.folder)

  def __enter__(self) -> Staging:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None and not self.finished:
      shutil.rmtree(self.folder, ignore_errors=True)
    os.close(self._descriptor)


def _unfinished(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f".{path.name}.unfinished")


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes a complete JSON file or nothing."""
  unfinished = _unfinished(path)
  with open(unfinished, "w", encoding="utf-8") as file:
    json.dump(value, file, indent=2)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(unfinished, path)


def write_configs(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  layout: records.Layout,
  decisions: Sequence[records.TensorDecision],
) -> None:
  """Writes config.json, and ModelOpt's file if the layout is ModelOpt's.

  They get a quantization if a weight is quantized.
  """
  config = dict(config)
  found = [x.weight.format for x in decisions if x.weight is not None]
  left = selection.unquantized_modules(decisions)
  if found and layout.config is not None:
    config[sources.QUANTIZATION] = layout.config(found[0], left)
  write_json(folder / sources.CONFIG, config)
  if found and layout.quant_config is not None:
    quant_config = layout.quant_config(found[0], left)
    write_json(folder / sources.QUANT_CONFIG, quant_config)


def copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a file and syncs it to the disk."""
  target.parent.mkdir(parents=True, exist_ok=True)
  shutil.copyfile(source, target)
  with open(target, "rb") as file:
    os.fsync(file.fileno())


def _lock(who: str, folder: pathlib.Path) -> int:
  """Returns a locked descriptor of the folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    import fcntl
  except ImportError:
    return descriptor
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise errors.CheckpointError(
      f"{who}: another process writes {folder}; wait for it"
    ) from None
  return descriptor
