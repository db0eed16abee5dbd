# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Variants: the ways to compute a row, and why some cannot run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import jax

from jaxplugin.core import decisions, targets
from jaxplugin.dot import primitive
from jaxplugin.tables import resolution

# Stands for the backends of the decision in a list of backends' names.
CHOSEN: Final = "chosen"

Role = Literal["ours", "peer", "ceiling"]
# The ceiling of a matmul: the rate of any floats, of f32, or of integers.
Arithmetic = Literal["floats", "f32", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
  """One way to compute a row.

  Attributes:
    role: "ours"; "peer", to compare with; or "ceiling", a limit of the device.
    function: the function of one set of operands. `jit` traces the function
      unless `on_host` is True.
    operands: returns set number i.
    check: raises WrongResultError if a result of set i is wrong. Returns the
      error in units of 2^-24 * sum(|a * b|), or None if bits are compared.
    num_bytes: the least number of bytes that one call reads and writes; 0 if
      only operations count.
    flops: floating-point operations of one call; 0 if only bytes count.
    arithmetic: the arithmetic whose ceiling applies.
    is_chosen: whether the package chooses this variant for the row.
    on_host: whether `function` is called without JAX.
    form: the form of the expression, if the peer has several forms.
    relative_error: returns norm(error) / norm(result) of a result of set i. The
      exact result has the unquantized activations and this variant's weights.
    same_as: a key shared by variants that take the same time in all formats of
      a row; "" if the time depends on the formats. The fastest form of a peer
      is searched in only one of the formats. A slow variant of a mixture of
      experts is timed in only one.
  """

  name: str
  role: Role
  function: Callable[..., Any]
  operands: Callable[[int], tuple[Any, ...]]
  check: Callable[[int, Any], float | None]
  num_bytes: int = 0
  flops: int = 0
  arithmetic: Arithmetic = "floats"
  is_chosen: bool = False
  on_host: bool = False
  form: str = ""
  relative_error: Callable[[int, Any], float] | None = None
  same_as: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unavailable:
  """A variant that cannot run here, and the reason."""

  name: str
  role: Role = "peer"
  reason: str


# A tuple has the forms in which users could write one peer. The fastest form
# counts.
AnyVariant = Variant | tuple[Variant, ...] | Unavailable


def arithmetic_of(role: Role, is_f32: bool, is_fp4: bool) -> Arithmetic:
  """Returns the arithmetic whose ceiling limits a matmul."""
  if is_f32:
    return "f32"
  return "int8" if role == "ours" and is_fp4 else "floats"


def decided(
  function: Callable[..., Any], operands: Sequence[Any], target: targets.Target
) -> list[Any]:
  """Returns the decision for each block-scaled dot of a function."""
  jaxpr = jax.make_jaxpr(function)(*operands)
  return [
    primitive.decide(eqn, target) for eqn in primitive.equations(jaxpr.jaxpr)
  ]


def ours(
  names: Sequence[str] | None,
  dots: Sequence[Any],
  operation: resolution.MeasuredOperation[Any],
  make: Callable[[decisions.BackendRecord[Any], bool], Iterable[Variant]],
  *,
  default: Sequence[str] | None = None,
) -> list[AnyVariant]:
  """Returns the variants of backends. The backends of the decision come first.

  Args:
    names: names of backends, or `CHOSEN`. None is the backends of `default`
      that support the row.
    dots: the `choice.DecidedCall` of each dot of the row.
    operation: the operation of the dots.
    make: returns the variants of a backend. The second argument is whether the
      decision chose the backend.
    default: names of backends, or `CHOSEN`. None is all of the operation.
  """
  chosen = {one.decision.implementation for one in dots}
  table = operation.backends()

  def refusal(name: str) -> str:
    if name not in table:
      return f"{operation.name} has no such implementation"
    backend, target = table[name], dots[0].target
    refusals = [backend.supports(one.problem, target) for one in dots]
    if backend.rank(target) is None:  # runs only if the caller names it
      refusals.append(backend.lowering_refusal(target))
    return next((one.reason for one in refusals if one is not None), "")

  wanted: set[str] = set()
  for name in names if names is not None else default or table:
    wanted |= chosen if name == CHOSEN else {name}
  found: list[AnyVariant] = []
  for name in sorted(wanted, key=lambda name: (name not in chosen, name)):
    reason = refusal(name)
    if not reason:
      found += make(table[name], name in chosen)
    elif names is not None:
      found.append(Unavailable(name=name, role="ours", reason=reason))
  return found
