# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses how a transformer's arrays are sharded over a mesh.

"fsdp=128,tp=8,sp" lists the mesh axes in order, each with its size. dp, fsdp
and ep split the batch. fsdp also splits weights, which are gathered before each
use. ep also splits experts. tp splits heads and hidden channels, as in
Megatron. The flag sp splits the sequence over tp between matmuls.

Source: M. Shoeybi et al., arXiv:1909.08053; V. Korthikanti et al.,
arXiv:2205.05198, section 4.2; S. Rajbhandari et al., arXiv:1910.02054.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Final

from jax.sharding import PartitionSpec

AXES: Final = ("dp", "fsdp", "ep", "tp")
_SPLITS_SEQUENCE: Final = "sp"
_AXIS: Final = re.compile(r"([a-z]+)=([1-9]\d*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshLayout:
  """The axes of a mesh, and the shardings of a model's arrays.

  Attributes:
    axes: (name, size) of each axis, in the mesh's order.
    splits_sequence: whether tp also splits the sequence between matmuls.
  """

  axes: tuple[tuple[str, int], ...]
  splits_sequence: bool = False

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(name for name, _ in self.axes)

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(size for _, size in self.axes)

  @property
  def devices(self) -> int:
    return math.prod(self.shape)

  def size(self, *names: str) -> int:
    """Returns the product of the sizes of axes; an absent axis has size 1."""
    sizes = dict(self.axes)
    return math.prod(sizes.get(name, 1) for name in names)

  def _present(self, *names: str) -> Any:
    found = tuple(name for name in names if name in self.names)
    return found[0] if len(found) == 1 else found or None

  @property
  def batch(self) -> Any:
    """The axes that split the batch."""
    return self._present("dp", "fsdp", "ep")

  def tokens(self) -> PartitionSpec:
    """Returns the spec of [batch, sequence, channels] between matmuls."""
    sequence = self._present("tp") if self.splits_sequence else None
    return PartitionSpec(self.batch, sequence, None)

  def hidden(self) -> PartitionSpec:
    """Returns the spec of [batch, sequence, heads or hidden channels, ...]."""
    return PartitionSpec(self.batch, None, self._present("tp"))

  def rows(self) -> PartitionSpec:
    """Returns the spec of [devices, ...], rows before they are sent."""
    return PartitionSpec(self.batch)

  def sent_rows(self) -> PartitionSpec:
    """Returns the spec of [experts, devices, ...], rows of each expert."""
    return PartitionSpec(self._present("ep"), self._present("dp", "fsdp"))

  def weight(
    self, *, into_channels: bool, of_experts: bool = False
  ) -> PartitionSpec:
    """Returns the spec of a weight [k, n].

    Args:
      into_channels: whether n, not k, is the channels of the residual stream.
      of_experts: whether the weight is [experts, k, n].
    """
    fsdp, tp = self._present("fsdp"), self._present("tp")
    sizes = (tp, fsdp) if into_channels else (fsdp, tp)
    return PartitionSpec(*([self._present("ep")] if of_experts else []), *sizes)

  def __str__(self) -> str:
    flags = [_SPLITS_SEQUENCE] if self.splits_sequence else []
    return ",".join([f"{name}={size}" for name, size in self.axes] + flags)


def parse(text: str) -> MeshLayout:
  """Parses a layout such as "fsdp=128,tp=8,sp".

  Raises:
    ValueError: If the text is not a layout.
  """
  axes: dict[str, int] = {}
  splits_sequence = False
  for item in text.lower().replace(" ", "").split(","):
    match = _AXIS.fullmatch(item)
    if match is not None and match[1] in AXES and match[1] not in axes:
      axes[match[1]] = int(match[2])
    elif item == _SPLITS_SEQUENCE and not splits_sequence:
      splits_sequence = True
    else:
      raise ValueError(
        f"plan: layout must be sizes of {', '.join(AXES)}, and the word"
        f" {_SPLITS_SEQUENCE}, each at most once, as fsdp=128,tp=8,sp; got"
        f" {item!r} in {text!r}"
      )
  if splits_sequence and "tp" not in axes:
    raise ValueError(
      f"plan: sp splits the sequence over tp, and {text!r} has no tp; add"
      " tp=8, or leave sp out"
    )
  return MeshLayout(axes=tuple(axes.items()), splits_sequence=splits_sequence)
