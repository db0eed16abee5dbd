# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes files to a folder NAME.partial, and renames it when it is complete.

If a call ends early, finished files stay, and the same call continues. The
offsets of a safetensors file are computed before any values. Tensors with the
largest elements come first, as in the safetensors package, so each offset is a
multiple of the element's size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  checkpoint_files,
  errors,
  records,
  safetensors_files,
  stored,
)
from jaxplugin.checkpoints.writing import selection, sources
from jaxplugin.core import atomic_files

_TASK: Final = ".jaxplugin-quantize.json"
_ALIGNMENT: Final = 8
_CHUNK_BYTES: Final = 1 << 24

# A tensor's name, an offset in the tensor, and uint8[...] bytes from there.
Piece = tuple[str, int, np.ndarray]


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
  """Raises CheckpointError unless the target can be a new one.

  Its parent must exist, and its name must not be that of another format.
  """
  is_empty = target.is_dir() and not any(target.iterdir())
  if os.path.lexists(target) and not is_empty:
    raise errors.CheckpointError(
      f"{who}: {target} already exists; remove it, or choose another name"
    )
  if target.suffix in sources.OTHER_WEIGHTS:
    raise errors.CheckpointError(
      f"{who}: the target must be a .safetensors file or a folder with one,"
      f" because {target.suffix} files are not written, got {target}; choose"
      f" {target.with_suffix('.safetensors')}"
    )
  if not target.parent.is_dir():
    raise errors.CheckpointError(
      f"{who}: {target.parent} must be an existing folder; create it first"
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
        self.folder.rmdir()
      os.close(self._descriptor)
      raise

  def _take_up(self, who: str, task: Mapping[str, Any]) -> None:
    task_file = self.folder / _TASK
    _unfinished(task_file).unlink(missing_ok=True)
    wanted = json.loads(json.dumps(task))
    if task_file.is_file():
      if stored.read_object(task_file) == wanted:
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
      atomic_files.sync_folder(pathlib.Path(folder))
    os.replace(
      self.folder if file is None else self.folder / file, self._target
    )
    atomic_files.sync_folder(self._target.parent)
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
  with atomic_files.replacing(path, _unfinished(path)) as file:
    file.write(f"{json.dumps(value, indent=2)}\n".encode())


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
  found = [x.format for x in decisions if x.format is not None]
  left = selection.unquantized_modules(decisions)
  if found and layout.config is not None:
    config[checkpoint_files.QUANTIZATION] = layout.config(found[0], left)
  write_json(folder / checkpoint_files.CONFIG, config)
  if found and layout.quant_config is not None:
    quant_config = layout.quant_config(found[0], left)
    write_json(folder / checkpoint_files.QUANT_CONFIG, quant_config)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """A file to write.

  Attributes:
    name: the file's name.
    decisions: a decision for each tensor of the source's file of this name.
    head: the header's size and the header.
    begins: the offset of each tensor in the file.
    size: bytes of the file.
  """

  name: str
  decisions: tuple[records.TensorDecision, ...]
  head: bytes
  begins: Mapping[str, int]
  size: int


def lay_out(
  name: str,
  decisions: Iterable[records.TensorDecision],
  metadata: Mapping[str, str],
) -> Shard:
  """Returns the layout of a file.

  Raises:
    CheckpointError: If its header is longer than readers accept.
  """
  decisions = tuple(decisions)
  tensors: list[tuple[str, str, tuple[int, ...], int]] = []
  for decision in decisions:
    if decision.format is None:
      x = decision.tensor
      tensors.append((x.name, x.type_name, x.logical_shape, x.nbytes))
    for name_of_part, part in decision.parts.items():
      type_name = safetensors_files.TYPE_NAMES[part.dtype]
      nbytes = part.size * part.dtype.itemsize
      tensors.append((name_of_part, type_name, part.shape, nbytes))
  tensors.sort(key=lambda x: -_itemsize(x[1]))
  header: dict[str, object] = {}
  if metadata:
    header[safetensors_files.METADATA] = dict(metadata)
  begins: dict[str, int] = {}
  end = 0
  for tensor, type_name, shape, nbytes in tensors:
    begins[tensor], end = end, end + nbytes
    header[tensor] = {
      "dtype": type_name,
      "shape": list(shape),
      "data_offsets": [begins[tensor], end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  if len(text) > stored.MAX_JSON_BYTES:
    raise errors.CheckpointError(
      f"{name}: its header must have at most {stored.MAX_JSON_BYTES} bytes, got"
      f" {len(text)}; split the file into several"
    )
  head = len(text).to_bytes(safetensors_files.SIZE_BYTES, "little") + text
  return Shard(
    name=name,
    decisions=decisions,
    head=head,
    begins={tensor: len(head) + x for tensor, x in begins.items()},
    size=len(head) + end,
  )


def _itemsize(type_name: str) -> int:
  dtype = safetensors_files.DTYPES.get(type_name)
  return dtype.itemsize if dtype is not None else 0


def is_finished(path: pathlib.Path, shard: Shard) -> bool:
  """Returns whether a file exists and has this head and size."""
  try:
    if path.stat().st_size != shard.size:
      return False
    with open(path, "rb") as file:
      return file.read(len(shard.head)) == shard.head
  except FileNotFoundError:
    return False


def write(path: pathlib.Path, shard: Shard, pieces: Iterable[Piece]) -> None:
  """Writes a complete file or nothing.

  Pieces have all bytes of the tensors, each once, in any order.

  Raises:
    OSError: If it cannot be written.
  """
  with atomic_files.replacing(path, _unfinished(path)) as file:
    file.write(shard.head)
    done = len(shard.head)
    for name, start, data in pieces:
      file.seek(shard.begins[name] + start)
      file.write(data.data)
      done += data.size
    assert done == shard.size, (path, done, shard.size)


def pieces(
  shard: Shard,
  layout: records.Layout,
  quantized: Callable[[records.TensorDecision], scaled_array.ScaledArray],
  done: Callable[[records.TensorDecision], None],
) -> Iterator[Piece]:
  """Yields the bytes of a file's tensors, one tensor or weight at a time.

  Args:
    shard: the file.
    layout: the layout of quantized weights.
    quantized: returns a quantized weight.
    done: called after each decision.
  """
  for decision in shard.decisions:
    tensor = decision.tensor
    if decision.format is not None:
      array = jax.tree.map(np.asarray, quantized(decision))
      parts = layout.tensors(tensor.name, array)
      yield from itertools.starmap(_whole, parts.items())
      del array, parts  # before the next weight is quantized
    elif tensor.begin is None:
      yield _whole(tensor.name, tensor.read())
    else:
      for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, tensor.nbytes - start)
        data = safetensors_files.read_bytes(tensor, start, size)
        yield tensor.name, start, data
    done(decision)


def _whole(name: str, x: Any) -> Piece:
  """Returns a tensor's bytes in one piece."""
  data = np.ascontiguousarray(np.asarray(x)).reshape(-1)
  return name, 0, data.view(np.uint8)
