# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traces a function to see which dimensions of parameters it contracts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import jax

from jaxplugin.arrays import leaves as leaves_lib
from jaxplugin.jaxext.tracing import interception_private
from jaxplugin.params import recognition
from jaxplugin.rewriting import acceptor as acceptor_lib
from jaxplugin.rewriting import facts

_Role = Literal["layers", "contracted", "kept"]


@dataclasses.dataclass(kw_only=True)
class Uses:
  """Uses of one parameter.

  Attributes:
    roles: roles of its dimensions in each matmul.
    others: its other uses, each an operation and a reason.
  """

  roles: set[tuple[_Role, ...]] = dataclasses.field(default_factory=set)
  others: list[str] = dataclasses.field(default_factory=list)

  def contraction(self) -> recognition.WeightDims:
    """Returns the dimensions that all matmuls contract.

    Raises:
      recognition.NotKnown: If no matmul uses the parameter, matmuls contract
        different dimensions, or other operations use it.
    """
    if self.others:
      raise recognition.NotKnown(f"call also uses it in {self.others[0]}")
    if len(self.roles) != 1:
      what = "contract different dimensions" if self.roles else "do not use it"
      raise recognition.NotKnown(f"the matmuls of call {what}")
    (roles,) = self.roles
    lead = next(
      (d for d, role in enumerate(roles) if role != "layers"), len(roles)
    )
    if "layers" in roles[lead:]:
      raise recognition.NotKnown(
        f"its dimension {roles.index('layers', lead)} counts layers or"
        " experts, and is not a leading one"
      )
    contracting = (d for d, role in enumerate(roles) if role == "contracted")
    return recognition.WeightDims(lead=lead, contracting=tuple(contracting))


def uses(
  leaves: Sequence[leaves_lib.Leaf],
  structure: Any,
  is_parameter: Callable[[Any], bool],
  call: Callable[[Any], Any],
) -> Mapping[str, Uses]:
  """Returns the uses of the parameters of a tree, by path.

  The function of the tree is traced, not run.
  """
  found = {leaf.path: Uses() for leaf in leaves if is_parameter(leaf.array)}

  def run(values: dict[str, jax.Array]) -> None:
    observer = _Observer(found)
    for path, value in values.items():
      observer.observe(path, value)
    tree = jax.tree.unflatten(
      structure, [values.get(leaf.path, leaf.array) for leaf in leaves]
    )
    interception_private.intercept(call, lambda _: observer)(tree)

  jax.eval_shape(
    run,
    {
      leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.array.dtype)
      for leaf in leaves
      if leaf.path in found
    },
  )
  return found


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("array", "layers"),
  meta_fields=("path",),
)
class _Parameter(acceptor_lib.Weight):
  """A weight that is not quantized."""

  def dequantized(self, dtype: Any) -> Any:
    return self.selected()


class _Observer(acceptor_lib.Acceptor):
  """An acceptor that replaces nothing, and records uses of parameters."""

  def __init__(self, found: Mapping[str, Uses]):
    super().__init__(
      acceptor_lib.AcceptOptions(activations=None, implementation=None)
    )
    self._found = found

  def observe(self, path: str, value: jax.Array) -> None:
    weight = _Parameter(path=path, array=value)  # type: ignore[arg-type]
    self._weights.put(value, weight)

  def _child(self) -> _Observer:
    return _Observer(self._found)

  def warn(self, name: str, args: Sequence[Any], reason: str) -> None:
    for path in (path for x in args for path in self._names(x)):
      self._found[path].others.append(f"{name}: {reason}")

  def _dot(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
  ) -> None:
    contracting, batch = params["dimension_numbers"]
    for i, x in enumerate(args):
      self._note_product(primitive, x, contracting[i], batch[i])

  def _ragged_dot(
    self, primitive: Any, args: Sequence[Any], params: dict[str, Any]
  ) -> None:
    numbers = params["ragged_dot_dimension_numbers"]
    contracting, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    self._note_product(primitive, args[0], contracting[0], batch[0])
    self._note_product(primitive, args[1], contracting[1], (*batch[1], *groups))

  def _note_product(
    self,
    primitive: Any,
    x: Any,
    contracting: Sequence[int],
    batch: Sequence[int],
  ) -> None:
    """Records the roles of a parameter's dimensions, if x is a view of one."""
    if not self._names(x):
      return
    view = self.view(x)
    if view is None or not view.has_all_once():
      self.warn(
        primitive.name, [x], "only a part of it is used, or it is scaled first"
      )
      return
    of = lambda dims: {atom for d in dims for atom in view.dims[d]}
    contracted, layers = of(contracting), of(batch)
    roles: list[_Role] = ["layers"] * len(view.weight.layers)
    for atoms in view.stored:
      role = _role(atoms, contracted, layers)
      if role is None:
        self.warn(primitive.name, [x], "a part of a dimension is contracted")
        return
      roles.append(role)
    self._found[view.weight.path].roles.add(tuple(roles))


def _role(
  atoms: facts.Atoms,
  contracted: set[facts.Atom],
  layers: set[facts.Atom],
) -> _Role | None:
  """Returns the role of a dimension; None if its parts have different roles."""
  roles: set[_Role] = {
    "contracted" if a in contracted else "layers" if a in layers else "kept"
    for a in atoms
  }
  if len(roles) > 1:
    return None
  return roles.pop() if roles else "kept"
