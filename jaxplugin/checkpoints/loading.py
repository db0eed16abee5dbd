# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint's tensors by name, each read when it is used."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import conversions
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import gguf_files
from jaxplugin.checkpoints import json_text
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints.reports import misfits as misfit_lists
from jaxplugin.checkpoints.reports import numbers as counting
from jaxplugin.checkpoints.reports import progress as reporting
from jaxplugin.checkpoints.reports import tables
from jaxplugin.core import speaking
from jaxplugin.printing import console

_WHO: Final = "checkpoints.load"
SAFETENSORS: Final = ".safetensors"
_GGUF: Final = ".gguf"
# One of several files that gguf-split wrote.
_SPLIT: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf$")
_CHECKS: Final = ("numbers",)
_REMEDY: Final = (
  "strict=False reads the other tensors, and skip= leaves out those it matches"
)
# Where a folder says who quantized it: the file, the object in it, its words.
_CONFIGS: Final = (
  ("hf_quant_config.json", "quantization", ("quant_algo",)),
  (
    "config.json",
    "quantization_config",
    ("quant_method", "quant_algo", "format", "expert_dtype"),
  ),
  ("config.json", "quantization", ("mode", "bits")),  # of MLX
)


class Checkpoint(Mapping[str, Any]):
  """A checkpoint's tensors by name; what `load` returns.

  Indexing makes the array anew: a `ScaledArray` of each quantized weight under
  the name it has in the model, and plain NumPy arrays of all else. They are
  views of the mapped file (of GGUF's blocks: one copy), which the system reads
  as their numbers are used. `str` is a table of what was found.

  Attributes:
    path: what was loaded.
    config: what the configuration beside it says, "" if nothing.
    entries: what there is under each name; nothing of it is read.
    misfits: why tensors are left out under strict=False, by their names.
    unread: files of weights in the same folder that were not opened.
    numbers: counts of NaNs and the like, of each tensor that has some, by name;
      None unless `load` had check="numbers".
  """

  def __init__(
    self,
    path: pathlib.Path,
    config: str,
    entries: Mapping[str, recognition.Entry],
    global_scale_range: conversions.Range | None,
    *,
    is_strict: bool = True,
    misfits: Mapping[str, str] | None = None,
    unread: Sequence[str] = (),
  ) -> None:
    self.path = path
    self.config = config
    self.entries = entries
    self.misfits = dict(misfits or {})
    self.unread = tuple(unread)
    self.numbers: Mapping[str, counting.Numbers] | None = None
    self._is_strict = is_strict
    self._global_scale_range = global_scale_range

  def __getitem__(self, name: str) -> Any:
    """Returns the array of a name.

    Raises:
      KeyError: there is none; the message has the nearest names.
      CheckpointError: its global scale is out of range, or it is of a type of
        GGUF that has no format here.

    Warns:
      NumbersWarning: a block's scale is NaN.
    """
    return self._make(name, stacklevel=3)

  def _make(self, name: str, stacklevel: int) -> Any:
    entry = self.entries.get(name)
    if entry is None:
      raise UnknownName(name, self)
    try:
      array = entry.make(self._global_scale_range)
    except errors.REFUSALS as error:
      raise recognition.fault(entry.parts[0], str(error)) from None
    if isinstance(array, scaled_array.ScaledArray):
      count, block = counting.nan_block(array)
      if block is not None:
        warnings.warn(
          f"{entry.parts[0].file}: {name!r}: {count} of"
          f" {array.linear_scale().size} block scales are NaN, the first is"
          f" that of block {list(block)}; matmuls with these blocks give NaN",
          errors.NumbersWarning,
          stacklevel=stacklevel,
        )
    return array

  def activation_scale(self, name: str) -> jax.Array | None:
    """Returns the calibrated global scale of what a weight is multiplied by.

    Args:
      name: the weight's.

    Returns:
      f32[], which multiplies: `jp.quantize(x, "nvfp4", global_scale=)` takes
      it. None if the checkpoint has none for this weight, or if `load` left
      the tensor out.

    Raises:
      KeyError: there is no such weight.
      TypeError: the tensor is not one float.
    """
    entry = self.entries.get(name)
    if entry is None:
      raise UnknownName(name, self)
    if entry.activation_scale is None or entry.layout is None:
      return None
    scale = self.entries.get(entry.activation_scale)
    if scale is None:  # left out by skip= or strict=False
      return None
    return conversions.activation_scale(entry.layout, scale.parts[0].read())

  def __contains__(self, name: object) -> bool:
    return name in self.entries

  def __iter__(self) -> Iterator[str]:
    return iter(self.entries)

  def __len__(self) -> int:
    return len(self.entries)

  def read(
    self, progress: reporting.Progress | bool | None = None
  ) -> dict[str, Any]:
    """Returns all of it as arrays of JAX, each brought to its device once.

    `jnp.asarray` converts 64-bit values. Under
    strict=False tensors that cannot be read are left out, and `misfits` gets
    their reasons.

    Args:
      progress: called after each name with the bytes read and all of them. Or
        True for a bar on standard error, False for none; None is True where
        standard error is a terminal.

    Raises:
      CheckpointError: as of indexing; it lists all tensors that raise it.
    """
    total = sum(entry.nbytes for entry in self.entries.values())
    done = 0
    tree: dict[str, Any] = {}
    misfits: dict[str, str] = {}
    with reporting.reporter(progress) as report:
      for name, entry in self.entries.items():
        try:
          array = self._make(name, stacklevel=3)
        except errors.CheckpointError as error:
          misfits[name] = str(error)
        else:
          # The rest is made only to list what else cannot be read.
          if not misfits or not self._is_strict:
            tree[name] = jax.tree.map(jnp.asarray, array)
        done += entry.nbytes
        report(done, total)
    if misfits and self._is_strict:
      raise misfit_lists.error(misfits, _REMEDY)
    self.misfits |= misfits
    return tree

  def __str__(self) -> str:
    """Returns a table: layout, format, shape, bytes and names."""
    return console.text(self.parts())

  def parts(self) -> Iterator[console.Part]:
    """Returns the report that `str` prints."""
    yield f"{self.path}: {self.config or 'no quantization_config'}"
    yield from tables.parts(tables.rows(self.entries.values()))
    if awq := _with_pre_quant_scale(self.entries):
      yield (f"{len(awq)} weights need inputs multiplied by pre_quant_scale")
    if open_ones := _open_layouts(self.entries):
      yield _open_line(open_ones)
    if self.misfits:
      yield f"left out, because they cannot be read: {len(self.misfits)}"
      yield from (f"  {x}" for x in misfit_lists.listed(self.misfits))
    if self.numbers is not None:
      yield _numbers_line(self.numbers)
      for name, counts in self.numbers.items():
        yield f"  {naming.printable(name)}: {counts}"
    if self.unread:
      unread = ", ".join(map(naming.printable, self.unread))
      yield f"files not read: {unread}"
    verdict = "yes"
    if self.misfits:
      verdict = f"no, {len(self.misfits)} tensors cannot be read; skip= or"
      verdict += " strict=False leaves them out"
    yield f"loads with jp.checkpoints.load: {verdict}"

  def to_json(self) -> str:
    """Returns the same as JSON."""
    found = tables.rows(self.entries.values())
    return json.dumps(
      {
        "path": str(self.path),
        "config": self.config,
        "loads": not self.misfits,
        "tensors": [dataclasses.asdict(row) for row in found],
        "misfits": self.misfits,
        "unread": self.unread,
        "numbers": self.numbers
        and {name: str(counts) for name, counts in self.numbers.items()},
      },
      indent=2,
    )

  def __repr__(self) -> str:
    return f"Checkpoint({str(self.path)!r}, {len(self.entries)} names)"


class UnknownName(KeyError):
  """A checkpoint has no such name; the message has the nearest ones."""

  def __init__(self, name: object, checkpoint: Checkpoint) -> None:
    super().__init__(name)
    self._checkpoint = checkpoint

  def __str__(self) -> str:
    (name,) = self.args
    start = f"{self._checkpoint.path}: it has no {name!r}"
    if name in self._checkpoint.misfits:
      return f"{start}, which was left out: {self._checkpoint.misfits[name]}"
    found = naming.near(str(name), self._checkpoint.entries)
    if not found:
      return f"{start}; print the checkpoint for its names"
    return f"{start}; it has {', '.join(map(repr, found))}"


def load(
  path: str | os.PathLike[str],
  *,
  global_scale_range: conversions.Range | None = conversions.GLOBAL_SCALE_RANGE,
  strict: bool = True,
  skip: str | Sequence[str] = (),
  check: str | None = None,
  layout: str | None = None,
) -> Checkpoint:
  """Opens a checkpoint; reads no more of it than what describes its tensors.

  Layouts are recognized by names, dtypes, shapes and marks: ModelOpt,
  compressed-tensors, gpt-oss, torchao, ComfyUI, DeepSeek, MLX and GGUF. A
  quantized weight is one `ScaledArray`, called as in the model
  ("layers.0.up_proj.weight"); its parts are not listed. A
  `pre_quant_scale` is listed, and so do `input_scale` and
  `input_global_scale`; `entries[name]` of its weight names them. Tensors that
  are not quantized pass through. One that some sign calls quantized, in a
  format that jaxplugin does not have (INT4, FP8 with f32 scales), cannot be
  read.

  Of a folder's files an index is read with the files that it names. Without an
  index all .safetensors files are read, and two of them with one name are an
  error. A .gguf file, or all parts that gguf-split wrote, are read if there are
  no others. `Checkpoint.unread` names the files that are not read.

  Args:
    path: a .safetensors file, a .safetensors.index.json, a .gguf file, or a
      folder.
    global_scale_range: smallest and largest global scale that may multiply, or
      None for any. One that is used the wrong way round is off by millions.
    strict: whether tensors that cannot be read are an error, which lists all.
      False leaves them out; `Checkpoint.misfits` has their reasons.
    skip: globs of names that are left out, with or without ".weight": those of
      weights, or of their tensors in the files.
    check: "numbers" reads all of it, a chunk at a time, and counts NaNs,
      infinities and global scales that are 0 or infinite: `Checkpoint.numbers`.
    layout: whose weights are, if their names, dtypes and shapes are those of
      several: "modelopt", "compressed-tensors", "comfyui" or
      "modelopt-swizzled" (ModelOpt's with its scales in tiles). None lets marks
      and configurations decide, and without them takes ModelOpt's.

  Returns:
    A `Checkpoint`, a mapping of names to arrays. `print` shows what was found.

  Raises:
    TypeError: path is not a path, or skip is not a glob or a list of globs.
    ValueError: check is neither None nor "numbers", or there is no such layout.
    OSError: a file cannot be read; FileNotFoundError if there is no such path.
    CheckpointError: a file breaks a rule of its format, a weight's parts are
      missing or do not fit each other, it is quantized in a way that is not
      read, or there is nothing to load.

  Warns:
    LayoutWarning: nothing says whose some weights are, and another layout would
      read them as other numbers.
    PreQuantScaleWarning: inputs of some weights are to be multiplied first.
    NumbersWarning: `check` found something.
  """
  errors.require_path(_WHO, "path", path)
  globs = naming.globs(_WHO, "skip", skip)
  if not (check is None or (isinstance(check, str) and check in _CHECKS)):
    raise ValueError(
      f'{_WHO}: check must be None or "numbers", got {speaking.shown(check)}'
    )
  known = recognition.OPEN_LAYOUTS
  if not (layout is None or (isinstance(layout, str) and layout in known)):
    raise ValueError(
      f"{_WHO}: layout must be None or one of"
      f" {', '.join(recognition.OPEN_LAYOUTS)}, got {speaking.shown(layout)}"
    )
  path = pathlib.Path(path)
  files = files_of(path)
  source = _open(files)
  folder = path if path.is_dir() else path.parent
  config = "" if files[0].suffix == _GGUF else _config(folder)
  misfits: dict[str, str] = {}
  entries = recognition.recognize(source, layout, misfits, config)
  entries = {n: x for n, x in entries.items() if not _is_skipped(globs, x)}
  misfits = {n: x for n, x in misfits.items() if not _any_match(globs, [n])}
  if not strict:
    for name, entry in entries.items():
      refusals = [x.refusal for x in entry.parts if x.refusal]
      if refusals:
        misfits[name] = str(recognition.fault(entry.parts[0], refusals[0]))
    entries = {n: x for n, x in entries.items() if n not in misfits}
  if misfits and (strict or not entries):
    raise misfit_lists.error(misfits, _REMEDY if entries else "")
  if not entries:
    rest = " but those that skip= matches" if globs else ""
    raise errors.CheckpointError(
      f"{path}: a checkpoint must have tensors, got none{rest}"
    )
  found = Checkpoint(
    path,
    config,
    entries,
    global_scale_range,
    is_strict=strict,
    misfits=misfits,
    unread=_unread(path, files, source),
  )
  if awq := _with_pre_quant_scale(entries):
    warnings.warn(
      f"{path}: the inputs of {len(awq)} weights, the first {awq[0].name!r},"
      " must be multiplied by their pre_quant_scale (AWQ)."
      f" Entry.pre_quant_scale is its name, here {awq[0].pre_quant_scale!r}",
      errors.PreQuantScaleWarning,
      stacklevel=2,
    )
  if open_ones := _open_layouts(entries):
    warnings.warn(
      f"{path}: {_open_line(open_ones)}", errors.LayoutWarning, stacklevel=2
    )
  if check is not None:
    counts = {
      name: counting.count(entry, global_scale_range)
      for name, entry in entries.items()
    }
    found.numbers = {name: x for name, x in counts.items() if x}
    if found.numbers:
      name, first = next(iter(found.numbers.items()))
      warnings.warn(
        f"{path}: {_numbers_line(found.numbers)}, the first {name!r}"
        f" ({first}); print the checkpoint for all",
        errors.NumbersWarning,
        stacklevel=2,
      )
  return found


def _open_layouts(
  entries: Mapping[str, recognition.Entry],
) -> list[recognition.Entry]:
  return [x for x in entries.values() if x.others]


def _open_line(entries: Sequence[recognition.Entry]) -> str:
  first = entries[0]
  others = " or ".join(dict.fromkeys(y for x in entries for y in x.others))
  return (
    f"{len(entries)} weights, the first {first.name!r}, are read as"
    f" {first.layout}, and may be {others}, which gives other numbers. The"
    " files do not decide it: pass layout="
  )


def _numbers_line(numbers: Mapping[str, counting.Numbers]) -> str:
  if not numbers:
    return "numbers: no NaN, no infinity, and no global scale that is 0"
  return (
    f"numbers: {len(numbers)} tensors have NaNs, infinities or global scales"
    " that are 0"
  )


def _is_skipped(globs: Sequence[str], entry: recognition.Entry) -> bool:
  return _any_match(globs, [entry.name, entry.parts[0].name])


def _any_match(globs: Sequence[str], names: Sequence[str]) -> bool:
  return any(naming.matches(glob, name) for glob in globs for name in names)


def _with_pre_quant_scale(
  entries: Mapping[str, recognition.Entry],
) -> list[recognition.Entry]:
  return [x for x in entries.values() if x.pre_quant_scale is not None]


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files to open: one, or several of safetensors or of GGUF.

  Raises:
    FileNotFoundError: there is no such path.
    CheckpointError: a folder has none, or several of which none is chosen.
  """
  if not path.exists():
    raise FileNotFoundError(
      errno.ENOENT, "no such file or directory", str(path)
    )
  if not path.is_dir():
    return [path]
  for pattern in (f"*{safetensors_files.INDEX_SUFFIX}", f"*{SAFETENSORS}"):
    if found := sorted(path.glob(pattern)):
      break
  else:
    found = sorted(path.glob(f"*{_GGUF}"))
  is_one = (
    len(found) == 1
    or (found and found[0].suffix == SAFETENSORS)
    or _are_one_split(found)
  )
  if not is_one:
    names = ", ".join(file.name for file in found) or "none of them"
    raise errors.CheckpointError(
      f"{path}: a folder must contain one .safetensors.index.json,"
      f" .safetensors files or one .gguf file, got {names}; pass the path of"
      " the file"
    )
  return found


def _are_one_split(files: Sequence[pathlib.Path]) -> bool:
  """Returns whether gguf-split wrote these files, and none is missing."""
  parts = [_SPLIT.match(file.name) for file in files]
  return len({x and (x[1], int(x[2])) for x in parts}) == 1 and all(
    x is not None and int(x[2]) == len(files) for x in parts
  )


def _open(files: Sequence[pathlib.Path]) -> stored.StoredTensors:
  found = stored.joined({str(file): _open_one(file) for file in files})
  if files[0].suffix != _GGUF:
    return found
  count = int(found.metadata.get(gguf_files.SPLIT_COUNT, 1))
  if count > 1 and count != len(files):
    raise errors.CheckpointError(
      f"{files[0]}: it is one of {count} files; pass a folder that contains"
      " only these"
    )
  return found


def _open_one(file: pathlib.Path) -> stored.StoredTensors:
  if file.name.endswith(safetensors_files.INDEX_SUFFIX):
    return safetensors_files.open_index(file)
  if file.suffix == SAFETENSORS:
    return safetensors_files.open_file(file)
  if file.suffix == _GGUF:
    return gguf_files.open_file(file)
  raise errors.CheckpointError(
    f"{file}: a checkpoint must be a folder or a file that ends in"
    f" .safetensors, {safetensors_files.INDEX_SUFFIX} or .gguf"
  )


def _unread(
  path: pathlib.Path,
  files: Sequence[pathlib.Path],
  source: stored.StoredTensors,
) -> list[str]:
  """Returns the names of a folder's files of weights that were not opened."""
  if not path.is_dir():
    return []
  opened = {*map(str, files), *(x.file for x in source.tensors.values())}
  return sorted(
    file.name
    for suffix in (SAFETENSORS, _GGUF)
    for file in path.glob(f"*{suffix}")
    if str(file) not in opened
  )


def _config(folder: pathlib.Path) -> str:
  """What the configurations in a folder say of its quantization."""
  said = []
  for file, key, words in _CONFIGS:
    path = folder / file
    if path.is_file():
      section = json_text.read_object(path).get(key)
      if isinstance(section, dict):
        values = [f"{w} {section[w]}" for w in words if section.get(w)]
        said.append(
          f"{file} says {', '.join(values)}"
          if values
          else f"{file} has a {key}"
        )
  return "; ".join(said)
