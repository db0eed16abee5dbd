# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of `quantize_dots` that are `QuantizedOperand`s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax

from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.rewriting import sites, sources
from jaxplugin.training import quantized_operand

_NONE_CAME: Final = "it reached no matmul"
_REMEDY = "or pass its array, .primal, which the matmul then quantizes"

# Their results have the elements of their operands in the same order.
_SAME: Final = frozenset(
  {
    *("sharding_constraint", "layout_constraint", "name", "copy"),
    *("optimization_barrier", "device_put"),
  }
)


@dataclasses.dataclass(kw_only=True)
class _Entry:
  """An operand, and whether a matmul uses it.

  Attributes:
    name: its place in the arguments.
    operand: the operand.
    is_taken: whether a matmul uses its copies.
    reason: why the last matmul did not.
  """

  name: str
  operand: quantized_operand.QuantizedOperand
  is_taken: bool = False
  reason: str = _NONE_CAME

  def note(self, is_taken: bool, reason: str) -> None:
    """Records whether a matmul uses the operand, and if not, why."""
    self.is_taken |= is_taken
    self.reason = reason


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("copies",),
  meta_fields=("origin", "name", "structure"),
  drop_fields=("entry",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
  """The origin of a value, and the operand whose array it is.

  Attributes:
    origin: the array of an argument that the value is; None if not known.
    name: see `_Entry`.
    structure: of the operand as a tree, whose first leaf is the array. None if
      the value is not an operand's array.
    copies: the other leaves.
    entry: the operand where the fact is passed on.
  """

  origin: sources.Origin | None
  name: str = ""
  structure: Any = None
  copies: tuple[Any, ...] = ()
  entry: _Entry | None = None

  def layers(self, length: int) -> tuple[Fact, tuple[bool, ...]]:
    """See `calls.Walker.layers`."""
    if all(x.shape[:1] == (length,) for x in self.copies):
      return self, (True,) * len(self.copies)
    self.note(
      False,
      "a scan iterates over it, and it was quantized as a whole, not with"
      " jax.lax.map(lambda w: jaxplugin.quantize_operand(w, recipe), stack)",
    )
    return Fact(origin=self.origin), ()

  def note(self, is_taken: bool, reason: str) -> None:
    """Records whether a matmul inside an operation uses the operand."""
    if self.entry is not None:
      self.entry.note(is_taken, reason)


class Operands:
  """The `QuantizedOperand`s of a function, whose code gets their arrays."""

  def __init__(self) -> None:
    self._entries: list[_Entry] = []
    # Values that are an operand's array.
    self._values = sources.TracedValues[_Entry]()

  def _add(self, name: str, operand: quantized_operand.QuantizedOperand) -> Any:
    entry = _Entry(name=name, operand=operand)
    self._entries.append(entry)
    self._values.put(operand.primal, entry)

  def arrays(self, tree: Any, name: str) -> Any:
    """Returns `tree` with the array of each operand, and records the operands.

    Args:
      name: of the argument, for errors.
    """

    def array(path: Any, x: Any) -> Any:
      if not quantized_operand.is_operand(x):
        return x
      self._add(name + jax.tree_util.keystr(path), x)
      return x.primal

    return jax.tree_util.tree_map_with_path(
      array, tree, is_leaf=quantized_operand.is_operand
    )

  def enter(
    self, facts: Sequence[tuple[int, Fact]], args: Sequence[Any]
  ) -> None:
    """Records facts about arguments of a function, each with its index."""
    for i, fact in facts:
      if fact.structure is not None:
        leaves = [args[i], *fact.copies]
        self._add(fact.name, jax.tree.unflatten(fact.structure, leaves))

  def outcomes(self) -> tuple[tuple[bool, str], ...]:
    """For each operand whether a matmul took it, and why one did not."""
    return tuple((entry.is_taken, entry.reason) for entry in self._entries)

  def _of(self, x: Any) -> _Entry | None:
    entry = self._values.get(x)
    # A function that is mapped over an operand gets parts of its array.
    is_whole = entry is not None and entry.operand.shape == jax.numpy.shape(x)
    return entry if is_whole else None

  def _among(self, args: Sequence[Any]) -> list[tuple[int, _Entry]]:
    if not self._entries:
      return []
    found = ((i, self._of(x)) for i, x in enumerate(args))
    return [(i, entry) for i, entry in found if entry is not None]

  def follow(
    self, operation: binding_private.BoundOperation, results: Sequence[Any]
  ) -> None:
    """Records results of an operation that are still an operand's array."""
    args = operation.args
    # A derivative without jit converts to the same dtype.
    is_same = operation.name in _SAME or (
      operation.name == "convert_element_type"
      and results[0].dtype == args[0].dtype
    )
    if is_same:
      for i, entry in self._among(args[: len(results)]):
        self._values.put(results[i], entry)

  def given(self, args: Sequence[Any]) -> list[Any]:
    """Returns the arguments with operands in place of their arrays."""
    result = list(args)
    for i, entry in self._among(args):
      result[i] = entry.operand.with_primal(args[i])
    return result

  def note(self, args: Sequence[Any], reason: str) -> None:
    """Records that a matmul uses its operands, or the reason why not."""
    for _, entry in self._among(args):
      entry.note(not reason, reason)

  def facts(
    self, args: Sequence[Any], origins: Sequence[sources.Origin | None]
  ) -> list[Fact | None]:
    """Returns facts about the arguments of an operation.

    Args:
      args: the arguments.
      origins: the origin of each argument, or None.
    """
    entries = dict(self._among(args))
    facts: list[Fact | None] = []
    for i, origin in enumerate(origins):
      fact = None if origin is None else Fact(origin=origin)
      if i in entries:
        entry = entries[i]
        fact = Fact(
          origin=origin,
          name=entry.name,
          structure=jax.tree.structure(entry.operand),
          copies=tuple(jax.tree.leaves(entry.operand)[1:]),
          entry=entry,
        )
      facts.append(fact)
    return facts

  def refuse_inside(self, operation: binding_private.BoundOperation) -> None:
    """Raises TypeError if an operand is an argument of the operation."""
    for _, entry in self._among(operation.args):
      raise TypeError(
        f"{sites.WHO}: {entry.name} is a QuantizedOperand, which matmuls"
        f" inside {operation.name} do not accept, got {entry.operand!r}; apply"
        f" quantize_dots to the function inside, {_REMEDY}"
      )

  def require_taken(self) -> None:
    """Raises TypeError unless a matmul used each operand."""
    for entry in self._entries:
      if not entry.is_taken:
        raise TypeError(
          f"{sites.WHO}: {entry.name} is a QuantizedOperand that no"
          f" matmul used, because {entry.reason}, got {entry.operand!r};"
          f" quantize it for the matmul that uses it, {_REMEDY}"
        )
