# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes weights as a layout stores them.

vLLM and TensorRT-LLM fuse some weights into one matmul with one global scale.
If the global scales differ, they use the largest, and the other weights get
wrong numbers. ModelOpt and llm-compressor therefore give such weights the
largest scale too.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxplugin.arrays import scaled_array
from jaxplugin.checkpoints import assembly, entries, numbers, records, stored
from jaxplugin.checkpoints import names as naming
from jaxplugin.core import formats
from jaxplugin.quantization import api

_FUSED: Final = (
  ("q_proj", "k_proj", "v_proj"),
  ("q_a_proj", "kv_a_proj_with_mqa"),
  ("gate_proj", "up_proj"),
  ("w1", "w3"),
)
_KINDS: Final = {leaf: kind for kind in _FUSED for leaf in kind}
# Scale codes of blocks whose only finite number is 0.
_NO_SCALE: Final = (0, 0x7F)


class Quantizer:
  """Quantizes the weights of a checkpoint.

  Attributes:
    layout: the layout to write.
    groups: for each weight that shares a global scale, the names of all weights
      that share it.
  """

  def __init__(
    self,
    layout: records.Layout,
    decisions: Iterable[records.TensorDecision],
    allow_nonfinite: bool,
  ) -> None:
    self.layout = layout
    self._allow_nonfinite = allow_nonfinite
    self._scaled = {
      x.tensor.name: x
      for x in decisions
      if x.format is not None and x.format.has_global_scale
    }
    self._scales: dict[tuple[str, ...], np.ndarray] = {}
    self.groups: Mapping[str, tuple[str, ...]] = (
      _groups(self._scaled) if layout.shares else {}
    )

  def quantize(
    self, decision: records.TensorDecision
  ) -> scaled_array.ScaledArray:
    """Returns a weight as it is written.

    Raises:
      CheckpointError: If a number is not finite, or if readers would refuse the
        global scale.
    """
    tensor = decision.tensor
    x = tensor.read()
    if not self._allow_nonfinite:
      _require_finite(tensor, x)
    array = quantize(self.layout, decision, x, self._shared(tensor.name))
    require_readable(tensor, array.global_scale, "exclude the weight")
    return array

  def _shared(self, name: str) -> np.ndarray | None:
    """Returns the global scale f32[] that a weight shares, or None.

    The first call for a group reads and quantizes all of its weights.
    """
    group = self.groups.get(name)
    if group is None:
      return None
    if group not in self._scales:
      scales = [x for n in group if (x := self._single(n)) is not None]
      self._scales[group] = np.asarray(max(scales, default=1), np.float32)
    return self._scales[group]

  def _single(self, name: str) -> float | None:
    """Returns the global scale of one weight; None if it is all zeros."""
    decision = self._scaled[name]
    array = quantize(self.layout, decision, decision.tensor.read())
    codes = np.asarray(array.scale).view(np.uint8)
    if np.isin(codes, _NO_SCALE).all():
      return None
    return np.asarray(array.global_scale, np.float32).item()


def require_readable(
  tensor: stored.StoredTensor, global_scale: Any, remedy: str
) -> None:
  """Raises CheckpointError if readers would refuse a global scale."""
  if global_scale is None:
    return
  scales = np.asarray(global_scale, np.float32)
  good = assembly.is_allowed(scales, assembly.GLOBAL_SCALE_RANGE)
  if not good.all():
    smallest, largest = assembly.GLOBAL_SCALE_RANGE
    raise stored.fault(
      tensor,
      f"its global scale, {float(scales[~good][0]):g}, is outside"
      f" [{smallest:.4g}, {largest:.4g}], so readers would consider it"
      f" inverted; {remedy}",
    )


def parts(
  layout: records.Layout, array: scaled_array.ScaledArray, name: str
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns dtypes and shapes of the tensors to write for a quantized weight.

  The array may consist of dtypes and shapes.
  """
  tensors = lambda x: collections.OrderedDict(layout.tensors(name, x))
  with jax.enable_x64(True):  # some layouts have 64-bit integers
    return jax.eval_shape(tensors, array)


@functools.lru_cache
def abstract(
  layout: records.Layout,
  format: formats.BlockFormat,
  axis: int,
  x: jax.ShapeDtypeStruct,
) -> scaled_array.ScaledArray:
  """Returns dtypes and shapes of a weight quantized for a layout."""
  quantize = functools.partial(_quantized, layout, format, axis)
  return jax.eval_shape(quantize, x)


def quantize(
  layout: records.Layout,
  decision: records.TensorDecision,
  x: np.ndarray,
  shared: np.ndarray | None = None,
) -> scaled_array.ScaledArray:
  """Returns a weight quantized by `jp.quantize`, as a layout represents it.

  If the layout writes a global scale that divides, the result's global scale is
  the reciprocal of an f32: the one nearest to the scale of `jp.quantize`, or to
  the shared global scale.
  """
  format = decision.format
  assert format is not None
  quantized = functools.partial(_quantized, layout, format, decision.axis, x)
  if not layout.divides or not format.has_global_scale:
    return quantized(shared)
  if shared is None:
    array = quantized()
    shared = np.asarray(array.global_scale).reshape(())
    if entries.divided(entries.divided(shared)) == shared:
      return array
  return quantized(entries.divided(entries.divided(shared)))


def _quantized(
  layout: records.Layout,
  format: formats.BlockFormat,
  axis: int,
  x: Any,
  scale: np.ndarray | None = None,
) -> scaled_array.ScaledArray:
  if layout.transposes_stacks and axis != -1:
    x, axis = x.swapaxes(-1, -2), -1
  return api.quantize(
    jnp.asarray(x),
    format,
    axis=axis,
    batch_dims=x.ndim - 2 if layout.has_scale_of_each else 0,
    global_scale=None if scale is None else jnp.asarray(scale),
  )


def _require_finite(tensor: stored.StoredTensor, x: np.ndarray) -> None:
  index = numbers.first_nonfinite(x)
  if index is not None:
    raise stored.fault(
      tensor,
      f"a weight must be finite, got {float(x[index])} at {list(index)}, the"
      " first such number; exclude the weight, or pass allow_nonfinite=True"
      ' (--allow-nonfinite). load(check="numbers") (checkpoint --check'
      " numbers) counts such numbers in all tensors",
    )


def _groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
  found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
  for name in names:
    parent, _, leaf = naming.base(name).rpartition(".")
    if name.endswith(naming.WEIGHT) and leaf in _KINDS:
      found.setdefault((parent, _KINDS[leaf]), []).append(name)
  return {
    name: tuple(group)
    for group in found.values()
    if len(group) > 1
    for name in group
  }
