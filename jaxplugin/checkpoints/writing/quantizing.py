# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`quantize`: a checkpoint of plain weights into another one, of quantized."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Final

import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import conversions
from jaxplugin.checkpoints import errors
from jaxplugin.checkpoints import loading
from jaxplugin.checkpoints import names as naming
from jaxplugin.checkpoints import recognition
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints import stored
from jaxplugin.checkpoints.reports import numbers
from jaxplugin.checkpoints.reports import progress as reporting
from jaxplugin.checkpoints.writing import configs
from jaxplugin.checkpoints.writing import layouts
from jaxplugin.checkpoints.writing import results
from jaxplugin.checkpoints.writing import selection
from jaxplugin.checkpoints.writing import shards
from jaxplugin.checkpoints.writing import sharing
from jaxplugin.checkpoints.writing import sources
from jaxplugin.checkpoints.writing import staging
from jaxplugin.checkpoints.writing import verification
from jaxplugin.core import formats

_WHO: Final = "checkpoints.quantize"
_CHUNK_BYTES: Final = 1 << 24
_INDEX: Final = f"model{safetensors_files.INDEX_SUFFIX}"
_TASK_VERSION: Final = 1


def quantize(
  source: str | os.PathLike[str],
  target: str | os.PathLike[str],
  format: formats.BlockFormat | str,
  *,
  layout: str = recognition.MODELOPT,
  include: str | Sequence[str] | None = None,
  exclude: str | Sequence[str] = (),
  transposed: str | Sequence[str] = (),
  allow_nonfinite: bool = False,
  verify: bool = False,
  dry_run: bool = False,
  progress: reporting.Progress | bool | None = None,
) -> results.Quantized:
  """Quantizes a checkpoint's weights, a tensor at a time, by `jp.quantize`.

  Weights are F32, BF16 and F16 matrices [n, k] called *.weight and, where the
  layout has them, experts in one tensor, [E, n, k] or [E, k, n], whose k is a
  multiple of the block size. Embeddings, norms, heads, routers and parts for
  images stay as they are, unless `include` says otherwise. The result's table
  tells why each tensor stays.

  Memory holds one tensor. Files keep their names, with an index anew where
  there was one, and a folder's other files are copied, but for weights in other
  formats. Its config.json, and hf_quant_config.json of ModelOpt, say what its
  layout's own tool says; weights alone are quantized, but engines quantize the
  other side too of ModelOpt's MX formats.

  NVFP4's global scale is that of `jp.quantize`, but for two things. ModelOpt's
  and compressed-tensors' weights that engines fuse (q_proj, k_proj and v_proj;
  gate_proj and up_proj) get the largest of theirs. compressed-tensors writes
  what divides, so that it is the reciprocal of an f32, the nearest one.

  The target appears when all of it is on the disk. Until then it is
  TARGET.partial; if that ends early, by whatever, the same call goes on after
  the files that are finished.

  Args:
    source: a .safetensors file, an index file, or a folder.
    target: a .safetensors file of a file, else a folder; not there yet.
    format: `NVFP4`, `MXFP8` or `MXFP4`, or its name.
    layout: "modelopt", "compressed-tensors", "torchao", "comfyui" of NVFP4 and
      MXFP8, or "gpt-oss" of MXFP4, which has experts alone.
    include: a glob or several of names, with or without ".weight": just these,
      whatever they are called. None for what tools take.
    exclude: globs of names that stay as they are.
    transposed: globs of experts [E, k, n]. Those of config.json's model types
      gpt_oss and llama4 are known to be so.
    allow_nonfinite: whether weights with NaNs or infinities are quantized, as
      `jp.quantize` does. They never count as verified.
    verify: whether the result is read back before it appears, and each weight
      compared with what `jp.quantize` makes of the source, and each other
      tensor with the source, all bitwise.
    dry_run: whether nothing is written.
    progress: as of `Checkpoint.read`.

  Returns:
    What became of each tensor; `print` shows a table.

  Raises:
    TypeError: source or target is not a path, or a glob is not a string.
    OSError: the source cannot be read; FileNotFoundError if there is none.
    ValueError: there is no such format or layout, or it does not have it.
    CheckpointError: the source breaks a rule or is quantized already, a glob
      matches nothing, there is nothing to quantize, a weight has a NaN or an
      infinity, or a global scale that readers refuse, the target exists
      or cannot be written, or, under verify, differs.
  """
  errors.require_path(_WHO, "source", source)
  errors.require_path(_WHO, "target", target)
  found, format = layouts.find(_WHO, layout, format)
  opened = sources.open_source(_WHO, pathlib.Path(source))
  rules = selection.Rules(
    include=(
      None if include is None else naming.globs(_WHO, "include", include)
    ),
    exclude=naming.globs(_WHO, "exclude", exclude),
    transposed=naming.globs(_WHO, "transposed", transposed),
    model_type=opened.model_type,
  )
  decisions = selection.choose(_WHO, opened.tensors, found, format, rules)
  shared = sharing.SharedScales(found, decisions)
  result = results.Quantized(
    path=pathlib.Path(target),
    layout=layout,
    format=format,
    decisions=tuple(decisions),
    shared=tuple(dict.fromkeys(shared.groups.values())),
    copied=opened.copied,
    left=opened.left,
    is_written=not dry_run,
  )
  job = _Job(
    found, format, opened, decisions, shared, result.path, allow_nonfinite
  )
  job.require_target()
  if dry_run:
    return result
  with reporting.reporter(progress) as report:
    return job.run(result, verify, report)


class _Job:
  """One call, of which all is known but the numbers."""

  def __init__(
    self,
    layout: layouts.Layout,
    format: formats.BlockFormat,
    source: sources.Source,
    decisions: Sequence[selection.Decision],
    shared: sharing.SharedScales,
    target: pathlib.Path,
    allow_nonfinite: bool,
  ) -> None:
    self._layout = layout
    self._allow_nonfinite = allow_nonfinite
    self._format = format
    self._source = source
    self._decisions = decisions
    self._shared = shared
    self._target = target
    by_name = {x.tensor.name: x for x in decisions}
    self._shards = []
    for name, shard in source.shards.items():
      its = [by_name[tensor] for tensor in shard.tensors]
      told = configs.metadata(layout.name, its)
      self._shards.append(shards.lay_out(name, its, {**shard.metadata, **told}))

  def require_target(self) -> None:
    """Raises CheckpointError for a target that is no place for the result."""
    ends = self._target.suffix == loading.SAFETENSORS
    if ends == self._source.is_folder:
      kind = "a folder" if self._source.is_folder else "a .safetensors file"
      raise sources.fault(
        _WHO,
        f"the target must be {kind}, as {self._source.path} is, got"
        f" {self._target}",
      )
    with staging.writing(_WHO, self._target):
      staging.require_new(_WHO, self._target)

  def run(
    self, result: results.Quantized, verify: bool, report: reporting.Progress
  ) -> results.Quantized:
    times = 2 if verify else 1
    meter = _Meter(
      report, times * sum(x.tensor.nbytes for x in self._decisions)
    )
    with staging.writing(_WHO, self._target):
      place = staging.Staging(_WHO, self._target, self._task())
      finished = 0
      try:
        left = [
          x
          for x in self._shards
          if not shards.is_finished(place.folder / x.name, x)
        ]
        finished = len(self._shards) - len(left)
        staging.require_space(_WHO, self._target, sum(x.size for x in left))
        for shard in self._shards:
          if shard in left:
            path = place.folder / shard.name
            shards.write(path, shard, self._pieces(shard, meter))
            finished += 1
          else:
            meter.add(sum(x.tensor.nbytes for x in shard.decisions))
        self._write_rest(place.folder)
        if verify:
          written, finished = finished, 0  # none is to be taken if one is wrong
          result = verification.verified(
            _WHO, place.folder, self._source, result, self._quantized, meter.add
          )
          finished = written
        place.finish(None if self._source.is_folder else self._shards[0].name)
      except BaseException:
        place.give_up(finished)
        raise
    return result

  def _task(self) -> dict[str, Any]:
    """What makes the files what they are."""
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

  def _quantized(
    self, decision: selection.Decision
  ) -> scaled_array.ScaledArray:
    """A weight as it is written."""
    weight = decision.weight
    assert weight is not None
    x = decision.tensor.read()
    if not self._allow_nonfinite:
      self._require_finite(decision.tensor, x)
    shared = self._shared.of(weight.name)
    array = self._layout.quantize(weight, x, shared)
    if array.global_scale is not None:
      scales = np.asarray(array.global_scale, np.float32)
      smallest, largest = conversions.GLOBAL_SCALE_RANGE
      good = (scales >= smallest) & (scales <= largest) | (scales == 1)
      if not good.all():
        raise recognition.fault(
          decision.tensor,
          f"its global scale, {float(scales[~good][0]):g}, is outside"
          f" [{smallest:.4g}, {largest:.4g}], so readers would consider it"
          " inverted; exclude the weight",
        )
    return array

  def _require_finite(self, tensor: stored.StoredTensor, x: np.ndarray) -> None:
    index = numbers.first_nonfinite(x)
    if index is not None:
      raise recognition.fault(
        tensor,
        f"a weight must be finite, got {float(x[index])} at {list(index)}, the"
        " first such number; exclude the weight, or pass allow_nonfinite=True"
        ' (--allow-nonfinite). load(check="numbers") (checkpoint --check'
        " numbers) counts such numbers in all tensors",
      )

  def _pieces(
    self, shard: shards.Shard, meter: _Meter
  ) -> Iterator[shards.Piece]:
    for decision in shard.decisions:
      if decision.weight is None:
        yield from shards.chunks(decision.tensor, _CHUNK_BYTES)
      else:
        array = self._quantized(decision)
        for part in decision.parts:
          yield part.name, 0, part.data(array)
        del array
      meter.add(decision.tensor.nbytes)

  def _write_rest(self, folder: pathlib.Path) -> None:
    """The index, what is copied, and what says how weights are quantized."""
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
    made: Mapping[str, Mapping[str, Any]] = configs.files(
      self._layout.name, self._format, self._decisions, self._source.config
    )
    for name, value in made.items():
      staging.write_json(folder / name, value)


class _Meter:
  """Adds up bytes, and reports them."""

  def __init__(self, report: reporting.Progress, total: int) -> None:
    self._report = report
    self._total = total
    self._done = 0

  def add(self, count: int) -> None:
    self._done += count
    self._report(self._done, self._total)
