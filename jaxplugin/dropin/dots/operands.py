# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that a function of `quantize_dots` is given quantized already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxplugin.dropin.dots import rewriting
from jaxplugin.dropin.dots import transforms
from jaxplugin.jaxext import program
from jaxplugin.jaxext.tracing import binding_private
from jaxplugin.training import quantized_operand

_REMEDY = "or pass its array, .primal, which the product quantizes itself"


def is_operand(x: Any) -> bool:
  return isinstance(x, quantized_operand.QuantizedOperand)


@dataclasses.dataclass(kw_only=True)
class _Entry:
  """An operand, and what became of it.

  Attributes:
    name: where it is in the arguments.
    identity: of its array.
    is_taken: whether a product took its copies.
    reason: why one did not.
  """

  name: str
  operand: quantized_operand.QuantizedOperand
  identity: Any
  is_taken: bool = False
  reason: str = "no product came to it"


class Operands:
  """The `QuantizedOperand`s of a call, of whose arrays a function is made."""

  def __init__(self) -> None:
    self._entries: dict[int, _Entry] = {}

  def arrays(self, tree: Any, name: str) -> Any:
    """`tree` with the array of each operand, which this then knows.

    Args:
      name: of the argument, for errors.
    """

    def array(path: Any, x: Any) -> Any:
      if not is_operand(x):
        return x
      entry = _Entry(
        name=name + jax.tree_util.keystr(path),
        operand=x,
        identity=binding_private.identity(x.primal),
      )
      self._entries[id(entry.identity)] = entry
      return x.primal

    return jax.tree_util.tree_map_with_path(array, tree, is_leaf=is_operand)

  def _of(self, x: Any) -> _Entry | None:
    entry = self._entries.get(id(binding_private.identity(x)))
    # A function that is mapped over it has parts of its array.
    is_whole = entry is not None and entry.operand.shape == jax.numpy.shape(x)
    return entry if is_whole else None

  def __contains__(self, x: Any) -> bool:
    return bool(self._entries) and self._of(x) is not None

  def given(self, args: Sequence[Any]) -> list[Any]:
    """Operands in place of their arrays, with the arrays that are there."""
    entries = map(self._of, args)
    return [
      x if entry is None else entry.operand.with_primal(x)
      for x, entry in zip(args, entries, strict=True)
    ]

  def note(self, args: Sequence[Any], reason: str) -> None:
    """Told of a product: that it took its operands, or why it did not."""
    for entry in map(self._of, args):
      if entry is not None:
        entry.is_taken |= not reason
        entry.reason = reason

  def refuse_inside(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
  ) -> None:
    """Raises TypeError where an operand goes into an operation's products."""
    entry = next((e for e in map(self._of, args) if e is not None), None)
    if entry is None:
      return
    jaxprs = program.jaxprs_of(tuple(params.values()))
    if "subfuns" in params or any(map(rewriting.may_contain_dots, jaxprs)):
      raise TypeError(
        f"{transforms.WHO}: {entry.name} is a QuantizedOperand, which products"
        f" inside of {primitive.name} cannot take, got {entry.operand!r}; apply"
        f" quantize_dots to the function inside, {_REMEDY}"
      )

  def require_taken(self) -> None:
    """Raises TypeError unless a product took each."""
    for entry in self._entries.values():
      if not entry.is_taken:
        raise TypeError(
          f"{transforms.WHO}: {entry.name} is a QuantizedOperand that no"
          f" product took, as {entry.reason}, got {entry.operand!r}; quantize"
          f" it as a product takes it, {_REMEDY}"
        )
