# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of models, from their published configurations."""

from __future__ import annotations

import dataclasses
from typing import Final

from jaxplugin.lab.planning import blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A transformer of equal layers.

  Attributes:
    name: what it is called here.
    layers: how many.
    channels, hidden, heads, kv_heads, head_size: as of `blocks.Block`.
    experts, top: of a mixture of experts; 0 for a dense model.
  """

  name: str
  layers: int
  channels: int
  hidden: int
  heads: int
  kv_heads: int
  head_size: int
  experts: int = 0
  top: int = 0

  def block(self, *, batch: int, sequence: int, remat: bool) -> blocks.Block:
    """One of its layers."""
    return blocks.Block(
      channels=self.channels,
      hidden=self.hidden,
      heads=self.heads,
      kv_heads=self.kv_heads,
      head_size=self.head_size,
      experts=self.experts,
      top=self.top,
      batch=batch,
      sequence=sequence,
      remat=remat,
    )


# "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; "gpt-oss-120b &
# gpt-oss-20b Model Card" (arXiv:2508.10925), table 1. "small" is no model.
_ALL: Final = (
  Model(
    name="small",
    layers=1,
    channels=1024,
    hidden=4096,
    heads=8,
    kv_heads=8,
    head_size=128,
  ),
  Model(
    name="llama3-8b",
    layers=32,
    channels=4096,
    hidden=14336,
    heads=32,
    kv_heads=8,
    head_size=128,
  ),
  Model(
    name="llama3-70b",
    layers=80,
    channels=8192,
    hidden=28672,
    heads=64,
    kv_heads=8,
    head_size=128,
  ),
  Model(
    name="llama3-405b",
    layers=126,
    channels=16384,
    hidden=53248,
    heads=128,
    kv_heads=8,
    head_size=128,
  ),
  Model(
    name="gpt-oss-120b",
    layers=36,
    channels=2880,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_size=64,
    experts=128,
    top=4,
  ),
)
MODELS: Final = {model.name: model for model in _ALL}
