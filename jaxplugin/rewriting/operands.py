# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that a function of `quantize_dots` is given quantized already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import Final

import jax

from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import transforms
from jaxplugin.training import quantized_operand

_NONE_CAME: Final = "it reached no matmul"
_REMEDY = "or pass its array, .primal, which the matmul then quantizes"

# Their results are their operands, the same numbers in the same order.
_SAME: Final = frozenset(
  {
    *("sharding_constraint", "layout_constraint", "name", "copy", "copy_p"),
    *("optimization_barrier", "device_put"),
  }
)


def is_operand(x: Any) -> bool:
  return isinstance(x, quantized_operand.QuantizedOperand)


@dataclasses.dataclass(kw_only=True)
class _Entry:
  """An operand, and what became of it.

  Attributes:
    name: where it is in the arguments.
    is_taken: whether a product took its copies.
    reason: why one did not.
  """

  name: str
  operand: quantized_operand.QuantizedOperand
  is_taken: bool = False
  reason: str = _NONE_CAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """What the jaxpr of an operation is told of an operand.

  Attributes:
    name: where it is in the arguments of the function.
    argument: the one of the jaxpr that is the operand's array.
    structure: of the operand as a tree. Its first leaf is the array.
    types: of its other leaves, the copies, in the jaxpr.
    is_each_trip: whether each trip of a `scan` has others.
  """

  name: str
  argument: int
  structure: Any
  types: tuple[Any, ...]
  is_each_trip: bool


@dataclasses.dataclass(frozen=True)
class Passed:
  """Operands whose copies an operation is given, as arguments of their own."""

  entries: tuple[_Entry, ...] = ()
  kinds: tuple[Kind, ...] = ()

  def arrays(self, *, each_trip: bool = False) -> list[Any]:
    """The copies that are the same in each trip, or those that are not."""
    return [
      x
      for entry, kind in zip(self.entries, self.kinds, strict=True)
      if kind.is_each_trip == each_trip
      for x in _copies(entry.operand)
    ]

  def note(self, outcomes: Sequence[tuple[bool, str]]) -> None:
    """Told what became of each inside, `Operands.outcomes` there."""
    for entry, (is_taken, reason) in zip(self.entries, outcomes, strict=True):
      entry.is_taken |= is_taken
      entry.reason = reason

  def __add__(self, other: Passed) -> Passed:
    return Passed(self.entries + other.entries, self.kinds + other.kinds)


class Operands:
  """The `QuantizedOperand`s of a function that has their arrays."""

  # The `outcomes` of one operand, where there is no product.
  NONE_CAME: Final = ((False, _NONE_CAME),)

  def __init__(self) -> None:
    self._entries: list[_Entry] = []
    # Values that are an operand's array, by identity, which are kept alive.
    self._values: dict[int, tuple[Any, _Entry]] = {}

  def _add(self, name: str, operand: quantized_operand.QuantizedOperand) -> Any:
    entry = _Entry(name=name, operand=operand)
    self._entries.append(entry)
    self._know(operand.primal, entry)

  def _know(self, x: Any, entry: _Entry) -> None:
    identity = binding_private.identity(x)
    self._values[id(identity)] = identity, entry

  def arrays(self, tree: Any, name: str) -> Any:
    """`tree` with the array of each operand, which this then knows.

    Args:
      name: of the argument, for errors.
    """

    def array(path: Any, x: Any) -> Any:
      if not is_operand(x):
        return x
      self._add(name + jax.tree_util.keystr(path), x)
      return x.primal

    return jax.tree_util.tree_map_with_path(array, tree, is_leaf=is_operand)

  @classmethod
  def inside(
    cls,
    kinds: Sequence[Kind],
    copies: Sequence[Sequence[Any]],
    args: Sequence[Any],
  ) -> Operands:
    """Those of a jaxpr.

    Args:
      kinds: what it is told of each.
      copies: of each.
      args: its arguments that are not copies.
    """
    known = cls()
    for kind, own in zip(kinds, copies, strict=True):
      leaves = [args[kind.argument], *own]
      known._add(kind.name, jax.tree.unflatten(kind.structure, leaves))
    return known

  def outcomes(self) -> tuple[tuple[bool, str], ...]:
    """Of each whether a product took it, and why one did not."""
    return tuple((entry.is_taken, entry.reason) for entry in self._entries)

  def _of(self, x: Any) -> _Entry | None:
    identity = binding_private.identity(x)
    _, entry = self._values.get(id(identity), (None, None))
    # A function that is mapped over it has parts of its array.
    is_whole = entry is not None and entry.operand.shape == jax.numpy.shape(x)
    return entry if is_whole else None

  def _among(self, args: Sequence[Any]) -> list[tuple[int, _Entry]]:
    if not self._values:
      return []
    found = ((i, self._of(x)) for i, x in enumerate(args))
    return [(i, entry) for i, entry in found if entry is not None]

  def follow(self, primitive: Any, args: Sequence[Any], out: Any) -> None:
    """Told of an operation: its result may be an operand's array still."""
    results = out if isinstance(out, (list, tuple)) else [out]
    # A derivative without jit has a conversion that changes no dtype.
    is_same = primitive.name in _SAME or (
      primitive.name == "convert_element_type"
      and results[0].dtype == args[0].dtype
    )
    if is_same:
      for i, entry in self._among(args[: len(results)]):
        self._know(results[i], entry)

  def given(self, args: Sequence[Any]) -> list[Any]:
    """Operands in place of their arrays, with the arrays that are there."""
    result = list(args)
    for i, entry in self._among(args):
      result[i] = entry.operand.with_primal(args[i])
    return result

  def note(self, args: Sequence[Any], reason: str) -> None:
    """Told of a product: that it took its operands, or why it did not."""
    for _, entry in self._among(args):
      entry.is_taken |= not reason
      entry.reason = reason

  def passed(self, args: Sequence[Any]) -> Passed:
    """The operands among all arguments of a jaxpr, or the first ones."""
    return _passed(self._among(args))

  def sliced(self, args: Sequence[Any], first: int, length: int) -> Passed:
    """Those among the arrays that a `scan` goes over.

    Args:
      args: these arrays.
      first: which argument of the body the first of them is.
      length: of the scan.
    """
    found = []
    for i, entry in self._among(args):
      if all(x.shape[:1] == (length,) for x in _copies(entry.operand)):
        found.append((first + i, entry))
      else:
        entry.reason = (
          "a scan iterates over it, and it was quantized as a whole, not with"
          " jax.lax.map(lambda w: jaxplugin.quantize_operand(w, recipe),"
          " stack)"
        )
    return _passed(found, each_trip=True)

  def leave(self, args: Sequence[Any], reason: str) -> None:
    """Told of operands that an operation has, and why none is taken there."""
    for _, entry in self._among(args):
      entry.reason = reason

  def refuse_inside(self, primitive: Any, args: Sequence[Any]) -> None:
    """Raises TypeError where an operand goes into an operation's products."""
    for _, entry in self._among(args):
      raise TypeError(
        f"{transforms.WHO}: {entry.name} is a QuantizedOperand, which matmuls"
        f" inside {primitive.name} do not accept, got {entry.operand!r}; apply"
        f" quantize_dots to the function inside, {_REMEDY}"
      )

  def require_taken(self) -> None:
    """Raises TypeError unless a product took each."""
    for entry in self._entries:
      if not entry.is_taken:
        raise TypeError(
          f"{transforms.WHO}: {entry.name} is a QuantizedOperand that no"
          f" matmul used, because {entry.reason}, got {entry.operand!r};"
          f" quantize it for the matmul that uses it, {_REMEDY}"
        )


def _copies(operand: quantized_operand.QuantizedOperand) -> list[Any]:
  return jax.tree.leaves(operand)[1:]


def _passed(
  found: Sequence[tuple[int, _Entry]], *, each_trip: bool = False
) -> Passed:
  kinds = []
  for argument, entry in found:
    types = [jax.typeof(x) for x in _copies(entry.operand)]
    if each_trip:
      types = list(map(binding_private.slice_type, types))
    kinds.append(
      Kind(
        name=entry.name,
        argument=argument,
        structure=jax.tree.structure(entry.operand),
        types=tuple(types),
        is_each_trip=each_trip,
      )
    )
  return Passed(tuple(entry for _, entry in found), tuple(kinds))
