# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the dimensions of a weight that its matmul contracts.

They follow from the type of its owner (equinox), its name and the names next to
it (flax, haiku, checkpoints), or the shape of its bias. There is no guess: if
these do not determine the dimensions, the module raises `NotKnown`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

from jaxplugin.arrays import leaves as leaves_lib
from jaxplugin.core import parameter_names

# Names of flax's attention.
_QUERIES: Final = ("query", "key", "value")
_OUT: Final = "out"
_BIASES: Final = ("bias", "b")
# Names of modules whose layers are stacked in one array. linen's classes
# "ScanBlock_0" and "VmapDense_0" are others.
_STACKS: Final = frozenset({"layers", "blocks", "experts"})
_LIFTED: Final = frozenset({"scan", "vmap"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightDims:
  """Dimensions of a weight.

  Attributes:
    lead: number of leading dimensions that are layers or experts.
    contracting: the contracting dimensions.
  """

  lead: int
  contracting: tuple[int, ...]


class NotKnown(Exception):
  """The contracting dimensions are not known; has the reason."""


_UNKNOWN: Final = (
  "the contracting axis cannot be inferred from its name; pass call=, or"
  " return its axis from where="
)


class Tree:
  """All leaves of a tree, which determine the contraction of one."""

  def __init__(self, leaves: Sequence[leaves_lib.Leaf]):
    self._siblings: dict[str, dict[str, tuple[int, ...]]] = {}
    self._offsets: list[tuple[str, tuple[int, ...]]] = []
    for leaf in leaves:
      self._siblings.setdefault(leaf.module, {})[leaf.name] = leaf.shape
      if leaf.name in (*_BIASES, "scale"):
        self._offsets.append((f"/{leaf.module}/", leaf.shape))

  def contraction(self, leaf: leaves_lib.Leaf) -> WeightDims:
    """Returns the contraction of a leaf of rank 2 or more.

    Raises:
      NotKnown: If nothing indicates it, or two indications disagree.
    """
    owner = _equinox_type(leaf.owner)
    if owner is not None:
      return _of_equinox(owner, leaf)
    siblings = self._siblings[leaf.module]
    bias = next((siblings[b] for b in _BIASES if b in siblings), None)
    rank = len(leaf.shape)
    if leaf.name == "kernel":
      return self._of_flax(leaf, bias)
    if leaf.name in ("weight", "weight_ih", "weight_hh"):
      return _of_torch(leaf, bias)
    if leaf.name == "w" and rank == 2:
      return _of_haiku(leaf, bias)
    raise NotKnown(_UNKNOWN)

  def _of_flax(
    self, leaf: leaves_lib.Leaf, bias: tuple[int, ...] | None
  ) -> WeightDims:
    """Returns the contraction of a flax kernel, such as (..., k, n)."""
    rank = len(leaf.shape)
    if rank == 2:
      return WeightDims(lead=0, contracting=(0,))
    count = self._attention_contracting(leaf)
    if count is not None:
      lead = rank - 3
      return WeightDims(lead=lead, contracting=tuple(range(lead, lead + count)))
    if bias is not None:
      return _by_bias(leaf.shape, bias)
    lead = rank - 2
    if _stacks(leaf) >= lead or self._is_with_stacks(leaf, lead):
      return WeightDims(lead=lead, contracting=(lead,))
    raise NotKnown(_UNKNOWN)

  def _attention_contracting(self, leaf: leaves_lib.Leaf) -> int | None:
    """Returns how many dimensions a kernel of attention contracts.

    Kernels of queries, keys and values are (..., d, heads, size). The output
    kernel is (..., heads, size, d). Returns None for other kernels.
    """
    parent, _, name = leaf.module.rpartition("/")
    prefix = f"{parent}/" if parent else ""
    kernels = {
      n: self._siblings.get(f"{prefix}{n}", {}).get("kernel", ())
      for n in (*_QUERIES, _OUT)
    }
    query, out = kernels[_QUERIES[0]], kernels[_OUT]
    is_attention = (
      len(leaf.shape) >= 3
      and len(query) == len(out) == len(leaf.shape)
      and query[-2:] == out[-3:-1]
      and query[:-3] == out[:-3]
    )
    if not is_attention or name not in kernels:
      return None
    return 2 if name == _OUT else 1

  def _is_with_stacks(self, leaf: leaves_lib.Leaf, lead: int) -> bool:
    """Whether the biases and norm scales nearest to the leaf are stacked.

    They have its first `lead` dimensions, and another one.
    """
    near: list[tuple[int, ...]] = []
    folder = f"/{leaf.module}/"
    while folder and not near:
      near = [shape for m, shape in self._offsets if m.startswith(folder)]
      folder = folder[: folder.rfind("/", 0, -1) + 1]
    return bool(near) and all(
      len(shape) > lead and shape[:lead] == leaf.shape[:lead] for shape in near
    )


def _equinox_type(owner: object) -> str | None:
  """Returns the name of equinox's layer class that the owner derives from."""
  for kind in type(owner).__mro__:
    if kind.__module__.startswith("equinox.nn"):
      return kind.__name__
  return None


def _of_equinox(owner: str, leaf: leaves_lib.Leaf) -> WeightDims:
  rank = len(leaf.shape)
  is_matrix = leaf.name in ("weight", "weight_ih", "weight_hh")
  if is_matrix and owner in ("Linear", "GRUCell", "LSTMCell"):
    return WeightDims(lead=rank - 2, contracting=(rank - 1,))
  raise NotKnown(
    f"it is the {leaf.name} of an equinox.nn.{owner}, which is not quantized"
    " by default"
  )


def _of_torch(
  leaf: leaves_lib.Leaf, bias: tuple[int, ...] | None
) -> WeightDims:
  """Returns the contraction of (..., n, k), or (k, n) if the bias has n."""
  rank = len(leaf.shape)
  if bias is not None and rank == 2:
    return _by_size(leaf.shape, bias, or_else=1)
  return WeightDims(lead=rank - 2, contracting=(rank - 1,))


def _of_haiku(
  leaf: leaves_lib.Leaf, bias: tuple[int, ...] | None
) -> WeightDims:
  if bias is not None:
    return _by_size(leaf.shape, bias, or_else=0)
  if "linear" in parameter_names.words(leaf.module):
    return WeightDims(lead=0, contracting=(0,))
  raise NotKnown(_UNKNOWN)


def _by_size(
  shape: tuple[int, ...], bias: tuple[int, ...], *, or_else: int
) -> WeightDims:
  """Returns the dimension of a matrix that its bias does not have.

  For a square matrix this is `or_else`.
  """
  fits = [d for d in (0, 1) if bias == (shape[1 - d],)]
  if not fits:
    raise NotKnown(
      "the contracting axis cannot be inferred from the bias shape"
      f" {list(bias)}; pass call=, or return its axis from where="
    )
  contracting = fits[0] if len(fits) == 1 else or_else
  return WeightDims(lead=0, contracting=(contracting,))


def _by_bias(shape: tuple[int, ...], bias: tuple[int, ...]) -> WeightDims:
  """Returns the dimensions of a kernel between those that its bias has.

  The bias has the kernel's leading and last dimensions.
  """
  num_contracting = len(shape) - len(bias)
  fits = [
    WeightDims(lead=lead, contracting=(*range(lead, lead + num_contracting),))
    for lead in range(len(bias))
    if num_contracting > 0
    and shape[:lead] + shape[lead + num_contracting :] == bias
  ]
  if len(fits) != 1:
    raise NotKnown(
      "the contracting axes cannot be inferred from the bias shape"
      f" {list(bias)}; pass call=, or return its axis from where="
    )
  if len(fits[0].contracting) > 1:
    raise NotKnown(
      "it may be a convolution kernel, because its bias would make dimensions"
      f" {fits[0].contracting} contracting; pass call=, or return the axes"
      " from where="
    )
  return fits[0]


def _stacks(leaf: leaves_lib.Leaf) -> int:
  """Returns how many modules around the leaf have the name of a stack."""
  return sum(
    (part in _STACKS and not following.isdecimal())
    or not _LIFTED.isdisjoint(parameter_names.words(part)[:1])
    for part, following in itertools.pairwise([*leaf.parts[:-1], ""])
  )
