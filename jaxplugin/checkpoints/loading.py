# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint's tensors by name, each read when it is used."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxplugin.arrays import quantized_weight, scaled_array
from jaxplugin.checkpoints import (
  assembly,
  checkpoint_files,
  errors,
  layouts,
  recognition,
  records,
  stored,
)
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints import numbers as counting
from jaxplugin.core import error_context, formats
from jaxplugin.printing import console
from jaxplugin.printing import progress as printing
from jaxplugin.quantization import api as quantization

_WHO: Final = "checkpoints.load"
_NEAR_GLOB: Final = 0.3  # a glob has only a part of the name
_CHECKS: Final = ("numbers",)
# A key of a header's metadata. Its value describes `QuantizedWeight`s as JSON:
# {"params.kernel": [kernel_shape, contracting, dtype]}.
KERNELS: Final = "jaxplugin.kernels"
_REMEDY: Final = (
  "strict=False reads the other tensors, and skip= leaves out those it matches"
)


class Checkpoint(Mapping[str, Any]):
  """A mapping of names to a checkpoint's tensors, as `load` returns it.

  Indexing returns a `ScaledArray` for a quantized weight, under its name in the
  model, a `QuantizedWeight` if `save` was given one, and otherwise a NumPy
  array. Each call makes a new array, a view of the mapped file (for GGUF's
  blocks, a copy). The system reads the bytes when they are used. `str` is a
  table of the tensors.

  Attributes:
    path: the path that was loaded.
    config: the quantization in the configuration next to it; "" if nothing.
    entries: a description of each name; no value is read.
    misfits: reasons of tensors that strict=False left out, by name.
    unread: weight files in the same folder that were not opened.
    numbers: counts of NaNs and other odd values, by the names that have some or
      that cannot be read; None unless `load` had check="numbers".
    losses: the norm of the error over the norm of the weight, by names of
      weights that requantize= changed when they were read.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> from safetensors import numpy as safetensors
    >>> weights = {"up.weight": np.ones((32, 64), np.float32)}
    >>> safetensors.save_file(weights, "model.safetensors")
    >>> checkpoint = jp.checkpoints.load("model.safetensors")
    >>> print(list(checkpoint), checkpoint["up.weight"].shape)
    ['up.weight'] (32, 64)
  """

  def __init__(
    self,
    path: pathlib.Path,
    config: str,
    entries: Mapping[str, records.Entry],
    global_scale_range: assembly.Range | None,
    *,
    is_strict: bool = True,
    misfits: Mapping[str, str] | None = None,
    unread: Sequence[str] = (),
    requantize: formats.BlockFormat | None = None,
  ) -> None:
    self.path = path
    self.config = config
    self.entries = entries
    self.misfits = dict(misfits or {})
    self.unread = tuple(unread)
    self.numbers: Mapping[str, counting.Numbers] | None = None
    self.losses: dict[str, float] = {}
    self._requantize = requantize
    self._is_strict = is_strict
    self._global_scale_range = global_scale_range

  def __getitem__(self, name: str) -> Any:
    """Returns the array of a name.

    Raises:
      KeyError: If there is no such name. The text has the nearest names.
      CheckpointError: If its global scale is out of range, or jaxplugin has no
        format for its GGUF type.

    Warns:
      NumbersWarning: If a block scale is NaN or infinite.
    """
    return self._make(name)

  def _make(self, name: str) -> Any:
    entry = self.entries.get(name)
    if entry is None:
      raise UnknownName(name, self)
    try:
      array = entry.make(self._global_scale_range)
      # GGUF's blocks may have fewer bytes than the array.
      is_larger = entry.layout == "gguf" and array.nbytes > entry.nbytes
      if self._requantize is not None and is_larger:
        array, self.losses[name] = _requantized(array, self._requantize)
      weight = array
      if entry.kernel is not None:
        weight = quantized_weight.QuantizedWeight(array, *entry.kernel)
    except errors.REFUSALS as error:
      raise stored.fault(entry.parts[0], str(error)) from None
    if isinstance(array, scaled_array.ScaledArray):
      nans, infinities, block = counting.nonfinite_scales(array)
      if block is not None:
        kind, result = "NaN", "NaN"
        if infinities:
          kind, result = "NaN or infinite", "NaN or infinity"
        parts = "block scales"
        if array.offset is not None and not array.format.has_zero_points:
          parts += " and minima"
        warnings.warn(
          f"{entry.parts[0].file}: {name!r}: {nans + infinities} of"
          f" {array.linear_scale().size} {parts} are {kind}, the first is"
          f" that of block {list(block)}; matmuls with these blocks give"
          f" {result}",
          errors.NumbersWarning,
          stacklevel=3,
        )
    return weight

  def activation_scale(self, name: str) -> jax.Array | None:
    """Returns the calibrated global scale of the activation of a weight.

    Args:
      name: the weight's name.

    Returns:
      f32[], which multiplies. For NVFP4, pass it to `jp.quantize(x, "nvfp4",
      global_scale=)`. For FP8 and INT8 it is the scale of the whole activation.
      None if the checkpoint has none for this weight, or if
      `load` left the tensor out.

    Raises:
      KeyError: If there is no such weight.
      TypeError: If the tensor is not one float.
    """
    entry = self.entries.get(name)
    if entry is None:
      raise UnknownName(name, self)
    if entry.activation_scale is None:
      return None
    scale = self.entries.get(entry.activation_scale)
    if scale is None:  # left out by skip= or strict=False
      return None
    return layouts.read_activation_scale(entry, scale.parts[0])

  def __contains__(self, name: object) -> bool:
    return name in self.entries

  def __iter__(self) -> Iterator[str]:
    return iter(self.entries)

  def __len__(self) -> int:
    return len(self.entries)

  def read(
    self, progress: printing.Report | bool | None = None
  ) -> dict[str, Any]:
    """Returns all tensors as JAX arrays, each copied to its device once.

    `jnp.asarray` converts 64-bit values. Under strict=False, tensors that
    cannot be read are left out, and `misfits` gets their reasons.

    Args:
      progress: called after each name with the bytes read and all bytes. True
        shows a bar on standard error, False nothing. None shows it on a
        terminal.

    Returns:
      A dict of arrays by name.

    Raises:
      CheckpointError: If tensors cannot be read; the text lists all of them.
    """
    total = sum(entry.nbytes for entry in self.entries.values())
    tree: dict[str, Any] = {}
    misfits: dict[str, str] = {}
    with printing.reporter(progress, total) as add:
      for name, entry in self.entries.items():
        try:
          array = self._make(name)
        except errors.CheckpointError as error:
          misfits[name] = str(error)
        else:
          # After a misfit, other tensors are read only to list misfits.
          if not misfits or not self._is_strict:
            tree[name] = jax.tree.map(jnp.asarray, array)
        add(entry.nbytes)
    if misfits and self._is_strict:
      raise errors.misfit_error(misfits, _REMEDY)
    self.misfits |= misfits
    return tree

  def __str__(self) -> str:
    """Returns a table: layout, format, shape, bytes and names."""
    return console.text(self.parts())

  def parts(self) -> Iterator[console.Part]:
    """Yields the parts of the report that `str` prints."""
    yield f"{self.path}: {self.config or 'no quantization_config'}"
    entries = self.entries.values()
    yield from _table(_rows(entries))
    if awq := [x for x in entries if x.pre_quant_scale]:
      yield (f"{len(awq)} weights need inputs multiplied by pre_quant_scale")
    if open_ones := [x for x in entries if x.others]:
      yield _open_line(open_ones)
    if self.misfits:
      yield f"left out, because they cannot be read: {len(self.misfits)}"
      yield from (f"  {x}" for x in errors.misfit_lines(self.misfits))
    if self._requantize is not None:
      yield (
        f"weights that were read as {self._requantize}, because they would need"
        f" more memory than in the file, and their errors: {len(self.losses)}"
      )
      for name, loss in self.losses.items():
        yield f"  {naming.printable(name)}: {loss:.3g}"
    if self.numbers is not None:
      yield _numbers_line(self.numbers)
      for name, counts in self.numbers.items():
        yield f"  {naming.printable(name)}: {counts}"
    if self.unread:
      unread = ", ".join(map(naming.printable, self.unread))
      yield f"files not read: {unread}"
    verdict = "yes"
    if unreadable := self._unreadable():
      verdict = f"no, {len(unreadable)} tensors cannot be read; skip= or"
      verdict += " strict=False leaves them out"
    yield f"loads with jp.checkpoints.load: {verdict}"

  def _unreadable(self) -> set[str]:
    """Returns the names that are known not to be readable."""
    counts = (self.numbers or {}).items()
    return {*self.misfits, *(name for name, x in counts if x.refusal)}

  def to_json(self) -> str:
    """Returns the report as JSON."""
    return json.dumps(
      {
        "path": str(self.path),
        "config": self.config,
        "loads": not self._unreadable(),
        "tensors": _rows(self.entries.values()),
        "misfits": self.misfits,
        "unread": self.unread,
        "numbers": self.numbers
        and {name: str(counts) for name, counts in self.numbers.items()},
      },
      indent=2,
    )

  def __repr__(self) -> str:
    return f"Checkpoint({str(self.path)!r}, {len(self.entries)} names)"


def _rows(entries: Iterable[records.Entry]) -> list[dict[str, Any]]:
  """Returns a row for each group of tensors whose names differ in numbers."""
  found: dict[tuple[object, ...], dict[str, Any]] = {}
  for entry in entries:
    alike = {
      "layout": entry.layout or "",
      "format": entry.type_name,
      "shape": tuple(entry.shape),
      "name": naming.starred(entry.name),
    }
    new = {**alike, "bytes": 0, "count": 0}
    row = found.setdefault(tuple(alike.values()), new)
    row["bytes"] += entry.nbytes
    row["count"] += 1
  return list(found.values())


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[console.Part]:
  """Yields a table of rows, and the totals."""
  yield console.table(
    ("layout", "format", "shape", "bytes", "count", "name"),
    [
      (
        row["layout"] or "-",
        row["format"],
        str(list(row["shape"])),
        f"{row['bytes']:,}",
        str(row["count"]),
        row["name"],
      )
      for row in rows
    ],
    names=("name",),
    figures=("shape", "bytes", "count"),
  )
  count, size = (sum(row[x] for row in rows) for x in ("count", "bytes"))
  yield f"{count} names, {size:,} bytes"


def _with_kernels(
  path: pathlib.Path, entries: Mapping[str, records.Entry], text: str
) -> dict[str, records.Entry]:
  """Returns entries with the kernels that `save` wrote into the metadata.

  Raises:
    CheckpointError: If the text is not what `save` writes.
  """
  found = dict(entries)
  for name, kernel in stored.parse_object(f"{path}: {KERNELS}", text).items():
    match kernel:
      case [[*shape], [*contracting], str(dtype)]:
        dims = range(len(shape))
        is_valid = (
          all(type(n) is int for n in (*shape, *contracting))
          and contracting == [d for d in dims if d in contracting]
          and dtype in ("float32", "bfloat16", "float16")
        )
        made = tuple(shape), tuple(contracting), dtype
      case _:
        is_valid = False
    if not is_valid:
      raise errors.fault(
        path,
        f"{KERNELS} must have a shape, contracting dimensions and a dtype for"
        f" {name!r}, got {error_context.shown(kernel)}",
      )
    if name in found and found[name].format is not None:
      found[name] = dataclasses.replace(found[name], kernel=made)
  return found


def _requantized(
  array: scaled_array.ScaledArray, format: formats.BlockFormat
) -> tuple[scaled_array.ScaledArray, float]:
  """Returns an array in another format, and its relative error."""
  x = array.dequantize()
  result = quantization.quantize(x, format)
  error = jnp.linalg.norm(x - result.dequantize()) / jnp.linalg.norm(x)
  return result, float(jnp.where(jnp.any(x != 0), error, 0))


class UnknownName(KeyError):
  """A checkpoint does not have a name; the message has the nearest ones."""

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
  global_scale_range: assembly.Range | None = assembly.GLOBAL_SCALE_RANGE,
  strict: bool = True,
  skip: str | Sequence[str] = (),
  check: str | None = None,
  layout: str | None = None,
  requantize: formats.BlockFormat | str | None = None,
) -> Checkpoint:
  """Opens a checkpoint of quantized or plain weights; reads no values yet.

  Names, dtypes, shapes and marks determine the layout: ModelOpt,
  compressed-tensors, gpt-oss, torchao, ComfyUI, DeepSeek, GPTQ, AWQ, MLX or
  GGUF. A quantized weight is one `ScaledArray` under its name in the model
  ("layers.0.up_proj.weight"); its parts are not listed. Other tensors pass
  through. docs/how_to/load_checkpoint.md has the rules for layouts and files.

  Args:
    path: a .safetensors, .safetensors.index.json or .gguf file, or a folder.
    global_scale_range: smallest and largest global scale that multiplies; None
      accepts any.
    strict: False leaves out tensors that cannot be read, see
      `Checkpoint.misfits`.
    skip: globs of names to leave out, with or without ".weight".
    check: "numbers" reads all tensors and counts odd values, see
      `Checkpoint.numbers`.
    layout: one of `OPEN_LAYOUTS`, for weights that fit several. None uses marks
      and configurations, or else ModelOpt's layout.
    requantize: a format for GGUF's weights that need more bytes than their
      file; see `Checkpoint.losses`.

  Returns:
    A `Checkpoint`, a mapping of names to arrays. `print` shows a table.

  Raises:
    TypeError: If path is not a path, or skip is not a glob or a list of globs.
    ValueError: If check or layout is unknown.
    OSError: If a file does not exist or cannot be read.
    CheckpointError: If a file breaks a rule, parts of a weight are missing, or
      its quantization is not supported.

  Warns:
    LayoutWarning: If nothing decides between layouts.
    PreQuantScaleWarning: If inputs need a pre_quant_scale.
    NumbersWarning: If `check` found something.
    PatternWarning: If skip or requantize applies to no tensor.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> from safetensors import numpy as safetensors
    >>> weights = {"up.weight": np.ones((32, 64), np.float32)}
    >>> safetensors.save_file(weights, "model.safetensors")
    >>> done = jp.checkpoints.quantize(
    ...   "model.safetensors", "quantized.safetensors", "nvfp4")
    >>> up = jp.checkpoints.load("quantized.safetensors")["up.weight"]
    >>> print(type(up).__name__, up.format, up.shape)
    ScaledArray nvfp4 (32, 64)
  """
  error_context.require_path(_WHO, "path", path)
  globs = naming.globs(_WHO, "skip", skip)
  if not (check is None or (isinstance(check, str) and check in _CHECKS)):
    raise ValueError(
      f'{_WHO}: check must be None or "numbers", got'
      f" {error_context.shown(check)}"
    )
  known = layouts.OPEN_LAYOUTS
  if not (layout is None or (isinstance(layout, str) and layout in known)):
    raise ValueError(
      f"{_WHO}: layout must be None or one of {', '.join(known)}, got"
      f" {error_context.shown(layout)}"
    )
  if requantize is not None:
    requantize = formats.resolve(_WHO, requantize, "requantize")
  path = pathlib.Path(path)
  files = checkpoint_files.paths_of(path)
  source = checkpoint_files.open_all(files)
  config, mlx = checkpoint_files.read_config(files)
  entries, misfits = recognition.recognize(source, layout, config, mlx)
  entries = _with_kernels(path, entries, source.metadata.get(KERNELS, "{}"))
  for text in _unmatched(globs, entries, misfits, requantize):
    warnings.warn(f"{path}: {text}", errors.PatternWarning, stacklevel=2)
  entries = {n: x for n, x in entries.items() if not _is_skipped(globs, x)}
  misfits = {n: x for n, x in misfits.items() if not naming.matches(globs, n)}
  if not strict:
    for name, entry in entries.items():
      refusals = [x.refusal for x in entry.parts if x.refusal]
      if refusals:
        misfits[name] = str(stored.fault(entry.parts[0], refusals[0]))
    entries = {n: x for n, x in entries.items() if n not in misfits}
  if misfits and (strict or not entries):
    raise errors.misfit_error(misfits, _REMEDY if entries else "")
  if not entries:
    rest = " but those that skip= matches" if globs else ""
    raise errors.fault(path, f"a checkpoint must have tensors, got none{rest}")
  found = Checkpoint(
    path,
    config,
    entries,
    global_scale_range,
    is_strict=strict,
    misfits=misfits,
    unread=checkpoint_files.unread(path, files, source),
    requantize=requantize,
  )
  if awq := [x for x in entries.values() if x.pre_quant_scale]:
    warnings.warn(
      f"{path}: the inputs of {len(awq)} weights, the first {awq[0].name!r},"
      " must be multiplied by their pre_quant_scale (AWQ)."
      f" Entry.pre_quant_scale is its name, here {awq[0].pre_quant_scale!r}",
      errors.PreQuantScaleWarning,
      stacklevel=2,
    )
  if open_ones := [x for x in entries.values() if x.others]:
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


def _open_line(entries: Sequence[records.Entry]) -> str:
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
    " that are 0, or cannot be read"
  )


def _unmatched(
  globs: Sequence[str],
  entries: Mapping[str, records.Entry],
  misfits: Mapping[str, str],
  requantize: formats.BlockFormat | None,
) -> Iterator[str]:
  """Yields texts about arguments of `load` that apply to no tensor."""
  for glob in globs:
    is_used = any(_is_skipped([glob], x) for x in entries.values())
    if not is_used and not any(naming.matches([glob], n) for n in misfits):
      found = naming.near(glob.strip("*."), [*entries, *misfits], _NEAR_GLOB)
      near = f"; it has {', '.join(map(repr, found))}" if found else ""
      yield f"skip={glob!r} matches no tensor{near}"
  if requantize is not None and not any(
    x.layout == "gguf" for x in entries.values()
  ):
    yield (
      f"requantize={str(requantize)!r} changes no tensor, because none is a"
      " quantized weight of GGUF"
    )


def _is_skipped(globs: Sequence[str], entry: records.Entry) -> bool:
  names = (entry.name, entry.parts[0].name)
  return any(naming.matches(globs, name) for name in names)
