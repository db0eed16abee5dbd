# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that engines fuse into one, and that have one global scale so.

vLLM and TensorRT-LLM make one product of these and take one global scale for
it; where they differ it is the largest, and the others' numbers are wrong.
ModelOpt and llm-compressor give such weights the largest, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Final

import numpy as np

from jaxplugin.checkpoints.writing import layouts
from jaxplugin.checkpoints.writing import selection

_FUSED: Final = (
  ("q_proj", "k_proj", "v_proj"),
  ("q_a_proj", "kv_a_proj_with_mqa"),
  ("gate_proj", "up_proj"),
  ("w1", "w3"),
)
_KINDS: Final = {leaf: kind for kind in _FUSED for leaf in kind}
# Scale codes of blocks that have no finite number but 0.
_NO_SCALE: Final = (0, 0x7F)


class SharedScales:
  """The global scales of weights that share one.

  Attributes:
    groups: the names of the weights of a group, by each of them.
  """

  def __init__(
    self, layout: layouts.Layout, decisions: Iterable[selection.Decision]
  ) -> None:
    self._layout = layout
    self._taken = {
      x.tensor.name: x
      for x in decisions
      if x.weight is not None and x.weight.format.has_global_scale
    }
    self._scales: dict[tuple[str, ...], np.ndarray] = {}
    self.groups: Mapping[str, tuple[str, ...]] = (
      _groups(self._taken) if layout.shares else {}
    )

  def of(self, name: str) -> np.ndarray | None:
    """f32[] that a weight shares; None if it shares none.

    Each of its group is read and quantized by itself for it, the first time.
    """
    group = self.groups.get(name)
    if group is None:
      return None
    if group not in self._scales:
      scales = [x for n in group if (x := self._own(n)) is not None]
      self._scales[group] = np.asarray(max(scales, default=1), np.float32)
    return self._scales[group]

  def _own(self, name: str) -> float | None:
    """A weight's own global scale; None if it has no finite number but 0."""
    decision = self._taken[name]
    assert decision.weight is not None
    array = self._layout.quantize(decision.weight, decision.tensor.read())
    codes = np.asarray(array.scale).view(np.uint8)
    if np.isin(codes, _NO_SCALE).all():
      return None
    return np.asarray(array.global_scale, np.float32).item()


def _groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
  found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
  for name in names:
    parent, _, leaf = name.removesuffix(selection.WEIGHT).rpartition(".")
    if name.endswith(selection.WEIGHT) and leaf in _KINDS:
      found.setdefault((parent, _KINDS[leaf]), []).append(name)
  return {
    name: tuple(group)
    for group in found.values()
    if len(group) > 1
    for name in group
  }
