# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: writes a quantized checkpoint from a plain one.

The result, a `Quantized`, prints a table of tensors.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import layouts as layouts_lib
from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import (
  assembly,
  errors,
  layouts,
  named_scales,
  numbers,
  recognition,
  records,
  safetensors_files,
  stored,
)
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints.writing import selection, sources, staging, weights
from jaxplugin.core import error_context, formats
from jaxplugin.printing import console
from jaxplugin.printing import progress as printing
from jaxplugin.quantization import dequantization

_WHO: Final = "checkpoints.quantize"
_INDEX: Final = f"model{safetensors_files.INDEX_SUFFIX}"
_TASK_VERSION: Final = 1
_CHUNK: Final = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
  """The result of `quantize`: a decision for each tensor; `str` is a table.

  Attributes:
    path: the target.
    layout: the layout of the target.
    format: the format of its weights.
    decisions: whether and how each tensor of the source is quantized.
    shared: names of weights that share a global scale.
    copied: other files that are copied.
    left: other files that are not copied.
    is_written: whether the target was written.
    errors: norm of the error over the norm of the weight, by names of verified
      weights; None without verify.
    nonfinite: weights with NaNs or infinities. They are written under
      allow_nonfinite; their bits are compared, and they do not count as
      verified.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> from safetensors import numpy as safetensors
    >>> weights = {"up.weight": np.ones((32, 64), np.float32)}
    >>> safetensors.save_file(weights, "model.safetensors")
    >>> done = jp.checkpoints.quantize(
    ...   "model.safetensors", "quantized.safetensors", "mxfp8", dry_run=True)
    >>> print(done.nbytes_before, done.nbytes, done.is_written)
    8192 2112 False
  """

  path: pathlib.Path
  layout: str
  format: formats.BlockFormat
  decisions: tuple[records.TensorDecision, ...]
  shared: tuple[tuple[str, ...], ...] = ()
  copied: tuple[pathlib.PurePath, ...] = ()
  left: tuple[pathlib.PurePath, ...] = ()
  is_written: bool = False
  errors: Mapping[str, float] | None = None
  nonfinite: tuple[str, ...] = ()

  @property
  def nbytes_before(self) -> int:
    """Bytes of the source's tensors."""
    return sum(x.tensor.nbytes for x in self.decisions)

  @property
  def nbytes(self) -> int:
    """Bytes of the target's tensors."""
    return sum(x.nbytes for x in self.decisions)

  def __str__(self) -> str:
    """Returns a table of tensors, and why some stay unquantized."""
    return console.text(self.parts())

  def parts(self) -> Iterator[console.Part]:
    """Yields the parts of the report that `str` prints."""
    yield f"{self.path}: {self.layout}, {self.format}"
    found = self._rows()
    header = ["format", "shape", "before", "after", "count", "name"]
    if self.errors:
      header.insert(-1, "error")
    yield console.table(
      header,
      [[row[title] for title in header] for row in found],
      names=("name",),
      figures=("shape", "before", "after", "count", "error"),
    )
    yield self._summary()
    for reason in dict.fromkeys(row["reason"] for row in found):
      names = [row["name"] for row in found if row["reason"] == reason]
      if reason:
        yield f"not quantized, {reason}: {', '.join(dict.fromkeys(names))}"
    alike = collections.Counter(
      tuple(map(naming.starred, names)) for names in self.shared
    )
    for group, count in alike.items():
      yield f"one global scale: {', '.join(group)} ({count} times)"
    if self.copied:
      yield f"copied: {', '.join(map(naming.printable, self.copied))}"
    if self.left:
      yield f"not copied: {', '.join(map(naming.printable, self.left))}"
    if self.errors:
      yield f"verified: {len(self.errors)} weights, bit by bit"
    if self.nonfinite:
      bad = ", ".join(map(naming.printable, self.nonfinite))
      yield f"not verified, because of NaNs or infinities: {bad}"
    if not self.is_written:
      yield "nothing was written"

  def to_json(self) -> str:
    """Returns the report as JSON, with a row for each tensor."""
    return json.dumps(
      {
        "path": str(self.path),
        "layout": self.layout,
        "format": str(self.format),
        "bytes_before": self.nbytes_before,
        "bytes": self.nbytes,
        "tensors": [
          {
            "name": decision.tensor.name,
            "shape": decision.tensor.logical_shape,
            "format": self._format_of(decision),
            "bytes_before": decision.tensor.nbytes,
            "bytes": decision.nbytes,
            "reason": decision.reason,
            "error": (self.errors or {}).get(decision.tensor.name),
          }
          for decision in self.decisions
        ],
        "shared": self.shared,
        "copied": list(map(str, self.copied)),
        "not_copied": list(map(str, self.left)),
        "not_finite": self.nonfinite,
        "is_written": self.is_written,
      },
      indent=2,
    )

  def _format_of(self, decision: records.TensorDecision) -> str:
    return str(decision.format or decision.tensor.type_name)

  def _rows(self) -> list[dict[str, str]]:
    """Returns a row for each group of similar tensors."""
    alike: dict[tuple[str, ...], list[records.TensorDecision]] = {}
    for decision in self.decisions:
      key = (
        self._format_of(decision),
        str(list(decision.tensor.logical_shape)),
        naming.starred(decision.tensor.name),
        decision.reason,
      )
      alike.setdefault(key, []).append(decision)
    return [
      {
        "format": format,
        "shape": shape,
        "before": console.size(sum(x.tensor.nbytes for x in its)),
        "after": console.size(sum(x.nbytes for x in its)),
        "count": str(len(its)),
        "error": self._error(its),
        "name": name,
        "reason": reason,
      }
      for (format, shape, name, reason), its in alike.items()
    ]

  def _error(self, its: list[records.TensorDecision]) -> str:
    found = [
      self.errors[x.tensor.name]
      for x in its
      if self.errors is not None and x.tensor.name in self.errors
    ]
    return f"{max(found):.4f}" if found else "-"

  def _summary(self) -> str:
    count = sum(x.format is not None for x in self.decisions)
    before, after = self.nbytes_before, self.nbytes
    return (
      f"{count} of {len(self.decisions)} tensors to {self.format}:"
      f" {before:,} bytes become {after:,}, {before - after:,} fewer"
    )


def quantize(
  source: str | os.PathLike[str],
  target: str | os.PathLike[str],
  format: formats.BlockFormat | str,
  *,
  layout: str = named_scales.MODELOPT,
  include: str | Sequence[str] | None = None,
  exclude: str | Sequence[str] = (),
  transposed: str | Sequence[str] = (),
  allow_nonfinite: bool = False,
  verify: bool = False,
  dry_run: bool = False,
  progress: printing.Report | bool | None = None,
) -> Quantized:
  """Writes a quantized checkpoint, one tensor at a time, by `jp.quantize`.

  The default quantizes f32, bf16 and f16 matrices [n, k] called *.weight, and
  experts. k must have whole blocks, except for FP8 and INT8. Embeddings, norms,
  heads, routers and vision towers stay. Weights that engines fuse share the
  largest of their global scales. docs/how_to/write_checkpoint.md has the rules.

  The target appears when it is complete. Until then it is TARGET.partial, which
  the same call continues.

  Args:
    source: a .safetensors file, an index file, or a folder.
    target: a new .safetensors file for a file, otherwise a folder.
    format: one of `WRITTEN_FORMATS`.
    layout: one of `WRITTEN_LAYOUTS`; "gpt-oss" has MXFP4 experts only.
    include: globs of the names to quantize; None for the default.
    exclude: globs of names that stay as they are.
    transposed: globs of experts [E, k, n]; gpt_oss and llama4 are known.
    allow_nonfinite: True quantizes weights with NaNs or infinities.
    verify: True reads the result back and compares all bits.
    dry_run: True writes nothing.
    progress: see `Checkpoint.read`.

  Returns:
    A `Quantized`; `print` shows a table.

  Raises:
    TypeError: If source or target is not a path, or a glob is not a string.
    OSError: If the source cannot be read.
    ValueError: If the format or layout is unknown, or they do not fit.
    CheckpointError: If the source breaks a rule or is quantized already, or a
      glob matches nothing. Also if a weight is not finite, or the target
      exists, cannot be written or differs under verify.

  Example:
    >>> import numpy as np
    >>> import jaxplugin as jp
    >>> from safetensors import numpy as safetensors
    >>> weights = {"up.weight": np.ones((32, 64), np.float32)}
    >>> safetensors.save_file(weights, "model.safetensors")
    >>> done = jp.checkpoints.quantize(
    ...   "model.safetensors", "quantized.safetensors", "mxfp8", verify=True)
    >>> print(done.errors)
    {'up.weight': 0.0}
  """
  error_context.require_path(_WHO, "source", source)
  error_context.require_path(_WHO, "target", target)
  format = formats.resolve(_WHO, format)
  found = layouts.find_written(_WHO, layout)
  layouts.require_format(_WHO, found, format)
  opened = sources.open_source(_WHO, pathlib.Path(source))
  rules = selection.SelectionRules(
    include=(
      None if include is None else naming.globs(_WHO, "include", include)
    ),
    exclude=naming.globs(_WHO, "exclude", exclude),
    transposed=naming.globs(_WHO, "transposed", transposed),
    model_type=opened.model_type,
  )
  decisions = selection.choose(_WHO, opened.tensors, found, format, rules)
  quantizer = weights.Quantizer(found, decisions, allow_nonfinite)
  result = Quantized(
    path=pathlib.Path(target),
    layout=layout,
    format=format,
    decisions=tuple(decisions),
    shared=tuple(dict.fromkeys(quantizer.groups.values())),
    copied=opened.copied,
    left=opened.left,
    is_written=not dry_run,
  )
  _require_target(opened, result.path)
  by_name = {x.tensor.name: x for x in decisions}
  to_write = []
  for name, shard in opened.shards.items():
    its = [by_name[tensor] for tensor in shard.tensors]
    metadata = {**shard.metadata, stored.LAYOUT: layout, **found.metadata(its)}
    to_write.append(staging.lay_out(name, its, metadata))
  if dry_run:
    return result
  total = result.nbytes_before * (2 if verify else 1)
  with printing.reporter(progress, total) as add:
    return _write(result, opened, to_write, quantizer, verify, add)


def _require_target(
  source: sources.SourceCheckpoint, target: pathlib.Path
) -> None:
  """Raises CheckpointError if the target exists or has the wrong kind."""
  if (target.suffix == safetensors_files.SUFFIX) == source.is_folder:
    kind = "a folder" if source.is_folder else "a .safetensors file"
    raise errors.CheckpointError(
      f"{_WHO}: the target must be {kind}, as {source.path} is, got {target}"
    )
  with staging.writing(_WHO, target):
    staging.require_new(_WHO, target)


def _write(
  result: Quantized,
  source: sources.SourceCheckpoint,
  to_write: Sequence[staging.Shard],
  quantizer: weights.Quantizer,
  verify: bool,
  add: Callable[[int], None],
) -> Quantized:
  """Writes the target, or the files that an earlier call did not finish."""
  target = result.path
  task = _task(result, source, to_write)
  add_read = lambda decision: add(decision.tensor.nbytes)
  with (
    staging.writing(_WHO, target),
    staging.Staging(_WHO, target, task) as place,
  ):
    paths = {x.name: place.folder / x.name for x in to_write}
    left = [x for x in to_write if not staging.is_finished(paths[x.name], x)]
    place.finished = len(to_write) - len(left)
    staging.require_space(_WHO, target, sum(x.size for x in left))
    for shard in to_write:
      if shard in left:
        pieces = staging.pieces(
          shard, quantizer.layout, quantizer.quantize, add_read
        )
        staging.write(paths[shard.name], shard, pieces)
        place.finished += 1
      else:
        for decision in shard.decisions:
          add_read(decision)
    if source.is_folder:
      _write_rest(place.folder, result, source, to_write, quantizer.layout)
    if verify:
      place.finished = 0  # a wrong result must not be reused
      norms, nonfinite = _require_equal(
        place.folder, source, result.decisions, quantizer, add
      )
      result = dataclasses.replace(result, errors=norms, nonfinite=nonfinite)
      place.finished = len(to_write)
    place.finish(None if source.is_folder else to_write[0].name)
  return result


def _task(
  result: Quantized,
  source: sources.SourceCheckpoint,
  to_write: Sequence[staging.Shard],
) -> dict[str, Any]:
  """Returns a description that identifies the files to write."""
  folder = source.path if source.is_folder else source.path.parent
  read = {name: os.stat(folder / name) for name in source.shards}
  return {
    "task": _TASK_VERSION,
    "layout": result.layout,
    "read": {n: [x.st_size, x.st_mtime_ns] for n, x in read.items()},
    "written": {x.name: hashlib.sha256(x.head).hexdigest() for x in to_write},
    "axes": {
      x.tensor.name: x.axis for x in result.decisions if x.format is not None
    },
  }


def _write_rest(
  folder: pathlib.Path,
  result: Quantized,
  source: sources.SourceCheckpoint,
  written: Sequence[staging.Shard],
  layout: records.Layout,
) -> None:
  """Writes the index, copied files and configurations."""
  if source.index is not None or len(written) > 1:
    names = {x: shard.name for shard in written for x in shard.begins}
    size = sum(shard.size - len(shard.head) for shard in written)
    staging.write_json(
      folder / (_INDEX if source.index is None else source.index.name),
      {
        "metadata": {"total_size": size},
        "weight_map": dict(sorted(names.items())),
      },
    )
  for path in source.copied:
    staging.copy_file(source.path / path, folder / path)
  staging.write_configs(folder, source.config or {}, layout, result.decisions)


def _require_equal(
  folder: pathlib.Path,
  source: sources.SourceCheckpoint,
  decisions: Sequence[records.TensorDecision],
  quantizer: weights.Quantizer,
  add: Callable[[int], None],
) -> tuple[dict[str, float], tuple[str, ...]]:
  """Returns errors by names of weights, and names of weights with NaNs.

  It quantizes each weight of the source again, and reports its bytes.

  Raises:
    CheckpointError: If a bit differs, or a file breaks a rule.
  """
  # Without layout=, as `load` reads the files.
  written = recognition.require_all(
    stored.joined(
      {
        name: sources.unmapped(safetensors_files.open_file(folder / name))
        for name in source.shards
      }
    )
  )
  norms: dict[str, float] = {}
  nonfinite: list[str] = []
  for decision in decisions:
    name = decision.tensor.name
    entry = written.get(name)
    if entry is None or (entry.layout is None) != (decision.format is None):
      raise errors.CheckpointError(
        f"{_WHO}: {name!r} was not read back from {folder}"
      )
    if decision.format is None:
      _require_same_bytes(decision.tensor, entry.parts[0])
    else:
      found = entry.make(assembly.GLOBAL_SCALE_RANGE)
      _require_same(decision.tensor, found, quantizer.quantize(decision))
      x = decision.tensor.read()
      if numbers.first_nonfinite(x) is None:
        norms[name] = _error(decision, found, x)
      else:
        nonfinite.append(name)
    add(decision.tensor.nbytes)
  return norms, tuple(nonfinite)


def _require_same_bytes(
  tensor: stored.StoredTensor, other: stored.StoredTensor
) -> None:
  same = (tensor.type_name, tensor.shape) == (other.type_name, other.shape)
  for start in range(0, tensor.nbytes, _CHUNK):
    size = min(_CHUNK, tensor.nbytes - start)
    same = same and np.array_equal(
      safetensors_files.read_bytes(tensor, start, size),
      safetensors_files.read_bytes(other, start, size),
    )
  if not same:
    raise stored.fault(other, f"it differs from that of {tensor.file}")


def _require_same(
  tensor: stored.StoredTensor,
  found: scaled_array.ScaledArray,
  wanted: scaled_array.ScaledArray,
) -> None:
  for part in ("values", "scale", "global_scale", "offset"):
    x, y = getattr(found, part), getattr(wanted, part)
    if x is None and y is None:
      continue
    if part == "scale" and found.scale_layout == layouts_lib.SWIZZLED:
      y = layouts_lib.swizzle_scale(jnp.asarray(y))
    x, y = np.asarray(x), np.asarray(y)
    is_same = x.dtype == y.dtype and x.size == y.size
    if not is_same or x.tobytes() != y.tobytes():
      raise stored.fault(
        tensor, f"its {part} on the disk differs from the result of jp.quantize"
      )


def _error(
  decision: records.TensorDecision,
  found: scaled_array.ScaledArray,
  x: np.ndarray,
) -> float:
  """Returns the norm of the error over the norm of the weight, in f64."""
  y = np.asarray(dequantization.dequantize(found, jnp.float32))
  ends = (np.asarray(part).shape[-1] for part in (found.values, found.scale))
  if decision.axis == -2 and len({*ends}) == 2:  # the layout has k last
    x = x.swapaxes(-1, -2)
  x, y = x.reshape(-1), y.reshape(-1)
  squares = difference = 0.0
  for start in range(0, x.size, _CHUNK):
    a = x[start : start + _CHUNK].astype(np.float64)
    b = y[start : start + _CHUNK].astype(np.float64)
    squares += float(a @ a)
    difference += float((a - b) @ (a - b))
  return math.sqrt(difference / squares) if squares else 0.0
