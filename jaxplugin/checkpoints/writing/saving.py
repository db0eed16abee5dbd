# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`save`: writes a tree of arrays as a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from jaxplugin.arrays import quantized_weight, scaled_array
from jaxplugin.checkpoints import (
  checkpoint_files,
  entries,
  errors,
  layouts,
  loading,
  named_scales,
  records,
  safetensors_files,
  stored,
)
from jaxplugin.checkpoints.writing import selection, staging, weights
from jaxplugin.core import error_context
from jaxplugin.printing import progress as printing

_WHO: Final = "checkpoints.save"
_FILE: Final = "model.safetensors"
# torchao's files have the dtype of the weight before quantization, which a
# `ScaledArray` does not store.
_UNKNOWN_TYPE: Final = "BF16"


def save(
  path: str | os.PathLike[str],
  tree: Any,
  *,
  layout: str = named_scales.MODELOPT,
  config: Mapping[str, Any] | None = None,
  progress: printing.Report | bool | None = None,
) -> None:
  """Writes a tree of quantized and plain arrays as a checkpoint.

  A tensor's name consists of the keys of its leaf, joined by dots: the weight
  of {"up": {"weight": w}} is "up.weight". `load` returns the same names and
  bits. Each array is copied from its devices when it is written.

  A `QuantizedWeight` becomes the matrix [n, k] of its `array`, and the file's
  metadata has what `load` needs to return the `QuantizedWeight`. Values and
  scales are written as the layout orders them. A missing global scale of NVFP4
  is written as 1. The target appears when it is complete.

  Args:
    path: a new .safetensors file, or a new folder that also gets a config.json.
    tree: a dict or another pytree of `ScaledArray`, `QuantizedWeight`, NumPy
      arrays and JAX arrays.
    layout: one of `WRITTEN_LAYOUTS`, the layout of the quantized weights.
    config: the model's configuration for config.json, whose
      quantization_config is replaced. Only for a folder.
    progress: see `Checkpoint.read`.

  Raises:
    TypeError: If path is not a path, or a leaf is not an array that this
      process can read, or has a dtype that safetensors does not have.
    ValueError: If the layout is unknown or does not store a weight's format, or
      a file gets a config.
    CheckpointError: If the layout cannot store a weight, two tensors would have
      one name, or the path exists or cannot be written.

  Example:
    >>> import jax.numpy as jnp
    >>> import jaxplugin as jp
    >>> tree = {"up": {"weight": jp.quantize(jnp.ones((32, 64)), "mxfp8")}}
    >>> jp.checkpoints.save("saved.safetensors", tree)
    >>> jp.checkpoints.load("saved.safetensors")["up.weight"].shape
    (32, 64)
  """
  error_context.require_path(_WHO, "path", path)
  target = pathlib.Path(path)
  is_file = target.suffix == safetensors_files.SUFFIX
  found = layouts.find_written(_WHO, layout)
  if not (config is None or isinstance(config, Mapping)):
    raise TypeError(
      f"{_WHO}: config must be a dict, got {error_context.shown(config)}"
    )
  if is_file and config is not None:
    raise ValueError(
      f"{_WHO}: config must be None for a file, got"
      f" {error_context.shown(config)}; pass the path of a folder"
    )
  leaves = dict(_leaves(tree))
  decisions = [_decide(found, target, n, x) for n, x in leaves.items()]
  selection.require_one_name_each(_WHO, decisions)
  if found.config is not None and not is_file:
    _require_one_format([x for x in decisions if x.format is not None])
  metadata = {
    stored.LAYOUT: layout,
    **found.metadata(decisions),
    **_kernels(leaves),
  }
  shard = staging.lay_out(
    target.name if is_file else _FILE, decisions, {"format": "pt", **metadata}
  )
  total = sum(x.nbytes for x in decisions)
  with (
    staging.writing(_WHO, target),
    printing.reporter(progress, total) as add,
  ):
    staging.require_new(_WHO, target)
    staging.require_space(_WHO, target, shard.size)
    # No other call continues this one, because its numbers may differ.
    task = {"save": secrets.token_hex()}
    with staging.Staging(_WHO, target, task) as place:
      file = place.folder / shard.name
      pieces = staging.pieces(
        shard,
        found,
        lambda x: _linear(leaves[x.tensor.name]),
        lambda x: add(x.nbytes),
      )
      staging.write(file, shard, pieces)
      if not is_file:
        given = dict(config or {})
        given.pop(checkpoint_files.QUANTIZATION, None)
        staging.write_configs(place.folder, given, found, decisions)
      _require_read_back(file if is_file else place.folder, decisions)
      place.finish(shard.name if is_file else None)


def _kernels(leaves: Mapping[str, Any]) -> dict[str, str]:
  """Returns the metadata from which `load` makes `QuantizedWeight`s again."""
  found = {
    name: [leaf.kernel_shape, leaf.contracting, leaf.dtype.name]
    for name, leaf in leaves.items()
    if isinstance(leaf, quantized_weight.QuantizedWeight)
  }
  return {loading.KERNELS: json.dumps(found)} if found else {}


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
  """Yields names and arrays of a tree.

  Raises:
    TypeError: If a leaf is not an array that this process can read.
    CheckpointError: If two leaves have the same name.
  """
  kinds = (scaled_array.ScaledArray, quantized_weight.QuantizedWeight)
  pairs, _ = jax.tree_util.tree_flatten_with_path(
    tree, is_leaf=lambda x: isinstance(x, kinds)
  )
  seen: set[str] = set()
  for keys, leaf in pairs:
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    if not name:
      raise TypeError(
        f"{_WHO}: tree must be a dict of arrays by name, got"
        f" {error_context.shown(tree)}; pass {{name: array}}"
      )
    if name in seen:
      raise errors.CheckpointError(
        f"{_WHO}: two leaves of the tree have the name {name!r}; rename one"
      )
    if name == safetensors_files.METADATA:
      raise errors.CheckpointError(
        f"{_WHO}: {name!r} is a reserved name; rename the array"
      )
    seen.add(name)
    for part in jax.tree.leaves(leaf):
      _require_readable(name, part)
    yield name, leaf


def _require_readable(name: str, array: Any) -> None:
  """Raises TypeError unless this process can read an array."""
  if isinstance(array, jax.core.Tracer):
    raise TypeError(
      f"{_WHO}: {name!r} must be a concrete array, got a traced one; call save"
      " outside of jax.jit and other transformations"
    )
  if not isinstance(array, (jax.Array, np.ndarray)):
    raise TypeError(
      f"{_WHO}: {name!r} must be an array, got {error_context.shown(array)};"
      " convert a scalar by numpy.asarray"
    )
  if isinstance(array, jax.Array) and not (
    array.is_fully_addressable or array.is_fully_replicated
  ):
    raise TypeError(
      f"{_WHO}: {name!r} must be an array that this process can read, got one"
      " with shards on other hosts; gather it with"
      " jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
    )


def _decide(
  layout: records.Layout, target: pathlib.Path, name: str, leaf: Any
) -> records.TensorDecision:
  """Returns the tensors to write for a leaf.

  Raises:
    TypeError: If safetensors does not have its dtype.
    ValueError: If the layout does not store its format.
    CheckpointError: If the layout cannot store the weight.
  """
  array, type_name = leaf, _UNKNOWN_TYPE
  if isinstance(leaf, quantized_weight.QuantizedWeight):
    array = leaf.array
    type_name = safetensors_files.TYPE_NAMES[leaf.dtype]
  if not isinstance(array, scaled_array.ScaledArray):
    if array.dtype not in safetensors_files.TYPE_NAMES:
      known = ", ".join(map(str, safetensors_files.TYPE_NAMES))
      raise TypeError(
        f"{_WHO}: {name!r} must have a dtype that safetensors stores, got"
        f" {array.dtype}; the dtypes are {known}"
      )
    type_name = safetensors_files.TYPE_NAMES[array.dtype]
    tensor = _tensor(target, name, array, type_name)
    return records.TensorDecision(tensor=tensor)
  who = f"{_WHO}: {name!r}"
  layouts.require_format(who, layout, array.format)
  tensor = _tensor(target, name, array, type_name)
  decision = records.TensorDecision(
    tensor=tensor, format=array.format, axis=array.axis - array.ndim
  )
  if reason := _refusal(layout, decision, array):
    raise errors.CheckpointError(f"{who}: {reason}")
  remedy = "quantize the weight with another global_scale"
  weights.require_readable(tensor, array.global_scale, remedy)
  parts = weights.parts(layout, jax.eval_shape(_linear, array), name)
  return dataclasses.replace(decision, parts=parts)


def _tensor(
  target: pathlib.Path, name: str, x: Any, type_name: str
) -> stored.StoredTensor:
  """Returns a description of an array."""
  return stored.StoredTensor(
    file=str(target),
    name=name,
    type_name=type_name,
    dtype=np.dtype(x.dtype),
    shape=tuple(x.shape),
    read=lambda: np.asarray(x),
  )


def _refusal(
  layout: records.Layout,
  decision: records.TensorDecision,
  array: scaled_array.ScaledArray,
) -> str:
  """Returns why a layout cannot store an array, or ""."""
  shape, axis = decision.tensor.shape, decision.axis
  rank = len(shape)
  if rank not in (2, 3):
    return f"a quantized weight must have rank 2 or 3, got rank {rank}"
  if rank == 2 and axis != -1:
    return (
      "a matrix must be blocked along its last dimension, got blocks along the"
      " first one; save array.T"
    )
  if axis == -3 or (axis == -2 and layout.transposes_stacks):
    return (
      "experts must be [E, n, k] blocked along k, got blocks along dimension"
      f" {array.axis} of {list(shape)}; transpose the array"
    )
  if reason := selection.refusal(layout, decision):
    return reason
  scale = array.global_scale
  if scale is None:
    return ""
  is_per_expert = layout.has_scale_of_each and rank == 3
  if scale.size not in (1, shape[0] if is_per_expert else 1):
    each = " for each expert" if is_per_expert else ""
    return (
      f"layout {layout.name} stores one global scale{each}, got shape"
      f" {list(scale.shape)}; quantize the weight with one"
    )
  g = np.asarray(scale, np.float32)
  if layout.divides and entries.divided(entries.divided(g)) != g:
    return (
      f"layout {layout.name} stores 1 / global_scale in f32, which does not"
      f" give back {float(g.reshape(())):g}; quantize the weight with"
      " global_scale=1 / (1 / global_scale) in f32, or choose another layout"
    )
  return ""


def _require_one_format(written: Sequence[records.TensorDecision]) -> None:
  for other in written[1:]:
    if other.format != written[0].format:
      raise errors.CheckpointError(
        f"{_WHO}: all quantized weights must have the format that config.json"
        f" names, got {written[0].format} for {written[0].tensor.name!r} and"
        f" {other.format} for {other.tensor.name!r}; save a .safetensors file,"
        " which has no config.json"
      )


def _linear(leaf: Any) -> scaled_array.ScaledArray:
  """Returns a weight with packed values, linear scales and a global scale."""
  array = getattr(leaf, "array", leaf)  # of a `QuantizedWeight`
  array = array.without_surrogate().to_floats().pack()
  scale = array.global_scale
  if array.format.has_global_scale and scale is None:
    scale = np.float32(1)
  return scaled_array.ScaledArray(
    *(array.values, array.linear_scale(), scale, array.format),
    offset=array.offset,
  )


def _require_read_back(
  path: pathlib.Path, decisions: Sequence[records.TensorDecision]
) -> None:
  """Raises CheckpointError unless `load` finds the weights under their names.

  Plain tensors may have names and dtypes of a quantized weight.
  """
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    entries = loading.load(path).entries
  for decision in decisions:
    tensor, format = decision.tensor, decision.format
    entry = entries.get(tensor.name)
    if entry is None or (entry.format, tuple(entry.shape)) != (
      format,
      tensor.shape,
    ):
      kind = "a plain array" if format is None else str(format)
      found = "a part of another tensor" if entry is None else entry.type_name
      raise errors.CheckpointError(
        f"{_WHO}: {tensor.name!r} must be read back as {kind} of shape"
        f" {list(tensor.shape)}, but load would read {found}"
        + ("" if entry is None else f" of shape {list(entry.shape)}")
        + "; rename the array"
      )
