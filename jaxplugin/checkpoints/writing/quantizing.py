# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: writes a quantized checkpoint from a plain one."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Final

from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import layouts
from jaxplugin.checkpoints import loading
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints import records
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints.writing import results
from jaxplugin.checkpoints.writing import selection
from jaxplugin.checkpoints.writing import shards
from jaxplugin.checkpoints.writing import sources
from jaxplugin.checkpoints.writing import staging
from jaxplugin.checkpoints.writing import verification
from jaxplugin.checkpoints.writing import weights
from jaxplugin.core import formats
from jaxplugin.printing import progress as printing

_WHO: Final = "checkpoints.quantize"
_CHUNK_BYTES: Final = 1 << 24
_INDEX: Final = f"model{safetensors_files.INDEX_SUFFIX}"
_TASK_VERSION: Final = 1


def quantize(
  source: str | os.PathLike[str],
  target: str | os.PathLike[str],
  format: formats.BlockFormat | str,
  *,
  layout: str = layouts.MODELOPT,
  include: str | Sequence[str] | None = None,
  exclude: str | Sequence[str] = (),
  transposed: str | Sequence[str] = (),
  allow_nonfinite: bool = False,
  verify: bool = False,
  dry_run: bool = False,
  progress: printing.Report | bool | None = None,
) -> results.Quantized:
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
  errors.require_path(_WHO, "source", source)
  errors.require_path(_WHO, "target", target)
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
  result = results.Quantized(
    path=pathlib.Path(target),
    layout=layout,
    format=format,
    decisions=tuple(decisions),
    shared=tuple(dict.fromkeys(quantizer.groups.values())),
    copied=opened.copied,
    left=opened.left,
    is_written=not dry_run,
  )
  job = _Job(found, format, opened, decisions, quantizer, result.path)
  job.require_target()
  if dry_run:
    return result
  with printing.reporter(progress) as report:
    return job.run(result, verify, report)


class _Job:
  """One call of `quantize`, after all decisions."""

  def __init__(
    self,
    layout: records.Layout,
    format: formats.BlockFormat,
    source: sources.SourceCheckpoint,
    decisions: Sequence[records.TensorDecision],
    quantizer: weights.Quantizer,
    target: pathlib.Path,
  ) -> None:
    self._layout = layout
    self._format = format
    self._source = source
    self._decisions = decisions
    self._quantizer = quantizer
    self._target = target
    by_name = {x.tensor.name: x for x in decisions}
    self._shards = []
    for name, shard in source.shards.items():
      its = [by_name[tensor] for tensor in shard.tensors]
      metadata = layout.metadata([(x.tensor.name, x.weight) for x in its])
      self._shards.append(
        shards.lay_out(name, its, {**shard.metadata, **metadata})
      )

  def require_target(self) -> None:
    """Raises CheckpointError if the target exists or has the wrong kind."""
    ends = self._target.suffix == loading.SAFETENSORS
    if ends == self._source.is_folder:
      kind = "a folder" if self._source.is_folder else "a .safetensors file"
      raise errors.CheckpointError(
        f"{_WHO}: the target must be {kind}, as {self._source.path} is, got"
        f" {self._target}"
      )
    with staging.writing(_WHO, self._target):
      staging.require_new(_WHO, self._target)

  def run(
    self, result: results.Quantized, verify: bool, report: printing.Report
  ) -> results.Quantized:
    times = 2 if verify else 1
    meter = _Meter(
      report, times * sum(x.tensor.nbytes for x in self._decisions)
    )
    with (
      staging.writing(_WHO, self._target),
      staging.Staging(_WHO, self._target, self._task()) as place,
    ):
      paths = {x.name: place.folder / x.name for x in self._shards}
      left = [
        x for x in self._shards if not shards.is_finished(paths[x.name], x)
      ]
      place.finished = len(self._shards) - len(left)
      staging.require_space(_WHO, self._target, sum(x.size for x in left))
      for shard in self._shards:
        if shard in left:
          shards.write(paths[shard.name], shard, self._pieces(shard, meter))
          place.finished += 1
        else:
          meter.add(sum(x.tensor.nbytes for x in shard.decisions))
      self._write_rest(place.folder)
      if verify:
        place.finished = 0  # a wrong result must not be reused
        result = verification.verified(
          _WHO, place.folder, self._source, result, self._quantizer, meter.add
        )
        place.finished = len(self._shards)
      place.finish(None if self._source.is_folder else self._shards[0].name)
    return result

  def _task(self) -> dict[str, Any]:
    """Returns a description that identifies the files to write."""
    folder = self._source.path
    folder = folder if folder.is_dir() else folder.parent
    read = {name: os.stat(folder / name) for name in self._source.shards}
    return {
      "task": _TASK_VERSION,
      "layout": self._layout.name,
      "read": {n: [x.st_size, x.st_mtime_ns] for n, x in read.items()},
      "written": {
        x.name: hashlib.sha256(x.head).hexdigest() for x in self._shards
      },
      "axes": {
        x.weight.name: x.weight.axis
        for x in self._decisions
        if x.weight is not None
      },
    }

  def _pieces(
    self, shard: shards.Shard, meter: _Meter
  ) -> Iterator[shards.Piece]:
    for decision in shard.decisions:
      if decision.weight is None:
        yield from shards.chunks(decision.tensor, _CHUNK_BYTES)
      else:
        array = self._quantizer.quantize(decision)
        yield from weights.pieces(self._layout, array, decision.tensor.name)
        del array
      meter.add(decision.tensor.nbytes)

  def _write_rest(self, folder: pathlib.Path) -> None:
    """Writes the index, copied files and configurations."""
    if not self._source.is_folder:
      return
    if self._source.index is not None or len(self._shards) > 1:
      index = self._source.index
      names = {x: shard.name for shard in self._shards for x in shard.begins}
      size = sum(shard.size - len(shard.head) for shard in self._shards)
      staging.write_json(
        folder / (_INDEX if index is None else index.name),
        {
          "metadata": {"total_size": size},
          "weight_map": dict(sorted(names.items())),
        },
      )
    for path in self._source.copied:
      staging.copy_file(self._source.path / path, folder / path)
    left = selection.unquantized_modules(self._decisions)
    config = self._source.config or {}
    staging.write_configs(folder, config, self._layout, self._format, left)


class _Meter:
  """Counts bytes and reports them."""

  def __init__(self, report: printing.Report, total: int) -> None:
    self._report = report
    self._total = total
    self._done = 0

  def add(self, count: int) -> None:
    self._done += count
    self._report(self._done, self._total)
