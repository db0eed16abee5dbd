# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a transformer's arrays are split between devices, in words.

"fsdp=128,tp=8,sp": axes of the mesh in their order, each with its size. Weights
are split over fsdp and gathered where they are used; tp splits heads and hidden
channels (Megatron's); sp also splits the sequence over tp where every channel
is on each device. dp splits tokens alone, ep experts. "free" leaves to the
compiler how heads and hidden channels are split.

Source: M. Shoeybi et al., arXiv:1909.08053; V. Korthikanti et al.,
arXiv:2205.05198, section 4.2; S. Rajbhandari et al., arXiv:1910.02054.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any
from typing import Final

from jax.sharding import PartitionSpec

AXES: Final = ("dp", "fsdp", "ep", "tp")
FLAGS: Final = ("sp", "free")
_AXIS: Final = re.compile(r"([a-z]+)=([1-9]\d*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A mesh, and what is split over its axes.

  Attributes:
    axes: (name, size) of each axis, in the mesh's order.
    splits_sequence: whether tp also splits the sequence between products.
    is_free: whether only attention's result and the residual stream say how
      they are split, and not heads and hidden channels.
  """

  axes: tuple[tuple[str, int], ...]
  splits_sequence: bool = False
  is_free: bool = False

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
    """Devices along these axes; an axis that is not there has one."""
    sizes = dict(self.axes)
    return math.prod(sizes.get(name, 1) for name in names)

  def _there(self, *names: str) -> Any:
    found = tuple(name for name in names if name in self.names)
    return found[0] if len(found) == 1 else found or None

  @property
  def batch(self) -> Any:
    """What splits the batch."""
    return self._there("dp", "fsdp", "ep")

  def tokens(self) -> PartitionSpec:
    """Of [batch, sequence, channels] between products."""
    sequence = self._there("tp") if self.splits_sequence else None
    return PartitionSpec(self.batch, sequence, None)

  def hidden(self) -> PartitionSpec:
    """Of [batch, sequence, heads or hidden channels] inside of products."""
    return PartitionSpec(self.batch, None, self._there("tp"))

  def heads(self) -> PartitionSpec:
    """Of [batch, sequence, heads, channels of one]."""
    return PartitionSpec(self.batch, None, self._there("tp"), None)

  def sent(self, to: str | None) -> PartitionSpec:
    """Of rows for experts, [devices, rows, experts, channels], where they are.

    Those that went to="experts" are [experts, devices, rows, channels].
    """
    if to is None:
      return PartitionSpec(self.batch, None, None, None)
    rest = self._there("dp", "fsdp")
    return PartitionSpec(self._there("ep"), rest, None, None)

  def weight(
    self, *, into_channels: bool, of_experts: bool = False
  ) -> PartitionSpec:
    """Of [k, n]; `into_channels` where n is what the block's result has."""
    fsdp, tp = self._there("fsdp"), self._there("tp")
    sizes = (tp, fsdp) if into_channels else (fsdp, tp)
    return PartitionSpec(*([self._there("ep")] if of_experts else []), *sizes)

  def __str__(self) -> str:
    given = (self.splits_sequence, self.is_free)
    flags = [flag for flag, is_on in zip(FLAGS, given, strict=True) if is_on]
    return ",".join([f"{name}={size}" for name, size in self.axes] + flags)


def parse(text: str) -> Layout:
  """Reads "fsdp=128,tp=8,sp".

  Raises:
    ValueError: it is none; says what is known.
  """
  axes: dict[str, int] = {}
  flags: set[str] = set()
  for item in text.lower().replace(" ", "").split(","):
    match = _AXIS.fullmatch(item)
    if match is not None and match[1] in AXES and match[1] not in axes:
      axes[match[1]] = int(match[2])
    elif item in FLAGS and item not in flags:
      flags.add(item)
    else:
      raise ValueError(
        f"plan: layout must be sizes of {', '.join(AXES)}, and of the words"
        f" {', '.join(FLAGS)}, each at most once, as fsdp=128,tp=8,sp; got"
        f" {item!r} in {text!r}"
      )
  if "sp" in flags and "tp" not in axes:
    raise ValueError(
      f"plan: sp splits the sequence over tp, and {text!r} has no tp; add"
      " tp=8, or leave sp out"
    )
  if not axes:
    raise ValueError(f"plan: layout must name an axis, got {text!r}")
  return Layout(
    axes=tuple(axes.items()),
    splits_sequence="sp" in flags,
    is_free="free" in flags,
  )
